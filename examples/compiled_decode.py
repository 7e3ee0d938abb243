"""Decode with more sessions than the device's KV pool holds, in one compiled step.

    python examples/compiled_decode.py                    # CPU, a small decoder
    python examples/compiled_decode.py --device cuda      # the layer shapes of Llama 3 8B

Sessions take turns in groups. A group whose turn ends is evicted to the host pool; its slots are given
away and overwritten. When its turn comes again, the first step restores it layer by layer: layer i is
loaded inside the compiled (on CUDA also captured) graph just before it is read. The tokens must be
exactly those of a run in which every session stays on the device.

The weights are random: this shows mechanism and time, not language.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_hicache import device_view, empty_host, transfer_kv
from torch_hicache.testing import missing_reason


@dataclass(frozen=True)
class Shape:
    """Of the decoder. A slot holds one token: per layer a K row and a V row [kv_heads, head_dim]."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    dtype: torch.dtype


SHAPES = {
    "cpu": Shape(4, 256, 8, 2, 32, 704, 512, torch.float32),
    "cuda": Shape(32, 4096, 32, 8, 128, 14336, 8192, torch.bfloat16),
}


def _weight(*shape: int, like: Shape, device: str) -> nn.Parameter:
    value = torch.randn(shape, device=device) * shape[-1] ** -0.5
    return nn.Parameter(value.to(like.dtype), requires_grad=False)


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding. x: [batch, heads, head_dim]"""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = positions[:, None, None] * frequency
    low, high = x.float().chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, shape: Shape, device: str) -> None:
        super().__init__()
        self.shape = shape
        width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        self.qkv = _weight(width, shape.hidden, like=shape, device=device)
        self.out = _weight(shape.hidden, shape.heads * shape.head_dim, like=shape, device=device)
        self.gate_up = _weight(2 * shape.mlp, shape.hidden, like=shape, device=device)
        self.down = _weight(shape.hidden, shape.mlp, like=shape, device=device)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, batch: "Batch") -> Tensor:
        """x: [batch, hidden]; keys, values: this layer's planes [slots, kv_heads, head_dim]"""
        s = self.shape
        q, k, v = F.linear(_norm(x), self.qkv).split(
            [s.heads * s.head_dim, s.kv_heads * s.head_dim, s.kv_heads * s.head_dim], dim=-1
        )
        q = _rotate(q.unflatten(-1, (s.heads, s.head_dim)), batch.positions)
        k = _rotate(k.unflatten(-1, (s.kv_heads, s.head_dim)), batch.positions)
        # The new token's rows are written by the op too: an ATen write would copy the pool.
        rows = torch.arange(x.shape[0], device=x.device)
        transfer_kv([keys, values], [k, v.unflatten(-1, (s.kv_heads, s.head_dim))], batch.new_slots, rows)
        attended = F.scaled_dot_product_attention(
            q.unsqueeze(2),  # [batch, heads, 1, head_dim]
            keys[batch.table].transpose(1, 2),  # [batch, kv_heads, context, head_dim]
            values[batch.table].transpose(1, 2),
            attn_mask=batch.mask[:, None, None, :],
            enable_gqa=True,
        )
        x = x + F.linear(attended.flatten(1), self.out)
        gate, up = F.linear(_norm(x), self.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


@dataclass(frozen=True)
class Batch:
    """What a step knows about its group. context: the most tokens of a session."""

    positions: Tensor  # [batch]
    new_slots: Tensor  # [batch] where the new tokens go
    table: Tensor  # [batch, context] the device slots of each session's tokens
    mask: Tensor  # [batch, context] which of them exist


class Decoder(nn.Module):
    """Its device pool is a buffer, so that captured graphs find it where it was."""

    def __init__(self, shape: Shape, slots: int, device: str) -> None:
        super().__init__()
        self.embedding = _weight(shape.vocabulary, shape.hidden, like=shape, device=device)
        self.layers = nn.ModuleList(Layer(shape, device) for _ in range(shape.layers))
        pool = torch.zeros(
            (shape.layers, 2, slots, shape.kv_heads, shape.head_dim), dtype=shape.dtype, device=device
        )
        self.register_buffer("pool", pool)

    def forward(
        self,
        tokens: Tensor,  # [batch]
        positions: Tensor,  # [batch]
        table: Tensor,  # [batch, context]
        host_pool: Tensor,  # like self.pool, in host memory
        slots: list[Tensor],  # [loads] each: device slots to restore, the host slots they come from
    ) -> Tensor:
        context = torch.arange(table.shape[1], device=table.device)
        new_slots = table.gather(1, positions[:, None])[:, 0]
        batch = Batch(positions, new_slots, table, context <= positions[:, None])
        device_slots, host_slots = slots
        x = self.embedding[tokens]
        for i, layer in enumerate(self.layers):
            keys, values = self.pool[i, 0], self.pool[i, 1]
            transfer_kv([keys, values], [host_pool[i, 0], host_pool[i, 1]], device_slots, host_slots)
            x = layer(x, keys, values, batch)
        return F.linear(_norm(x), self.embedding).argmax(-1)


class Captured:
    """A step as one CUDA graph: inputs are written in place, then the graph is replayed."""

    def __init__(self, step: Callable[..., Tensor]) -> None:
        self._step = step
        self._inputs: list[Tensor] = []

    def __call__(
        self, tokens: Tensor, positions: Tensor, table: Tensor, host_pool: Tensor, slots: list[Tensor]
    ) -> Tensor:
        inputs = [tokens, positions, table, *slots]
        if not self._inputs:
            self._inputs = [value.clone() for value in inputs]
            arguments = (*self._inputs[:3], host_pool, self._inputs[3:])
            # A step may run twice with the same inputs: it writes the same rows again.
            self._step(*arguments)
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._output = self._step(*arguments)
        for static, value in zip(self._inputs, inputs, strict=True):
            static.copy_(value)
        self._graph.replay()
        return self._output.clone()


@dataclass
class Run:
    tokens: Tensor  # [sessions, turns * tokens of a turn]
    loading_ms: list[float]  # of steps that restore a group
    plain_ms: list[float]


class Serving:
    """Groups of sessions that take turns, with or without the host pool between them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.context = options.turns * options.tokens
        self.group_slots = options.batch * self.context
        self.slots = options.groups * self.group_slots
        torch.manual_seed(0)
        shape = SHAPES[options.device]
        self.decoder = Decoder(shape, self.slots, options.device)
        self.host_pool = empty_host(self.decoder.pool.shape, shape.dtype, options.device)
        if options.device != "cpu":
            self.host_pool = device_view(self.host_pool, options.device)
        self.first_tokens = torch.randint(shape.vocabulary, (options.groups, options.batch))

    def _index(self, values: Tensor) -> Tensor:
        return values.to(self.options.device)

    def run(self, step: Callable[..., Tensor], *, offload: bool) -> Run:
        options = self.options
        self.decoder.pool.fill_(7)  # finite, so that masked rows add exactly nothing
        nothing = self._index(torch.full((self.group_slots,), -1))
        tokens = self.first_tokens.clone()
        result = Run(torch.empty(options.groups, options.batch, 0, dtype=torch.int64), [], [])
        produced: list[list[Tensor]] = [[] for _ in range(options.groups)]
        for turn in range(options.turns):
            for group in range(options.groups):
                home = torch.arange(self.group_slots) + group * self.group_slots
                # With offloading all groups share the first slots, in another order each time.
                place = torch.randperm(self.group_slots) if offload else home
                table = self._index(place.view(options.batch, self.context))
                restore = [self._index(place), self._index(home)]
                for i in range(options.tokens):
                    loads = offload and turn > 0 and i == 0
                    position = torch.full((options.batch,), turn * options.tokens + i)
                    arguments = self._index(tokens[group]), self._index(position), table, self.host_pool
                    started = self._now()
                    output = step(*arguments, restore if loads else [nothing, nothing])
                    elapsed = (self._now() - started) * 1e3
                    (result.loading_ms if loads else result.plain_ms).append(elapsed)
                    tokens[group] = output.cpu()
                    produced[group].append(tokens[group].clone())
                if offload:
                    evicted = [self._index(home), self._index(place)]
                    transfer_kv([self.host_pool], [self.decoder.pool], *evicted, slot_dim=2)
                    self.decoder.pool[:, :, place] = 7
        result.tokens = torch.stack([torch.stack(steps, -1) for steps in produced])
        return result

    def _now(self) -> float:
        if self.options.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of 1 or more, got '{text}'")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=sorted(SHAPES), default="cpu")
    parser.add_argument("--groups", type=_positive, default=3, help="of sessions that take turns")
    parser.add_argument("--batch", type=_positive, default=4, help="sessions of a group")
    parser.add_argument("--turns", type=_positive, default=3, help="of each group")
    parser.add_argument("--tokens", type=_positive, default=8, help="of a session in a turn")
    options = parser.parse_args(arguments)
    if reason := missing_reason(options.device):
        print(
            f"[compiled_decode] --device {options.device}: {reason} (see hicache info).", file=sys.stderr
        )
        return 2

    serving = Serving(options)
    compiled = torch.compile(serving.decoder, fullgraph=True)
    steps: dict[str, Callable[..., Tensor]] = {"eager": serving.decoder, "compiled": compiled}
    if options.device == "cuda":
        steps["captured"] = Captured(compiled)

    same = True
    print(
        f"{'step':10} {'without load':>14} {'with load':>14}   tokens of a run that stays on the device"
    )
    with torch.no_grad():
        for name, step in steps.items():
            serving.run(step, offload=True)  # compiles, captures, warms up
            stays = serving.run(step, offload=False)
            moves = serving.run(step, offload=True)
            equal = torch.equal(stays.tokens, moves.tokens)
            same &= equal
            plain, loading = statistics.median(moves.plain_ms), statistics.median(moves.loading_ms)
            verdict = "the same" if equal else "DIFFERENT"
            print(f"{name:10} {plain:11.3f} ms {loading:11.3f} ms   {verdict}, {moves.tokens.numel()}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
