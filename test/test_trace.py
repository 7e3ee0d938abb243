"""Serving traces: what the reader takes, what it refuses and how it says so, and the generator."""

import codecs
import json
import os
import re
from pathlib import Path

import pytest

from torch_hicache import trace
from torch_hicache.trace import (
    BLOCK_TOKENS,
    Request,
    TraceError,
    generate_trace,
    num_blocks,
    read_trace,
)

GOOD = b'{"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [1, 2]}'
_NAME = "conversation_3000.jsonl"


def changed(**fields: object) -> bytes:
    """GOOD with fields replaced, or left out where the value is Ellipsis."""
    value = json.loads(GOOD) | fields
    return json.dumps({k: v for k, v in value.items() if v is not ...}).encode()


def real_trace() -> Path:
    """The published trace: HICACHE_TRACE, or beside the repository. It is not part of it."""
    named = os.environ.get("HICACHE_TRACE")
    path = Path(named) if named else Path(__file__).parents[2] / "shared" / "traces" / _NAME
    if not path.is_file():
        pytest.skip(f"needs the published trace: set HICACHE_TRACE to a copy of {_NAME}")
    return path


def test_reads_requests(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n" + GOOD + b"\r\n \n" + changed(timestamp=6.5, hash_ids=[1, 2**63 - 1]))
    assert read_trace(path) == [
        Request(5, 600, 7, (1, 2)),
        Request(6.5, 600, 7, (1, 2**63 - 1)),
    ]


def test_an_empty_prompt_has_no_blocks(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(changed(input_length=0, hash_ids=[]))
    assert read_trace(path) == [Request(5, 0, 7, ())]


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (512, 1), (513, 2), (1024, 2)])
def test_num_blocks(num_tokens: int, blocks: int) -> None:
    assert num_blocks(num_tokens) == blocks


BAD_LINES = {
    "not JSON": (b"hello", "not JSON: Expecting value in column 1"),
    "cut off": (GOOD[:40], "not JSON: "),
    "two objects": (GOOD + GOOD, "not JSON: Extra data in column 78"),
    "not an object": (b"[1, 2]", r"a request must be a JSON object, got \[1, 2\]"),
    "null": (b"null", "a request must be a JSON object, got null"),
    "not UTF-8": (GOOD + b"\xff", r"not UTF-8 text \(byte 0xff in column 78\)"),
    "NaN": (GOOD.replace(b"600", b"NaN"), "NaN is not a number that JSON allows"),
    "-Infinity": (GOOD.replace(b" 5", b"-Infinity"), "-Infinity is not a number that JSON allows"),
    "overflow": (GOOD.replace(b" 5", b"1e999"), "timestamp must be finite and not negative"),
    "deep": (b"[" * 100_000, "not JSON that can be read: "),
    "long number": (b"9" * 5000, "not JSON that can be read: "),
    "huge length": (changed(input_length=10**400), "hash_ids must have one id for each 512 tokens"),
    "no timestamp": (changed(timestamp=...), "timestamp is missing"),
    "no length": (changed(input_length=...), "input_length is missing"),
    "no output": (changed(output_length=...), "output_length is missing"),
    "no ids": (changed(hash_ids=...), "hash_ids is missing"),
    "timestamp of text": (changed(timestamp="5"), 'timestamp must be a number, got "5"'),
    "timestamp of bool": (changed(timestamp=True), "timestamp must be a number, got true"),
    "negative timestamp": (changed(timestamp=-1), "timestamp must be finite and not negative, got -1"),
    "length of text": (changed(input_length="600"), 'input_length must be an integer, got "600"'),
    "length of float": (changed(input_length=600.0), "input_length must be an integer, got 600.0"),
    "length of bool": (changed(output_length=False), "output_length must be an integer, got false"),
    "length of null": (changed(output_length=None), "output_length must be an integer, got null"),
    "negative length": (changed(input_length=-600), "input_length must not be negative, got -600"),
    "negative output": (changed(output_length=-1), "output_length must not be negative, got -1"),
    "ids of text": (changed(hash_ids="12"), 'hash_ids must be a list of integers, got "12"'),
    "an id of text": (changed(hash_ids=[1, "x"]), r'hash_ids\[1\] must be an integer, got "x"'),
    "an id of bool": (changed(hash_ids=[True, 2]), r"hash_ids\[0\] must be an integer, got true"),
    "negative id": (changed(hash_ids=[1, -2]), r"hash_ids\[1\] must be from 0 to 2\^63-1, got -2"),
    "large id": (changed(hash_ids=[2**63, 2]), r"hash_ids\[0\] must be from 0 to 2\^63-1, got 9"),
    "too few ids": (changed(hash_ids=[1]), "input_length 600 needs 2, got 1"),
    "too many ids": (changed(hash_ids=[1, 2, 3]), "input_length 600 needs 2, got 3"),
    "long value": (changed(hash_ids="x" * 100), r'got "x{36}\.\.\.'),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_refused_with_file_line_and_reason(tmp_path: Path, name: str) -> None:
    line, reason = BAD_LINES[name]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(GOOD + b"\n\n" + line + b"\n" + GOOD + b"\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    text = str(caught.value)
    assert re.fullmatch(rf"\[replay\] {re.escape(str(path))}:3: .*{reason}.*\.", text), text
    assert len(text) < len(str(path)) + 200


def test_limit_reads_no_further(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(GOOD + b"\n" + GOOD + b"\nbad")
    assert len(read_trace(path, limit=2)) == 2
    with pytest.raises(TraceError, match=r"trace\.jsonl:3: not JSON"):
        read_trace(path, limit=3)


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"^\[replay\] .*missing\.jsonl: No such file or directory\.$"):
        read_trace(tmp_path / "missing.jsonl")
    with pytest.raises(TraceError, match=r"Is a directory\.$"):
        read_trace(tmp_path)
    empty = tmp_path / "empty.jsonl"
    empty.write_bytes(b"\n\n")
    with pytest.raises(TraceError, match=r"empty\.jsonl: the file holds no requests\.$"):
        read_trace(empty)


def test_generated_requests_are_a_trace_file(tmp_path: Path) -> None:
    requests = generate_trace(500, seed=3)
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(request.to_json() + "\n" for request in requests))
    assert read_trace(path) == requests


def test_generator_depends_on_the_seed_alone() -> None:
    assert generate_trace(50, seed=1) == generate_trace(50, seed=1)
    assert generate_trace(50, seed=1) != generate_trace(50, seed=2)
    assert generate_trace(80, seed=1)[:50] == generate_trace(50, seed=1)


def test_generated_ids_stand_for_prefixes() -> None:
    requests = generate_trace(800)
    before: dict[int, int | None] = {}
    filled: dict[int, int] = {}
    shared = 0
    for request in requests:
        previous = None
        for i, hash_id in enumerate(request.hash_ids):
            shared += hash_id in before
            assert before.setdefault(hash_id, previous) == previous
            tokens = min(BLOCK_TOKENS, request.input_length - i * BLOCK_TOKENS)
            assert filled.setdefault(hash_id, tokens) == tokens
            previous = hash_id
    total = sum(len(request.hash_ids) for request in requests)
    assert 0.3 < shared / total < 0.9
    times = [request.timestamp for request in requests]
    assert times == sorted(times)


def test_the_real_trace() -> None:
    requests = read_trace(real_trace())
    assert len(requests) == 3000
    assert sum(len(request.hash_ids) for request in requests) == 80619
    assert max(request.input_length for request in requests) == 123192


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    line = Request(0.0, 512, 1, (7,)).to_json()
    path = tmp_path / "marked.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + f"{line}\n{line}\n".encode())
    assert len(read_trace(path)) == 2


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_MAX_LINE_BYTES", 1 << 16)
    with pytest.raises(TraceError, match=r"/dev/zero:1: a line must be at most 65,536 bytes"):
        read_trace("/dev/zero")
