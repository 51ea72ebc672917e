"""A fleet of 1 to 10,000 verifiers and up to 10 million devices, simulated from measured service times.

Service times come from a result of `python -m benchmarks server_load` (`--measured`), or are stated. What a device does
(turns, tokens, acceptance, links) are flags. `docs/scaling.md` has the formulas beside it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fleet import scenarios
from benchmarks.fleet.model import Service, Work
from benchmarks.fleet.scenarios import READING, World
from benchmarks.kit.figures import listing, titled
from benchmarks.kit.progress import say
from moa.errors import UsageError

_MEASURED = Path(__file__).parents[1] / "results" / "server_load.json"


@dataclass(frozen=True, kw_only=True)
class Options(Work):
    """What verifiers take, and what devices do."""

    measured: str = str(_MEASURED)
    """A result of server_load."""
    forward_ms: float = 0.0
    """Milliseconds of a forward; 0 takes the measured ones."""
    row_ms: float = 0.0
    """Milliseconds of each draft in a forward."""
    handshake_ms: float = 1.0
    """Milliseconds of the event loop for a new connection."""
    slots: int = 64
    """Slots of a verifier."""
    devices: tuple[int, ...] = (100, 10_000, 100_000, 1_000_000, 10_000_000)
    """Sizes of the fleets."""
    load: float = 0.7
    """Share of a verifier's capacity."""
    price: float = 2.0
    """Price of a verifier's hour."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.load < 1:
            raise UsageError(f"--load must be between 0 and 1, not {self.load}")

    @property
    def service(self) -> Service:
        """What a verifier takes."""
        handshake, base, row = self.handshake_ms / 1000, self.forward_ms / 1000, self.row_ms / 1000
        if not base:
            return Service.measured(Path(self.measured), slots=self.slots, handshake=handshake)
        name = f"stated: {self.forward_ms:g} ms + {self.row_ms:g} ms a row"
        return Service(name, base, row, row / self.nodes, slots=self.slots, handshake=handshake)


def measure(options: Options) -> dict[str, Any]:
    """Run every scenario."""
    service, load, began = options.service, options.load, time.process_time()
    world = World(service, options, options.seed)
    say("how many devices one verifier serves well")
    users = scenarios.capacity(world)
    figures: dict[str, Any] = {
        "service": dataclasses.asdict(service),
        "work": dataclasses.asdict(options) | {"tau": round(options.tau, 3), "away": round(options.away, 4)},
        "load": load,
        "price": options.price,
        "users": users,
    }
    for name, run in {
        "queues": lambda: scenarios.queues(world, users),
        "acceptances": lambda: scenarios.acceptances(world, options.price),
        "sizes": lambda: scenarios.sizes(world, users, load, options.devices),
        "zone": lambda: scenarios.zone(world, users, load),
        "rolling": lambda: scenarios.rolling(world, users, load),
        "thundering": lambda: scenarios.thundering(world, users, load),
    }.items():
        say(name)
        figures[name] = run()
    return {"fleet": figures | {"cpu_seconds": round(time.process_time() - began, 1)}}


_COMMON: dict[str, Any] = {
    "busy": "{busy:.0%}",
    "rows a forward": "{rows_per_forward:.1f}",
    "wait p50 / p95 ms": "{wait_ms[p50]:.0f} / {wait_ms[p95]:.0f}",
    "first token p95 ms": "{first_token_ms[p95]:.0f}",
    "slowest 5 % of readers, tokens/s": "{reader_tokens_per_second_p5:.1f}",
}


def tables(result: Mapping[str, Any]) -> str:
    """Everything as Markdown."""
    fleet = result["fleet"]
    service, work, zone = fleet["service"], fleet["work"], fleet["zone"]
    head = (
        f"Service times: {service['name']}; a forward of B drafts takes {1000 * service['base']:.1f} + "
        f"{1000 * service['per_row']:.2f} B ms, {service['slots']} slots. Devices: {work['turns_per_hour']:g} turns an "
        f"hour of {work['tokens']} tokens, acceptance {work['acceptance']:g} (tau {work['tau']:.2f}), "
        f"{1000 * work['away']:.0f} ms from a verdict to the next draft. "
        f"**One verifier serves {fleet['users']:,} devices well**: 95 of 100 answers at {READING:g} tokens/s or more, "
        "95 of 100 first tokens within a second."
    )
    returns = [case | step for case in fleet["thundering"] for step in case["after"]]
    speed = {"tokens/s": "{tokens_per_second:,.0f}"}
    worth = {
        "acceptance": "{acceptance:g}",
        "tau": "{tau:.2f}",
        "devices a verifier": "{devices:,}",
        "tokens an hour": "{tokens_per_hour:,}",
        "a million tokens": "{price_per_million}",
    }
    size = {"devices": "{devices:,}", "verifiers (simulated)": "{verifiers:,} ({simulated:,})", **speed, **_COMMON}
    coming_back = {
        "longest back-off s": "{back_off:g}",
        "devices, with work, a verifier": "{devices_per_verifier:,}, {returning_with_work_per_verifier:g}",
        "all connected after s": "{all_connected_after:g}",
        "seconds after": "{until:g}",
    }
    parts = [
        (
            "Where the queue forms, one verifier",
            listing(fleet["queues"], {"load": "{share:.0%}", "devices": "{devices:,}"} | _COMMON),
        ),
        (
            f"What acceptance is worth (at {fleet['price']:g} an hour and verifier, an assumption)",
            listing(fleet["acceptances"], worth),
        ),
        (f"Fleets at {fleet['load']:.0%} of that", listing(fleet["sizes"], size | {"CPU s": "{cpu_seconds:g}"})),
        (
            f"One zone of three is lost ({zone['verifiers']} verifiers, {zone['moved']} answers move)",
            listing(
                [{"until": "before", **zone["before"]}, *zone["after"]], {"seconds after": "{until}"} | speed | _COMMON
            ),
        ),
        (
            f"A rolling update, a tenth at a time, {fleet['rolling']['restart']:g} s each",
            listing([fleet["rolling"]], {"answers moved": "{moved:,}"} | _COMMON),
        ),
        ("Everybody returns after two minutes without a network", listing(returns, coming_back | _COMMON)),
    ]
    return f"{head}\n\n{titled(*parts)}\n\n{fleet['cpu_seconds']:g} s of one core in all."
