"""The machine code for AMD GPUs: wide non-temporal accesses to global memory, and nothing through flat
addresses, scratch memory or spilled registers."""

import re
import subprocess
from pathlib import Path

import hip_objects
import pytest
from hip_objects import Kernel

pytestmark = pytest.mark.backend("hip")

UNITS = 4  # kUnitsPerThread of copy_params.h
WIDTHS = (16, 8, 4, 2, 1)
KERNELS = {(width, 1) for width in WIDTHS} | {(16, UNITS)}  # bytes of a vector, stripes
# What a load or store of so many bytes is called: gfx9, and gfx11 and newer.
LOADS = {
    16: "dwordx4|b128",
    8: "dwordx2|b64",
    4: "dword|b32",
    2: "ushort|u16",
    1: "ubyte|u8",
}
STORES = {16: "dwordx4|b128", 8: "dwordx2|b64", 4: "dword|b32", 2: "short|b16", 1: "byte|b8"}
# What marks an access as non-temporal.
HINTS = {
    "gfx90a": (r"glc slc$", r"glc slc$"),
    "gfx942": (r"nt$", r"nt$"),
    "gfx950": (r"nt$", r"nt$"),
    "gfx1100": (r"slc dlc$", r"glc slc dlc$"),
    "gfx1201": (r"th:TH_LOAD_NT$", r"th:TH_STORE_NT$"),
}
# Registers of a lane and their granule, and the most waves of a SIMD.
REGISTERS = {
    "gfx90a": (512, 8, 8),
    "gfx942": (512, 8, 8),
    "gfx950": (512, 8, 8),
    "gfx1100": (1536, 24, 16),
    "gfx1201": (1536, 24, 16),
}
# The least that any compiler may leave room for, and what clang 19 does: two blocks of 1,024 threads on a
# unit of gfx9 take 8 waves a SIMD.
FEWEST_WAVES = {"gfx90a": 6, "gfx942": 6, "gfx950": 6, "gfx1100": 16, "gfx1201": 16}
FEWEST_WAVES_CLANG_19 = FEWEST_WAVES | {"gfx90a": 8, "gfx942": 8}


def faults(arch: str, kernel: Kernel) -> list[str]:
    """What is wrong with a copy kernel; empty when nothing is."""
    found = []
    for pattern in ("flat_", "scratch_", "buffer_load", "buffer_store", "v_accvgpr"):
        if number := kernel.count(pattern):
            found.append(f"{number} x {pattern}")
    for note in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        if kernel.notes[note]:
            found.append(f"{note} {kernel.notes[note]}")
    load_hint, store_hint = HINTS[arch]
    for width in WIDTHS:
        # Chunks with stripes have no bytes behind their last vector.
        is_needed = width == kernel.vector_bytes or (width < kernel.vector_bytes and kernel.stripes == 1)
        expected = UNITS if is_needed else 0
        loads = kernel.count(rf"global_load_({LOADS[width]}) .*{load_hint}")
        stores = kernel.count(rf"global_store_({STORES[width]}) .*{store_hint}")
        if loads != expected or stores != expected:
            found.append(f"{loads} loads and {stores} stores of {width} bytes, expected {expected}")
    # On gfx12 a pair of words waits for the other width's load, which it is never behind.
    allowed = 2 * UNITS // kernel.stripes if arch.startswith("gfx12") else 0
    if (waits := waits_among_index_loads(arch, kernel)) > allowed:
        found.append(f"{waits} waits before all indices are on their way")
    if (waves := waves_per_simd(arch, kernel)) < fewest_waves(arch):
        found.append(f"room for {waves} waves a SIMD")
    return found


def waits_among_index_loads(arch: str, kernel: Kernel) -> int:
    """Indices are the loads without a hint nearest to the first row's: of two sides, in two widths."""
    text = kernel.instructions
    is_row = [re.match(rf"global_load_.*{HINTS[arch][0]}", line) is not None for line in text]
    before = text[: is_row.index(True)] if any(is_row) else []
    loads = [k for k, line in enumerate(before) if re.match("global_load_(dword|dwordx2|b32|b64) ", line)]
    units = UNITS // kernel.stripes
    among = before[loads[-4 * units] : loads[-1]] if len(loads) >= 4 * units else []
    return sum(re.match(r"s_waitcnt.*vmcnt|s_wait_loadcnt", line) is not None for line in among)


def waves_per_simd(arch: str, kernel: Kernel) -> int:
    """What the registers allow; scalar ones are shared on gfx9 only."""
    registers, granule, most = REGISTERS[arch]
    used = -(-kernel.notes["vgpr_count"] // granule) * granule
    if arch.startswith("gfx9"):
        most = min(most, 800 // kernel.notes["sgpr_count"])
    return min(most, registers // used)


def fewest_waves(arch: str) -> int:
    is_clang_19 = hip_objects.build_record().get("compiler", "").endswith("clang++-19")
    return (FEWEST_WAVES_CLANG_19 if is_clang_19 else FEWEST_WAVES)[arch]


@pytest.fixture(params=hip_objects.archs())
def arch(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def kernels(arch: str, tmp_path: Path) -> list[Kernel]:
    path = tmp_path / "code.o"
    path.write_bytes(hip_objects.code_objects()[arch])
    return [kernel for kernel in hip_objects.read_kernels(path, arch) if kernel.is_copy]


def test_archs_of_the_library() -> None:
    assert set(hip_objects.code_objects()) >= {"gfx90a", "gfx942", "gfx1100", "gfx1201"}


def test_kernels_of_the_library(arch: str, kernels: list[Kernel]) -> None:
    found = {
        (kernel.vector_bytes, kernel.stripes, kernel.slot): faults(arch, kernel) for kernel in kernels
    }
    assert found == {(*kernel, slot): [] for kernel in KERNELS for slot in ("int32", "int64")}


def test_registers_leave_room_for_whole_blocks(arch: str, kernels: list[Kernel]) -> None:
    """A block of 1,024 threads is 16 or 32 waves on 4 SIMDs (gfx9) or on the 4 of a pair of units."""
    for kernel in kernels:
        waves = waves_per_simd(arch, kernel)
        print(
            f"{arch} {kernel.vector_bytes} bytes, {kernel.stripes} stripes, {kernel.slot}: "
            f"{kernel.notes['vgpr_count']} vector and {kernel.notes['sgpr_count']} scalar registers, "
            f"{waves} waves a SIMD, {len(kernel.instructions)} instructions, all in all "
            f"{len(kernel.instructions) / (UNITS * kernel.vector_bytes):.1f} a byte of a lane's tile"
        )
        lanes = kernel.notes["wavefront_size"]
        assert kernel.notes["max_flat_workgroup_size"] == 1024
        assert waves * 4 >= 1024 // lanes
        assert waves >= fewest_waves(arch)


def test_parameters_fit(kernels: list[Kernel]) -> None:
    for kernel in kernels:
        assert kernel.notes["kernarg_segment_size"] <= 4096 + 256  # the second part is the runtime's own


MUTANTS = {
    "temporal load": (
        "hip/runtime.h",
        "return __builtin_nontemporal_load((const HICACHE_GLOBAL Vector<kBytes>*)address);",
        "return *(const HICACHE_GLOBAL Vector<kBytes>*)address;",
        "0 loads and 4 stores",
    ),
    "temporal store": (
        "hip/runtime.h",
        "__builtin_nontemporal_store(value, (HICACHE_GLOBAL Vector<kBytes>*)address);",
        "*(HICACHE_GLOBAL Vector<kBytes>*)address = value;",
        "4 loads and 0 stores",
    ),
    "flat access": (
        "hip/runtime.h",
        "#define HICACHE_GLOBAL __attribute__((address_space(1)))",
        "#define HICACHE_GLOBAL",
        r"\d+ x flat_",
    ),
    "a call, and so a stack": (
        "hip/runtime.h",
        "#define HICACHE_RARE inline __attribute__((always_inline))",
        "#define HICACHE_RARE __attribute__((noinline))",
        "private_segment_fixed_size|x scratch_",
    ),
    "rows that hold registers all through the loop": (
        "hip/copy_rows.cuh",
        "data[k][s] = Held<kVectorBytes>{};",
        ";",
        "room for [1-7] waves",
    ),
    "an index that is waited for": (
        "hip/copy_rows.cuh",
        "slot.low = *(const HICACHE_GLOBAL int32_t*)at;",
        "slot.low = *(const HICACHE_GLOBAL int32_t*)at;\n    slot.high = slot.low >> 31;",
        "waits before all indices",
    ),
    "narrow vectors": (
        "hip/copy_kernels.hip",
        "copy_rows<kVectorBytes, kStripes, Slot>(HICACHE_PARAMETER(params));",
        "copy_rows<(kVectorBytes > 4 ? 4 : kVectorBytes), kStripes, Slot>(HICACHE_PARAMETER(params));",
        "0 loads and 0 stores of 16 bytes",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(mutant: str, tmp_path: Path) -> None:
    file, right, wrong, expected = MUTANTS[mutant]
    csrc = hip_objects.with_fault(tmp_path, file, right, wrong)
    kernels = hip_objects.compile_kernels("gfx942", tmp_path / "code.o", csrc)
    wide = next(
        k for k in kernels if k.is_copy and (k.vector_bytes, k.stripes, k.slot) == (16, 1, "int32")
    )
    assert any(re.search(expected, fault) for fault in faults("gfx942", wide)), faults("gfx942", wide)


def test_the_library_names_the_runtime_only_by_name() -> None:
    """A path, or a second copy of the runtime, would not know torch's streams."""
    content = hip_objects.LIBRARY.read_bytes()
    major = hip_objects.build_record()["hip"].partition(".")[0]
    assert f"\0libamdhip64.so.{major}\0".encode() in content
    text = subprocess.run(
        [str(hip_objects.tool("llvm-readelf")), "-d", str(hip_objects.LIBRARY)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "RPATH" not in text
    assert "RUNPATH" not in text
    assert "cuda" not in text
