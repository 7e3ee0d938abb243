"""Builds the HIP backend for an NVIDIA GPU, as _hip.so of a package without _cuda.so.

    python test/hip_on_cuda/build.py OUTPUT [ARCH]              needs nvcc; ARCH as nvcc names it (sm_90)
    python test/hip_on_cuda/build.py OUTPUT [ARCH] -- -k cuda   and runs the tests, with these arguments

The tests run in the folder test: `python -m pytest` puts the current folder first, and from the root of
the tree it would load the tree's own package, whose CUDA backend takes the key.

What runs then is the HIP source under CUDA's runtime: say "HIP source on an NVIDIA GPU" of any result.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
SOURCES = ["transfer_kv.cpp", "slot_runs.cpp", "plan.cpp", "known_calls.cpp"]
HIP_SOURCES = [
    "transfer_kv.cpp",
    "copy_launch.cpp",
    "copy_engine.cpp",
    "staged.cpp",
    "upload.cpp",
    "device_state.cpp",
    "host_memory.cpp",
    "library.cpp",
]


def build(output: Path, arch: str) -> Path:
    """The library, in a copy of the package. Links to no driver, so it builds without a GPU."""
    package = output / "torch_hicache"
    ignored = shutil.ignore_patterns("__pycache__", "_cuda.so", "_hip.so")
    shutil.copytree(ROOT / "torch_hicache", package, dirs_exist_ok=True, ignore=ignored)
    for name in ("_cuda.so", "_hip.so"):
        (package / name).unlink(missing_ok=True)
    torch_folder = Path(torch.__file__).parent
    simt = FOLDER.parent / "hip_sim" / "simt.h"
    kernels = output / "copy_kernels.o"
    nvcc = ["nvcc", "-x", "cu", "-std=c++17", "-O3", f"-arch={arch}", f"-I{FOLDER}"]
    nvcc += ["-maxrregcount=64"]  # blocks of 1,024 threads: nvcc does not know the attribute that says so
    nvcc += ["-Xcompiler=-fPIC,-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    nvcc += [f"-isystem={torch_folder / 'include'}"]
    source = ROOT / "csrc" / "hip" / "copy_kernels.hip"
    subprocess.run([*nvcc, "-include", str(simt), "-c", str(source), "-o", str(kernels)], check=True)
    objects = [kernels]
    for number, path in enumerate([*SOURCES, *(f"hip/{name}" for name in HIP_SOURCES)]):
        objects.append(output / f"{number}.o")
        subprocess.run([*nvcc, "-c", str(ROOT / "csrc" / path), "-o", str(objects[-1])], check=True)
    link = ["nvcc", "-shared", "-cudart", "static", *map(str, objects), f"-L{torch_folder / 'lib'}"]
    link += ["-Xlinker=--no-as-needed,-ltorch,--as-needed", "-o", str(package / "_hip.so")]
    subprocess.run(link, check=True)
    record = json.loads((ROOT / "torch_hicache" / "_build.json").read_text())
    record["built"].pop("cuda", None)
    record["missing"].pop("hip", None)
    record["missing"]["cuda"] = "the HIP source takes its place here"
    record["built"]["hip"] = {"hip": "the HIP source under CUDA's runtime", "archs": arch}
    (package / "_build.json").write_text(json.dumps(record, indent=2) + "\n")
    return package / "_hip.so"


LOADED = """
import torch_hicache
backends = {backend.name: backend for backend in torch_hicache.backends()}
why = "it has the cuda backend" if backends["cuda"].loaded else backends["hip"].reason
print(torch_hicache.__file__, why, sep="\\n")
"""


def run_tests(output: Path, arguments: list[str]) -> int:
    """pytest with the package in `output`; refused where that would test something else."""
    environment = os.environ | {"HICACHE_HIP_KEY": "CUDA", "PYTHONPATH": str(output)}
    where = {"cwd": FOLDER.parent, "env": environment}
    asked = [sys.executable, "-c", LOADED]
    found = subprocess.run(asked, **where, stdout=subprocess.PIPE, text=True, check=True).stdout
    path, why = found.splitlines()[-2:]
    if why or not Path(path).is_relative_to(output):
        why = why or "another package"
        raise SystemExit(f"[hip_on_cuda] {path} is not the HIP source in {output}: {why}.")
    command = [sys.executable, "-m", "pytest", "-c", "../pyproject.toml", "--rootdir=..", *arguments]
    return subprocess.run(command, **where, check=False).returncode


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        raise SystemExit(__doc__)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    output, arch = Path(arguments[0]).resolve(), arguments[1] if at > 1 else "sm_90"
    print(build(output, arch), flush=True)
    return run_tests(output, arguments[at + 1 :]) if at < len(arguments) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
