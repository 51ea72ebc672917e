"""Compares the simulation with real verifiers: one and three of them, with emulated forwards."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.fleet.model import Service, Work
from benchmarks.fleet.world import Answer, Fleet
from benchmarks.kit.devices import Script, ScriptedDevice, run_all, scripts
from benchmarks.kit.figures import listing
from benchmarks.kit.progress import steps
from benchmarks.kit.verifier import Emulated, many_short, verifier

_NODES, _RATE, _DRAFT, _PROMPT = 8, 0.7, 0.1, 32


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is compared."""

    step_ms: float = 60.0
    """Milliseconds of an emulated forward."""
    devices: int = 24
    """Devices at a time."""
    tokens: int = 96
    """Tokens of an answer."""


async def measure(options: Options) -> dict[str, Any]:
    """Measure and simulate the same devices at one verifier and at three."""
    rows: list[dict[str, Any]] = []
    for lanes in steps((1, 3), "verifiers"):
        emulated, many = Emulated(step_ms=options.step_ms, lanes=lanes), options.devices
        with verifier(*many_short(many), emulated=emulated, threads=1) as running:
            said = await scripts(running.url, many, length=_PROMPT, tokens=options.tokens, rate=_RATE, nodes=_NODES)
            homes = [i % lanes for i in range(many)]
            places = [running.urls[home] for home in homes]
            measured = await run_all(
                [ScriptedDevice((url,), one, think=_DRAFT) for url, one in zip(places, said, strict=True)]
            )
        predicted = _simulate(options, homes, said)
        rows.append(
            {
                "verifiers": lanes,
                "measured": measured,
                "predicted": predicted,
                "ratio": round(predicted["tokens_per_second"] / measured["tokens_per_second"], 3),
                "forwards": running.forwards,
                "late": running.late,
            }
        )
    return {"step_ms": options.step_ms, "devices": options.devices, "draft_ms": 1000 * _DRAFT, "rows": rows}


def _simulate(options: Options, homes: Sequence[int], said: Sequence[Script]) -> dict[str, float]:
    """The same devices: all begin at once, and the clock stops with the last token."""
    work = Work(tokens=options.tokens, nodes=_NODES, acceptance=_RATE, draft=_DRAFT, links=("loopback",))
    service = Service("emulated", options.step_ms / 1000, 0.0, 0.0, slots=options.devices + 2)
    seconds = []
    for seed in range(20):
        fleet = Fleet(service, work, verifiers=max(homes) + 1, devices=0, seed=seed)
        for home, one in zip(homes, said, strict=True):
            fleet.verifiers[home].bring([Answer(0.0, len(one.truth), len(one.ids))])
        fleet.run(600.0)
        seconds.append(fleet.ended)
    middle = statistics.median(seconds)
    return {"seconds": round(middle, 2), "tokens_per_second": round(options.devices * options.tokens / middle, 1)}


def tables(result: Mapping[str, Any]) -> str:
    """Prediction beside measurement."""
    shown = listing(
        result["rows"],
        {
            "verifiers": "{verifiers}",
            "measured tokens/s": "{measured[tokens_per_second]:.0f}",
            "predicted": "{predicted[tokens_per_second]:.0f}",
            "off by": lambda row: f"{row['ratio'] - 1:+.1%}",
            "texts equal": "{measured[exact]} of {measured[devices]}",
            "forwards that took too long": "{late} of {forwards}",
        },
    )
    return (
        f"{shown}\n\n{result['devices']} devices at once that draft for {result['draft_ms']:.0f} ms; a forward takes "
        f"{result['step_ms']:g} ms (emulated)."
    )
