"""Speculation sized by utility, beside plain decoding, for targets whose forwards cost unlike amounts by their tokens.

A dense target, two mixtures of experts, whose forward reads more weights the more tokens it has, and a target whose
layers are read from disk for every forward, whatever its tokens. All are random, so the drafts are made of the target's
own text, each level right with a stated probability. After a pass from which utility learns, each text is written plain
and by utility one after the other, the one first and then the other, by turns; a ratio is the median of such
neighbours' ratios, in seconds and in the process's own seconds (other load affects these less; the time that drafting
is given counts there too), with the standard error of a median. Every text is compared.
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
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, MixtralConfig, PretrainedConfig, Qwen3MoeConfig

from benchmarks.kit.figures import listing
from benchmarks.kit.progress import say
from benchmarks.kit.random_pair import llama
from moa.model.drafting import DraftRequest
from moa.model.generate import Generation, GenerationSettings, Speculator
from moa.model.placement import Placement
from moa.model.target import Committed, Target
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
    tokens: int = 64
    """Tokens of each."""
    repeats: int = 6
    """Times that each text is written each way."""


class LuckyDrafting:
    """Knows the texts, and drafts a chain of which each level is right with a probability."""

    def __init__(self, texts: Sequence[Sequence[int]], rate: float, level_seconds: float) -> None:
        self._texts, self._rate, self._level_seconds = texts, rate, level_seconds
        self._read: list[int] = []
        self.seconds = 0.0
        """Slept so far, in place of drafting."""

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
        self.seconds += (took := self._level_seconds * len(chain))
        time.sleep(took)
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


def of_target(name_of: str, target: Target, rate: float, options: Options) -> dict[str, Any]:
    """Both ways on one target, in turn."""
    draws = np.random.default_rng(0)
    prompts = [draws.integers(4, VOCABULARY, 24).tolist() for _ in range(options.prompts)]
    how: dict[str, Any] = {"max_new_tokens": options.tokens, "ignore_eos": True}
    plain, shape = GenerationSettings(shape=None, **how), TreeShape.chain(options.depth)
    drafted = GenerationSettings(shape=shape, **how)
    texts = [prompt + one.ids for prompt, one in zip(prompts, Speculator(target).generate(prompts, plain), strict=True)]
    drafting = LuckyDrafting(texts, rate, options.level_ms / 1000)
    ways = {"plain": (Speculator(target), plain), "by_utility": (Speculator(target, drafting), drafted)}
    engine = ways["by_utility"][0]
    engine.generate(prompts, drafted)  # learns
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    said: list[tuple[int, Generation]] = []
    for number, place in enumerate(place for _ in range(options.repeats) for place in range(len(prompts))):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            slept = drafting.seconds
            seconds, own, found = _timed(*ways[name], prompts[place])
            took[name].append((seconds, own + drafting.seconds - slept))
            said += [(place, found)] * (name == "by_utility")
    rounds = [won for _, one in said for won in one.won]
    costs = engine.utility(shape).costs.forward
    ratios = np.array(took["plain"]) / np.array(took["by_utility"])
    middle, errors = np.median(ratios, 0), _error(ratios)
    return {
        "target": name_of,
        "rate": rate,
        **{name: round(options.tokens / median(seconds for seconds, _ in found), 1) for name, found in took.items()},
        "ratio": round(float(middle[0]), 3),
        "error": round(float(errors[0]), 3),
        "own_ratio": round(float(middle[1]), 3),
        "own_error": round(float(errors[1]), 3),
        "neighbours": len(ratios),
        "nodes": round(sum(one.drafted for _, one in said) / len(rounds), 1),
        "won": round(mean(rounds), 2),
        "forward_ms": [round(1000 * float(costs.at(size)), 1) for size in SIZES],
        "faults": sum(one.ids != texts[place][24:] for place, one in said),
    }


def _error(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard error of the median of each column, as of normal values with the same quartiles."""
    low, high = np.percentile(values, [25, 75], axis=0)
    return np.asarray(1.2533 * (high - low) / 1.349 / np.sqrt(len(values)))


def _timed(engine: Speculator, settings: GenerationSettings, prompt: Sequence[int]) -> tuple[float, float, Generation]:
    """Seconds and the process's own seconds of decoding, its prompt not counted."""
    began, own = time.perf_counter(), time.process_time()
    found: list[int] = []
    out = [Generation()]
    for _, tokens, _ in engine.stream([prompt], settings, out):
        if not found:  # the prompt and the first round
            began, own = time.perf_counter(), time.process_time()
        found += tokens
    out[0].ids = found
    return time.perf_counter() - began, time.process_time() - own, out[0]


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
            "by utility": "{by_utility}",
            "times plain": "{ratio:.3f} ± {error:.3f}",
            "in the process's seconds": "{own_ratio:.3f} ± {own_error:.3f}",
        },
    )
    told = f"A level takes {result['level_ms']:g} ms to draft. Prompts and the first round are not counted."
    return f"{shown}\n\n{told} Medians of {result['runs'][0]['neighbours']} neighbours, ± a standard error."
