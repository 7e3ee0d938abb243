"""Each method by row size: scattered rows of a small host pool, beside one big copy of the same run.

    python benchmark/bench_row_sizes.py [--json results.json]

What `hicache calibrate` decides by; smaller rows are in bench_transfer_kv.py.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from bench_transfer_kv import link_rates, machine, print_row

from torch_hicache.calibrate import measure_rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write machine and results here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("[bench_row_sizes] these figures need a CUDA device, and there is none.", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    link = link_rates()
    print(f"CE: load {link['load']:.1f} GB/s, store {link['store']:.1f} GB/s", flush=True)
    results: list[dict[str, object]] = []
    for rate in measure_rows(device):
        row = {
            "section": "row_sizes",
            "case": f"{rate.row_bytes} B, {rate.method}",
            "method": rate.method,
            "row_bytes": rate.row_bytes,
            "direction": rate.direction,
            "gbps": rate.gbps,
            "of_link": rate.gbps / link[rate.direction],
        }
        results.append(row)
        print_row(row)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"machine": machine(), "link_gbps": link, "results": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
