"""What we set out to reach on an H200, and where a benchmark's record has the figure.

Each figure is a ratio within one run, or a time. "best peer" is what the kernels that SGLang 0.5.23 ships
reached on the same kind of machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """`form` is filled by the row of `case` in `section`, or by those of its loads and stores."""

    what: str
    target: str
    peer: str
    section: str
    case: str
    form: str

    def measured(self, records: Sequence[Row]) -> str:
        """Of the first record that has the case."""
        for record in records:
            rows = [
                r for r in record["results"] if (r["section"], r["case"]) == (self.section, self.case)
            ]
            if rows:
                return " / ".join(self.form.format(**row) for row in rows)
        return "not measured"


def _share(what: str, target: str, peer: str, section: str, case: str) -> Target:
    return Target(what, f"{target} of CE", peer, section, case, "{of_link:.2f}")


def _rate(what: str, target: str, peer: str, case: str) -> Target:
    return Target(what, f"{target} GB/s", peer, "big_pool", case, "{gbps:.0f}")


def _time(what: str, target: str, peer: str, section: str, case: str) -> Target:
    return Target(what, f"<= {target} us", peer, section, case, "{us:.1f}")


def _beside(what: str, peer: str, case: str) -> Target:
    form = "{gemm_slower:+.1%} at {of_link:.2f}"
    return Target(what, "<= 2 % / 5 % slower at 0.90 of CE", peer, "gemm", case, form)


STAGED = "page_first, pages of 64 x 2048 B x 32, auto: staged"
RUN = "layer_first, one run of slots, 2048 B x 32, auto: copy_engine"

TARGETS = [
    _share(
        "`kernel`, random slots, rows of 2048 B",
        "0.92 / 0.94",
        "0.92 / 0.95",
        "rows",
        "2048 B x 8 planes",
    ),
    _share("rows of 576 B", "0.90 / 0.92", "refuses it", "rows", "576 B x 28 planes"),
    _share("rows of 256 B", "0.91 / 0.94", "0.84 / 0.93", "rows", "256 B x 32 planes"),
    _share("rows of 128 B", "0.89 / -", "-", "rows", "128 B x 32 planes"),
    _share("rows of 64 B", "0.75 / -", "-", "rows", "64 B x 32 planes"),
    _rate("`kernel`, random slots of 16 GiB, 256 B", "40 / 31", "9 / 10", "16 GiB, 256 B"),
    _rate("576 B", "49 / 42", "-", "16 GiB, 576 B"),
    _rate("1152 B", "51 / 47", "32 / 26", "16 GiB, 1152 B"),
    _rate("random slots of 32 GiB, 256 B", "30 / 25", "8 / 9", "32 GiB, 256 B"),
    _beside("8192-cubed product beside `kernel`, 2048 B", "1-5 % / 19-76 %", "kernel 2048 B"),
    Target(
        "torch's add_, for comparison", "-", "-", "host", "torch add_ (for comparison)", "{us:.1f} us"
    ),
    _time("host time of a call, stack of 64", "9", "9-10", "host", "stack of 64, device indices"),
    _time("host time of a call, list of 16", "15.4", "-", "host", "list of 16, device indices"),
    _time(
        "one token x 16 planes, load to completion",
        "19",
        "19.8",
        "host",
        "1 token x 16 planes load to completion, device indices",
    ),
    Target(
        "CPU, runs of 64 KiB, 16 cores",
        ">= 0.9 of memcpy",
        "-",
        "cpu",
        "1024 B, runs of 64",
        "{of_memcpy:.2f}",
    ),
    Target(
        "CPU, random rows of 576 B, 16 cores",
        ">= 0.95 of the best loop",
        "-",
        "cpu",
        "576 B, runs of 1",
        "{of_best_loop:.2f}, {x_torch_indexing:.0f} x torch indexing",
    ),
    _share("pages of 64 tokens, page_first", "0.98 / 0.98", "0.92 / 0.94", "pages", STAGED),
    _share(
        "pages of 64 KiB, scattered (`auto`: `staged`)",
        "0.92 / 0.92",
        "0.92",
        "pages",
        "page_first, pages of 1 x 2048 B x 32, auto: staged",
    ),
    _share("layer_first, one run of slots", "0.95 / 0.95", "-", "pages", RUN),
    _beside("8192-cubed product beside pages of 64 tokens", "1-5 % / 19-76 %", STAGED),
    _beside("the same beside a run of slots", "-", RUN),
    Target(
        "both directions at once, page_first, pages of 64 tokens",
        ">= 0.95 of two copies",
        "0.58-0.73",
        "both",
        "page_first, pages of 64 x 2048 B x 32",
        "{of_copies:.2f}",
    ),
    *(
        _share(
            f"32 GiB pool after a long history, page size 1, {row} B",
            "0.85 / 0.85",
            peer,
            "history",
            f"{row} B x {layers} layers, 32 GiB",
        )
        for row, layers, peer in ((256, 128, "0.14"), (576, 57, "-"), (1152, 28, "0.5"))
    ),
    *(
        Target(
            f"load of 32 layers beside a forward pass of 32: {layout}, products of {size} cubed",
            "<= 1.05 of the longer",
            "-",
            "forward",
            f"{layout}, products of {size} cubed",
            "{of_longer:.2f}",
        )
        for layout in ("layer_first", "page_first")
        for size in (4096, 1024)
    ),
    _time(
        "host time of a load of 1,000 pages, page_first, by page, all layers at once",
        "1000",
        "2400 a layer",
        "submit",
        "1,000 pages of 64 tokens, 8 layers, page_first, by page, all layers at once",
    ),
    Target(
        "16 GiB of pinned memory, seconds",
        "<= 0.15 of torch's",
        "1.0, up to 2 x the size",
        "host_memory",
        "empty_host",
        "{of_torch:.2f}, {taken:.2f} x the size",
    ),
    Target(
        "captured replay of 32 one-token transfers",
        "<= 0.1 of eager",
        "-",
        "compile",
        "32 transfers of one token, replayed",
        "{of_eager:.3f}",
    ),
    Target(
        "compiled load of 32 layers beside a captured pass",
        "<= 1.05 of the longer",
        "-",
        "compile",
        "32 layers, load beside a captured pass",
        "{of_longer:.2f}",
    ),
    Target(
        "peak memory of the compiled step over eager",
        "< 1 % of the pool",
        "-",
        "compile",
        "8 layers, peak of the compiled step over eager",
        "{of_pool:+.2%}",
    ),
    *(
        Target(
            what, "<= 3 us over the op", "-", "integrations", f"sglang: {case}", "{overhead_us:+.1f} us"
        )
        for what, case in (
            ("SGLang's transfer_hicache_one_layer", "transfer_hicache_one_layer"),
            (
                "its transfer_kv_per_layer_ph_lf, tokens on the GPU",
                "transfer_kv_per_layer_ph_lf (pages)",
            ),
        )
    ),
]
