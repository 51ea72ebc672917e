"""Scenarios of the simulation: where queues form, the value of acceptance, and outages."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.fleet.model import Service, Work
from benchmarks.fleet.world import Answer, Fleet
from benchmarks.kit.figures import percentiles

Figures = dict[str, Any]

READING = 10.0
"""Reading speed, in tokens a second, that 95 of 100 answers must keep up with."""
_FIRST = 1.0
"""Seconds within which 95 of 100 first tokens must be there."""
_WARM, _SPAN = 15.0, 60.0
_MOST_SIMULATED = 500
"""Verifiers simulated; a larger fleet is so many of its verifiers, for they share nothing."""


@dataclass(frozen=True)
class World:
    """What all scenarios run on."""

    service: Service
    work: Work
    seed: int = 0

    def fleet(self, verifiers: int, devices: float) -> Fleet:
        """A fleet after its warm-up."""
        fleet = Fleet(self.service, self.work, verifiers=verifiers, devices=devices, seed=self.seed)
        fleet.run(_WARM)
        fleet.count_anew()
        return fleet


def told(fleet: Fleet, seconds: float) -> Figures:
    """Figures of users and verifiers in the last seconds."""
    forwards = sum(verifier.forwards for verifier in fleet.verifiers)
    return {
        "tokens_per_second": round(fleet.tokens / seconds, 1),
        "busy": round(sum(verifier.busy for verifier in fleet.verifiers) / seconds / len(fleet.verifiers), 3),
        "rows_per_forward": round(sum(verifier.rows for verifier in fleet.verifiers) / max(1, forwards), 2),
        "wait_ms": percentiles(1000 * np.asarray(fleet.waits), 50, 95, 99),
        "first_token_ms": percentiles(1000 * np.asarray(fleet.first), 50, 95),
        "reader_tokens_per_second_p5": percentiles(fleet.speeds, 5)["p5"],
    }


def _served_well(world: World, devices: float) -> bool:
    fleet = world.fleet(1, devices)
    fleet.run(_SPAN)
    figures = told(fleet, _SPAN)
    return figures["first_token_ms"]["p95"] <= 1000 * _FIRST and figures["reader_tokens_per_second_p5"] >= READING


def capacity(world: World) -> int:
    """Devices that one verifier serves well."""
    low, high = 0.0, 64.0
    while _served_well(world, high):
        low, high = high, 2 * high
    while high - low > 0.03 * high:
        middle = (low + high) / 2
        if _served_well(world, middle):
            low = middle
        else:
            high = middle
    return int(low)


def queues(world: World, users: int) -> list[Figures]:
    """One verifier from nearly idle to overload."""
    rows = []
    for share in (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25):
        fleet = world.fleet(1, share * users)
        fleet.run(_SPAN)
        rows.append({"share": share, "devices": int(share * users), **told(fleet, _SPAN)})
    return rows


def acceptances(world: World, price: float) -> list[Figures]:
    """The value of a better drafter: devices on one verifier, and the price of a million tokens."""
    rows = []
    for acceptance in (0.0, 0.4, 0.6, 0.7, 0.8, 0.9):
        changed = replace(world, work=replace(world.work, acceptance=acceptance))
        users = capacity(changed)
        per_hour = users * changed.work.turns_per_hour * changed.work.tokens
        rows.append(
            {
                "acceptance": acceptance,
                "tau": round(changed.work.tau, 2),
                "devices": users,
                "tokens_per_hour": int(per_hour),
                "price_per_million": round(1e6 * price / per_hour, 3) if per_hour else None,
            }
        )
    return rows


def sizes(world: World, users: int, load: float, devices: tuple[int, ...]) -> list[Figures]:
    """From one verifier to thousands, at the same load."""
    rows = []
    for count in devices:
        verifiers = max(1, math.ceil(count / (load * users)))
        simulated = min(verifiers, _MOST_SIMULATED)
        began = time.process_time()
        fleet = world.fleet(simulated, count * simulated / verifiers)
        fleet.run(_SPAN)
        figures = told(fleet, _SPAN)
        figures["tokens_per_second"] = round(figures["tokens_per_second"] * verifiers / simulated, 1)
        cpu = round(time.process_time() - began, 1)
        rows.append({"devices": count, "verifiers": verifiers, "simulated": simulated, "cpu_seconds": cpu, **figures})
    return rows


def zone(world: World, users: int, load: float) -> Figures:
    """A third of the verifiers are gone from one moment to the next."""
    count = 30
    fleet = world.fleet(count, load * users * count)
    fleet.run(30)
    before = told(fleet, 30)
    fleet.count_anew()
    moved = fleet.lose(fleet.verifiers[: count // 3], noticed=0.5)
    return {"verifiers": count, "load": load, "moved": moved, "before": before, "after": _in_steps(fleet, 10, 6)}


def rolling(world: World, users: int, load: float, restart: float = 30.0) -> Figures:
    """Every tenth verifier at a time is stopped and returns without sessions after `restart` seconds."""
    count = 30
    fleet = world.fleet(count, load * users * count)
    moved = 0
    for first in range(0, count, count // 10):
        part = fleet.verifiers[first : first + count // 10]
        moved += fleet.lose(part, noticed=0.1)
        fleet.run(restart)
        fleet.restore(part)
    seconds = 10 * restart
    return {"verifiers": count, "load": load, "restart": restart, "moved": moved, **told(fleet, seconds)}


def thundering(world: World, users: int, load: float, outage: float = 120.0, backoff: float = 5.0) -> list[Figures]:
    """All verifiers are unreachable for a while; then every device reconnects within its longest back-off, at once or
    spread."""
    return [_return(world, users, load, outage, spread) for spread in (backoff, 12 * backoff)]


def _return(world: World, users: int, load: float, outage: float, backoff: float) -> Figures:
    count = 10
    fleet = world.fleet(count, load * users * count)
    running = [answer for verifier in fleet.verifiers for answer in verifier.leave()]
    fleet.up = 0
    fleet.run(outage)
    fleet.count_anew()
    fleet.restore(fleet.verifiers)
    # Offline text is checked in bulk: a prompt with the text after it, and a round.
    alone = int(load * users * count * world.work.turns_per_hour / 3600 * outage)
    now = fleet.now
    back = [Answer(now, answer.tokens, world.work.prompt + world.work.tokens) for answer in running]
    back += [Answer(now, 1, world.work.prompt + world.work.tokens) for _ in range(alone)]
    connected = _connected(load * users, backoff, world.service.handshake, np.random.default_rng(world.seed))
    for index, verifier in enumerate(fleet.verifiers):
        share = back[index::count]
        for answer, moment in zip(share, np.sort(connected[: len(share)]), strict=False):
            answer.asked = now + float(moment)
            verifier.bring([answer], answer.asked)
    return {
        "back_off": backoff,
        "devices_per_verifier": int(load * users),
        "returning_with_work_per_verifier": round(len(back) / count, 1),
        "all_connected_after": round(float(connected.max()), 2),
        "after": _in_steps(fleet, 10, 4),
    }


def _connected(devices: float, backoff: float, handshake: float, rng: np.random.Generator) -> Any:
    """When each device of one verifier is connected: its event loop takes handshakes one by one. In random order."""
    comes = np.sort(rng.uniform(0.5 * backoff, backoff, max(1, int(devices))))
    steps = handshake * np.arange(1, len(comes) + 1)
    done = steps + np.maximum.accumulate(comes - steps + handshake)
    return rng.permutation(done)


def _in_steps(fleet: Fleet, seconds: float, steps: int) -> list[Figures]:
    rows = []
    for step in range(steps):
        fleet.run(seconds)
        rows.append({"until": (step + 1) * seconds, **told(fleet, seconds)})
        fleet.count_anew()
    return rows
