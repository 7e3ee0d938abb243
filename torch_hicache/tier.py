"""What a third tier behind a host pool is, whoever keeps the bytes: an interface, counters, and a URL."""

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from torch_hicache.pool import HostPool


class ThirdTier(Protocol):
    """Whole pages of one host pool, kept elsewhere by key: the hash of a block and all that precedes it.

    Nothing that a tier meets at work raises: what can't be had in time is a miss, what can't be put is
    not kept. Only bad arguments raise, before anything is done. All methods may be called from several
    threads, but a page must not take part in two calls at once.
    """

    def put(self, keys: Sequence[str], pages: Sequence[int]) -> list[bool]:
        """Keep copies of pages of the host pool. True: the tier has the key now, or had it already (the
        older bytes stay). The pages must not change until this returns."""
        ...

    def get(self, keys: Sequence[str], pages: Sequence[int]) -> list[bool]:
        """Fill pages of the host pool, allocated by the caller. True: the page holds what was put; that
        has been verified.

        False: a miss. The page's contents are undefined, and a call that was given up may write into it
        still: `free` it. The pool hands it out again only when that call has returned.
        """
        ...

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """Whether `get` would find them. A hint: False may be wrong, and True a moment later."""
        ...

    def stats(self) -> "TierStats":
        """Counters since the tier was made."""
        ...

    def close(self) -> None:
        """Give everything back. Waits for calls under way, within limits. Later calls do nothing."""
        ...


@dataclass
class TierStats:
    """Counters of a third tier. Seconds are of `put` and `get`, with checksums and waits.

    Attributes:
        pages_put, pages_got: that the tier has; that it gave, verified.
        bytes_put, bytes_got: of those.
        pages_dropped: that `put` could not place: the tier full, slow or away.
        pages_missed: that `get` did not give, for any reason.
        pages_corrupt: of those missed, that arrived with a wrong checksum.
        calls_abandoned: that did not return within their deadline.
        outages: how often the tier was found to be away, and left alone for a while.
        checks_withheld: keys that `contains` called absent without asking.
    """

    pages_put: int = 0
    pages_got: int = 0
    bytes_put: int = 0
    bytes_got: int = 0
    seconds_put: float = 0.0
    seconds_got: float = 0.0
    pages_dropped: int = 0
    pages_missed: int = 0
    pages_corrupt: int = 0
    calls_abandoned: int = 0
    outages: int = 0
    checks_withheld: int = 0


def check_tier_url(url: str) -> tuple[str, int]:
    """Host and port of a third tier's URL; `mooncake://host:port` is the only kind there is.

    Raises:
        ValueError: anything else.
    """
    host, port = None, None
    if isinstance(url, str):
        try:
            parts = urlsplit(url)
            if url == f"mooncake://{parts.netloc}" and parts.username is None:
                host, port = parts.hostname, parts.port
        except ValueError:
            pass
    if not host or not port or not re.fullmatch(r"\S+", host):
        raise ValueError(f"[tier] a third tier must be mooncake://host:port, got {url!r}.")
    return host, port


def open_tier(url: str, pool: HostPool, **options: Any) -> ThirdTier:
    """The tier of a URL behind `pool`; `options` are those of its class but for what the URL says.

    Raises:
        ValueError: a bad URL or option.
        ImportError: the tier's package is missing, or of an unknown version.
        RuntimeError: nobody answers at that address.
    """
    host, port = check_tier_url(url)
    from torch_hicache.integrations.mooncake import MooncakeTier

    master = f"{host}:{port}"
    try:
        inspect.signature(MooncakeTier).bind(pool, master=master, **options)
    except TypeError as error:
        raise ValueError(f"[tier] options must be those of MooncakeTier, {error}.") from None
    return MooncakeTier(pool, master=master, **options)
