"""Time of a verification compared with the bare arithmetic of the same shapes, in one run. The bare arithmetic is the
model written plainly in torch: the same weights, norms, rotations and products over the tokens of all rows side by
side, attention row by row over keys that lie ready, the head and its argmax. It has no checks, masks, cache writes or
trees. It is measured twice: with torch's products, and with oneDNN's over weights laid out for them, as the verifier
has them. The library's own model, padded to the longest row, is measured too. Sessions have different lengths. Times
are CPU times on one core, which other load affects least; measurements alternate, and a ratio is the median of
neighbours' ratios.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from benchmarks.kit.figures import listing, titled
from benchmarks.kit.progress import steps
from benchmarks.kit.verifier import random_pair
from moa.demo import paths
from moa.model.blocks import rotary, rotate
from moa.model.products import Product, joined, widened
from moa.model.target import Row, Target

LENGTHS = (40, 400)
"""Tokens that a session holds: drawn evenly from this range."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which targets, and for how long."""

    random: str = ""
    """A random target instead of the embedded one, HIDDENxLAYERS."""
    sessions: tuple[int, ...] = (1, 8, 32)
    """Sessions in a forward."""
    tokens: tuple[int, ...] = (1, 8, 17, 62)
    """Tokens of each."""
    seconds: float = 2.0
    """Seconds for each batch."""


class Bare:
    """A Llama's forward over packed rows, and nothing around it."""

    def __init__(self, target: Target, lengths: Sequence[int], tokens: int, *, pack: bool) -> None:
        facts = target.facts
        self.facts, self.model = facts, target.model.get_decoder()
        weight = target.head_weight
        self.head = (widened(weight) if pack else None) or partial(linear, weight=weight)
        self.ids = torch.randint(4, facts.vocab_size, (len(lengths) * tokens,))
        self.positions = torch.cat([torch.arange(start, start + tokens) for start in lengths])
        self.tokens = tokens
        self.past = [
            [torch.randn(2, 1, facts.kv_heads, length + tokens, facts.head_dim) for length in lengths]
            for _ in range(facts.layers)
        ]
        self.products = [self._products(layer, pack) for layer in self.model.layers]

    @torch.inference_mode()
    def __call__(self) -> Tensor:
        facts = self.facts
        cos, sin = rotary(self.positions, facts.head_dim, facts.rope_theta)
        x = embedding(self.ids, self.model.embed_tokens.weight)
        for layer, products, past in zip(self.model.layers, self.products, self.past, strict=True):
            qkv, out, both, down = products
            heads = qkv(self._norm(x, layer.input_layernorm)).view(len(x), -1, facts.head_dim).transpose(0, 1)
            turned = rotate(heads[: facts.heads + facts.kv_heads], cos, sin)
            queries = turned[: facts.heads].split(self.tokens, 1)
            x = x + out(torch.cat([self._attend(one, *two) for one, two in zip(queries, past, strict=True)]))
            gate, up = both(self._norm(x, layer.post_attention_layernorm)).chunk(2, -1)
            x = x + down(silu(gate) * up)
        return self.head(self._norm(x, self.model.norm)).argmax(-1)

    def _products(self, layer: Any, pack: bool) -> list[Product]:
        attention, mlp = layer.self_attn, layer.mlp
        groups = [
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (attention.o_proj,),
            (mlp.gate_proj, mlp.up_proj),
            (mlp.down_proj,),
        ]
        owner = torch.nn.Module()
        found = []
        for group in groups:
            for number, part in enumerate(group):
                setattr(owner, str(number), copy.deepcopy(part))
            found.append(joined(owner, [str(number) for number in range(len(group))], pack=pack))
        return found

    def _norm(self, x: Tensor, norm: Any) -> Tensor:
        return rms_norm(x, (x.shape[-1],), norm.weight, self.facts.rms_norm_eps)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads, size, width = query.shape
        grouped = query.reshape(1, self.facts.kv_heads, -1, width)
        seen = scaled_dot_product_attention(grouped, key, value)
        return seen.view(heads, size, width).transpose(0, 1).reshape(size, heads * width)


def rows_of(target: Target, sessions: int, tokens: int, rng: np.random.Generator) -> tuple[list[Row], list[int]]:
    """A row for each of so many new sessions of unlike lengths; chains, as devices send them."""
    lengths = [int(n) for n in rng.integers(*LENGTHS, sessions)]
    rows = []
    for length in lengths:
        slot = target.pool.acquire()
        prompt = [int(n) for n in rng.integers(4, target.facts.vocab_size, length)]
        target.commit(target.forward([Row.chain(slot, prompt, judged="none")]), 0, range(length))
        rows.append(Row.chain(slot, [int(n) for n in rng.integers(4, target.facts.vocab_size, tokens)], judged="all"))
    return rows, lengths


def batches(folder: Path, options: Options) -> list[dict[str, Any]]:
    """Every batch: milliseconds of each way, and ours over the two kinds of bare arithmetic."""
    room: dict[str, Any] = {"slots": max(options.sessions), "capacity": 512}
    ours, library = Target.load(folder, pack_weights=True, **room), Target.load(folder, packed=False, **room)
    found = []
    for sessions, tokens in steps(product(options.sessions, options.tokens), "batches"):
        rows, lengths = rows_of(ours, sessions, tokens, np.random.default_rng(sessions))
        padded, _ = rows_of(library, sessions, tokens, np.random.default_rng(sessions))
        ways: dict[str, Callable[[], Any]] = {
            "ms": partial(_verify, ours, rows),
            "library_ms": partial(_verify, library, padded),
            "bare_ms": Bare(library, lengths, tokens, pack=True),
            "bare_torch_ms": Bare(library, lengths, tokens, pack=False),
        }
        times = dict(zip(ways, _in_turn(list(ways.values()), options.seconds), strict=True))
        for target, used in ((ours, rows), (library, padded)):
            for row in used:
                target.pool.release(row.slot)
        found.append(
            {"sessions": sessions, "tokens": tokens, "times": len(times["ms"])}
            | {name: round(1000 * median(took), 3) for name, took in times.items()}
            | {
                "ratio": _ratio(times["ms"], times["bare_ms"]),
                "ratio_torch": _ratio(times["ms"], times["bare_torch_ms"]),
                "library_ratio": _ratio(times["library_ms"], times["bare_torch_ms"]),
            }
        )
    return found


def _verify(target: Target, rows: Sequence[Row]) -> None:
    target.forward(rows).argmax(0)


def _ratio(ours: Sequence[float], bare: Sequence[float]) -> float:
    return round(median(a / b for a, b in zip(ours, bare, strict=True)), 3)


def _in_turn(ways: Sequence[Callable[[], Any]], seconds: float) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in ways]
    until = time.perf_counter() + seconds
    while len(times[0]) < 4 or time.perf_counter() < until:
        for run, took in zip(ways, times, strict=True):
            began = time.process_time()
            run()
            took.append(time.process_time() - began)
    return [took[1:] for took in times]


def measure(options: Options) -> dict[str, Any]:
    """All batches of the target."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        name, folder = "embedded, 7M", paths().target
        if options.random:
            name, folder = f"random, {options.random}", Path(stack.enter_context(random_pair(options.random)).target)
        times = {name: batches(folder, options)}
    return {"lengths": LENGTHS, "forward": times}


def tables(result: Mapping[str, Any]) -> str:
    """Time and ratio by sessions and tokens."""
    columns = {
        "sessions x tokens": "{sessions} x {tokens}",
        "ms": "{ms:.2f}",
        "of the bare arithmetic": "{ratio:.2f}x",
        "of torch's products": "{ratio_torch:.2f}x",
        "library, padded": "{library_ratio:.2f}x",
    }
    return titled(*((name, listing(found, columns)) for name, found in result["forward"].items()))
