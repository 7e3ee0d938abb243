"""Builds one shared object for each backend with ninja, on LibTorch's stable ABI.

The libraries use no Python C API, so one `py3-none-<platform>` wheel serves every Python and every
torch from 2.10 on. A backend is built where its compiler is found:

    _C     schemas and the CPU backend   any C++17 compiler
    _cuda  NVIDIA                        nvcc 12.x or 13.x, also against a CPU-only torch
    _hip   AMD                           hipcc or a clang that knows AMD GPUs, and HIP's headers (of ROCm
                                         or of an installed triton); also against a CPU-only torch
    _ascend  Ascend (host side)        any C++17 compiler; CANN's functions are found at run time

The AI-vector kernel of the Ascend backend needs CANN's compiler and is a library of its own, see
docs/ascend.md.

HICACHE_BACKENDS=cpu,cuda   builds exactly these; what a listed one lacks is an error
TORCH_CUDA_ARCH_LIST="9.0"  compute capabilities, "+PTX" as in torch's own extensions
PYTORCH_ROCM_ARCH="gfx942"  AMD GPUs
ROCM_PATH, HIPCXX           ROCm's folder; the compiler for HIP
HIP_INCLUDE_DIR             the folder that holds hip/hip_runtime_api.h
HICACHE_SANITIZE=1          AddressSanitizer and UBSan for the CPU backend
CUDA_HOME, CXX, MAX_JOBS    as usual
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
SHARED_SOURCES = ["transfer_kv.cpp", "slot_runs.cpp", "plan.cpp", "known_calls.cpp"]
SOURCES = {
    "cpu": ["ops.cpp", *SHARED_SOURCES, "cpu/transfer_kv.cpp"],
    "cuda": [
        *SHARED_SOURCES,
        "cuda/transfer_kv.cpp",
        "cuda/copy_kernel.cu",
        "cuda/copy_engine.cpp",
        "cuda/staged.cpp",
        "cuda/entries.cu",
        "cuda/upload.cu",
        "cuda/device_state.cu",
        "cuda/host_memory.cpp",
    ],
    "ascend": [
        *SHARED_SOURCES,
        "ascend/transfer_kv.cpp",
        "ascend/kv_exchange.cpp",
        "ascend/copy_engine.cpp",
        "ascend/chip.cpp",
        "ascend/error_records.cpp",
        "ascend/host_memory.cpp",
        "ascend/runtime.cpp",
    ],
    "hip": [
        *SHARED_SOURCES,
        "hip/transfer_kv.cpp",
        "hip/copy_kernels.hip",
        "hip/copy_launch.cpp",
        "hip/copy_engine.cpp",
        "hip/staged.cpp",
        "hip/upload.cpp",
        "hip/device_state.cpp",
        "hip/host_memory.cpp",
        "hip/library.cpp",
    ],
}
LIBRARY = {"cpu": "_C", "cuda": "_cuda", "hip": "_hip", "ascend": "_ascend"}
DEFAULT_CUDA_ARCHS = "8.0+PTX;9.0;10.0;12.0"
DEFAULT_HIP_ARCHS = "gfx90a;gfx942;gfx950;gfx1100;gfx1201"
# The kernels use the compiler's builtins only: no device libraries, none of HIP's wrapper headers.
HIP_DEVICE_FLAGS = ["-x", "hip", "-std=c++17", "-nogpuinc", "-nogpulib"]
# The oldest driver branch that runs a library built with this major version of the toolkit.
MIN_CUDA_DRIVER = {12: "525", 13: "580"}
TORCH_TARGET = "0x020a000000000000"  # 2.10


def find_nvcc() -> Path | None:
    """nvcc of CUDA_HOME, of the PATH, or of the usual place, in this order."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path))
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((path for path in candidates if path.is_file()), None)


def nvcc_version(nvcc: Path) -> str:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    if not match:
        raise SystemExit(f"setup.py: {nvcc} --version gives no release number")
    return match.group(1)


def cuda_arch_flags(archs: str) -> tuple[list[str], str]:
    """-gencode flags, and their short names, of a list such as "8.0+PTX;9.0 10.0"."""
    flags, names = [], []
    for arch in re.split(r"[;,\s]+", archs.strip()):
        match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", arch)
        if not match:
            raise SystemExit(
                f"setup.py: TORCH_CUDA_ARCH_LIST holds '{arch}'; write numbers such as 9.0 or 8.0+PTX"
            )
        number = f"{match[1]}{match[2]}{match[3]}"
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        names.append(f"sm_{number}")
        if match[4]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
            names.append(f"compute_{number} (PTX)")
    return flags, ", ".join(names)


def default_cuda_archs(nvcc: Path) -> str:
    """Those of DEFAULT_CUDA_ARCHS that this nvcc knows: 10.0 and 12.0 came with 12.8."""
    text = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    known = set(text.split())
    wanted = DEFAULT_CUDA_ARCHS.split(";")
    return ";".join(a for a in wanted if "compute_" + re.sub(r"\D", "", a) in known)


def rocm_folder() -> Path | None:
    folder = Path(os.environ.get("ROCM_PATH") or "/opt/rocm")
    return folder if folder.is_dir() else None


def hip_archs(compiler: Path | str) -> list[str]:
    """Those of the wanted GPUs that this compiler knows; empty for a compiler without AMD's target."""
    wanted = re.split(r"[;,\s]+", (os.environ.get("PYTORCH_ROCM_ARCH") or DEFAULT_HIP_ARCHS).strip())
    command = [
        compiler,
        "-x",
        "hip",
        "-nogpuinc",
        "-nogpulib",
        "--cuda-device-only",
        "-S",
        "-o",
        "-",
        "-",
    ]
    known = []
    for arch in wanted:
        flags = [*command, f"--offload-arch={arch}"]
        done = subprocess.run(flags, input=b"", capture_output=True, check=False)
        if done.returncode == 0:
            known.append(arch)
        elif os.environ.get("PYTORCH_ROCM_ARCH"):
            message = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            print(f"torch_hicache: {compiler} does not compile for {arch}: {message}", file=sys.stderr)
    return known


def find_hip_compiler() -> tuple[Path | str, list[str]] | None:
    """HIPCXX, ROCm's hipcc or a clang++ that knows AMD GPUs, and the GPUs that it compiles for."""
    rocm = rocm_folder()
    candidates = [os.environ.get("HIPCXX"), str(rocm / "bin" / "hipcc") if rocm else None]
    # Not a hipcc on the PATH: Debian's takes nvcc where CUDA is installed.
    candidates += [f"clang++-{version}" for version in range(25, 17, -1)] + ["clang++"]
    for name in candidates:
        compiler = shutil.which(name) if name else None
        if compiler and (archs := hip_archs(compiler)):
            return compiler, archs
    return None


def find_hip_headers() -> Path | None:
    """The include folder of HIP_INCLUDE_DIR, of ROCm, or of an installed triton, which carries HIP's."""
    candidates = [Path(folder) for folder in [os.environ.get("HIP_INCLUDE_DIR")] if folder]
    if rocm := rocm_folder():
        candidates.append(rocm / "include")
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        candidates.append(Path(triton.origin).parent / "backends" / "amd" / "include")
    return next((path for path in candidates if (path / "hip" / "hip_runtime_api.h").is_file()), None)


def hip_version(headers: Path) -> tuple[str, str]:
    """Major and minor number."""
    text = (headers / "hip" / "hip_version.h").read_text()
    numbers = [re.search(rf"HIP_VERSION_{part}\s+(\d+)", text) for part in ("MAJOR", "MINOR")]
    if not all(numbers):
        raise SystemExit(f"setup.py: {headers}/hip/hip_version.h gives no version")
    major, minor = (number[1] for number in numbers if number)
    return major, minor


def missing_for_hip() -> str:
    """What the HIP backend lacks here; empty when it can be built."""
    if find_hip_compiler() is None:
        return "no hipcc and no clang++ for AMD GPUs was found (ROCM_PATH, HIPCXX, PATH)"
    if find_hip_headers() is None:
        return "HIP's headers were not found (HIP_INCLUDE_DIR, ROCM_PATH, an installed triton)"
    return ""


def choose_backends() -> tuple[list[str], dict[str, str]]:
    """The backends to build, and why the others are not."""
    missing = {}
    if find_nvcc() is None:
        missing["cuda"] = "nvcc was not found (CUDA_HOME, PATH, /usr/local/cuda)"
    if reason := missing_for_hip():
        missing["hip"] = reason
    wanted = os.environ.get("HICACHE_BACKENDS")
    if not wanted:
        return [name for name in SOURCES if name not in missing], missing
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    for name in names:
        if name not in SOURCES:
            raise SystemExit(f"setup.py: HICACHE_BACKENDS names '{name}'; there are {', '.join(SOURCES)}")
        if name in missing:
            raise SystemExit(
                f"setup.py: HICACHE_BACKENDS wants '{name}', but {missing[name]}. Install it, or leave "
                f"'{name}' out."
            )
    if "cpu" not in names:
        raise SystemExit("setup.py: HICACHE_BACKENDS must contain cpu: it holds every schema")
    return names, missing | {
        name: "left out by HICACHE_BACKENDS" for name in SOURCES if name not in names
    }


class NinjaFile:
    """The build.ninja of all chosen backends, and a record of what was built for `hicache info`."""

    def __init__(self, build_dir: Path, output_dir: Path) -> None:
        import torch

        torch_dir = Path(torch.__file__).parent
        self.build_dir = build_dir
        self.output_dir = output_dir
        self.lines: list[str] = []
        self.cxx_flags = ""  # of host code; add_cpu sets them
        self.record: dict[str, dict[str, str]] = {}
        self.torch_lib = torch_dir / "lib"
        # No symbol of libtorch.so itself is used, but its name pulls in the libraries that are.
        self.link_flags = f"-L{self.torch_lib} -Wl,--no-as-needed -ltorch -Wl,--as-needed -lpthread"
        self.common = f"-std=c++17 -DTORCH_TARGET_VERSION={TORCH_TARGET} -isystem {torch_dir}/include"
        self.torch_version = torch.__version__

    def rule(self, name: str, command: str, description: str) -> None:
        self.lines += [
            f"rule {name}",
            f"  command = {command}",
            f"  description = {description}",
            "  depfile = $out.d",
            "  deps = gcc",
            "",
        ]

    def add_cpu(self) -> None:
        cxx = os.environ.get("CXX", "c++")
        sanitize = (
            " -g -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
            if os.environ.get("HICACHE_SANITIZE") == "1"
            else ""
        )
        flags = f"{self.common} -O3 -fPIC -fvisibility=hidden -Wall -Wextra -Werror{sanitize}"
        self.cxx_flags = flags
        self.rule("cxx", f"{cxx} -MMD -MF $out.d {flags} -c $in -o $out", "CXX $out")
        self.lines += [
            "rule link_cpu",
            f"  command = {cxx} -shared{sanitize} $in -o $out {self.link_flags}",
            "  description = LINK $out",
            "",
        ]
        self.library("cpu", "cxx", "cxx", "link_cpu")
        self.record["cpu"] = {"compiler": cxx, "torch_headers": self.torch_version}

    def add_ascend(self) -> None:
        """Behind add_cpu, whose compiler and link it shares."""
        cxx = os.environ.get("CXX", "c++")
        name = '-DHICACHE_PRIVATE_DEVICE_NAME=\\"npu\\"'
        self.rule(
            "cxx_ascend",
            f"{cxx} -MMD -MF $out.d {self.cxx_flags} {name} -c $in -o $out",
            "CXX $out",
        )
        self.library("ascend", "cxx_ascend", "cxx_ascend", "link_cpu")
        self.record["ascend"] = {"compiler": cxx, "torch_headers": self.torch_version}

    def add_cuda(self) -> None:
        nvcc = find_nvcc()
        if nvcc is None:
            raise SystemExit("setup.py: nvcc was not found")
        version = nvcc_version(nvcc)
        archs, names = cuda_arch_flags(os.environ.get("TORCH_CUDA_ARCH_LIST") or default_cuda_archs(nvcc))
        flags = (
            f"{self.common.replace('-isystem ', '-isystem=')} -DUSE_CUDA -O3 "
            f"-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra -lineinfo {' '.join(archs)}"
        )
        self.rule("nvcc", f"{nvcc} -MMD -MF $out.d {flags} -c $in -o $out", "NVCC $out")
        self.lines += [
            "rule link_cuda",
            f"  command = {nvcc} -shared -cudart static $in -o $out "
            + f"-L{self.torch_lib} -Xlinker=--no-as-needed,-ltorch,--as-needed -lpthread",
            "  description = LINK $out",
            "",
        ]
        self.library("cuda", "nvcc", "cxx", "link_cuda")
        major = int(version.split(".")[0])
        self.record["cuda"] = {
            "cuda_toolkit": version,
            "archs": names,
            "min_driver": MIN_CUDA_DRIVER.get(major, "unknown"),
        }

    def add_hip(self) -> None:
        found, headers = find_hip_compiler(), find_hip_headers()
        if found is None or headers is None:
            raise SystemExit(f"setup.py: {missing_for_hip()}")
        compiler, archs = found
        major, minor = hip_version(headers)
        cxx = os.environ.get("CXX", "c++")
        # -isystem: an installed HIP of another version, whose ABI differs, must not win.
        common = (
            f"-D__HIP_PLATFORM_AMD__=1 -isystem {headers} -O3 -fPIC -fvisibility=hidden -Wall -Wextra"
        )
        flags = f"{self.common} {common} -Werror"
        self.rule("hip_host", f"{cxx} -MMD -MF $out.d {flags} -c $in -o $out", "CXX $out")
        device = " ".join([*HIP_DEVICE_FLAGS, *(f"--offload-arch={arch}" for arch in archs)])
        self.rule("hip", f"{compiler} -MMD -MF $out.d {device} {common} -c $in -o $out", "HIP $out")
        # A second copy of the runtime beside torch's would not know torch's streams: only the runtime's
        # name goes into the library, never a path. An empty library of that name stands in for it here.
        stand_in = self.build_dir / "hip" / f"libamdhip64.so.{major}"
        self.lines += [
            "rule hip_runtime_name",
            f"  command = {cxx} -shared -nostdlib -x c++ /dev/null -Wl,-soname,$soname -o $out",
            "  description = NAME $out",
            "",
            f"build {stand_in}: hip_runtime_name",
            f"  soname = {stand_in.name}",
            "",
            "rule link_hip",
            f"  command = {cxx} -shared -Wl,--no-as-needed $in -o $out {self.link_flags}",
            "  description = LINK $out",
            "",
        ]
        self.library("hip", "hip_host", "hip_host", "link_hip", extra=[str(stand_in)])
        self.record["hip"] = {
            "hip": f"{major}.{minor}",
            "archs": ", ".join(archs),
            "compiler": str(compiler),
            "headers": str(headers),
        }

    def library(
        self,
        backend: str,
        device_rule: str,
        shared_rule: str,
        link_rule: str,
        *,
        extra: Sequence[str] = (),
    ) -> None:
        objects = []
        for source in SOURCES[backend]:
            rule = device_rule if source.startswith(f"{backend}/") else shared_rule
            if source.endswith(".hip"):
                rule = "hip"
            target = self.build_dir / backend / (source.replace("/", "_") + ".o")
            objects.append(str(target))
            self.lines += [f"build {target}: {rule} {CSRC / source}"]
        output = self.output_dir / f"{LIBRARY[backend]}.so"
        self.lines += [f"build {output}: {link_rule} {' '.join([*objects, *extra])}", ""]

    def run(self) -> None:
        import ninja

        self.build_dir.mkdir(parents=True, exist_ok=True)
        self.output_dir.mkdir(parents=True, exist_ok=True)
        text = "ninja_required_version = 1.5\n\n" + "\n".join(self.lines)
        (self.build_dir / "build.ninja").write_text(text)
        command = [str(Path(ninja.BIN_DIR) / "ninja"), "-C", str(self.build_dir)]
        if jobs := os.environ.get("MAX_JOBS"):
            command += ["-j", jobs]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit("setup.py: the build failed; the compiler's message is above")


class BuildBackends(build_ext):
    """build_ext that hands the whole build to ninja."""

    def run(self) -> None:
        backends, missing = choose_backends()
        variant = "asan" if os.environ.get("HICACHE_SANITIZE") == "1" else "release"
        build_dir = ROOT / "build" / "ninja" / variant
        build = NinjaFile(build_dir, build_dir / "lib")
        build.add_cpu()
        if "cuda" in backends:
            build.add_cuda()
        if "ascend" in backends:
            build.add_ascend()
        if "hip" in backends:
            build.add_hip()
        build.run()
        # A copy, so that the source tree and the wheel hold the very same libraries.
        package = ROOT if self.inplace else Path(self.build_lib).resolve()
        package /= "torch_hicache"
        package.mkdir(parents=True, exist_ok=True)
        for backend, library in LIBRARY.items():
            target = package / f"{library}.so"
            target.unlink(missing_ok=True)  # a process that has the old one mapped keeps it
            if backend in backends:
                shutil.copy2(build.output_dir / target.name, target)
        record = {"built": build.record, "missing": missing}
        (package / "_build.json").write_text(json.dumps(record, indent=2) + "\n")
        for name, reason in missing.items():
            print(f"torch_hicache: the {name} backend is not built: {reason}", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class AnyPythonWheel(bdist_wheel):
    """The libraries depend on the platform, not on the Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[Extension("torch_hicache._C", sources=[])],
    cmdclass={"build_ext": BuildBackends, "bdist_wheel": AnyPythonWheel},
)
