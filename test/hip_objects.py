"""The code objects inside _hip.so, their disassembly and notes, and kernels compiled with a fault."""

import functools
import json
import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch_hicache

PACKAGE = Path(torch_hicache.__file__).parent
LIBRARY = PACKAGE / "_hip.so"
CSRC = Path(__file__).parent.parent / "csrc"
_MAGIC = b"__CLANG_OFFLOAD_BUNDLE__"


def tool(name: str) -> str | None:
    """An LLVM tool: of the compiler that built the library, as Debian names it, or of the PATH."""
    compiler = Path(build_record().get("compiler", ""))
    version = compiler.name.partition("clang++-")[2]
    for path in (compiler.resolve().parent / name, f"{name}-{version}", f"{name}-19", name):
        if found := shutil.which(path):
            return found
    return None


def build_record() -> dict[str, str]:
    try:
        return json.loads((PACKAGE / "_build.json").read_text())["built"].get("hip", {})
    except FileNotFoundError:
        return {}


def missing() -> str:
    """Why the machine code can't be looked at, or compiled once more, here; empty when it can."""
    if not LIBRARY.is_file():
        backend = next(backend for backend in torch_hicache.backends() if backend.name == "hip")
        return f"the hip backend is not built: {backend.reason}"
    for name in ("llvm-objdump", "llvm-readelf"):
        if tool(name) is None:
            return f"{name} was not found"
    compiler, headers = build_record().get("compiler", ""), build_record().get("headers", "")
    if not shutil.which(compiler):
        return f"the compiler that built the hip backend is not here: '{compiler}'"
    return "" if Path(headers).is_dir() else f"HIP's headers are no longer at '{headers}'"


def unbundle(content: bytes) -> dict[str, bytes]:
    """Code objects by GPU, out of a file that holds one of clang's bundles."""
    start = content.find(_MAGIC)
    assert start >= 0, "no bundle of code objects in the library"
    at = start + len(_MAGIC)
    (entries,) = struct.unpack_from("<Q", content, at)
    at += 8
    objects = {}
    for _ in range(entries):
        offset, size, name_size = struct.unpack_from("<QQQ", content, at)
        name = content[at + 24 : at + 24 + name_size].decode()
        at += 24 + name_size
        if "amdgcn" in name:
            objects[name.rpartition("-")[2]] = content[start + offset : start + offset + size]
    return objects


@functools.cache
def code_objects() -> dict[str, bytes]:
    return unbundle(LIBRARY.read_bytes())


def archs() -> list[str]:
    """The GPUs that the library holds code for; one that stands for all where there is no library."""
    return ["gfx942"] if missing() else sorted(code_objects())


@dataclass(frozen=True)
class Kernel:
    """One kernel of one code object: its instructions as text, and what its notes say."""

    name: str
    instructions: list[str]
    notes: dict[str, int]

    @property
    def is_copy(self) -> bool:
        return "copy_kernel" in self.name

    @property
    def vector_bytes(self) -> int:
        return int(self._template[1])

    @property
    def stripes(self) -> int:
        return int(self._template[2])

    @property
    def slot(self) -> str:
        return {"i": "int32", "l": "int64"}[self._template[3]]

    @property
    def _template(self) -> re.Match[str]:
        match = re.search(r"copy_kernelILi(\d+)ELi(\d+)E([il])E", self.name)
        assert match
        return match

    def count(self, pattern: str) -> int:
        return sum(re.match(pattern, text) is not None for text in self.instructions)


def objdump(arch: str) -> list[str]:
    """LLVM 19's does not know gfx950, which has gfx942's instructions and more: those fail as unknown."""
    return [str(tool("llvm-objdump")), *(["--mcpu=gfx942"] if arch == "gfx950" else [])]


def disassemble(path: Path, arch: str) -> str:
    command = [*objdump(arch), "-d", "--no-show-raw-insn", "--no-leading-addr", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_kernels(path: Path, arch: str) -> list[Kernel]:
    """All kernels of a code object for `arch` in a file."""
    listing: dict[str, list[str]] = {}
    name = ""
    for line in disassemble(path, arch).splitlines():
        if match := re.match(r"<(\w+)>:", line.strip()):
            name = match[1]
            listing[name] = []
        elif name and line.startswith("\t"):
            listing[name].append(line.partition("//")[0].strip())
    notes = subprocess.run(
        [str(tool("llvm-readelf")), "--notes", str(path)], capture_output=True, text=True, check=True
    ).stdout
    kernels = []
    for block in notes.split("- .agpr_count:")[1:] or notes.split("- .args:")[1:]:
        values = {key: int(value) for key, value in re.findall(r"\.(\w+): +(\d+)\s", block)}
        match = re.search(r"\.name: +(\w+)", block)
        assert match
        kernels.append(Kernel(match[1], listing[match[1]], values))
    return kernels


def compile_kernels(arch: str, target: Path, csrc: Path = CSRC) -> list[Kernel]:
    """Compile copy_kernels.hip of a source tree as setup.py does, for one GPU."""
    record = build_record()
    command = [record["compiler"], "-x", "hip", "-std=c++17", "-nogpuinc", "-nogpulib", "-O3"]
    command += ["-D__HIP_PLATFORM_AMD__=1", "-isystem", record["headers"], f"--offload-arch={arch}"]
    command += ["--cuda-device-only", "--no-gpu-bundle-output"]
    command += ["-c", str(csrc / "hip" / "copy_kernels.hip"), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True)
    return read_kernels(target, arch)


def with_fault(tmp_path: Path, file: str, right: str, wrong: str) -> Path:
    """A copy of the sources in which `right` has become `wrong`."""
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    text = (csrc / file).read_text()
    assert right in text, f"{file} no longer holds the text that this fault replaces"
    (csrc / file).write_text(text.replace(right, wrong))
    return csrc
