"""Builds the simulated driver, and the kernel for its emulated AI cores.

What torch_npu and Memfabric look for and the simulator does not define becomes a function that returns an
error. `python build.py FOLDER` makes the folder look like an installation of CANN, as far as they look;
site/sitecustomize.py loads the libraries.
"""

import re
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
EMULATION = HERE.parent / "ascend_emulation"
KERNEL = ROOT / "csrc" / "ascend" / "kv_exchange_kernel.cpp"
EMPTY = (
    "hccl",
    "acl_op_compiler",
    "ge_runner",
    "graph",
    "acl_tdt_channel",
    "ascend_hal",
    "ra",
    "tsdclient",
)
PREFIXES = ("acl", "rt", "Hccl", "Msprof", "hal", "drv", "Ra", "ra_", "Tsd")
# The newest that this Memfabric knows; it compares.
DRIVER_VERSION = "Innerversion=V100R001C23SPC005B219"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra")
MEMFABRIC_KERNELS = ("SparseCopy", "GroupPackCopy", "KvExchange", "EntryGather")


def package_folder(distribution: str, name: str) -> Path:
    """Without importing the package, which needs the driver that is to be built."""
    for file in files(distribution) or ():
        if file.parts[0] == name and file.name == "__init__.py" and len(file.parts) == 2:
            return Path(str(file.locate())).parent
    raise SystemExit(f"build.py: {distribution} is not installed in this environment")


def run(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"build.py: {' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def symbols(library: Path, which: str) -> set[str]:
    lines = run("nm", "--dynamic", which, library).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines}


def missing_functions(torch_npu: Path, memfabric: Path, defined: set[str]) -> list[str]:
    """C functions of the driver that the packages link to, or look up by name, and nobody defines."""
    core = (memfabric / "lib" / "libmf_hybm_core.so").read_bytes()
    pattern = rb"\0((?:%s)\w+)(?=\0)" % "|".join(PREFIXES).encode()
    needed = {name.decode() for name in re.findall(pattern, core)}
    for library in (torch_npu / "lib").glob("lib*.so"):
        if library.name != "libop_plugin_atb.so":  # loaded only for an optional package
            needed |= symbols(library, "--undefined-only")
    return sorted(name for name in needed - defined if name.startswith(PREFIXES))


def link(output: Path, *inputs: object) -> Path:
    run("g++", *FLAGS, "-o", output, *inputs, f"-Wl,-soname,{output.name}")
    return output


def build_driver(folder: Path) -> None:
    """libascendcl.so with all functions, libopapi.so, and the libraries that only have to be there."""
    torch_npu = package_folder("torch-npu", "torch_npu")
    memfabric = package_folder("memfabric-hybrid", "memfabric_hybrid")
    headers = ("-isystem", torch_npu / "include/third_party/acl/inc", "-I", HERE)
    headers += ("-Wno-deprecated-declarations",)
    objects = []
    for name in ("memory", "streams", "acl", "hal"):
        objects.append(folder / f"{name}.o")
        run("g++", *FLAGS, *headers, "-c", HERE / f"{name}.cpp", "-o", objects[-1])
    driver = link(folder / "libascendcl.so", *objects)
    stubs = folder / "stubs.cpp"
    stubs.write_text(
        "".join(
            f'extern "C" int {name}() {{ return 207000; }}\n'
            for name in missing_functions(torch_npu, memfabric, symbols(driver, "--defined-only"))
        )
    )
    link(driver, *objects, stubs)
    # Named as needed, so that whoever loads an empty library finds the driver's functions.
    with_driver = (f"-L{folder}", "-Wl,--no-as-needed", "-lascendcl")
    link(folder / "libopapi.so", HERE / "opapi.cpp", *headers, *with_driver)
    for name in EMPTY:
        link(folder / f"lib{name}.so", *with_driver)
    link(folder / "libpreload.so", HERE / "preload.cpp")
    (folder / "version.info").write_text(DRIVER_VERSION + "\n")
    for part in ("runtime", "compiler"):  # torch_npu wants to see them
        (folder / part).mkdir(exist_ok=True)
    if not (folder / "lib64").exists():
        (folder / "lib64").symlink_to(".")


def complete_memfabric(folder: Path) -> None:
    """Its own kernels, which its wheel holds as an empty file for a CANN machine to build."""
    library = package_folder("memfabric-hybrid", "memfabric_hybrid") / "lib" / "libmf_hybm_accoffload.so"
    if library.stat().st_size == 0:
        source = folder / "accoffload.cpp"
        functions = (f'extern "C" void AccOffload{name}() {{}}\n' for name in MEMFABRIC_KERNELS)
        source.write_text("".join(functions))
        link(library, source)


def build_kernel(folder: Path, source: Path = KERNEL, output: str = "_ascend_kernel.so") -> Path:
    """The kernel's own source, against the emulation instead of CANN."""
    headers = ("-I", EMULATION, "-I", HERE, "-I", KERNEL.parent)
    launch = EMULATION / "launch.cpp"
    return link(folder / output, *headers, source, launch, f"-L{folder}", "-lascendcl")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    build_driver(target)
    build_kernel(target)
    complete_memfabric(target)
