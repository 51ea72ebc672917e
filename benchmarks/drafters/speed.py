"""Tokens per second on one device: plain, speculative, Hugging Face generate and assisted, interleaved in one run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.baselines.independent import as_llama
from benchmarks.baselines.registry import load_independent, load_target, open_drafting, taps_of
from benchmarks.drafters.acceptance import PAPER as SHAPES
from benchmarks.drafters.race import PLAIN, Way, race
from benchmarks.kit.figures import table, titled
from benchmarks.kit.options import one_of
from benchmarks.kit.pair import Compared, independent
from benchmarks.kit.paired import Estimate
from benchmarks.kit.speculator import Generation, GenerationSettings, Speculator
from demo import held_out
from moa.bundle import Bundle
from moa.demo import paths
from moa.model.drafting import Drafting
from moa.model.identity import weights_id
from moa.model.loading import locate
from moa.model.target import Target
from moa.sampling import SamplingSettings
from moa.tree import TreeShape


@dataclass(frozen=True, kw_only=True)
class Options(Compared):
    """Which pair, and how long."""

    per_kind: int = 6
    """Prompts of each kind of natural text, and exercises."""
    tokens: int = 96
    """Tokens of an answer at most."""
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    repeats: int = 3
    """Passes, in which all ways take turns prompt by prompt."""
    ways: tuple[str, ...] = one_of(("huggingface", "chain", "tree"), ("huggingface", "chain", "tree"))
    """Ways of the trained pair beside plain decoding."""
    bundle: str = str(paths().bundle)
    """Folder of a bundle: on a CPU the drafter that it was made of drafts by its graph, as in a verifier."""


def speculating(
    speculator: Speculator, tokens: int, shape: TreeShape | None, t: float = 0.0
) -> Callable[[list[int]], Generation]:
    """Our engine, one prompt at a time, as for a single user."""
    settings = GenerationSettings(max_new_tokens=tokens, shape=shape, sampling=SamplingSettings(temperature=t))
    return lambda prompt: speculator.generate([prompt], settings)[0]


@torch.inference_mode()
def generate(model: Any, tokens: int, assistant: PreTrainedModel | None, prompt: list[int]) -> Generation:
    """Hugging Face, with its own defaults; assisted where an assistant is given."""
    ids = torch.tensor([prompt], device=model.device)
    extra = {} if assistant is None else {"assistant_model": assistant}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0, **extra
    )
    return Generation(ids=out[0, len(prompt) :].tolist())


def embedded_pair(options: Options) -> dict[str, Any]:
    """The trained pair: real drafters on real prompts."""
    target = Target.load(options.target, capacity=options.capacity, device=options.device)
    asked = [(kind, held_out.encode(target.tokenizer, e)) for kind, e in held_out.by_kind(options.per_kind)]
    asked = [(kind, prompt) for kind, prompt in asked if len(prompt) + options.tokens <= options.capacity]
    categories, prompts = [kind for kind, _ in asked], [prompt for _, prompt in asked]
    speculators = []
    for folder in options.folders:
        # The same target where it can be: two of them differ by some percent by their places in memory alone.
        own = target
        if taps_of(folder, target.facts):
            own = load_target(options.target, slots=1, capacity=options.capacity, drafter=folder, device=options.device)
        speculators.append((folder.name, Speculator(own, beside(folder, own, options.bundle))))
    races = []
    for t in options.temperatures:
        plain = speculating(Speculator(target), options.tokens, None, t)
        ways = [Way(PLAIN, "our engine, no drafter", plain)]
        if t == 0 and "huggingface" in options.ways:
            # With sampling its texts differ from ours, so they are not compared.
            ways = [*hugging_face(options), *ways]
        for name, speculator in speculators:
            for kind, shape in SHAPES.items():
                if kind in options.ways:
                    run = speculating(speculator, options.tokens, shape, t)
                    ways.append(Way(f"{name}-{kind}", f"our engine, {name}, {kind}", run))
        races.append(race(ways, target, prompts, categories, repeats=options.repeats, t=t))
    return {
        "says": f"Trained pair ({target.model.num_parameters() / 1e6:.1f}M target)",
        "races": races,
        "notes": [
            f"{len(prompts)} held-out prompts one by one, up to {options.tokens} new tokens, float32, prefill counted."
        ],
    }


def beside(folder: Path, target: Target, bundle: str) -> Drafting:
    """The fastest way to draft on the target's device."""
    made_of = Bundle.open(bundle).manifest.drafter.weights_id
    by_graph = target.device.type == "cpu" and made_of == weights_id(folder, target.facts)
    return open_drafting(folder, target, graph=bundle if by_graph else "", threads=1)


def hugging_face(options: Options) -> list[Way]:
    """The library's own generation, plain and assisted."""
    model = AutoModelForCausalLM.from_pretrained(locate(options.target), dtype=torch.float32).to(options.place).eval()
    model.generation_config.use_cache = True
    ways = [Way("generate", "Hugging Face generate", partial(generate, model, options.tokens, None))]
    for folder in independent()[:1]:
        drafter, facts = load_independent(folder, options.target)
        assistant = as_llama(drafter, facts.max_positions, facts.eos_ids).to(options.place)
        run = partial(generate, model, options.tokens, assistant)
        ways.append(Way("assisted", "Hugging Face assisted generation, independent drafter", run))
    return ways


def measure(options: Options) -> dict[str, Any]:
    """One pair."""
    logging.getLogger("transformers").setLevel(logging.ERROR)  # ignore the warnings of `generate` about settings
    return {"max_new_tokens": options.tokens, "repeats": options.repeats, "pairs": [embedded_pair(options)]}


def tables(result: Mapping[str, Any]) -> str:
    """Tokens per second, and how that compares with `model.generate` and with plain decoding by the same engine."""
    parts, notes = [], []
    for pair in result["pairs"]:
        parts += [(f"{pair['says']}, T = {one['temperature']:g}", _race_tables(one["ways"])) for one in pair["races"]]
        notes += pair.get("notes", [])
    return "\n\n".join([titled(*parts), *notes])


def _race_tables(ways: Sequence[Mapping[str, Any]]) -> str:
    medians = {way["name"]: way["median"] for way in ways}
    rows = []
    for way in ways:
        relative = [
            f"{way['median'] / medians[name]:.2f}x" if name in medians else "-" for name in ("generate", "plain")
        ]
        spread = f"{way['median']:.1f} ({min(way['runs']):.1f}-{max(way['runs']):.1f})"
        tau = way.get("tau")
        rows.append([way["says"], spread, *relative, "-" if tau is None else f"{tau:.2f}"])
    parts = [table(["way", "tokens/s (range)", "vs generate", "vs our plain", "tau"], rows)]
    categories = list(ways[0]["times_plain"])
    if len(categories) > 1:
        others = [way for way in ways if way["name"] != PLAIN]
        for key, words in (("seconds", "by seconds"), ("cpu", "by processor time")):
            rows = [
                [name, *(f"{Estimate(*way['times_plain'][name][key]):.3f}" for way in others)] for name in categories
            ]
            parts.append(f"By category, as times our plain decoding prompt by prompt, {words}:")
            parts.append(table(["category", *(way["name"] for way in others)], rows))
    return "\n\n".join(parts)
