"""copy_engine and staged, and the choice between methods, on the simulated GPU (test/hip_sim)."""

import json
import textwrap
from pathlib import Path

import hip_simulator
import pytest

pytestmark = pytest.mark.backend("hip")

# Rings of 2 buffers of 64 KiB, so that a call of 40 rows of 16 KiB fills each of them five times. What
# the current stream has run is looked at, and nothing else is waited for.
START = """
from torch_hicache import testing
table = torch_hicache.MethodTable(staging_bytes=1 << 16, staging_buffers=2)
torch_hicache.set_method_table(device, table)
transfer = torch.ops.hicache.transfer_kv
ROW = 16 << 10
host = torch_hicache.empty_host((64, ROW), torch.uint8, device)
pool = torch.zeros(64, ROW, dtype=torch.uint8, device=device)
testing.fill_pool([host])
torch.accelerator.synchronize()
to, at = torch.randperm(64)[:40], torch.randperm(64)[:40]
expected = host[at].clone()

def bytes_of(tensor):  # waits for the current stream, not for the device
    copy = torch.empty(tensor.shape, dtype=torch.uint8, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    torch.accelerator.current_stream().synchronize()
    return copy.clone()
"""

# A load of rows that the caller's stream has just stored: its copies may not start before that.
LOAD = """
source = pool.clone()

def is_right(lost):
    wanted = torch.randint(1, 255, (64, ROW), dtype=torch.uint8)
    source.copy_(wanted)
    torch.accelerator.synchronize()
    sim.hip_sim_lose_wait(lost)
    transfer([host], [source], torch.arange(64), torch.arange(64), method="kernel")
    transfer([pool], [host], to, at, method="staged")
    waits.add(sim.hip_sim_lose_wait(0))
    right = torch.equal(bytes_of(pool)[to], wanted[at])
    torch.accelerator.synchronize()
    return right
"""

# A store of rows that the caller's stream has just written, and writes again behind the store.
STORE = """
def is_right(lost):
    wanted = torch.randint(1, 255, (64, ROW), dtype=torch.uint8)
    written, zeros = wanted.clone().pin_memory(), torch.zeros(64, ROW, dtype=torch.uint8).pin_memory()
    sim.hip_sim_lose_wait(lost)
    pool.copy_(written, non_blocking=True)
    transfer([host], [pool], to, at, method="staged")
    pool.copy_(zeros, non_blocking=True)
    waits.add(sim.hip_sim_lose_wait(0))
    torch.accelerator.current_stream().synchronize()
    right = torch.equal(host[to], wanted[at])
    torch.accelerator.synchronize()
    return right
"""

# Copies run as late as somebody needs them, or as early as the waits let them. Whichever wait is lost,
# the bytes are wrong in one of the two; no wait is lost, and they are right in both.
ORDER = """
waits = set()
found = {eager: [] for eager in (0, 1)}
for eager in found:
    sim.hip_sim_set_eager(eager)
    assert is_right(0)
    for lost in range(1, max(waits) + 1 - MORTAL):
        if is_right(lost):
            found[eager].append(lost)
assert len(waits) == 1, waits
print(max(waits), sorted(set(found[0]) & set(found[1])))
"""


def run(program: str, executor: str = "host", **settings: str) -> str:
    env = hip_simulator.environment(executor, **settings)
    done = hip_simulator.run_python(START + textwrap.dedent(program), env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.slow
def test_the_doctor_finds_nothing(tmp_path: Path) -> None:
    """Every method in five of the placements that together have every kind of memory, and the engine."""
    path = tmp_path / "report.json"
    program = f"""
        import sys
        from torch_hicache import cli, doctor, testing
        names = ("load-cpu_indices", "store-src_indices_on_device", "store_view-cpu_indices")
        names += ("load_view-dst_indices_on_device", "on_device-device_indices")
        doctor.placements = lambda name: [
            place for place in testing.placements(name) if str(place).endswith(names)]
        sys.exit(cli.main(["doctor", "--device", "hip", "--mib", "1", "--json", {str(path)!r}]))
    """
    done = hip_simulator.run_python(textwrap.dedent(program), hip_simulator.environment())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(path.read_text())
    assert report["finished"]
    assert report["device"]["device"] == "hipsim:0"
    assert {check["status"] for check in report["checks"]} == {"passed"}
    assert {check["method"] for check in report["checks"]} == {"auto", "kernel", "copy_engine", "staged"}
    assert {rate["method"] for rate in report["rates"]} == {"kernel", "copy_engine", "staged"}


# Ten parts in two buffers: the fork, ten waits for a filled buffer, eight for an emptied one, the join.
WAITS = 1 + 10 + 8 + 1
# Of a load the last wait for a filled buffer is behind all that the join is for; of a store the first is
# ahead of all that the fork is for.
NEEDLESS = {"LOAD": WAITS, "STORE": 1}


@pytest.mark.parametrize("program", NEEDLESS)
def test_staged_is_ordered_and_every_wait_is_needed(program: str) -> None:
    mortal = int(program == "STORE")
    body = f"MORTAL = {mortal}\n{globals()[program]}{ORDER}"
    assert run(body) == f"{WAITS} [{NEEDLESS[program]}]"


def test_a_store_that_does_not_join_dies() -> None:
    """Its buffers are torch's again while copies still read them."""
    env = hip_simulator.environment()
    program = f"{START}waits = set()\n{STORE}is_right({WAITS})\n"
    assert hip_simulator.run_python(program, env).returncode == -11


def test_the_copy_engine_runs_in_the_caller_s_stream() -> None:
    out = run("""
        side = torch.Stream(device)
        with side:
            pool.copy_(torch.zeros(64, ROW, dtype=torch.uint8).pin_memory(), non_blocking=True)
            transfer([pool], [host], to, at, method="copy_engine")
            assert sim.hip_sim_launches() == 0
            print(torch.equal(bytes_of(pool)[to], expected))
    """)
    assert out == "True"


def test_more_copies_than_a_batch_holds() -> None:
    out = run("""
        small = torch_hicache.empty_host((20000, 64), torch.uint8, device)
        testing.fill_pool([small])
        onto = torch.zeros(20000, 64, dtype=torch.uint8, device=device)
        some = torch.arange(10000) * 2
        testing.check_transfer([onto], [small], some, some.flip(0).clone(), method="copy_engine")
        print("right")
    """)
    assert out == "right"


def test_a_store_puts_back_what_only_the_device_knows_to_be_padding() -> None:
    """Without an alias of the host pool the copies would work, the kernel that reads it does not."""
    program = """
        given = at.to(device)
        given[::3] = -1
        given[1] = 64
        before = host.clone()
        transfer([host], [pool], to, given, method="staged")
        torch.accelerator.synchronize()
        moved = (given.cpu() >= 0) & (given.cpu() < 64)
        assert int(host[to[moved]].sum()) == 0
        assert torch.equal(host[to[~moved]], before[to[~moved]])
        try:
            torch_hicache.check_errors(device)
        except IndexError as error:
            print("src_indices[1] is 64" in str(error))
    """
    assert run(program) == "True"
    env = hip_simulator.environment(HIP_SIM_NO_ALIAS="1")
    assert hip_simulator.run_python(START + textwrap.dedent(program), env).returncode == -11


def test_auto_decides_as_on_cuda_and_says_why() -> None:
    out = run("""
        big_host = torch_hicache.empty_host((32, 1 << 20), torch.uint8, device)
        big = torch.zeros(32, 1 << 20, dtype=torch.uint8, device=device)
        slots = torch.arange(0, 32, 2)
        def plan(pools, *indices, **keywords):
            return torch_hicache.explain([pools[0]], [pools[1]], *indices, **keywords)
        load = big, big_host
        print(plan(load, slots, slots).method, plan(load, slots.to(device), slots).method)
        few, there = slots[:2], slots.to(device)
        print(plan(load, there, there).method, plan(load, few, few).method)
        print(plan(load, slots, slots, method="copy_engine"))
        torch_hicache.set_method_table(
            device, torch_hicache.MethodTable(copy_engine_min_row_bytes=(1 << 30, 1 << 30)))
        print(plan(load, slots, slots).method)
        pageable = torch.zeros(32, 1 << 20, dtype=torch.uint8)
        print(plan((big, pageable), slots, slots).reason)
        testing.check_transfer([big], [pageable], slots, slots)
        for indices in ((slots.to(device), slots.to(device)), (slots, slots.to(device))):
            try:
                plan((big, pageable), *indices)
            except ValueError as error:
                print(error)
    """).splitlines()
    assert out[:2] == ["copy_engine staged", "kernel kernel"]
    assert out[2].startswith("Plan(method='copy_engine', runs=16, rows=16, batches=1, bytes=16777216")
    assert out[3:5] == ["staged", "the host pool is pageable; the call may block the host"]
    assert len(out) == 7
    assert all("src[0] is pageable host memory" in text for text in out[5:])


USES = {
    "copy_engine": ["hipMemcpyAsync"],
    "staged": ["hipMemcpyAsync", "hipLaunchKernel", "hipStreamWaitEvent", "hipEventRecord"],
}


@pytest.mark.parametrize("method", USES)
def test_a_failure_in_the_middle(method: str) -> None:
    """It has a name, leaves no error behind, and what was begun is joined: the next call is right."""
    out = run(f"""
        def load():
            transfer([pool], [host], to, at, method={method!r})

        load()
        for function in {USES[method]!r}:
            sim.hip_sim_fail(function.encode(), 719, 3)
            try:
                load()
            except RuntimeError as error:
                assert "failed: hipErrorLaunchFailure" in str(error), error
                print(function)
            assert sim.hip_sim_pending_error() == 0
            load()
            assert torch.equal(bytes_of(pool)[to], expected)
    """)
    assert out.split() == USES[method]
