"""Calls of transfer_kv for tensors of another shape, of which each is worked out once.

What is kept of one (csrc/known_calls.cpp) is found by its form and by address, device, dtype, sizes and
strides of all its tensors, as they are in that call: whoever passes tensors that equal in all of these
passes the memory that the planes describe. What is kept of memory that is gone is never used again. A
table's tensor doesn't hold the memory at its addresses: whoever passes the table sees to that.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from torch_hicache.integrations.sglang.addresses import AddressTable, Call, Side, bad, check_type
from torch_hicache.integrations.sglang.pages import page_indices

transfer_kv = torch.ops.hicache.transfer_kv.default
_transfer_known = torch.ops.hicache.transfer_known.default
_keep_call = torch.ops.hicache.keep_call.default

Form = tuple[Any, ...]  # all that is no tensor in a call: which one it is, sizes, tables that were read

_MOST_FORMS = 4096  # kept; a pool of 128 layers needs a few hundred
_forms: dict[Form, int] = {}
_numbers = itertools.count()  # none is given twice


def run_known(
    form: Form,
    dst: Side,
    src: Side,
    dst_indices: Tensor,
    src_indices: Tensor,
    block_quota: int | None = None,
) -> bool:
    """The whole call, if run() has had one of this form with tensors that equal these.

    False, and nothing has happened, if not, and for all that run() and the checks before it may refuse.
    """
    number = _forms.get(form)
    if number is None or (block_quota is not None and not 1 <= block_quota < 1 << 63):
        return False
    try:
        for tensor in dst:
            if tensor.requires_grad and torch.is_grad_enabled():
                return False
        return _transfer_known(dst, src, dst_indices, src_indices, number, block_quota or 0)
    except (AttributeError, RuntimeError, ValueError):
        if all(isinstance(tensor, Tensor) for tensor in (*dst, *src, dst_indices, src_indices)):
            raise
        return False


def run(
    form: Form,
    call: Call,
    dst: Side,
    src: Side,
    dst_indices: Tensor,
    src_indices: Tensor,
    block_quota: int | None = None,
    page_size: int = 0,
) -> None:
    """transfer_kv, of which a kernel takes `block_quota` blocks at most. From now on the call is known.

    Not so if a size is no int: a tensor of one element, which torch takes for one, may change.
    With a `page_size`, indices are tokens, while slots of the planes are pages.
    """
    check_type(dst_indices, "dst_indices")
    check_type(src_indices, "src_indices")
    is_constant = all(part is None or type(part) in (int, AddressTable) for part in form)
    if is_constant and page_size < 1 << 63:
        if len(_forms) >= _MOST_FORMS:
            _forms.clear()
        number = _forms.setdefault(form, next(_numbers))
        planes = call.dst, call.src, call.slot_dim
        _keep_call(dst, src, dst_indices, src_indices, number, *planes, page_size)
    if page_size:
        dst_indices = page_indices(dst_indices, page_size, "dst_indices")
        src_indices = page_indices(src_indices, page_size, "src_indices")
    if block_quota is not None and block_quota < 1:
        raise bad(f"block_quota must be 1 or more, got {block_quota}.")
    if block_quota is not None and block_quota >= 1 << 63:
        raise bad(f"block_quota must be less than 2**63, got {block_quota}.")
    transfer_kv(
        call.dst,
        call.src,
        dst_indices,
        src_indices,
        slot_dim=call.slot_dim,
        max_blocks=block_quota or 0,
    )
