"""Serving traces: a reader that names what is wrong with a line, and a generator.

The format is that of the traces published with Mooncake (FAST'25), one JSON object a line:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

`timestamp` is in ms, lengths are in tokens. `hash_ids` has one id for each block of 512 prompt
tokens, the last one possibly not full. An id stands for a block and all that precedes it, so two
requests share a prefix as far as their ids agree.
"""

import codecs
import json
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

BLOCK_TOKENS = 512
_MAX_ID = 2**63 - 1  # ids become int64 tensors


class TraceError(ValueError):
    """A trace that can't be read; the text has file, line and reason."""


@dataclass(frozen=True)
class Request:
    """One request of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def to_json(self) -> str:
        """The request as a line of a trace file, without the line's end."""
        return json.dumps(asdict(self))


_MAX_LINE_BYTES = 64 << 20  # far above a request of a million blocks


def num_blocks(num_tokens: int) -> int:
    """Blocks that hold so many tokens, the last one possibly not full."""
    return -(-num_tokens // BLOCK_TOKENS)


def read_trace(path: str | Path, *, limit: int | None = None) -> list[Request]:
    """The first `limit` requests of a file, or all. Blank lines are skipped.

    Raises:
        TraceError: the file can't be read, holds no request, or a line is not a request.
    """
    requests: list[Request] = []
    try:
        with open(path, "rb") as file:
            lines = iter(lambda: file.readline(_MAX_LINE_BYTES + 1), b"")
            for number, line in enumerate(lines, start=1):
                if limit is not None and len(requests) >= limit:
                    break
                if len(line) > _MAX_LINE_BYTES:
                    raise TraceError(
                        f"[replay] {path}:{number}: a line must be at most {_MAX_LINE_BYTES:,} bytes."
                    )
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if not text.isspace():
                    try:
                        requests.append(_parse(text))
                    except _BadLine as error:
                        raise TraceError(f"[replay] {path}:{number}: {error}.") from None
    except OSError as error:
        raise TraceError(f"[replay] {path}: {error.strerror or error}.") from None
    if not requests:
        raise TraceError(f"[replay] {path}: the file holds no requests.")
    return requests


class _BadLine(Exception):
    """Why a line is not a request."""


def _parse(line: bytes) -> Request:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text (byte 0x{line[error.start]:02x} in column {error.start + 1})"
        raise _BadLine(reason) from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise _BadLine(f"not JSON: {error.msg} in column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deep nesting
        raise _BadLine(f"not JSON that can be read: {error}") from None
    if not isinstance(value, dict):
        raise _BadLine(f"a request must be a JSON object, got {_show(value)}")
    request = Request(
        timestamp=_timestamp(value),
        input_length=_length(value, "input_length"),
        output_length=_length(value, "output_length"),
        hash_ids=_hash_ids(value),
    )
    wanted = num_blocks(request.input_length)
    if len(request.hash_ids) != wanted:
        raise _BadLine(
            f"hash_ids must have one id for each {BLOCK_TOKENS} tokens: input_length "
            f"{_show(request.input_length)} needs {_show(wanted)}, got {len(request.hash_ids)}"
        )
    return request


def _refuse_constant(name: str) -> NoReturn:
    raise _BadLine(f"{name} is not a number that JSON allows")


def _show(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _field(value: dict[str, Any], name: str) -> object:
    if name not in value:
        raise _BadLine(f"{name} is missing")
    return value[name]


def _timestamp(value: dict[str, Any]) -> float:
    timestamp = _field(value, "timestamp")
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
        raise _BadLine(f"timestamp must be a number, got {_show(timestamp)}")
    if not 0 <= timestamp < math.inf:
        raise _BadLine(f"timestamp must be finite and not negative, got {_show(timestamp)}")
    return timestamp


def _length(value: dict[str, Any], name: str) -> int:
    length = _field(value, name)
    if isinstance(length, bool) or not isinstance(length, int):
        raise _BadLine(f"{name} must be an integer, got {_show(length)}")
    if length < 0:
        raise _BadLine(f"{name} must not be negative, got {_show(length)}")
    return length


def _hash_ids(value: dict[str, Any]) -> tuple[int, ...]:
    ids = _field(value, "hash_ids")
    if not isinstance(ids, list):
        raise _BadLine(f"hash_ids must be a list of integers, got {_show(ids)}")
    for i, hash_id in enumerate(ids):
        if isinstance(hash_id, bool) or not isinstance(hash_id, int):
            raise _BadLine(f"hash_ids[{i}] must be an integer, got {_show(hash_id)}")
        if not 0 <= hash_id <= _MAX_ID:
            raise _BadLine(f"hash_ids[{i}] must be from 0 to 2^63-1, got {_show(hash_id)}")
    return tuple(ids)


# --- The generator: conversations over shared system prompts -------------------------------------

_ACTIVE_CONVERSATIONS = 256
_NUM_SYSTEM_PROMPTS = 4
_MEAN_GAP_MS = 300.0
_LAST_TURN = 0.15  # the chance that a turn is its conversation's last


class _Conversation:
    """The tokens said so far, and the ids of the blocks that they fill."""

    def __init__(self, system_ids: tuple[int, ...]) -> None:
        self.ids = list(system_ids)
        self.num_tokens = len(system_ids) * BLOCK_TOKENS

    def say(self, num_tokens: int, ids: Iterator[int]) -> None:
        """Append tokens. A block that was not full becomes another block."""
        del self.ids[self.num_tokens // BLOCK_TOKENS :]
        self.num_tokens += num_tokens
        missing = num_blocks(self.num_tokens) - len(self.ids)
        self.ids += [next(ids) for _ in range(missing)]


def generate_trace(num_requests: int, *, seed: int = 0) -> list[Request]:
    """Requests of many conversations at once, the same for the same seed.

    A prompt is all that was said before in its conversation. Most messages are short, some bring a
    document; conversations with the same system prompt share its blocks.
    """
    rng = random.Random(seed)
    ids = iter(range(_MAX_ID))
    system_prompts = [
        tuple(next(ids) for _ in range(rng.randint(1, 6))) for _ in range(_NUM_SYSTEM_PROMPTS)
    ]
    active: list[_Conversation] = []
    requests = []
    timestamp = 0.0
    for _ in range(num_requests):
        timestamp += rng.expovariate(1 / _MEAN_GAP_MS)
        if not active or (len(active) < _ACTIVE_CONVERSATIONS and rng.random() < 0.35):
            conversation = _Conversation(rng.choice(system_prompts))
        else:
            conversation = active.pop(rng.randrange(len(active)))
        median = 8000 if rng.random() < 0.15 else 800
        conversation.say(max(1, int(rng.lognormvariate(math.log(median), 0.8))), ids)
        output_length = max(1, int(rng.lognormvariate(math.log(250), 0.7)))
        requests.append(
            Request(int(timestamp), conversation.num_tokens, output_length, tuple(conversation.ids))
        )
        if rng.random() > _LAST_TURN:
            conversation.say(output_length, ids)
            active.append(conversation)
    return requests
