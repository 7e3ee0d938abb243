"""torch.ops.hicache.wait_layer: a ticket's wait for compiled and captured graphs.

    wait_layer(Tensor(a!)[] pool, int engine, int layer) -> ()

`pool` are the planes that are read next; the op touches none of them. It declares them mutated, so that
no compiler moves a read of the layer in front of the wait. `engine` is `TransferEngine.handle`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hicache.engine import find_engine


def wait_layer(pool: Sequence[Tensor], engine: int, layer: int) -> None:
    """Let the caller's current stream wait for the newest load of a layer. No load outstanding: a no-op.

    Args:
        pool: the tensors whose reads must come behind the wait.
        engine: `TransferEngine.handle`. The engine must outlive the graphs that captured a wait.
        layer: a layer id of its pools.

    In a captured CUDA graph the wait follows the newest load at each replay. On the CPU, where the caller
    is the stream, it blocks the host.

    Raises:
        ValueError: there is no such engine or layer.
        The error of a load, for the layer in which it happened and those behind it: at every call until
        another load of the layer follows, or the ticket is given up by `cancel`; from then on once for
        each layer, unless the ticket has told someone before. Replays of captured graphs run no host
        code and raise nothing.
    """
    torch.ops.hicache.wait_layer(pool, engine, layer)


def _wait_layer(_pool: Sequence[Tensor], engine: int, layer: int) -> None:
    found = find_engine(engine)
    if found is None:
        raise ValueError(f"[wait_layer] engine must be the handle of a TransferEngine, got {engine}.")
    found._wait_layer(layer)


# One kernel for every device: it calls no kernel of one.
_library = torch.library.Library("hicache", "IMPL")
_library.impl("wait_layer", _wait_layer, "CompositeExplicitAutograd")


@torch.library.register_fake("hicache::wait_layer")
def _wait_layer_fake(_pool: Sequence[Tensor], _engine: int, _layer: int) -> None:
    if torch._guards.TracingContext.try_get() is not None:  # a graph is being compiled
        from torch_hicache import _inductor

        _inductor.install()
