"""Builds the simulated AMD GPU of test/hip_sim, and runs Python with it.

libamdhip64.so.7   the runtime (memory.cpp, runtime.cpp, errors.cpp, code_objects.cpp)
libbodies.so       the kernels' source, built for the host
libinterpreter.so  executes the machine code itself (test/hip_interpreter)
libdevice.so       the GPU as a device of this torch
"""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hip_objects
import torch

FOLDER = Path(__file__).parent
SIMULATOR = FOLDER / "hip_sim"
INTERPRETER = FOLDER / "hip_interpreter"
ROOT = FOLDER.parent
CXX = os.environ.get("CXX", "c++")
SANITIZE = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
HOST_BODY = [
    "-x",
    "c++",
    "-Wno-attributes",
    "-Wno-unknown-pragmas",
    "-include",
    str(SIMULATOR / "simt.h"),
]


def missing() -> str:
    """Why there is no simulator here; empty when there is one."""
    if reason := hip_objects.missing():
        return reason
    return "" if shutil.which(CXX) else f"no C++ compiler: '{CXX}'"


def _compile(target: Path, sources: list[Path], *flags: str) -> Path:
    """A shared library, built again when anything that it is made of has changed."""
    headers = hip_objects.build_record()["headers"]
    common = ["-std=c++20", "-O2", "-fPIC", "-shared", "-D__HIP_PLATFORM_AMD__=1", "-isystem", headers]
    command = [CXX, *common, *flags, *map(str, sources), "-o", str(target)]
    inputs = [*SIMULATOR.iterdir(), *INTERPRETER.iterdir(), *(p for p in (ROOT / "csrc").rglob("*.*"))]
    digest = hashlib.sha256(" ".join([*command, torch.__version__]).encode())
    for path in sorted(inputs):
        digest.update(path.read_bytes())
    stamp = target.with_suffix(".stamp")
    if target.is_file() and stamp.is_file() and stamp.read_text() == digest.hexdigest():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    stamp.write_text(digest.hexdigest())
    return target


@functools.cache
def folder(sanitize: bool = False) -> Path:
    return ROOT / "build" / "hip_sim" / (torch.__version__ + ("-sanitized" if sanitize else ""))


@functools.cache
def runtime(sanitize: bool = False) -> Path:
    major = hip_objects.build_record()["hip"].partition(".")[0]
    name = f"libamdhip64.so.{major}"
    sources = [SIMULATOR / f"{part}.cpp" for part in ("runtime", "errors", "memory", "code_objects")]
    flags = ["-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{name}", "-ldl"]
    return _compile(folder(sanitize) / name, sources, *flags, *(SANITIZE if sanitize else []))


@functools.cache
def bodies(sanitize: bool = False) -> Path:
    flags = ["-Wall", "-Wextra", "-Werror", *HOST_BODY, *(SANITIZE if sanitize else [])]
    return _compile(folder(sanitize) / "libbodies.so", [SIMULATOR / "bodies.cpp"], *flags)


@functools.cache
def interpreter() -> Path:
    flags = ["-Wall", "-Wextra", "-Werror"]
    return _compile(
        folder() / "libinterpreter.so",
        [*sorted(INTERPRETER.glob("*.cpp")), SIMULATOR / "code_objects.cpp"],
        *flags,
    )


@functools.cache
def torch_device(key: str = "PrivateUse1") -> Path:
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    flags = ["-O1", "-w", f"-DHIP_SIM_KEY={key}", f"-DHIP_SIM_IS_PRIVATE={int(key == 'PrivateUse1')}"]
    flags += [f"-DHIP_SIM_IS_HIP={int(key == 'HIP')}"]
    for folder_name in (include, include / "torch" / "csrc" / "api" / "include"):
        flags += ["-isystem", str(folder_name)]
    libraries = torch_folder / "lib"
    flags += [
        f"-L{libraries}",
        f"-Wl,-rpath,{libraries},--no-as-needed",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
    ]
    return _compile(
        folder() / f"libdevice_{key}.so", [SIMULATOR / "torch_device.cpp"], *flags, str(runtime())
    )


def environment(
    executor: str = "host", key: str = "PrivateUse1", *, sanitize: bool = False, **settings: str
) -> dict[str, str]:
    """The environment of a process with the simulated GPU; see hip_sim_device.py.

    Args:
        executor: "host" for host-built bodies, or a GPU such as "gfx942", whose code is interpreted.
        settings: more variables.
    """
    arch = "gfx942" if executor == "host" else executor
    variables = {
        "HIP_SIM_RUNTIME": str(runtime(sanitize)),
        "HIP_SIM_DEVICE": str(torch_device(key)),
        "HIP_SIM_KEY": key,
        "HIP_SIM_EXECUTOR": str(bodies(sanitize) if executor == "host" else interpreter()),
        "HIP_SIM_ARCH": arch,
        "HIP_SIM_OBJDUMP": " ".join(hip_objects.objdump(arch)),
        "OMP_NUM_THREADS": "1",  # small tensors: threads only get in their way
        "PYTHONPATH": os.pathsep.join([str(FOLDER), str(hip_objects.PACKAGE.parent)]),
    }
    if sanitize:
        libraries = [
            subprocess.run([CXX, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
            for name in ("libasan.so", "libubsan.so")
        ]
        variables["LD_PRELOAD"] = " ".join(found.stdout.strip() for found in libraries)
        variables["ASAN_OPTIONS"] = "detect_leaks=0:allocator_may_return_null=1"
    return {**os.environ, **variables, **settings}


def run_python(program: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A program that starts with the simulated device in place, as `sim` and `device`."""
    start = "from hip_sim_device import device, sim\nimport torch, torch_hicache\n"
    command = [sys.executable, "-X", "faulthandler", "-c", start + program]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=500)


def run_suite(files: list[str], env: dict[str, str], only: str) -> subprocess.CompletedProcess[str]:
    """The tests of the op's own suite that run on the simulated device; pytest's `-k only` picks some.

    Not those of several threads: while the simulated GPU works for one, the page-locked memory of all is
    inaccessible, and another one that writes its indices there would end the process.
    """
    paths = [str(FOLDER / file) for file in files]
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        "pytest",
        "-p",
        "hip_sim_device",
        "-q",
        "-x",
        "-rf",
    ]
    command += ["-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
    command += ["-k", f"({only}) and not several_threads", *paths]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=900)
