"""Writes docs/figures.md from results of the benchmarks, and the README's table of targets.

python benchmark/write_tables.py benchmark/results/h200.json benchmark/results/h200_*.json
"""

import json
import sys
from pathlib import Path
from typing import Any

from targets import TARGETS

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- tables: written by benchmark/write_tables.py -->", "<!-- end of tables -->"
Row = dict[str, Any]


def pairs(results: list[Row], section: str) -> dict[str, dict[str, Row]]:
    """case -> direction -> row"""
    found: dict[str, dict[str, Row]] = {}
    for row in results:
        if row["section"] == section:
            found.setdefault(row["case"], {})[row.get("direction", "")] = row
    return found


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def cell(row: Row | None, form: str) -> str:
    return form.format(**row) if row else "-"


def device_tables(record: Row) -> list[str]:
    machine, link, results = record["machine"], record["link_gbps"], record["results"]
    lines = [
        f"One {machine['device']} (host {machine['host']}), driver {machine['driver']}, torch "
        f"{machine['torch']}, commit {machine['commit']}. CE is one cudaMemcpyAsync of 1 GiB pinned "
        f"memory in the same run: {link['load']:.1f} GB/s load, {link['store']:.1f} GB/s store.",
        "",
        "`kernel` method, random slots, all planes in one call:",
        "",
    ]
    for section, title in (("rows", "rows in a host pool of 0.5 GiB"), ("big_pool", "host pool, row")):
        rows = [
            [
                case,
                *(cell(of.get(way), "{gbps:.1f} GB/s, {of_link:.2f} of CE") for way in ("load", "store")),
            ]
            for case, of in pairs(results, section).items()
        ]
        lines += table([title, "load", "store"], rows)
    rows = [
        [
            case,
            *(
                cell(of.get(way), "{gemm_slower:+.1%}, transfer {of_link:.2f} of CE")
                for way in ("load", "store")
            ),
        ]
        for case, of in pairs(results, "gemm").items()
    ]
    lines += [
        "An 8192-cubed bf16 matrix product beside transfers of 1 GiB on a stream of high priority. A "
        "kernel that only holds SMs, and moves nothing, costs this product something too (idle blocks):",
        "",
        *table(["transfer", "load: product slower by", "store"], rows),
    ]
    rows = [[row["case"], f"{row['us']:.1f}"] for row in results if row["section"] == "host"]
    return [*lines, "Host time of a call, and latency:", "", *table(["call", "us"], rows)]


def other_source_table(record: Row) -> list[str]:
    """Of bench_transfer_kv.py --sections rows with csrc/hip in the place of csrc/cuda."""
    rows = [
        [case, *(cell(of.get(way), "{gbps:.1f} GB/s, {of_link:.2f} of CE") for way in ("load", "store"))]
        for case, of in pairs(record["results"], "rows").items()
        if not case.startswith("torch")
    ]
    title = f"{record['machine']['source']} ({origin(record)}), says nothing of an AMD GPU:"
    return [title, "", *table(["rows in a host pool of 0.5 GiB", "load", "store"], rows)]


def cpu_table(record: Row) -> list[str]:
    machine = record["machine"]
    rows = [
        [
            row["case"],
            f"{row['gbps']:.1f}",
            f"{row['of_memcpy']:.2f}",
            f"{row['of_best_loop']:.2f}",
            f"{row['x_torch_indexing']:.1f} x",
        ]
        for row in record["results"]
        if row["section"] == "cpu"
    ]
    head = [
        "rows of a 1 GiB pool",
        "GB/s",
        "of one memcpy",
        "of the best hand-written loop",
        "torch indexing",
    ]
    return [
        f"CPU backend, {machine['threads']} threads of the same machine and run:",
        "",
        *table(head, rows),
    ]


def origin(record: Row) -> str:
    return "{device}, host {host}, torch {torch}, commit {commit}".format(**record["machine"])


def method_tables(record: Row) -> list[str]:
    """Of bench_methods.py and bench_engine.py."""
    results, lines = record["results"], []
    forms = {
        "pages": "{gbps:.1f} GB/s, {of_link:.2f} of CE",
        "gemm": "{gemm_slower:+.1%}, transfer {of_link:.2f} of CE",
        "history": "{gbps:.1f} GB/s, {of_link:.2f} of CE, runs of {mean_run:,.0f} slots",
    }
    titles = {
        "pages": "Methods",
        "gemm": "The matrix product beside them, slower by",
        "history": "Through the engine, after a long history of allocations, page size 1",
    }
    for section, form in forms.items():
        rows = [
            [case, *(cell(of.get(way), form) for way in ("load", "store"))]
            for case, of in pairs(results, section).items()
        ]
        if rows:
            lines += [
                f"{titles[section]} ({origin(record)}):",
                "",
                *table(["case", "load", "store"], rows),
            ]
    both = [
        [row["case"], f"{row['gbps']:.1f}", f"{row['of_copies']:.2f}" if "of_copies" in row else ""]
        for row in results
        if row["section"] == "both"
    ]
    if both:
        lines += ["Load and store at once:", "", *table(["case", "GB/s", "of two big copies"], both)]
    return lines


def time_table(record: Row) -> list[str]:
    """Host times, and loads beside a forward pass, of bench_engine.py and bench_compile.py."""
    rows = []
    for row in record["results"]:
        if "of_longer" in row:
            text = "compute {compute_ms:.1f} ms, load {load_ms:.1f} ms, both {total_ms:.1f} ms: "
            text += "{of_longer:.2f} of the longer"
        elif "of_pool" in row:
            text = "{of_pool:+.2%} of the pool"
        elif row["section"] in ("compile", "submit"):
            text = "{us:.1f} us"
        else:
            continue
        way = f", {row['direction']}" if row.get("direction") else ""
        rows.append([row["case"] + way, text.format(**row)])
    if not rows:
        return []
    return [
        f"Engine, compiled and captured graphs ({origin(record)}):",
        "",
        *table(["case", "figure"], rows),
    ]


def memory_table(record: Row) -> list[str]:
    rows = [
        [
            row["case"],
            f"{row['seconds']:.2f}",
            cell(row if "of_torch" in row else None, "{of_torch:.2f}"),
            f"{row['release_seconds']:.2f}",
            f"{row['taken']:.2f}",
        ]
        for row in record["results"]
        if row["section"] == "host_memory"
    ]
    if not rows:
        return []
    size = record["results"][0]["gib"]
    head = ["memory", "seconds", "of torch's", "released in", "taken x asked"]
    return [f"{size:.0f} GiB of host memory ({origin(record)}):", "", *table(head, rows)]


def integration_table(record: Row) -> list[str]:
    """Of bench_integrations.py."""
    rows = [
        [row["case"], *(f"{row[key]:.1f}" for key in ("us", "op_us")), f"{row['overhead_us']:+.1f}"]
        for row in record["results"]
        if row["section"] == "integrations"
    ]
    if not rows:
        return []
    head = ["call, pools on the GPU and in pinned memory", "us", "the op's, planes ready", "difference"]
    return [f"Host time of the integrations' calls ({origin(record)}):", "", *table(head, rows)]


def target_table(records: list[Row]) -> list[str]:
    """What was aimed at, beside what was measured."""
    records = [record for record in records if "source" not in record["machine"]]
    rows = [[t.what, t.target, t.measured(records), t.peer] for t in TARGETS]
    machine = records[0]["machine"]
    commits = ", ".join(sorted({record["machine"]["commit"] for record in records}))
    return [
        f"{machine['device']}, torch {machine['torch']}, at commits {commits}. Load / store; CE is one "
        "cudaMemcpyAsync of 1 GiB pinned memory in the same run. All figures, and which run they are of: "
        "[docs/figures.md](docs/figures.md). Targets are what we set out to reach "
        "(benchmark/targets.py). The best peer is what SGLang 0.5.23, or torch, reached on "
        "such a machine: typed in from runs that no record is kept of.",
        "",
        *table(["what", "target", "measured", "best peer"], rows),
    ]


def replace_tables(path: Path, lines: list[str]) -> None:
    text = path.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    path.write_text(before + BEGIN + "\n\n" + "\n".join(lines) + "\n" + END + after)


def figure_tables(records: list[Row]) -> list[str]:
    lines: list[str] = []
    for record in records:
        if "source" in record["machine"]:
            lines += other_source_table(record)
            continue
        sections = {row["section"] for row in record["results"]}
        if "rows" in sections:
            lines += device_tables(record)
        if "cpu" in sections:
            lines += cpu_table(record)
        if "rows" not in sections:
            lines += method_tables(record) + time_table(record) + memory_table(record)
            lines += integration_table(record)
    return lines


def main() -> int:
    records = [json.loads(Path(path).read_text()) for path in sys.argv[1:]]
    replace_tables(ROOT / "docs" / "figures.md", figure_tables(records))
    replace_tables(ROOT / "README.md", target_table(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
