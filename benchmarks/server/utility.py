"""Speculation sized by utility, beside plain decoding, for targets whose forwards cost unlike amounts by their tokens.

A dense target, two mixtures of experts, whose forward reads more weights the more tokens it has, and a target whose
layers are read from disk for every forward, whatever its tokens. All are random, so the drafts are made of the target's
own text, each level right with a stated probability. Plain decoding and utility run in turn, after a pass from which
utility learns; every text is compared.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PretrainedConfig, Qwen3MoeConfig

from benchmarks.kit.figures import listing
from benchmarks.kit.progress import say
from benchmarks.kit.random_pair import llama
from moa.model.drafting import DraftRequest
from moa.model.placement import Placement
from moa.model.target import Committed, Target
from moa.speculate import Generation, GenerationSettings, Speculator
from moa.tree import DraftTree, TreeShape

VOCABULARY = 2048
SIZES = (1, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How much."""

    hidden: int = 512
    """Width of the targets; the offloaded one has twice that."""
    layers: int = 4
    """Layers of the targets; the offloaded one has twice that, and one of them in memory."""
    rates: tuple[float, ...] = (0.3, 0.6, 0.9)
    """Probabilities that a level is right."""
    depth: int = 16
    """Deepest draft."""
    level_ms: float = 0.5
    """Milliseconds of drafting a level."""
    prompts: int = 3
    """Texts."""
    tokens: int = 96
    """Tokens of each."""
    repeats: int = 3
    """Passes of each way."""


class LuckyDrafting:
    """Knows the texts, and drafts a chain of which each level is right with a probability."""

    def __init__(self, texts: Sequence[Sequence[int]], rate: float, level_seconds: float) -> None:
        self._texts, self._rate, self._level_seconds = texts, rate, level_seconds
        self._read: list[int] = []

    def open(self) -> int:
        """There is one text at a time."""
        return 0

    def close(self, slot: int) -> None:
        """Forget it."""
        self._read = []

    def observe(self, slot: int, tokens: Sequence[int], committed: Committed) -> None:
        """Read on."""
        self._read += tokens

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A chain for the only request."""
        (request,) = requests
        at = len(self._read) + 1
        text = next(text for text in self._texts if text[: at - 1] == self._read)
        right = text[at : at + request.shape.depth]
        luck = random.Random(at)
        chain = [token if luck.random() < self._rate else (token + 1) % VOCABULARY for token in right]
        time.sleep(self._level_seconds * len(chain))
        return [DraftTree([request.pending, *chain], list(range(-1, len(chain))), [0.0] * (1 + len(chain)))]


def shapes(options: Options) -> Iterator[tuple[str, PretrainedConfig, int]]:
    """Name and shape of each target, and how many of its layers stay in memory (-1: all)."""
    hidden, layers = options.hidden, options.layers
    dense = llama(hidden, layers, VOCABULARY)
    same = {
        name: getattr(dense, name)
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                     "head_dim", "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id")
    }  # fmt: skip
    yield "dense", dense, -1
    yield (
        "8 experts, 2 a token (Mixtral)",
        MixtralConfig(**same, intermediate_size=2 * hidden, num_local_experts=8, sliding_window=None),
        -1,
    )
    yield (
        "32 experts, 4 a token (Qwen3-MoE)",
        Qwen3MoeConfig(**same, moe_intermediate_size=hidden // 2, num_experts=32, num_experts_per_tok=4),
        -1,
    )
    yield "dense, all layers but one on disk", llama(2 * hidden, 2 * layers, VOCABULARY), 1


def measure(options: Options) -> dict[str, Any]:
    """Every target, at every rate."""
    runs = []
    for name, config, resident in shapes(options):
        say(name)
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            away = Path(folder, "offloaded") if resident >= 0 else None
            placement = Placement(resident_layers=resident, offload_folder=away)
            target = Target.load(folder, placement=placement, pack_weights=True, capacity=64 + options.tokens)
            runs += [of_target(name, target, rate, options) for rate in options.rates]
    return {"runs": runs, "faults": sum(run["faults"] for run in runs), "level_ms": options.level_ms}


def of_target(name: str, target: Target, rate: float, options: Options) -> dict[str, Any]:
    """Both ways on one target, in turn."""
    draws = np.random.default_rng(0)
    prompts = [draws.integers(4, VOCABULARY, 24).tolist() for _ in range(options.prompts)]
    how: dict[str, Any] = {"max_new_tokens": options.tokens, "ignore_eos": True}
    plain, shape = GenerationSettings(shape=None, **how), TreeShape.chain(options.depth)
    drafted = GenerationSettings(shape=shape, **how)
    texts = [prompt + one.ids for prompt, one in zip(prompts, Speculator(target).generate(prompts, plain), strict=True)]
    engine = Speculator(target, LuckyDrafting(texts, rate, options.level_ms / 1000))
    engine.generate(prompts, drafted)  # learns
    pairs: list[tuple[float, float]] = []
    said: list[Generation] = []
    for _ in range(options.repeats):
        slow, _ = _timed(Speculator(target), prompts, plain)
        fast, found = _timed(engine, prompts, drafted)
        pairs.append((slow, fast))
        said += found
    count = options.tokens * len(prompts)
    rounds = [rounds for one in said for rounds in one.won]
    costs = engine.utility(shape).costs.forward
    return {
        "target": name,
        "rate": rate,
        "plain": round(count / median(slow for slow, _ in pairs), 1),
        "by_utility": round(count / median(fast for _, fast in pairs), 1),
        "ratio": round(median(slow / fast for slow, fast in pairs), 2),
        "nodes": round(sum(one.drafted for one in said) / len(rounds), 1),
        "won": round(mean(rounds), 2),
        "forward_ms": [round(1000 * float(costs.at(size)), 1) for size in SIZES],
        "faults": sum(one.ids != text[24:] for one, text in zip(said, texts * options.repeats, strict=True)),
    }


def _timed(
    engine: Speculator, prompts: Sequence[Sequence[int]], settings: GenerationSettings
) -> tuple[float, list[Generation]]:
    before = engine.seconds.prefill
    began = time.perf_counter()
    found = engine.generate(prompts, settings)
    return time.perf_counter() - began - (engine.seconds.prefill - before), found


def tables(result: dict[str, Any]) -> str:
    """Both ways by target and rate."""
    sizes = ", ".join(map(str, SIZES))
    shown = listing(
        [run | {"forward": ", ".join(f"{ms:g}" for ms in run["forward_ms"])} for run in result["runs"]],
        {
            "target": "{target}",
            "a level is right": "{rate:.0%}",
            f"forward of {sizes} tokens, ms": "{forward}",
            "nodes drafted a round": "{nodes}",
            "tokens won a round": "{won}",
            "plain tokens/s": "{plain}",
            "by utility": "{by_utility} ({ratio:.2f}x)",
        },
    )
    return f"{shown}\n\nA level takes {result['level_ms']:g} ms to draft. Prompts are not counted."
