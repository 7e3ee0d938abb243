"""What a call through an adapter costs on the host, beside the op with planes that are ready.

    python benchmark/bench_integrations.py [--json results.json]

Each line: the adapter's call, the op's call with the same planes and indices, the difference. Pools are
on the GPU and in pinned memory where there is one, else both on the CPU. One page moves in a call, by one
thread. Both are timed in turns, and the quickest turn of each is shown. With SGLang installed (the
packages of test/integrations/sglang.txt are enough) the hooks around its pools' methods are measured too,
on the CPU.
"""

import argparse
import importlib.util
import inspect
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_transfer_kv import save
from torch import Tensor

from torch_hicache import empty_host
from torch_hicache.integrations.sglang import jit, kvcacheio, plugin

LAYERS, HEADS, DIM, PAGE = 32, 2, 64, 16
TOKENS, HOST_TOKENS = 64 * PAGE, 128 * PAGE
ITEM = HEADS * DIM * 2
TURNS, CALLS = 100, 20
SGLANG_TESTS = Path(__file__).parent.parent / "test" / "integrations" / "sglang"

Call = Callable[[], object]
Results = list[dict[str, object]]
transfer_kv = torch.ops.hicache.transfer_kv.default


def time_calls(call: Call) -> float:
    """Microseconds of one."""
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - started) / CALLS * 1e6


def compare(case: str, adapter: Call, op: Call) -> dict[str, object]:
    """In turns, so that whatever else the machine does meets both."""
    times: dict[str, list[float]] = {"adapter": [], "op": []}
    adapter(), op()
    for _ in range(TURNS):
        times["adapter"].append(time_calls(adapter))
        times["op"].append(time_calls(op))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    adapter_us, op_us = min(times["adapter"]), min(times["op"])
    overhead = adapter_us - op_us
    print(f"{case:<58}{adapter_us:8.1f} us  op {op_us:8.1f} us  adapter {overhead:+7.1f} us", flush=True)
    return {
        "section": "integrations",
        "case": case,
        "us": adapter_us,
        "op_us": op_us,
        "overhead_us": overhead,
    }


def host_tensor(*shape: int) -> Tensor:
    return empty_host(shape, torch.bfloat16, device()).zero_()


def device_layers() -> list[Tensor]:
    """One distance apart, as layers of one size mostly are."""
    shape = LAYERS, TOKENS, HEADS, DIM
    return list(torch.zeros(shape, dtype=torch.bfloat16, device=device()).unbind())


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def table_of(layers: list[Tensor]) -> Tensor:
    return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64, device=device())


def bench_sglang() -> Results:
    k, v = device_layers(), device_layers()
    tokens, page = torch.arange(PAGE, 2 * PAGE, device=device()), torch.ones(1, dtype=torch.int64)
    page = page.to(device())
    cpu_tokens = tokens.cpu()
    cpu_page = page.cpu()
    tables = table_of(k), table_of(v)
    by_token = [host_tensor(HOST_TOKENS, LAYERS, HEADS, DIM) for _ in "kv"]  # page_first
    by_layer = [host_tensor(LAYERS, HOST_TOKENS, HEADS, DIM) for _ in "kv"]  # layer_first
    by_head = [host_tensor(HOST_TOKENS // PAGE, HEADS, PAGE, LAYERS, DIM) for _ in "kv"]
    direct = [host_tensor(HOST_TOKENS // PAGE, LAYERS, PAGE, HEADS, DIM) for _ in "kv"]
    layer = [k[3], v[3]]
    pages = [side.unflatten(0, (-1, PAGE)) for side in layer]
    of_layer = [by_layer[0][3], by_layer[1][3]]
    in_token = [pool[:, 3] for pool in by_token]
    all_in_token = [pool[:, i] for pool in by_token for i in range(LAYERS)]
    of_head = [pool[:, :, :, 3] for pool in by_head]
    head_pages = [side.transpose(1, 2) for side in pages]
    of_direct = [pool[:, 3] for pool in direct]
    wide = ITEM, LAYERS * ITEM
    both = tokens, tokens
    cases: list[tuple[str, Call, Call]] = [
        (
            "transfer_kv_per_layer",
            lambda: kvcacheio.transfer_kv_per_layer(
                of_layer[0], layer[0], of_layer[1], layer[1], *both, ITEM
            ),
            lambda: transfer_kv(layer, of_layer, *both),
        ),
        (
            "transfer_kv_per_layer_pf_lf",
            lambda: kvcacheio.transfer_kv_per_layer_pf_lf(
                by_token[0], layer[0], by_token[1], layer[1], *both, 3, *wide
            ),
            lambda: transfer_kv(layer, in_token, *both),
        ),
        (
            "transfer_hicache_one_layer",
            lambda: jit.transfer_hicache_one_layer(
                *layer, tokens, *in_token, tokens, element_dim=HEADS * DIM
            ),
            lambda: transfer_kv(layer, in_token, *both),
        ),
        (
            "transfer_kv_all_layer_lf_pf, 32 layers",
            lambda: kvcacheio.transfer_kv_all_layer_lf_pf(
                tables[0], by_token[0], tables[1], by_token[1], *both, *wide, LAYERS
            ),
            lambda: transfer_kv(all_in_token, [*k, *v], *both),
        ),
        (
            "transfer_kv_direct, one layer, CPU indices",
            lambda: kvcacheio.transfer_kv_direct(of_layer, layer, cpu_tokens, cpu_tokens, PAGE),
            lambda: transfer_kv(layer, of_layer, cpu_tokens, cpu_tokens),
        ),
        (
            "transfer_kv_per_layer_direct_pf_lf, CPU indices (pages)",
            lambda: kvcacheio.transfer_kv_per_layer_direct_pf_lf(
                direct, layer, cpu_tokens, cpu_tokens, 3, PAGE
            ),
            lambda: transfer_kv(pages, of_direct, cpu_page, cpu_page),
        ),
        (
            "transfer_kv_per_layer_ph_lf (pages)",
            lambda: kvcacheio.transfer_kv_per_layer_ph_lf(
                by_head[0], layer[0], by_head[1], layer[1], *both, 3, *wide, PAGE, HEADS
            ),
            lambda: transfer_kv(head_pages, of_head, page, page),
        ),
    ]
    return [compare(f"sglang: {case}", adapter, op) for case, adapter, op in cases]


def bench_sglang_pools() -> Results:
    """The functions that hook the methods of SGLang's own pools, as its registry calls them."""
    if importlib.util.find_spec("sglang") is None or torch.cuda.is_available():
        return []
    sys.path.insert(0, str(SGLANG_TESTS))
    if importlib.util.find_spec("triton") is None:
        import import_stubs

        import_stubs.install()
    from pools import PAGE as POOL_PAGE
    from pools import Pools, page_tokens

    results = []
    for layout, io_backend in (
        ("page_first", "kernel"),
        ("page_head", "kernel"),
        ("page_first_direct", "direct"),
    ):
        pools = Pools("mha", layout)
        tokens = page_tokens(1)
        original = inspect.unwrap(type(pools.host).load_to_device_per_layer)

        def load(
            pools: Pools = pools, tokens: Tensor = tokens, original: Call = original, io: str = io_backend
        ) -> None:
            plugin.load_to_device_per_layer(
                original,
                pools.host,
                pools.device,
                tokens,
                tokens,
                1,
                io,  # type: ignore[arg-type]
            )

        load()
        planes = plugin.planes_of(pools.host, io_backend)
        assert planes is not None
        dst, src = planes.layers[1]
        indices = tokens if layout == "page_first" else tokens[::POOL_PAGE] // POOL_PAGE
        results.append(
            compare(
                f"sglang: hook of load_to_device_per_layer, {layout}",
                load,
                lambda dst=dst, src=src, at=indices: transfer_kv(dst, src, at, at),  # type: ignore[misc]
            )
        )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write machine and results here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = bench_sglang() + bench_sglang_pools()
    save(options.json, results, {})
    return 0


if __name__ == "__main__":
    sys.exit(main())
