"""Every refusal: its type, its text (the same from the fake kernel), and that no byte has moved."""

import re

import expecttest
import pytest
import torch
from bad_calls import (
    BAD_CALLS,
    BAD_DATA,
    BAD_PAIRS,
    BAD_PLACES,
    arguments,
    fake_text_of,
    indices,
    pool,
    run,
    sparse,
    text_of,
)

import torch_hicache
from torch_hicache.testing import fill_pool, unchanged

transfer_kv = torch.ops.hicache.transfer_kv


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_move_nothing_and_fakes_say_the_same(device: str, name: str) -> None:
    call = arguments(device, BAD_CALLS[name](device))
    dense = [t for t in (*call["dst"], *call["src"]) if t.layout is torch.strided and not t.is_conj()]
    with torch.no_grad(), unchanged([tensor.detach() for tensor in dense]):
        with torch.enable_grad():
            text = text_of(call)
        assert text.startswith("ValueError: [transfer_kv] "), text
    assert fake_text_of(BAD_CALLS[name], device) == text


@pytest.mark.parametrize("side", ["dst", "src"])
def test_indices_that_are_none(device: str, side: str) -> None:
    """A schema's Tensor takes None from Python; the typed call refuses it before."""
    call = arguments(device, {f"{side}_indices": None})
    text = f"{side}_indices must be a tensor, got None"
    with unchanged(call["dst"]), pytest.raises(ValueError, match=text):
        run(dict(call))
    indices = call["dst_indices"], call["src_indices"]
    with pytest.raises(TypeError):
        torch_hicache.transfer_kv(call["dst"], call["src"], *indices)


def test_a_good_call_of_the_table_is_good(device: str) -> None:
    run(arguments(device, {}))
    assert fake_text_of(lambda device: {}, device) == "nothing was raised"
    with torch.no_grad():
        for name in ("requires grad", "result that requires grad", "float8 that requires grad"):
            run(arguments(device, BAD_CALLS[name](device)))
            assert fake_text_of(BAD_CALLS[name], device) == "nothing was raised"


@pytest.mark.backend("cuda")
@pytest.mark.parametrize("name", BAD_PLACES)
def test_bad_places_on_a_gpu(name: str) -> None:
    call = arguments("cuda", BAD_PLACES[name]("cuda"))
    with unchanged(call["dst"]):
        text = text_of(call)
    assert text.startswith("ValueError: [transfer_kv] "), text
    assert fake_text_of(BAD_PLACES[name], "cuda") == text


def texts(title: str, lines: dict[str, str]) -> str:
    return "\n".join([title, *(f"  {name}: {text}" for name, text in lines.items())]) + "\n"


class Texts(expecttest.TestCase):
    """The texts themselves; EXPECTTEST_ACCEPT=1 writes them anew."""

    maxDiff = None

    def test_texts(self) -> None:
        cpu = {name: text_of(arguments("cpu", make("cpu"))) for name, make in BAD_CALLS.items()}
        self.assertExpectedInline(
            texts("On the CPU", cpu),
            """\
On the CPU
  method: ValueError: [transfer_kv] method must be 'auto', 'kernel', 'copy_engine' or 'staged', got 'dma'.
  max_blocks: ValueError: [transfer_kv] max_blocks must be 0 or more, got -1.
  list lengths: ValueError: [transfer_kv] dst and src must have the same number of tensors, got 2 and 1.
  dst_indices dtype: ValueError: [transfer_kv] dst_indices must be int32 or int64, got int16.
  src_indices dtype: ValueError: [transfer_kv] src_indices must be int32 or int64, got float32.
  dst_indices bool: ValueError: [transfer_kv] dst_indices must be int32 or int64, got bool.
  dst_indices 2-D: ValueError: [transfer_kv] dst_indices must be 1-D, got shape [1, 3].
  src_indices 0-D: ValueError: [transfer_kv] src_indices must be 1-D, got shape [].
  index lengths: ValueError: [transfer_kv] dst_indices and src_indices must have the same length, got 3 and 4.
  index lengths, dst longer: ValueError: [transfer_kv] dst_indices and src_indices must have the same length, got 4 and 3.
  slot_dim: ValueError: [transfer_kv] slot_dim 2 is out of range for dst[0] of shape [9, 4].
  slot_dim from the end: ValueError: [transfer_kv] slot_dim -3 is out of range for dst[0] of shape [9, 4].
  slot_dim of a scalar: ValueError: [transfer_kv] slot_dim 0 is out of range for dst[0] of shape [].
  slot_dim of src: ValueError: [transfer_kv] dst[0] and src[0] must have the same plane dimensions (before slot_dim=1), got [9] and [8].
  dtype: ValueError: [transfer_kv] dst[1] and src[1] must have the same dtype, got float32 and float16.
  dtype of the same size: ValueError: [transfer_kv] dst[0] and src[0] must have the same dtype, got float8_e4m3fn and float8_e5m2.
  new dtypes: ValueError: [transfer_kv] dst[0] and src[0] must have the same dtype, got float8_e8m0fnu and float4_e2m1fn_x2.
  row: ValueError: [transfer_kv] dst[0] and src[0] must have the same row dimensions (after slot_dim=0), got [4] and [5].
  row of one: ValueError: [transfer_kv] dst[1] and src[1] must have the same row dimensions (after slot_dim=0), got [2] and [1].
  row of another rank: ValueError: [transfer_kv] dst[1] and src[1] must have the same row dimensions (after slot_dim=0), got [2] and [2, 1].
  planes: ValueError: [transfer_kv] dst[0] and src[0] must have the same plane dimensions (before slot_dim=1), got [2] and [3].
  planes, from the end: ValueError: [transfer_kv] dst[0] and src[0] must have the same plane dimensions (before slot_dim=-2), got [] and [1].
  expanded dst: ValueError: [transfer_kv] dst[0] has elements that share memory (an expanded view?); a destination must not.
  dst with rows that overlap: ValueError: [transfer_kv] dst[1] has elements that share memory (an expanded view?); a destination must not.
  requires grad: ValueError: [transfer_kv] dst[1] requires grad and transfer_kv has no derivative; call it under torch.no_grad() or detach the pool.
  result that requires grad: ValueError: [transfer_kv] dst[0] requires grad and transfer_kv has no derivative; call it under torch.no_grad() or detach the pool.
  float8 that requires grad: ValueError: [transfer_kv] dst[0] requires grad and transfer_kv has no derivative; call it under torch.no_grad() or detach the pool.
  count dtype: ValueError: [transfer_kv] count must be int32 or int64, got float32.
  count of two: ValueError: [transfer_kv] count must have one element, got shape [2].
  count of none: ValueError: [transfer_kv] count must have one element, got shape [0].
  sparse dst: ValueError: [transfer_kv] sparse and nested tensors are refused; pass their strided values.
  sparse src: ValueError: [transfer_kv] sparse and nested tensors are refused; pass their strided values.
  sparse indices: ValueError: [transfer_kv] sparse and nested tensors are refused; pass their strided values.
  conjugated: ValueError: [transfer_kv] conjugate and negated views are refused; resolve them first (resolve_conj, resolve_neg).
  negated: ValueError: [transfer_kv] conjugate and negated views are refused; resolve them first (resolve_conj, resolve_neg).
  negated indices: ValueError: [transfer_kv] conjugate and negated views are refused; resolve them first (resolve_conj, resolve_neg).
""",  # noqa: E501
        )

    def test_texts_that_need_data(self) -> None:
        lines = {}
        for name, changes in BAD_DATA.items():
            call = arguments("cpu", changes)
            with unchanged(call["dst"]):
                lines[name] = text_of(call)
        self.assertExpectedInline(
            texts("By data", lines),
            """\
By data
  dst index: IndexError: [transfer_kv] dst_indices[2] is 9, out of range for 9 slots (-1 skips an entry).
  src index: IndexError: [transfer_kv] src_indices[0] is -2, out of range for 8 slots (-1 skips an entry).
  index without planes: IndexError: [transfer_kv] src_indices[2] is -3, below 0 (-1 skips an entry).
  index of rows of no bytes: IndexError: [transfer_kv] dst_indices[1] is 9, out of range for 9 slots (-1 skips an entry).
  index of a pool without slots: IndexError: [transfer_kv] src_indices[0] is 0, out of range for 0 slots (-1 skips an entry).
  index beside padding: IndexError: [transfer_kv] src_indices[2] is 8, out of range for 8 slots (-1 skips an entry).
  negative count: ValueError: [transfer_kv] count must be between 0 and 3, the number of indices, got -1.
  count too large: ValueError: [transfer_kv] count must be between 0 and 3, the number of indices, got 4.
  one destination twice: ValueError: [transfer_kv] dst[0] and dst[1] share memory; a destination must be named once.
  shifted destinations: ValueError: [transfer_kv] two tensors of dst share memory (shifted views?); a destination must be named once.
  copy_engine: ValueError: [transfer_kv] method 'copy_engine' needs an accelerator, but both pools are on cpu; use 'auto' or 'kernel'.
  staged: ValueError: [transfer_kv] method 'staged' needs an accelerator, but both pools are on cpu; use 'auto' or 'kernel'.
""",  # noqa: E501
        )

    @pytest.mark.skipif(torch.cuda.device_count() == 1, reason="torch makes no fake of a missing cuda:1")
    def test_texts_that_name_devices(self) -> None:
        """By the fake kernel; a GPU that is there says the same (above, and in test_two_devices.py)."""
        cuda = {name: fake_text_of(make, "cuda") for name, make in (BAD_PLACES | BAD_PAIRS).items()}
        self.assertExpectedInline(
            texts("For cuda", cuda),
            """\
For cuda
  dst on two devices: ValueError: [transfer_kv] all tensors of dst must be on one device, got cuda:0 (dst[0]) and cpu (dst[1]).
  src on two devices: ValueError: [transfer_kv] all tensors of src must be on one device, got cpu (src[0]) and cuda:0 (src[1]).
  index with pools on the CPU: ValueError: [transfer_kv] dst_indices must be on the CPU when both pools are, got cuda:0 (the pools are on cpu).
  count on the CPU: ValueError: [transfer_kv] count must be on cuda:0, where both index tensors are, got cpu.
  count beside CPU indices: ValueError: [transfer_kv] count must be on the CPU unless both index tensors are on the accelerator, got cuda:0.
  pools on two GPUs: ValueError: [transfer_kv] dst and src may be on at most one accelerator, got cuda:0 (dst) and cuda:1 (src).
  dst on two GPUs: ValueError: [transfer_kv] all tensors of dst must be on one device, got cuda:0 (dst[0]) and cuda:1 (dst[1]).
  index on another GPU: ValueError: [transfer_kv] dst_indices must be on the CPU or on cuda:0, got cuda:1.
  no planes, indices on two GPUs: ValueError: [transfer_kv] src_indices must be on the CPU or on cuda:1, got cuda:0.
  count on another GPU: ValueError: [transfer_kv] count must be on cuda:0, where both index tensors are, got cuda:1.
""",  # noqa: E501
        )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dst": torch.ones(9, 4)}, "dst must be a list of tensors, got a tensor; pass [tensor]."),
        ({"src": torch.ones(8, 4)}, "src must be a list of tensors, got a tensor; pass [tensor]."),
        ({"src": None}, "src must be a list of tensors, got NoneType."),
        ({"dst": [torch.ones(9, 4), [1]]}, "dst[1] must be a tensor, got list."),
        ({"dst_indices": [0, 1, 2]}, "dst_indices must be a tensor, got list."),
        ({"count": 2}, "count must be a tensor, got int."),
    ],
)
def test_the_function_names_the_argument_of_another_type(changes: dict, text: str) -> None:
    call = arguments("cpu", changes)
    positional = [call.pop(name) for name in ("dst", "src", "dst_indices", "src_indices")]
    with pytest.raises(TypeError, match=f"^{re.escape('[transfer_kv] ' + text)}$") as error:
        torch_hicache.transfer_kv(*positional, **call)
    assert error.value.__suppress_context__  # torch's own text shows the whole value


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
def test_quantised_and_nested_tensors_are_refused() -> None:
    quantised = torch.empty(9, 4, dtype=torch.quint4x2)
    jagged = torch.nested.nested_tensor([torch.ones(9, 4), torch.ones(9, 4)], layout=torch.jagged)
    at = torch.tensor([1])
    for tensor, match in (
        (quantised, "quantized tensors are refused"),
        (jagged, "nested tensors are refused"),
    ):
        with pytest.raises(ValueError, match=match):
            transfer_kv([tensor], [tensor], at, at)
    with pytest.raises(ValueError, match="sparse and nested tensors are refused"):
        transfer_kv([sparse("meta", 9, 4)], [sparse("meta", 9, 4)], at, at)


@pytest.mark.parametrize("side", ["dst", "src"])
def test_a_storage_resized_to_nothing_is_refused(side: str) -> None:
    index = torch.tensor([0])
    sides = {name: torch.zeros(4, 8) for name in ("dst", "src")}
    sides[side].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=rf"{side}\[0\] has no memory"):
        transfer_kv([sides["dst"]], [sides["src"]], index, index)


def test_a_bad_pair_late_in_a_long_list_moves_nothing(device: str) -> None:
    dst = [pool(device, 9, 4) for _ in range(200)]
    src = [pool(device, 8, 4) for _ in range(199)] + [pool(device, 8, 3)]
    fill_pool(dst)
    with (
        unchanged(dst),
        pytest.raises(ValueError, match=r"dst\[199\] and src\[199\] must have the same row"),
    ):
        transfer_kv(dst, src, indices(device), indices(device))


def test_after_a_refusal_the_next_call_works(device: str) -> None:
    call = arguments(device, {})
    fill_pool(call["src"])
    with pytest.raises(ValueError, match="max_blocks"):
        run(arguments(device, {"max_blocks": -1}))
    run(dict(call))
    assert torch.equal(call["dst"][0][:3].cpu(), call["src"][0][:3].cpu())
