"""The compiled code for AMD GPUs, executed by the interpreter of test/hip_interpreter."""

import os
import re
import textwrap
from pathlib import Path

import hip_objects
import hip_simulator
import pytest

pytestmark = pytest.mark.backend("hip")

ARCHS = hip_objects.archs()

# Rows of every vector width, with tails, padding, bad and repeated entries, all in one process.
ROWS = """
from torch_hicache import testing

def move(row_bytes, offset, dst_memory, src_memory, where, planes=2):
    place = dict(device=device, offset_bytes=offset)
    dst = testing.strided_tensor((planes, 40, row_bytes), memory=dst_memory, **place)
    src = testing.strided_tensor((planes, 50, row_bytes), memory=src_memory, **place)
    testing.fill_pool([dst], 1)
    testing.fill_pool([src], 1, seed=1)
    dst_indices, src_indices = testing.random_entries(33, 40, 50, seed=row_bytes)
    dst_indices[5] = src_indices[7] = -1
    testing.check_transfer([dst], [src], dst_indices.to(where), src_indices.to(where), slot_dim=1)

for row_bytes in (1, 2, 3, 4, 7, 8, 15, 16, 24, 31, 36, 132, 512, 576, 584, 656, 1152, 1536, 4096):
    move(row_bytes, 0, "device", "pinned", device)
    move(row_bytes, 0, "pinned", "device", "cpu")
for offset in (1, 2, 4, 8):
    move(576, offset, "device", "view", device)
move(16, 0, "device", "device", device, planes=150)
torch_hicache.check_errors(device)
"""

# Slots whose bytes lie behind 2**32.
FAR = """
slots = (5 << 30) // 16
pool = torch.empty(slots, 16, dtype=torch.uint8, device=device)
host = torch_hicache.empty_host((4, 16), torch.uint8, device)
host.copy_(torch.arange(64).view(4, 16) + 1)
far = [slots - 1, (1 << 32) // 16, (1 << 32) // 16 - 1, (1 << 31) // 16]
for where in ("cpu", device):
    for slot in far:
        pool[slot].copy_(torch.zeros(16, dtype=torch.uint8))
    at = torch.tensor(far, device=where)
    torch.ops.hicache.transfer_kv([pool], [host], at, torch.arange(4, device=where))
    for k, slot in enumerate(far):
        assert torch.equal(pool[slot].cpu(), host[k]), slot
assert int(pool[(slots - 1) - (1 << 32) // 16].cpu().sum()) == 0
assert int(pool[0].cpu().sum()) == 0
"""

# The staged method, whose stores put back what only the device knows to be padding.
STAGED = """
from torch_hicache import testing
table = torch_hicache.MethodTable(staging_bytes=1 << 16, staging_buffers=2)
torch_hicache.set_method_table(device, table)
host = torch_hicache.empty_host((120, 80), torch.uint8, device)
pool = torch.zeros(130, 80, dtype=torch.uint8, device=device)
for number in (1, 90):
    testing.fill_pool([host])
    testing.fill_pool([pool], seed=1)
    to, at = testing.random_entries(number, 120, 130, seed=number)
    given = at.clone()
    given[::4], given[3::7] = -1, 130
    snapshot = testing.Snapshot([host, pool])
    snapshot.transfer([host], [pool], to, torch.where(given == 130, -1, given))
    torch.ops.hicache.transfer_kv([host], [pool], to, given.to(device), method="staged")
    snapshot.compare(f"{number} entries stored")
    try:
        torch_hicache.check_errors(device)
    except IndexError:
        pass
testing.check_transfer([pool], [host], at.to(device), to, method="staged")
"""

# Every lane of many wavefronts has a bad entry to report.
BAD = """
pool = torch.zeros(64, 16, dtype=torch.uint8, device=device)
at = torch.full((5000,), 9999, device=device)
at[:3] = torch.tensor([1, -1, 2])
torch.ops.hicache.transfer_kv([pool], [pool.clone()], at, torch.zeros_like(at))
try:
    torch_hicache.check_errors(device)
except IndexError as error:
    assert "dst_indices[3] is 9999, out of range for 64 slots" in str(error), error
else:
    raise AssertionError("nothing was raised")
torch_hicache.check_errors(device)
sources = torch.zeros_like(at)
at[:] = 1
at[7::9], sources[5::9] = 9999, -2  # both kinds in one wavefront
torch.ops.hicache.transfer_kv([pool], [pool.clone()], at, sources)
try:
    torch_hicache.check_errors(device)
except IndexError as error:
    assert "src_indices[5] is -2, out of range for 64 slots" in str(error), error
else:
    raise AssertionError("nothing was raised")
count = torch.tensor(7000, device=device)
torch.ops.hicache.transfer_kv([pool], [pool.clone()], at[1:2], at[1:2], count=count)
try:
    torch_hicache.check_errors(device)
except IndexError as error:
    assert "count is 7000, outside 0 to 1, and was clamped" in str(error), error
else:
    raise AssertionError("nothing was raised")
"""


# Tokens to pages: quotients by a rounded reciprocal, wrong tokens, padding.
PAGES = """
import torch_hicache.integrations.sglang.pages
for page_size in (1, 3, 64, 1000):
    starts = torch.tensor([page * page_size for page in (0, 1, (1 << 31) - 1, 1 << 31, (1 << 51) + 1)])
    tokens = (starts.unsqueeze(1) + torch.arange(page_size)).flatten()
    tokens[page_size : 2 * page_size] = -1
    expected = starts // page_size
    expected[1] = -1
    if page_size > 1:
        tokens[-1] += 1
        expected[-1] = 1 << 62
    found = torch.ops.hicache.page_indices(tokens.to(device), page_size)
    assert found.tolist() == expected.tolist(), (page_size, found, expected)
"""


def run(program: str, arch: str, **settings: str) -> tuple[int, str]:
    env = hip_simulator.environment(arch, **settings)
    done = hip_simulator.run_python(textwrap.dedent(program), env)
    return done.returncode, done.stderr[-3000:]


@pytest.mark.parametrize("arch", ARCHS)
def test_machine_code(arch: str) -> None:
    """All programs in one process: to start one, and to read the code, takes longer than they do."""
    code, text = run("\n".join((ROWS, FAR, STAGED, PAGES, BAD)), arch)
    assert code == 0, text


# One block copies 1 tile of 64 KiB, then 10: what 9 of them take, without the kernel's beginning and end.
COUNTED = """
def move(planes, entries, row_bytes):
    pools = [[torch.zeros(entries, row_bytes, dtype=torch.uint8, device=device) for _ in range(planes)]
             for _ in range(2)]
    at = torch.arange(entries, device=device)
    torch.ops.hicache.transfer_kv(*pools, at, at, max_blocks=1)

for tiles in (1, 10):
    move(PLANES, tiles * (1 << 16) // (PLANES * ROW), ROW)
    torch_hicache.check_errors(device)  # waits
"""
# By planes and bytes of a row, on wave64: instructions for each byte of a lane.
MOST_INSTRUCTIONS = {(2, 1024): 2.6, (64, 1024): 2.7, (1, 576): 8.0}


@pytest.mark.parametrize(("planes", "row_bytes"), MOST_INSTRUCTIONS)
def test_instructions_for_a_byte(planes: int, row_bytes: int) -> None:
    program = COUNTED.replace("PLANES", str(planes)).replace("ROW", str(row_bytes))
    code, text = run(program, "gfx942", HIP_SIM_COUNT="1")
    assert code == 0, text
    one, ten = (int(steps) for steps in re.findall(r"copy_kernelILi16E\w+: (\d+) instructions", text))
    lanes, tile = 64, 1 << 16
    each = (ten - one) / (9 * tile / lanes)
    print(f"gfx942, {planes} planes, rows of {row_bytes} bytes: {each:.2f} instructions a byte of a lane")
    assert each <= MOST_INSTRUCTIONS[planes, row_bytes]


# The op's whole suite takes minutes in the interpreter: with HICACHE_HIP_FULL=1 only, as in .ci/run.
# Without it one GPU shows that the suite can be interpreted.
IS_FULL = os.environ.get("HICACHE_HIP_FULL") == "1"
SUITE_ARCHS = [arch for arch in ARCHS if arch != "gfx90a"] if IS_FULL else ["gfx942"]
SUITE = "hipsim-load-cpu_indices or hipsim-store-device_indices"
SUITE_SAMPLE = "hipsim-load-cpu_indices and (layer_ids or differ_in_their_padding or a_page_is_a_row)"


@pytest.mark.slow
@pytest.mark.parametrize("arch", SUITE_ARCHS)
def test_the_suite_of_the_op(arch: str) -> None:
    env = hip_simulator.environment(arch)
    only = SUITE if IS_FULL else SUITE_SAMPLE
    done = hip_simulator.run_suite(["test_transfer_kv.py"], env, only)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


MUTANTS = {
    "offsets of 32 bits": (
        "hip/copy_rows.cuh",
        "place[k].dst += dst_slot * dst_slot_stride;",
        "place[k].dst += static_cast<uint32_t>(dst_slot * dst_slot_stride);",
        FAR,
        "AssertionError|are not the GPU's",
    ),
    "all lanes want the lock": (
        "record_error.cuh",
        "if (!has_least_of_lockstep(position))",
        "if (false)",
        BAD,
        "a wave that does not end",
    ),
    "each kind of bad index has a critical section of its own": (
        "hip/copy_rows.cuh",
        "const auto src_slot = to_slot<int64_t>(src, read_slot(src, entry));",
        "if (dst_slot < -1 || dst_slot >= params.dst_slots)\n"
        "    return record_error(params.errors, BadValue::kDstIndex, params.first_entry + entry,\n"
        "                        dst_slot, params.dst_slots);\n"
        "  const auto src_slot = to_slot<int64_t>(src, read_slot(src, entry));",
        BAD,
        "a wave that does not end|dst_indices[7] is 9999",
    ),
    "an instruction without a meaning here": (
        "hip/copy_rows.cuh",
        "const uint32_t count = read_count(params);",
        "__builtin_amdgcn_s_sleep(1);\n  const uint32_t count = read_count(params);",
        ROWS,
        "an unknown instruction in: s_sleep 1",
    ),
    "a row one vector too long": (
        "hip/copy_rows.cuh",
        "place[k].dst = params.planes[plane[k]].dst + dst_offset[k];",
        "place[k].dst = params.planes[plane[k]].dst + dst_offset[k] + kVectorBytes;",
        ROWS,
        "bytes differ in memory|are not the GPU's",
    ),
    "a flat access": (
        "hip/runtime.h",
        "#define HICACHE_GLOBAL __attribute__((address_space(1)))",
        "#define HICACHE_GLOBAL",
        ROWS,
        "an unknown instruction in: flat_",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(mutant: str, tmp_path: Path) -> None:
    file, right, wrong, program, expected = MUTANTS[mutant]
    csrc = hip_objects.with_fault(tmp_path, file, right, wrong)
    hip_objects.compile_kernels("gfx942", tmp_path / "code.o", csrc)
    code, text = run(program, "gfx942", HIP_SIM_CODE=str(tmp_path / "code.o"))
    assert code != 0
    assert any(part in text for part in expected.split("|")), text


def test_the_right_code_in_place_of_the_library_s(tmp_path: Path) -> None:
    """What the mutants change is what makes them fail."""
    hip_objects.compile_kernels("gfx942", tmp_path / "code.o")
    code, text = run(BAD, "gfx942", HIP_SIM_CODE=str(tmp_path / "code.o"))
    assert code == 0, text
