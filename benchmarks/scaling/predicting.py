"""Whether the simulation of `benchmarks.fleet` says what verifiers do: one and three, with emulated forwards."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.emulation import verifiers
from benchmarks.fleet_sim.model import Service, Work
from benchmarks.fleet_sim.world import Answer, Fleet
from benchmarks.report import table
from benchmarks.scaling.devices import Device, run_all
from benchmarks.server.crowd import Speech, speeches
from cloud_verifier.workers.affinity import choose_worker

Figures = dict[str, Any]

_DEVICES = 24
_NODES, _RATE, _DRAFT = 8, 0.7, 0.1
_TOKENS, _PROMPT = 96, 32


async def measure(step_ms: float) -> Figures:
    """Measure and simulate the same devices at one verifier and at three."""
    rows: list[Figures] = []
    for lanes in (1, 3):
        with verifiers(step_ms, lanes, slots=_DEVICES + 2) as running:
            said = await speeches(running.urls[0], _DEVICES, length=_PROMPT, tokens=_TOKENS, rate=_RATE)
            homes = [choose_worker(f"device {i}", dict.fromkeys(range(lanes), 0)) or 0 for i in range(_DEVICES)]
            devices = [Device(running.urls[home], one, _NODES, _DRAFT) for home, one in zip(homes, said, strict=True)]
            measured = await run_all(devices)
        rows.append(
            {
                "verifiers": lanes,
                "measured": measured,
                "predicted": _simulate(step_ms / 1000, homes, said),
                "forwards": running.forwards,
                "late": running.late,
            }
        )
    for row in rows:
        row["ratio"] = round(row["predicted"]["tokens_per_second"] / row["measured"]["tokens_per_second"], 3)
    return {"step_ms": step_ms, "devices": _DEVICES, "draft_ms": 1000 * _DRAFT, "rows": rows}


def _simulate(step: float, homes: Sequence[int], said: Sequence[Speech]) -> Figures:
    """The same devices: all begin at once, and the clock stops with the last token."""
    work = Work(tokens=_TOKENS, nodes=_NODES, acceptance=_RATE, draft=_DRAFT, links=(("loopback", 1.0),))
    service = Service("emulated", step, 0.0, 0.0, slots=_DEVICES + 2)
    seconds = []
    for seed in range(20):
        fleet = Fleet(service, work, verifiers=len(set(homes)), devices=0, seed=seed)
        for home, one in zip(homes, said, strict=True):
            fleet.verifiers[home].bring([Answer(0.0, len(one.truth), len(one.ids))])
        fleet.run(600.0)
        seconds.append(fleet.ended)
    return {
        "seconds": round(statistics.median(seconds), 2),
        "tokens_per_second": round(_DEVICES * _TOKENS / statistics.median(seconds), 1),
    }


def table_of(figures: Figures) -> str:
    """Prediction beside measurement."""
    rows = [
        [
            str(row["verifiers"]),
            f"{row['measured']['tokens_per_second']:.0f}",
            f"{row['predicted']['tokens_per_second']:.0f}",
            f"{row['ratio'] - 1:+.1%}",
            f"{row['measured']['exact']} of {row['measured']['devices']}",
            f"{row['late']} of {row['forwards']}",
        ]
        for row in figures["rows"]
    ]
    header = ("verifiers", "measured tokens/s", "predicted", "off by", "texts equal", "forwards that took too long")
    return (
        table(header, rows)
        + f"\n\n{figures['devices']} devices at once that draft for {figures['draft_ms']:.0f} ms; a forward takes "
        f"{figures['step_ms']:g} ms (emulated)."
    )
