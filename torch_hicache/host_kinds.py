"""The kinds of host memory, in one table by name. A kind is two verbs and what it says of itself.

A backend with memory of its own (Ascend's Memfabric) adds it by `register_host_kind`.
"""

import abc
import contextlib
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from torch_hicache import numa
from torch_hicache.host_mapping import HUGE_PAGE_BYTES, HostMapping, round_up
from torch_hicache.memory_budget import Budget, host_memory_budget, readable
from torch_hicache.registrations import TABLE, Cuts, has_registrar, reason, registrar_for
from torch_hicache.shared_memory import SharedHostMemory

KIND_VARIABLE = "HICACHE_HOST_KIND"  # what "auto" means for an accelerator
HUGE_PAGES = ("transparent", "explicit")
_FREE_HUGE_PAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")


@dataclass(frozen=True)
class HostRequest:
    """What empty_host was asked for, checked, and never of zero bytes."""

    nbytes: int
    device: torch.device
    cuts: Cuts = field(default_factory=Cuts)
    huge_pages: str = "transparent"
    numa_node: int | str | None = "auto"
    shared: SharedHostMemory | None = None
    local_ranks: int | None = None
    reserve_bytes: int | None = None

    def budget(self) -> Budget:
        return host_memory_budget(local_ranks=self.local_ranks, reserve_bytes=self.reserve_bytes)


class HostMemory:
    """`nbytes` at `address`, released by `free`, once, or when collected."""

    def __init__(self, address: int, nbytes: int, release: Callable[[], None]) -> None:
        self.address = address
        self.nbytes = nbytes
        self._release: Callable[[], None] | None = release

    def free(self) -> None:
        release, self._release = self._release, None
        if release:
            release()

    def __del__(self) -> None:
        # A destructor has nobody to tell, and at interpreter exit anything may be gone.
        try:
            self.free()
        except Exception:
            return


class HostMemoryKind(abc.ABC):
    """One way to come by host memory."""

    name: str

    def refusal(self, device: torch.device) -> str:
        """Why it does not serve `device`; empty when it does."""
        return ""

    def is_default_for(self, device: torch.device) -> bool:
        """Whether "auto" means this kind. Of several, the kind that was added last."""
        return False

    def prepare(self, sizes: Sequence[int], device: torch.device) -> None:  # noqa: B027 - may be nothing
        """A pool is about to allocate memory of these sizes, in bytes, one after the other.

        MemoryError where they do not fit together; nothing has been allocated then.
        """

    @abc.abstractmethod
    def allocate(self, request: HostRequest) -> HostMemory:
        """Memory that nobody else has.

        MemoryError, with nothing left behind, when there is not so much; `request.budget()` is asked
        first. Whoever gets the memory calls its `free`, which waits for work of the device that uses it.
        """


KINDS: dict[str, HostMemoryKind] = {}


def register_host_kind(kind: HostMemoryKind) -> None:
    """Make `kind` known to empty_host by its name. ValueError if the name is taken."""
    if kind.name in ("auto", *KINDS):
        raise ValueError(f"[host_memory] there is a kind '{kind.name}' already.")
    KINDS[kind.name] = kind


def choose_kind(name: str, device: torch.device) -> HostMemoryKind:
    """The kind of that name; for "auto" the default, or what HICACHE_HOST_KIND says for accelerators.

    ValueError where it does not serve `device`.
    """
    asked = os.environ.get(KIND_VARIABLE, "") if name == "auto" and device.type != "cpu" else ""
    if asked:
        if asked not in KINDS:
            raise ValueError(
                f"[empty_host] {KIND_VARIABLE} must be one of {', '.join(KINDS)}, got '{asked}'."
            )
        kind = KINDS[asked]
    elif name == "auto":
        kind = next(kind for kind in reversed(KINDS.values()) if kind.is_default_for(device))
    elif name in KINDS:
        kind = KINDS[name]
    else:
        raise ValueError(f"[empty_host] kind must be one of {', '.join(('auto', *KINDS))}, got '{name}'.")
    if reason := kind.refusal(device):
        raise ValueError(f"[empty_host] kind '{kind.name}' {reason}.")
    return kind


class PageableKind(HostMemoryKind):
    """Plain memory; its pages are found when they are first touched."""

    name = "pageable"

    def is_default_for(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def allocate(self, request: HostRequest) -> HostMemory:
        mapping = _map(request, _node_of(request), stays_here=False)
        return HostMemory(mapping.address, request.nbytes, mapping.free)


class PinnedKind(HostMemoryKind):
    """Memory whose pages are there, near the device, and locked by its runtime."""

    name = "pinned"

    def refusal(self, device: torch.device) -> str:
        if has_registrar(device):
            return ""
        return f"needs an accelerator as device, got {device}; use 'pageable'"

    def is_default_for(self, device: torch.device) -> bool:
        return device.type != "cpu"

    def allocate(self, request: HostRequest) -> HostMemory:
        registrar = registrar_for(request.device)
        node = _node_of(request)
        mapping = _map(request, node, stays_here=True)
        try:
            mapping.touch(() if node is None else numa.cpus_of(node))
            # The mapping is freed when the last claim is gone.
            claim = TABLE.claim(
                registrar,
                mapping.address,
                request.nbytes,
                owner=mapping,
                cuts=request.cuts,
                is_new=True,
            )
        except (RuntimeError, MemoryError) as error:
            mapping.free()
            raise MemoryError(
                f"[empty_host] page-locking {readable(request.nbytes)} failed: {reason(error)}. "
                f"All of it was given back; {request.budget()}."
            ) from None
        except BaseException:
            mapping.free()
            raise
        return HostMemory(mapping.address, request.nbytes, claim.close)


register_host_kind(PinnedKind())
register_host_kind(PageableKind())


def _map(request: HostRequest, node: int | None, *, stays_here: bool) -> HostMapping:
    """Memory of the kernel for a request, within the budget, on `node` when it is touched."""
    try:
        mapping = _map_within_budget(request, stays_here)
    except OSError as error:
        raise MemoryError(
            f"[empty_host] the system gave no {readable(request.nbytes)}: {error}."
        ) from None
    if node is not None:
        try:
            numa.prefer_node(mapping.address, mapping.length, node)
        except OSError as error:
            if request.numa_node == node:  # asked for, not merely tried
                _warn(f"memory was not placed on NUMA node {node}: {error}")
    return mapping


def _map_within_budget(request: HostRequest, stays_here: bool) -> HostMapping:
    if request.shared is not None:  # whoever made it has checked the budget
        return HostMapping(request.nbytes, fd=request.shared.fd)
    if request.huge_pages == "explicit":
        wanted = round_up(request.nbytes, HUGE_PAGE_BYTES)
        free = _free_huge_bytes()
        if wanted <= free:
            with contextlib.suppress(OSError):  # others were faster
                return HostMapping(request.nbytes, explicit_huge_pages=True, stays_here=stays_here)
        _warn(
            f"of the machine's huge pages {readable(free)} are free, {readable(wanted)} are needed; "
            "transparent huge pages are used instead"
        )
    request.budget().check("empty_host", request.nbytes)
    return HostMapping(request.nbytes, stays_here=stays_here)


def _free_huge_bytes() -> int:
    """Set aside by the administrator and unused; no part of the memory that counts as available."""
    try:
        return int(_FREE_HUGE_PAGES.read_text()) * HUGE_PAGE_BYTES
    except (OSError, ValueError):
        return 0


def _node_of(request: HostRequest) -> int | None:
    if isinstance(request.numa_node, int):
        return request.numa_node
    if request.numa_node is None or len(numa.nodes()) < 2:
        return None
    return numa.node_of_device(request.device)


def _warn(text: str) -> None:
    warnings.warn(f"[empty_host] {text}.", RuntimeWarning, stacklevel=5)
