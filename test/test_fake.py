"""Tensors without data: meta, fake ones of a GPU that may not be there, opcheck, and a simple compile."""

from collections.abc import Callable

import pytest
import torch
from bad_calls import BAD_CALLS, arguments, fake_text_of, run, text_of
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
transfer_kv = torch.ops.hicache.transfer_kv


# A CPU build of torch aborts where autograd meets a fake tensor of a GPU.
@pytest.mark.parametrize("name", [name for name in BAD_CALLS if "grad" not in name])
def test_fakes_of_a_gpu_refuse_like_the_cpu(name: str) -> None:
    cpu = text_of(arguments("cpu", BAD_CALLS[name]("cpu")))
    assert fake_text_of(BAD_CALLS[name], "cuda") == cpu
    if "negated" not in name:
        assert text_of(arguments("meta", BAD_CALLS[name]("meta"))) == cpu


def test_fakes_of_a_gpu_take_what_a_gpu_takes() -> None:
    """Loads, stores, mixed indices, a count on the device, every method; nothing asks for a device."""
    with FakeTensorMode():
        host, device = torch.empty(3, 9, 4), torch.empty(3, 8, 4, device="cuda")
        for dst, src in ((device, host), (host, device), (device, device)):
            for dst_at in ("cpu", "cuda"):
                for src_at in ("cpu", "cuda"):
                    on_device = dst_at == src_at == "cuda"
                    for method in ("auto", "kernel", "copy_engine", "staged"):
                        transfer_kv(
                            [dst],
                            [src],
                            torch.empty(5, dtype=torch.int32, device=dst_at),
                            torch.empty(5, dtype=torch.int64, device=src_at),
                            slot_dim=1,
                            count=torch.empty(
                                (), dtype=torch.int64, device="cuda" if on_device else "cpu"
                            ),
                            method=method,
                        )
        transfer_kv([], [], torch.empty(5, dtype=torch.int32, device="cuda"), torch.arange(5))
        assert torch.ops.hicache.check_errors(device) is None
    assert not torch.cuda.is_initialized() or torch.cuda.is_available()


def test_meta_tensors() -> None:
    run(arguments("meta", {}))
    run(arguments("meta", {"count": torch.tensor(1, device="meta")}))


def test_symbolic_shapes_need_no_data() -> None:
    """Lengths and pool sizes that have no value; two lengths become one."""
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        n, m, slots = (shapes.create_unbacked_symint() for _ in range(3))
        torch._check(n >= 0)
        torch._check(m >= 0)
        torch._check(slots >= 0)
        transfer_kv(
            [torch.empty(slots, 4)],
            [torch.empty(9, 4)],
            torch.empty(n, dtype=torch.int64),
            torch.empty(m, dtype=torch.int64),
        )
        assert shapes.simplify(n.node.expr - m.node.expr) == 0 or bool(n == m)


OPCHECKS: dict[str, Callable[[str], tuple[tuple, dict]]] = {
    "one plane": lambda d: (
        ([torch.rand(9, 4).to(d)], [torch.rand(8, 4).to(d)], *ints(d, [0, 8], [1, 1])),
        {},
    ),
    "stacks and padding": lambda d: (
        (
            [torch.rand(2, 9, 4).to(d), torch.rand(3, 9, 4).to(d)],
            [torch.rand(2, 8, 4).to(d), torch.rand(3, 8, 4).to(d)],
            *ints(d, [0, -1, 3], [1, 1, 7]),
        ),
        {"slot_dim": 1, "count": torch.tensor(2, device=d)},
    ),
    "other dtypes": lambda d: (
        (
            [torch.ones(9, 4, dtype=torch.uint8, device=d), torch.ones(9, 3, 2, device=d).bfloat16()],
            [torch.ones(8, 4, dtype=torch.uint8, device=d), torch.ones(8, 3, 2, device=d).bfloat16()],
            *(at.int() for at in ints(d, [4, 5], [0, 7])),
        ),
        {"method": "kernel", "max_blocks": 2},
    ),
    "strided": lambda d: (
        (
            [torch.rand(4, 9, 6).to(d).transpose(0, 1)[:, :, ::2]],
            [torch.rand(8, 4, 3).to(d)],
            *ints(d, [4, 5], [0, 7]),
        ),
        {},
    ),
    "no entries": lambda d: (
        ([torch.rand(9, 4).to(d)], [torch.rand(8, 4).to(d)], *ints(d, [], [])),
        {},
    ),
    "no planes": lambda d: (([], [], *ints(d, [1, 2], [3, 4])), {}),
    "source that requires grad": lambda d: (
        (
            [torch.rand(9, 4).to(d)],
            [torch.rand(8, 4).to(d).requires_grad_()],
            *ints(d, [4, 5], [0, 7]),
        ),
        {},
    ),
    "indices on the CPU": lambda d: (
        ([torch.rand(9, 4).to(d)], [torch.rand(8, 4).to(d)], *ints("cpu", [0, 8], [1, 1])),
        {"count": torch.tensor(2)},
    ),
}


def ints(device: str, *lists: list[int]) -> list[Tensor]:
    return [torch.tensor(values, dtype=torch.int64).to(device) for values in lists]


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(device: str, name: str) -> None:
    args, kwargs = OPCHECKS[name](device)
    utils = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if device != "npu":  # torch has not implemented this one for it
        utils.append("test_autograd_registration")
    torch.library.opcheck(transfer_kv, args, kwargs, test_utils=utils)


def test_the_schema_says_what_is_written() -> None:
    expected = (
        "hicache::transfer_kv(Tensor(a!)[] dst, Tensor[] src, Tensor dst_indices, Tensor src_indices, *, "
        'int slot_dim=0, Tensor? count=None, str method="auto", int max_blocks=0) -> ()'
    )
    assert str(transfer_kv.default._schema) == expected


def test_one_compiled_function_takes_all_lengths(device: str) -> None:
    """Few graphs: torch itself treats the lengths 0 and 1 apart."""
    counter = CompileCounterWithBackend("inductor")

    @torch.compile(fullgraph=True, backend=counter, dynamic=True)
    def load(pool: Tensor, host: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        transfer_kv([pool], [host], dst, src)
        return pool[dst] * 2

    host = torch.arange(2000 * 3, dtype=torch.float32, device=device).view(2000, 3)
    for n in (7, 0, 1, 2, 64, 1000, 7):
        pool = torch.full((1500, 3), -1.0, device=device)
        dst = torch.randperm(1500)[:n].to(device)
        src = torch.randint(2000, (n,)).to(device)
        expected = pool.clone()
        expected[dst] = host[src]
        assert torch.equal(load(pool, host, dst, src), host[src] * 2)
        assert torch.equal(pool, expected)
    assert counter.frame_count <= 3


def test_a_compiled_call_raises_in_eager_words(device: str) -> None:
    """Index errors come from the real op; wrong dtypes from the fake one, inside torch's own class."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def load(pool: Tensor, host: Tensor, dst: Tensor, src: Tensor) -> None:
        transfer_kv([pool], [host], dst, src)

    pool, host = torch.ones(9, 4, device=device), torch.ones(8, 4, device=device)
    with pytest.raises(IndexError, match=r"src_indices\[0\] is 8, out of range for 8 slots"):
        load(pool, host, torch.tensor([1]), torch.tensor([8]))
    text = "must have the same dtype, got float32 and int32"
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=text):
        load(pool, host.int(), torch.tensor([1]), torch.tensor([3]))
