"""What torch.compile's inductor must know about the ops; docs/compile.md has the whole story.

`wait_layer` counts as a transfer that reads nothing: it writes its `pool` as far as order is concerned.

Three remedies keep results right, one keeps inductor from copying pools. `install` is called by the
fake kernel while a graph is being compiled: `import torch_hicache` stays free of inductor.

All of this is private to torch. The first three are installed wherever their interfaces exist: they
only add what inductor leaves out. The fourth is kept to the torch versions it was tested with; on
others torch copies the pools, which is slow, and a warning says so.
"""

import hashlib
import operator
import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, Node

# The versions that test/test_compile*.py were run with.
TESTED_TORCH = ("2.11", "2.13", "2.14")
# HICACHE_COMPILE_HOOKS=force takes any other version for tested too.
FORCE_VARIABLE = "HICACHE_COMPILE_HOOKS"


def install() -> None:
    """Install what is missing. Cheap when nothing is, so that a hook a user replaced comes back."""
    try:
        _install_lowerings()
        _add_pass("joint_custom_pre_pass", _RECORD, first=True)
        _add_pass("post_grad_custom_post_pass", _KEEP_APART)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"[transfer_kv] can't be compiled rightly with torch {torch.__version__}: {error}. "
            "Keep it out of the graph (torch.compiler.disable), or use a tested torch: "
            f"{', '.join(TESTED_TORCH)}."
        ) from error
    if _is_tested():
        # Before the joint patterns, which must not pull a read over a transfer, and behind them:
        # they may have renumbered.
        _add_pass("joint_custom_pre_pass", _SEPARATE_REGIONS)
        _add_pass("joint_custom_post_pass", _SEPARATE_REGIONS)


@cache
def _is_tested() -> bool:
    version = ".".join(torch.__version__.split(".")[:2])
    if version in TESTED_TORCH or os.environ.get(FORCE_VARIABLE) == "force":
        return True
    warnings.warn(
        f"torch_hicache was not tested with compiled graphs of torch {torch.__version__} (tested: "
        f"{', '.join(TESTED_TORCH)}). They may copy whole KV pools, which costs time and memory. "
        f"{FORCE_VARIABLE}=force removes the copies all the same.",
        stacklevel=2,
    )
    return False


# --- Passes over the functional graph ------------------------------------------------------------


class _Pass(CustomGraphPass):
    """A function as a pass with an identity for inductor's cache.

    The lowerings below are no part of a cache key, so that each identity covers the whole file.
    """

    def __init__(self, function: Callable[[Graph], None]) -> None:
        self._function = function

    def __call__(self, graph: Graph) -> None:
        self._function(graph)

    def uuid(self) -> tuple[str, str]:
        return self._function.__name__, _file_digest()


class _Chain(CustomGraphPass):
    """Several passes in a hook of a torch that takes only one (before 2.13)."""

    def __init__(self, passes: Sequence[Callable[[Graph], None]]) -> None:
        self.passes = tuple(passes)

    def __call__(self, graph: Graph) -> None:
        for graph_pass in self.passes:
            graph_pass(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """None, which turns the cache off, when one of the passes has no identity."""
        uuids = tuple(getattr(graph_pass, "uuid", lambda: None)() for graph_pass in self.passes)
        return None if None in uuids else uuids


@cache
def _file_digest() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def _add_pass(hook: str, graph_pass: _Pass, *, first: bool = False) -> None:
    """Add to what a user has in the same hook, first or last."""
    current = getattr(torch._inductor.config, hook)
    if isinstance(current, _Chain):
        passes = current.passes
    elif isinstance(current, list | tuple):
        passes = tuple(current)
    else:
        passes = () if current is None else (current,)
    if graph_pass in passes:
        return
    passes = (graph_pass, *passes) if first else (*passes, graph_pass)
    takes_several = hasattr(custom_graph_pass, "get_custom_graph_passes")
    value = passes[0] if len(passes) == 1 else passes if takes_several else _Chain(passes)
    setattr(torch._inductor.config, hook, value)


# The ops that write a list of tensors, and the name of that list.
_WRITES = {
    torch.ops.hicache.transfer_kv.default: "dst",
    torch.ops.hicache.wait_layer.default: "pool",
}


def _is_transfer(node: Node) -> bool:
    """The op inside torch's wrapper for mutating ops, as functional graphs have it."""
    higher_order = torch.ops.higher_order
    wrappers = (higher_order.auto_functionalized_v2, higher_order.auto_functionalized)
    return node.target in wrappers and node.args[0] in _WRITES


def _transfers(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if _is_transfer(node)]


def _separate_regions(graph: Graph) -> None:
    """Let every transfer begin a new region, over whose border inductor moves nothing.

    A functional graph has no order but that of its data. Inductor moves a read of the old pool
    behind the transfer, finds both pools in use and copies the old one (reorder_for_locality).
    """
    from torch._inductor.pattern_matcher import is_mutation_op

    borders = set(_transfers(graph))
    if not borders:
        return
    region = 0
    for node in graph.nodes:
        region += node in borders or is_mutation_op(node)
        node.meta["mutation_region_id"] = region


# What the program said before inductor's passes: see _record_apart.
_APART = "hicache_apart"
_GEOMETRY = "hicache_geometry"
_OFFSETS = "hicache_offsets"
_OFFSET = "_storage_offset"  # how the wrapper's arguments end that say where a plane lies in its base


def _reads(transfer: Node) -> list[Any]:
    """What a transfer reads, in a fixed order."""
    kwargs = transfer.kwargs
    if "src" not in kwargs:
        return []
    return [*kwargs["src"], kwargs["dst_indices"], kwargs["src_indices"], kwargs.get("count")]


def _bases(transfer: Node) -> list[Any]:
    """What a transfer writes: the tensors that the planes of `dst` are views of."""
    kwargs = transfer.kwargs
    return list(kwargs["_all_bases"] if "_all_bases" in kwargs else kwargs[_WRITES[transfer.args[0]]])


def _storage(node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _geometry(node: Node) -> tuple[Any, Any]:
    value = node.meta["val"]
    return value.storage_offset(), value.untyped_storage().nbytes()


def _offsets(transfer: Node) -> dict[str, Any]:
    values = {key: value for key, value in transfer.kwargs.items() if key.endswith(_OFFSET)}
    return {key: v.meta["val"] if isinstance(v, Node) else v for key, v in values.items()}


def _insert_clone(node: Node, before: Node) -> Node:
    graph = before.graph
    with graph.inserting_before(before):
        clone = graph.call_function(torch.ops.aten.clone.default, (node,))
    with node.meta["val"].fake_mode:
        clone.meta["val"] = node.meta["val"].clone()
    return clone


def _record_apart(graph: Graph) -> None:
    """Record what the program keeps apart, before inductor drops what looks like no work.

    A clone of the pool as source looks so to inductor: it takes the pool itself, sees no later use
    of its old contents and lets the transfer write what it still reads. A copy as destination too:
    it takes the original, whose place in its storage the views of the copy know nothing of.
    """
    for transfer in _transfers(graph):
        written = {_storage(base) for base in _bases(transfer)}
        transfer.meta[_APART] = [
            position for position, read in enumerate(_reads(transfer)) if _storage(read) not in written
        ]
        transfer.meta[_GEOMETRY] = [_geometry(base) for base in _bases(transfer)]
        transfer.meta[_OFFSETS] = _offsets(transfer)


def _keep_apart(graph: Graph) -> None:
    """Give what the program kept apart, and inductor put together, a copy of its own again."""
    if not _transfers(graph):
        return
    # Such as a write of ATen's that is overwritten before anything reads it. Inductor would drop it
    # when it is an op in place, and with it the order of reads of the pool and what overwrites it.
    graph.eliminate_dead_code()
    transfers = _transfers(graph)
    for transfer in transfers:
        _keep_bases(transfer)
        _keep_reads(transfer)
    _keep_old_contents(graph, transfers)


def _keep_bases(transfer: Node) -> None:
    if "_all_bases" not in transfer.kwargs or _GEOMETRY not in transfer.meta:
        return
    bases = _bases(transfer)
    versions = _written_versions(transfer)
    for position, recorded in enumerate(transfer.meta[_GEOMETRY]):
        base, version = bases[position], versions[position]
        now = _geometry(base)
        moved = not all(map(_same, recorded, now))
        memory = _input_of(base)
        # Inductor lets what it computes begin where its memory does, whatever it was made of.
        begins_late = memory is None and not _same(now[0], 0)
        if moved or begins_late or (memory and version and not _flows_back(version, memory)):
            bases[position] = _insert_clone(base, transfer)
            offsets = _offsets_in_clone(transfer, position)
            transfer.kwargs = {**transfer.kwargs, "_all_bases": bases, **offsets}


def _same(a: Any, b: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a == b)


def _offsets_in_clone(transfer: Node, position: int) -> dict[str, Any]:
    """Where the planes of a base lie in its clone, which begins at 0: as far behind its begin as in the
    program. What the graph says of it by now has followed the base to where inductor found it."""
    began, _ = transfer.meta[_GEOMETRY][position]
    offsets: dict[str, Any] = {}
    for key, recorded in transfer.meta[_OFFSETS].items():
        if transfer.kwargs[key.removesuffix(_OFFSET) + "_base_index"] != position:
            continue
        offsets[key] = offset = recorded - began
        if not isinstance(offset, int):
            with transfer.graph.inserting_before(transfer):
                offsets[key] = transfer.graph.call_function(_number, (str(offset),))
            offsets[key].meta["val"] = offset
    return offsets


def _number(_text: str) -> Any:
    """In a graph the symbolic number that its node's `val` holds; the text is for who reads the graph."""
    return _value_of_node(_text)


_number._inductor_lowering_function = True  # type: ignore[attr-defined]  # its own lowering


def _keep_reads(transfer: Node) -> None:
    written = {_storage(base) for base in _bases(transfer)}
    reads = _reads(transfer)
    # Without a record all that shares memory is copied: right in any case.
    together = [
        position
        for position in transfer.meta.get(_APART, range(len(reads)))
        if _storage(reads[position]) in written
    ]
    for position in together:
        reads[position] = _insert_clone(reads[position], transfer)
    if together:
        *src, dst_indices, src_indices, count = reads
        indices = {"dst_indices": dst_indices, "src_indices": src_indices, "count": count}
        transfer.kwargs = {**transfer.kwargs, "src": src, **indices}


def _keep_old_contents(graph: Graph, transfers: Sequence[Node]) -> None:
    """Copy the part of a pool whose old contents are used after a transfer into the pool.

    The program had a copy of it, which inductor dropped. Torch would copy the whole base instead.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    views: dict[Any, list[Node]] = {}
    for node in order:
        views.setdefault(_storage(node), []).append(node)
    for transfer in transfers:
        for base, version in zip(_bases(transfer), _written_versions(transfer), strict=True):
            memory = _input_of(base, through_writes=True)
            if not (memory and version and _flows_back(version, memory)):
                continue
            for view in views.get(_storage(base), ()):
                users = [user for user in view.users if _uses_after(user, view, transfer, order)]
                if order[view] < order[transfer] and users:
                    clone = _insert_clone(view, transfer)
                    for user in users:
                        user.replace_input_with(view, clone)


def _written_versions(transfer: Node) -> list[Node | None]:
    """For every base the node of its contents after the transfer; None where nobody asks for it."""
    outputs = {user.args[1]: user for user in transfer.users if user.target is operator.getitem}
    # The first output stands for what the op returns: nothing.
    return [outputs.get(position + 1) for position in range(len(_bases(transfer)))]


def _input_of(base: Node, *, through_writes: bool = False) -> Node | None:
    """The graph's input in whose memory `base` lives, through transfers into it and views.

    With `through_writes` through ATen's writes too, which inductor may do in place (index_put).
    """
    from torch._inductor.fx_passes.reinplace import inplaceable_ops

    while base.op == "call_function" and base.args and isinstance(base.args[0], Node):
        source = base.args[0]
        write = inplaceable_ops.get(base.target) if through_writes else None
        if base.target is operator.getitem and _is_transfer(source):
            base = _bases(source)[int(base.args[1]) - 1]
        elif _storage(source) == _storage(base) or (write and write.mutated_arg == 0):
            base = source
        else:
            return None
    return base if base.op in ("placeholder", "get_attr") else None


def _flows_back(version: Node, memory: Node) -> bool:
    """Whether contents that a transfer wrote are on their way into this input.

    Only then may the transfer write the input's memory. If not, it writes a copy that inductor dropped:
    torch lets it write the original, and overwrites that with what belongs there before, or after,
    the copy is read.
    """
    copy_back = torch.ops.aten.copy_.default
    targets = [user.args[0] for user in version.users if user.target is copy_back]
    if memory in targets:
        return True
    if targets or any(user.op == "output" for user in version.users):
        return False
    return any(
        _flows_back(new, memory) if transferred else _leads_to(new, memory, set())
        for new, transferred in _made_of(version)
    )


def _made_of(version: Node) -> list[tuple[Node, bool]]:
    """What further transfers, or other ops (`mul_`, `index_put_`), make of these contents."""
    made = []
    for user in version.users:
        if _is_transfer(user):
            pairs = zip(_bases(user), _written_versions(user), strict=True)
            made += [(new, True) for base, new in pairs if base is version and new]
        elif user.args and user.args[0] is version:
            made.append((user, False))
    return made


def _leads_to(node: Node, memory: Node, seen: set[Node]) -> bool:
    seen.add(node)
    if node.target is torch.ops.aten.copy_.default:
        return node.args[0] is memory
    copies = [user for user in node.users if user.target is torch.ops.aten.copy_.default]
    new = [user for user, _ in _made_of(node)]
    return any(_leads_to(user, memory, seen) for user in (*copies, *new) if user not in seen)


def _uses_after(user: Node, view: Node, transfer: Node, order: dict[Node, int]) -> bool:
    if order.get(user, -1) <= order[transfer]:
        return False
    if user.target is torch.ops.aten.copy_.default and user.args[0] is view:
        return False
    return not isinstance(user.meta.get("val"), torch.SymInt)  # sizes, strides, offsets


_RECORD = _Pass(_record_apart)
_KEEP_APART = _Pass(_keep_apart)
_SEPARATE_REGIONS = _Pass(_separate_regions)


# --- Lowerings -----------------------------------------------------------------------------------


@cache
def _install_lowerings() -> None:
    from torch._inductor import lowering

    offset = torch.ops.aten.sym_storage_offset.default
    if offset not in lowering.lowerings:  # torch then takes 0: a view of layer 1 becomes one of layer 0
        lowering.register_lowering(offset, type_promotion_kind=None)(_value_of_node)

    for op, written in _WRITES.items():
        # As inductor does by itself for an op that it meets without a lowering.
        tag = torch._library.utils.get_layout_constraint_tag(op, with_default=True)
        constraint = lowering.tag_to_layout_constraint(tag)
        lowering.make_fallback(op, constraint, warn=False)
        lowering.lowerings[op] = _realizing(lowering.lowerings[op], written)


def _realizing(fallback: Callable[..., Any], written: str) -> Callable[..., Any]:
    def lower(*args: Any, **kwargs: Any) -> Any:
        _realize_reads(args[0] if args else kwargs[written])
        return fallback(*args, **kwargs)

    return lower


def _value_of_node(_: Any) -> Any:
    from torch._inductor.virtualized import V

    value = V.graph.current_node.meta["val"]
    return value.node.expr if isinstance(value, torch.SymInt) else int(value)


def _realize_reads(dst: Sequence[Any]) -> None:
    """Compute what reads a destination and is still pending, before the transfer is scheduled.

    Inductor computes a pointwise read where its result is needed, which may be behind the transfer.
    Torch's fallback asks for pending reads too, but after it has taken its own place in the order.
    """
    from torch._inductor.virtualized import V

    for tensor in dst:
        tensor.realize()
        V.graph.mark_buffer_mutated(tensor.get_name())
