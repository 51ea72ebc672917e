"""One pass over a block beside steps of the same weights: tokens won a round, and the time of a draft on the device.

Tokens are won beside the target, with records in step, and every text is compared with plain decoding's. The time is
that of the client's own drafter over an int4 bundle, without records, for both ways in turn along the target's texts.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.baselines.train import finished
from benchmarks.drafters.acceptance import SHAPES, Drafted, summary
from benchmarks.kit.exactness import count_ties
from benchmarks.kit.figures import table, titled, values_of
from benchmarks.kit.options import one_of
from benchmarks.kit.pair import shown_name
from benchmarks.kit.progress import Progress, say
from demo import held_out
from edge_client.device import Device
from export.build import BuildSettings, build
from moa.errors import UsageError
from moa.graph.drafter import run
from moa.model.checkpoint import load_drafter
from moa.model.drafting import MoaDrafting
from moa.model.generate import GenerationSettings, Speculator
from moa.model.one_pass import OnePassDrafting
from moa.model.target import Target
from moa.sampling import SamplingSettings

WAYS: dict[str, type[MoaDrafting]] = {"steps": MoaDrafting, "one pass": OnePassDrafting}
_APART = 7
"""Tokens between two timed drafts of a text."""


@dataclass(frozen=True, kw_only=True)
class Options(Drafted):
    """What is drafted."""

    per_kind: int = 28
    """Held-out prompts of each kind of text."""
    tokens: int = 64
    """Tokens of a continuation at most."""
    shapes: tuple[str, ...] = one_of(("chain", "long-chain"), SHAPES)
    """Shapes of drafts."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    drafts: int = 200
    """Drafts of each shape that are timed, in each way."""


def measure(options: Options) -> dict[str, Any]:
    """Every drafter that knows both ways."""
    target = Target.load(options.target, slots=options.batch, capacity=options.capacity, device=options.device)
    asked = [
        (held_out.encode(target.tokenizer, example), kind)
        for kind, example in held_out.by_kind(options.per_kind, options.seed)
    ]
    asked = [one for one in asked if len(one[0]) + options.tokens <= options.capacity]
    asked.sort(key=lambda one: len(one[0]))  # sort by length, to avoid padding
    prompts, kinds = [prompt for prompt, _ in asked], [kind for _, kind in asked]
    samplings = {t: SamplingSettings(temperature=t, seed=options.seed) for t in options.temperatures}
    plain: dict[float, list[list[int]]] = {}
    for temperature, sampling in samplings.items():
        settings = GenerationSettings(max_new_tokens=options.tokens, sampling=sampling, shape=None)
        plain[temperature] = [g.ids for g in Speculator(target).generate(prompts, settings)]
    progress = Progress(len(options.folders) * len(WAYS) * len(samplings) * len(options.shapes), "runs")
    runs, times = [], []
    for folder in options.folders:
        drafter, trained = load_drafter(folder, target.model, target.facts), finished(folder) or {}
        if not drafter.config.block:
            raise UsageError(f"{folder} drafts only by steps", hint="moa-train --block 16 teaches it one pass")
        for temperature, sampling in samplings.items():
            for name in options.shapes:
                for way, drafting in WAYS.items():
                    beside = drafting(drafter, slots=options.batch, capacity=options.capacity)
                    settings = GenerationSettings(
                        max_new_tokens=options.tokens, sampling=sampling, shape=SHAPES[name], adapt=False
                    )
                    found = Speculator(target, beside).generate(prompts, settings)
                    ties = count_ties(target, prompts, plain[temperature], [g.ids for g in found], sampling)
                    runs.append({
                        "drafter": folder.name,
                        "steps": trained.get("steps"),
                        "block": drafter.config.block,
                        "way": way,
                        "shape": name,
                        "temperature": temperature,
                        **summary(kinds, found, SHAPES[name].depth),
                        "texts_parted_at_a_tie": ties,
                    })  # fmt: skip
                    progress.step(f"{folder.name} {name} T={temperature:g} {way}: {runs[-1]['mean']['tau']:.3f}")
        texts = [prompt + answer for prompt, answer in zip(prompts, plain[min(plain)], strict=True)]
        times += _times(options, folder, texts)
    return {"prompts": len(prompts), "max_new_tokens": options.tokens, "runs": runs, "times": times}


def _times(options: Options, folder: Path, texts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Median milliseconds of a draft on the device, by shape and way."""
    say(f"{folder.name}: drafts on the device")
    with tempfile.TemporaryDirectory() as place:
        bundle = Path(place) / "bundle"
        build(
            BuildSettings(
                target=options.target, drafter=str(folder), out=bundle, variants=("cpu-int4",), time_steps=False
            )
        )
        devices = {way: Device.load(bundle, threads=1, one_pass=way == "one pass") for way in WAYS}
    rows = []
    for name in options.shapes:
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        for text in texts[:: max(1, len(texts) * 8 // options.drafts)]:
            drafters = {way: device.new_drafter() for way, device in devices.items()}
            for end in range(max(2, len(text) - 8 * _APART), len(text), _APART):
                for way, drafter in drafters.items():
                    run(drafter.guess(text[: end - 1], SamplingSettings()))  # what a prompt costs is not a draft's
                    start = perf_counter()
                    run(drafter.draft(text[:end], SHAPES[name], SamplingSettings()))
                    taken[way].append(1000 * (perf_counter() - start))
        rows += [
            {"drafter": folder.name, "shape": name, "way": way, "drafts": len(found), "ms": statistics.median(found)}
            for way, found in taken.items()
        ]
    return rows


def tables(result: Mapping[str, Any]) -> str:
    """Tokens a round by kind of text, a table for each drafter and temperature."""
    times = {(row["drafter"], row["shape"], row["way"]): row["ms"] for row in result["times"]}
    parts = []
    for drafter in values_of(result["runs"], "drafter"):
        for temperature in values_of(result["runs"], "temperature"):
            found = [r for r in result["runs"] if (r["drafter"], r["temperature"]) == (drafter, temperature)]
            steps = {run["shape"]: run["mean"]["tau"] for run in found if run["way"] == "steps"}
            rows = [
                [
                    f"{run['shape']}, {run['way']}",
                    *("{tau:.2f} ± {se:.2f}".format(**kind) for kind in run["categories"].values()),
                    "**{tau:.2f}** ± {se:.2f}".format(**run["mean"]),
                    f"{run['mean']['tau'] / steps[run['shape']]:.2f}x",
                    f"{times[drafter, run['shape'], run['way']]:.2f}",
                ]
                for run in found
            ]
            header = ["draft", *found[0]["categories"], "**mean**", "of steps", "ms a draft"]
            title = f"{shown_name(drafter)}, tokens a round (± standard error), T = {temperature:g}"
            parts.append((title, table(header, rows)))
    ties = sum(run["texts_parted_at_a_tie"] for run in result["runs"])
    checked = len(result["runs"]) * result["prompts"]
    end = f"All {checked:,} texts equal plain decoding" + (f", {ties} up to a numerical tie." if ties else ".")
    return f"{titled(*parts)}\n\n{end}"
