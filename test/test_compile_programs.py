"""Random programs of transfers, lazy reads and writes, compiled and compared with eager.

    HICACHE_PROGRAMS=2000 HICACHE_PROGRAMS_SEED=7 pytest test/test_compile_programs.py

A failure prints the program. Half of the batches have static sizes, half dynamic ones and two pool
sizes through one function. What costs time is the C++ compiler, about a second for every stretch between
transfers. So the programs of a batch run side by side in one function, and transfer at the same places.
"""

import os
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
from compiling import compare, indices, pool

from torch_hicache import transfer_kv

PROGRAMS = int(os.environ.get("HICACHE_PROGRAMS", "100"))
SEED = int(os.environ.get("HICACHE_PROGRAMS_SEED", "0"))
BATCH = 20
ROW = 8

# Every program's arguments. All planes are [slots, row] views; none shares memory with another.
ARGUMENTS = "a, h, kv, ls, padded, turned, i, j"
PLANES = (
    *(f"a[{layer}]" for layer in range(3)),
    *(f"h[{layer}]" for layer in range(3)),
    "kv[0]",
    "kv[1]",
    "ls[0]",
    "ls[1]",
    f"padded[:, 1:{1 + ROW}]",
    "turned.T",
)
# ATen writes into stacks are copies of inductor's own, outside of what is promised.
WRITABLE = ("ls[0]", "ls[1]")

READS = {
    "rows": ("{p}[3:8] * 2", "{p}[i[:5]]", "{p}[3:8].relu()", "{p}[-5:] + 1", "{p}[:5].clone()"),
    "plane": ("{p} * 2 + 1", "{p}.clone()", "{p}.abs()", "{p} - {q}"),
    "slots": ("{p}.sum(1)", "{p}.amax(1)", "{p}[:, 2] * 3"),
    "row": ("{p}.sum(0)", "{p}[2] * 3"),
}
COMBINATIONS = ("({x} + {y}) % 61", "{x} - {y}", "{x} * 2", "torch.maximum({x}, {y})")
PRODUCT = "(({x} @ {y}.T) % 31) @ {y} % 61"
COPIES = ("{p}.clone()", "{p} * 1", "{p}.to({p}.dtype, copy=True)", "{p} + torch.zeros_like({p})")
INDICES = ("i, j", "j, i", "torch.where(i % 3 == 0, -1, i), j", "i.int(), j")


# A stretch has up to four lines of computing, then up to three transfers.
STRETCHES = 4


class _Writer:
    """Writes one program. `values` are the names of what was computed so far, by kind."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.values: dict[str, list[str]] = {kind: [] for kind in READS}
        self.lines: list[str] = []
        self.stretches = [self._stretch() for _ in range(STRETCHES)]
        names = [name for names in self.values.values() for name in names]
        self.kept = self.random.sample(names, self.random.randint(0, len(names)))

    def _stretch(self) -> tuple[list[str], list[str]]:
        for _ in range(self.random.randint(0, 4)):
            self.random.choices((self.read, self.combine, self.write), weights=(4, 3, 1))[0]()
        computing, self.lines = self.lines, []
        for _ in range(self.random.choice((0, 1, 1, 1, 2, 3))):
            self.transfer()
        transfers, self.lines = self.lines, []
        return computing, transfers

    def new(self, kind: str, expression: str) -> None:
        name = f"v{sum(map(len, self.values.values()))}"
        self.lines.append(f"{name} = {expression}")
        self.values[kind].append(name)

    def planes(self, n: int) -> list[str]:
        return self.random.sample(PLANES, n)

    def read(self) -> None:
        kind = self.random.choice(list(READS))
        p, q = self.planes(2)
        self.new(kind, self.random.choice(READS[kind]).format(p=p, q=q))

    def combine(self) -> None:
        kind = self.random.choice([kind for kind, names in self.values.items() if names] or ["row"])
        if not self.values[kind]:
            return self.read()
        x, y = (self.random.choice(self.values[kind]) for _ in range(2))
        choices = COMBINATIONS + ((PRODUCT,) if kind == "rows" else ())
        return self.new(kind, self.random.choice(choices).format(x=x, y=y))

    def transfer(self) -> None:
        p, q, r, s = self.planes(4)
        values = self.values["plane"]
        form = self.random.randrange(9)
        dst, src, slot_dim = f"[{p}]", f"[{q}]", ""
        if form == 0:
            dst, src = f"[{p}, {r}]", f"[{q}, {s}]"
        elif form == 1:
            src = f"[{self.random.choice(COPIES).format(p=p)}]"
        elif form == 2:
            dst, src, slot_dim = "[a]", "[h]", ", slot_dim=1"
        elif form == 3 and values:
            src = f"[{self.random.choice(values)}]"
        elif form == 4 and values:
            dst = f"[{self.random.choice(values)}]"
        elif form == 5 and len(values) > 1:
            dst, src = (f"[{name}]" for name in self.random.sample(values, 2))
        self.lines.append(f"transfer_kv({dst}, {src}, {self.random.choice(INDICES)}{slot_dim})")

    def write(self) -> None:
        (p,) = self.random.sample(WRITABLE, 1)
        q = self.random.choice([plane for plane in PLANES if plane != p])
        forms = (f"{p}.mul_(2)", f"{p}[i[:2]] = 7", f"{p}.copy_({q})", f"{p}.add_({q})")
        self.lines.append(self.random.choice(forms))


def _source(writers: list[_Writer]) -> str:
    """The programs side by side, as one function of a list of their arguments."""

    def named(text: str, program: int) -> str:
        return re.sub(r"\b(a|h|kv|ls|padded|turned|i|j|v\d+)\b", rf"\1_{program}", text)

    lines = [f"{named(ARGUMENTS, n)} = arguments[{n}]" for n in range(len(writers))]
    for stretch in range(STRETCHES):
        for part in range(2):
            for n, writer in enumerate(writers):
                lines += [named(line, n) for line in writer.stretches[stretch][part]]
    kept = [f"[{named(', '.join(writer.kept), n)}]" for n, writer in enumerate(writers)]
    return "def program(arguments):\n    " + "\n    ".join(lines) + f"\n    return [{', '.join(kept)}]\n"


def _arguments(slots: int, length: int, device: str) -> tuple[Any, ...]:
    def planes(*shape: int) -> torch.Tensor:
        return pool(*shape, device=device, dtype=torch.float64)

    return (
        planes(3, slots, ROW),
        planes(3, slots, ROW),
        planes(2, slots, ROW),
        [planes(slots, ROW) for _ in range(2)],
        planes(slots, ROW + 3),
        planes(ROW, slots),
        indices(length, slots, device),
        indices(length, slots, device),
    )


def _load(source: str) -> Callable:
    scope: dict[str, Any] = {"torch": torch, "transfer_kv": transfer_kv}
    exec(source, scope)
    return scope["program"]


def _compiled(function: Callable, dynamic: bool) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=dynamic)


def _run(writers: list[_Writer], sizes: tuple[tuple[int, int], ...], device: str) -> None:
    """Raises AssertionError where the compiled programs differ from eager, or copy a stack."""
    program = _load(_source(writers))
    compiled = _compiled(program, len(sizes) > 1)
    for slots, length in sizes:
        allocated = compare(program, compiled, ([_arguments(slots, length, device) for _ in writers],))
        # No program computes or clones more than one plane at once.
        assert max(allocated, default=0) < 2 * slots * ROW * 8, f"a stack is copied: {allocated}"


def _wrong_alone(
    writers: list[_Writer], sizes: tuple[tuple[int, int], ...], device: str
) -> tuple[list[str], int]:
    """The programs that differ by themselves; and how many others do without their transfers too.

    Torch drops a clone behind writes of its own into the same tensor (pytorch/pytorch#198096).
    """
    wrong, of_torch = [], 0
    for writer in writers:
        try:
            _run([writer], sizes, device)
        except AssertionError as error:
            text = f"{_source([writer])}\n{error}"
            for _, transfers in writer.stretches:
                transfers.clear()
            try:
                _run([writer], sizes, device)
            except AssertionError:
                of_torch += 1
            else:
                wrong.append(text)
    return wrong, of_torch


@pytest.mark.parametrize("batch", range(-(-PROGRAMS // BATCH)))
def test_programs(batch: int, device: str) -> None:
    first = SEED + batch * BATCH
    writers = [_Writer(seed) for seed in range(first, min(first + BATCH, SEED + PROGRAMS))]
    sizes = ((24, 7), (40, 9)) if batch % 2 else ((24, 7),)
    # In the order of the source stretches of several programs become one kernel, which compiles sooner.
    order = torch._inductor.config.patch(reorder_for_peak_memory=batch % 2 == 1)
    mode = (torch.enable_grad, torch.no_grad, torch.inference_mode)[batch % 3]
    torch.manual_seed(first)
    with mode(), order:
        try:
            _run(writers, sizes, device)
        except AssertionError as error:
            source = _source(writers)
            wrong, of_torch = _wrong_alone(writers, sizes, device)
            if wrong or not of_torch:
                pytest.fail("\n".join(wrong) or f"wrong only side by side: {error}\n{source}")
