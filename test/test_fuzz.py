"""Random geometries with random indices, against the reference, as hypothesis thinks of them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_hicache.testing import Placement, check_transfer, fill_pool, unchanged

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies

transfer_kv = torch.ops.hicache.transfer_kv
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.complex128)
# The fixture is one value for all examples; the examples make their own tensors.
QUICK = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


@st.composite
def layouts(draw: Any, dims: int, item_bytes: int) -> dict[str, Any]:
    return {
        "order": draw(st.permutations(range(dims))),
        "padding": draw(st.dictionaries(st.integers(0, dims - 1), st.integers(0, 9), max_size=2)),
        "offset_bytes": draw(st.integers(0, 17)) * item_bytes,
    }


@st.composite
def geometries(draw: Any) -> dict[str, Any]:
    """One or several pairs of tensors with a common slot_dim."""
    num_planes = draw(st.integers(0, 2))
    dst_slots, src_slots = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    pairs = []
    for _ in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        stack = draw(st.lists(st.integers(1, 3), min_size=num_planes, max_size=num_planes))
        row = draw(st.lists(st.integers(0, 7), max_size=3) | st.lists(st.integers(1, 300), max_size=1))
        dims = len(stack) + 1 + len(row)
        pairs.append(
            {
                "dtype": dtype,
                "dst_sizes": (*stack, dst_slots + draw(st.integers(0, 2)), *row),
                "src_sizes": (*stack, src_slots + draw(st.integers(0, 2)), *row),
                "dst_layout": draw(layouts(dims, dtype.itemsize)),
                "src_layout": draw(layouts(dims, dtype.itemsize)),
            }
        )
    return {"slot_dim": num_planes, "pairs": pairs, "dst_slots": dst_slots, "src_slots": src_slots}


@st.composite
def entries(draw: Any, dst_slots: int, src_slots: int, duplicates: bool) -> dict[str, Any]:
    """Indices from -1 on, in runs or at random, and perhaps a count."""
    if draw(st.booleans()):
        length = draw(st.integers(0, min(dst_slots, src_slots)))
        dst_begin = draw(st.integers(0, dst_slots - length))
        src_begin = draw(st.integers(0, src_slots - length))
        dst = list(range(dst_begin, dst_begin + length))
        src = list(range(src_begin, src_begin + length))
        if draw(st.booleans()):
            dst.reverse()
            src.reverse()
    else:
        dst = draw(st.lists(st.integers(-1, dst_slots - 1), max_size=24))
        src = draw(st.lists(st.integers(-1, src_slots - 1), min_size=len(dst), max_size=len(dst)))
    if not duplicates:
        dst = [slot if slot not in dst[:i] else -1 for i, slot in enumerate(dst)]
    count = draw(st.none() | st.integers(0, len(dst)))
    return {
        "dst": dst,
        "src": src,
        "count": count,
        "dtypes": draw(st.tuples(*[st.sampled_from((torch.int32, torch.int64))] * 3)),
    }


@QUICK
@given(data=st.data())
def test_any_geometry(placement: Placement, data: Any) -> None:
    geometry = data.draw(geometries())
    dst, src = [], []
    for pair in geometry["pairs"]:
        dst.append(placement.dst(pair["dst_sizes"], pair["dtype"], **pair["dst_layout"]))
        src.append(placement.src(pair["src_sizes"], pair["dtype"], **pair["src_layout"]))
    fill_pool(dst, geometry["slot_dim"])
    fill_pool(src, geometry["slot_dim"], seed=1)
    drawn = data.draw(entries(geometry["dst_slots"], geometry["src_slots"], placement.checks_indices))
    dst_dtype, src_dtype, count_dtype = drawn["dtypes"]
    check_transfer(
        dst,
        src,
        placement.dst_indices(torch.tensor(drawn["dst"], dtype=dst_dtype), dst_dtype),
        placement.src_indices(torch.tensor(drawn["src"], dtype=src_dtype), src_dtype),
        slot_dim=geometry["slot_dim"],
        count=None if drawn["count"] is None else placement.count(drawn["count"], count_dtype),
    )


@st.composite
def views(draw: Any, flat: Tensor, row: int) -> Tensor:
    """[slots, row] somewhere in `flat`, also strided; rows of one view never share a byte."""
    step = draw(st.integers(1, 3))
    reach = (row - 1) * step + 1
    stride = draw(st.integers(reach, max(reach, 24)))
    slots = draw(st.integers(1, min(6, 1 + (len(flat) - reach) // stride)))
    offset = draw(st.integers(0, len(flat) - (slots - 1) * stride - reach))
    return flat.as_strided((slots, row), (stride, step), offset)


def addresses(list_of_views: list[Tensor], slots: list[int]) -> list[int]:
    """Of all bytes that a call touches on one side, in the order of planes, entries and rows."""
    return [
        view.storage_offset() + slot * view.stride(0) + byte * view.stride(1)
        for view in list_of_views
        for slot in slots
        for byte in range(view.shape[1])
    ]


@settings(QUICK, max_examples=400)
@given(data=st.data())
def test_overlap_is_judged_by_bytes(data: Any) -> None:
    """Refused exactly when a byte that the call writes is read for another byte."""
    flat = torch.zeros(160, dtype=torch.uint8)
    fill_pool([flat.view(1, -1)])
    dst, src = [], []
    for _ in range(data.draw(st.integers(1, 2))):
        row = data.draw(st.integers(1, 12))
        dst.append(data.draw(views(flat, row)))
        src.append(data.draw(st.just(dst[-1]) | views(flat, row)))
    drawn = data.draw(entries(min(map(len, dst)), min(map(len, src)), duplicates=False))
    moves = [
        (i, j)
        for i, j in list(zip(drawn["dst"], drawn["src"], strict=True))[: drawn["count"]]
        if i >= 0 and j >= 0
    ]
    written = addresses(dst, [i for i, _ in moves])
    read = addresses(src, [j for _, j in moves])
    of_all_slots = addresses(dst, list(range(min(map(len, dst)))))
    hypothesis.assume(len(set(of_all_slots)) == len(of_all_slots))  # else dst itself is refused
    writer = {address: number for number, address in enumerate(written)}
    overlaps = any(writer.get(address, number) != number for number, address in enumerate(read))
    call = (
        dst,
        src,
        torch.tensor(drawn["dst"], dtype=torch.int64),
        torch.tensor(drawn["src"], dtype=torch.int64),
    )
    count = None if drawn["count"] is None else torch.tensor(drawn["count"])
    if not overlaps:
        check_transfer(*call, count=count)
        return
    with unchanged([flat]), pytest.raises(ValueError, match="destination and source overlap"):
        transfer_kv(*call, count=count)
    hypothesis.event("refused")
