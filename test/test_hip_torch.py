"""The HIP backend as an op of torch: opcheck and torch.compile on the simulated GPU."""

import textwrap

import hip_simulator
import pytest
import torch

pytestmark = [
    pytest.mark.backend("hip"),
    pytest.mark.skipif(
        torch.version.cuda is not None,
        reason="a torch that is built for CUDA loads _cuda, and never both libraries",
    ),
]

# A load by device indices from a device view into a stack of two planes.
SETUP = """
host = torch_hicache.empty_host((2, 64, 16), torch.uint8, device)
host.copy_(torch.arange(2 * 64 * 16).view(2, 64, 16) % 251)
source = torch_hicache.device_view(host, device)
pool = torch.empty(2, 32, 16, dtype=torch.uint8, device=device)
pool.copy_(torch.zeros(2, 32, 16, dtype=torch.uint8))
at, places = torch.tensor([3, 4, 31]).to(device), torch.tensor([9, 0, 63]).to(device)

def load(pool, source, at, places):
    torch.ops.hicache.transfer_kv([pool], [source], at, places, slot_dim=1)
    return pool

def is_loaded():
    expected = torch.zeros(2, 32, 16, dtype=torch.uint8)
    expected[:, at.cpu()] = host[:, places.cpu()]
    return torch.equal(pool.cpu(), expected)
"""


def passes(program: str, key: str) -> None:
    env = hip_simulator.environment(key=key)
    done = hip_simulator.run_python(SETUP + textwrap.dedent(program), env)
    assert done.returncode == 0, done.stderr[-3000:]


def test_opcheck_on_an_out_of_tree_device() -> None:
    passes(
        """
        arguments = ([pool], [source], at, places), {"slot_dim": 1}
        torch.library.opcheck(torch.ops.hicache.transfer_kv.default, *arguments)
        """,
        "PrivateUse1",
    )


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_on_an_out_of_tree_device(backend: str) -> None:
    passes(
        f"""
        from hip_sim_device import enable_compile
        enable_compile()
        result = torch.compile(load, fullgraph=True, backend="{backend}")(pool, source, at, places)
        assert result is pool
        assert is_loaded()
        """,
        "PrivateUse1",
    )


@pytest.mark.parametrize(("key", "name"), [("CUDA", "cuda"), ("HIP", "hip")])
def test_devices_that_torch_has_a_name_for(key: str, name: str) -> None:
    """`cuda` on a torch for ROCm; `hip`, which nobody ships a backend for, and is found untold."""
    passes(
        f"""
        backend = torch_hicache.backends()[2]
        assert (backend.name, backend.key, backend.loaded) == ("hip", "{key}", True), backend
        assert torch.accelerator.current_accelerator().type == "{name}"
        assert source.device == torch.device("{name}", 0)
        load(pool, source, at, places)
        assert is_loaded()
        load(pool, source, at.cpu(), places.cpu())
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        arguments = ([pool], [source], at, places), {{"slot_dim": 1}}
        torch.library.opcheck(torch.ops.hicache.transfer_kv.default, *arguments, test_utils=checks)
        load(pool, source, at + 30, places)
        try:
            torch_hicache.check_errors(device)
        except IndexError as error:
            assert "on {name}:0: dst_indices[0] is 33, out of range for 32 slots" in str(error), error
        else:
            raise AssertionError("nothing was raised")
        """,
        key,
    )


@pytest.mark.slow
def test_the_suite_of_the_op_on_the_device_type_that_torch_calls_hip() -> None:
    env = hip_simulator.environment(key="HIP")
    only = "hip-load-cpu_indices or hip-store-device_indices or hip-load_view-src_indices_on_device"
    done = hip_simulator.run_suite(["test_transfer_kv.py", "test_indices.py"], env, only)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
