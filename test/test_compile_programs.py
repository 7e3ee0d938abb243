"""Random programs of transfers, lazy reads and writes, compiled and compared with eager.

    HICACHE_PROGRAMS=2000 HICACHE_PROGRAMS_SEED=7 pytest test/test_compile_programs.py

A failure prints the program. Programs are compiled in batches, one function each, to save time: half
of the batches with static sizes, half with dynamic ones, two pool sizes through one function.
"""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import allocations, assert_same, compare, copy_of, indices, pool

from torch_hicache import transfer_kv

PROGRAMS = int(os.environ.get("HICACHE_PROGRAMS", "160"))
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


class _Writer:
    """Writes one program. `values` are the names of what was computed so far, by kind."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.values: dict[str, list[str]] = {kind: [] for kind in READS}
        self.lines: list[str] = []

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

    def program(self) -> str:
        steps = (self.read, self.combine, self.transfer, self.write)
        for _ in range(self.random.randint(4, 14)):
            self.random.choices(steps, weights=(4, 3, 4, 1))[0]()
        names = [name for names in self.values.values() for name in names]
        kept = self.random.sample(names, self.random.randint(0, len(names)))
        self.lines.append(f"return [{', '.join(kept)}]")
        body = "\n    ".join(self.lines)
        return f"def program({ARGUMENTS}):\n    {body}\n"


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


def _run_alone(sources: list[str], sizes: tuple[tuple[int, int], ...], device: str) -> list[str]:
    """The programs that are wrong by themselves too."""
    wrong = []
    for source in sources:
        program = _load(source)
        compiled = _compiled(program, len(sizes) > 1)
        try:
            for slots, length in sizes:
                compare(program, compiled, _arguments(slots, length, device))
        except AssertionError as error:
            wrong.append(f"{source}\n{error}")
    return wrong


@pytest.mark.parametrize("batch", range(-(-PROGRAMS // BATCH)))
def test_programs(batch: int, device: str) -> None:
    seeds = range(SEED + batch * BATCH, SEED + min((batch + 1) * BATCH, PROGRAMS))
    sources = [_Writer(seed).program() for seed in seeds]
    programs = [_load(source) for source in sources]

    def all_programs(arguments: list[tuple[Any, ...]]) -> list[Any]:
        return [program(*args) for program, args in zip(programs, arguments, strict=True)]

    dynamic = batch % 2 == 1
    sizes = ((24, 7), (40, 9)) if dynamic else ((24, 7),)
    compiled = _compiled(all_programs, dynamic)
    mode = (torch.enable_grad, torch.no_grad, torch.inference_mode)[batch % 3]
    for slots, length in sizes:
        torch.manual_seed(SEED + batch)
        with mode():
            arguments = [_arguments(slots, length, device) for _ in programs]
            eager_arguments, compiled_arguments = copy_of(arguments), copy_of(arguments)
            expected = all_programs(eager_arguments)
            with allocations() as allocated:
                actual = compiled(compiled_arguments)
        try:
            assert_same((expected, eager_arguments), (actual, compiled_arguments))
        except AssertionError:
            wrong = _run_alone(sources, sizes, device)
            pytest.fail("\n".join(wrong) or "wrong only as a batch:\n" + "\n".join(sources))
        # No program computes or clones more than one plane at once: more is a copy of a stack.
        assert max(allocated) < 2 * slots * ROW * 8
