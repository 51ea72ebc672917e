"""One answer on a timeline: what device, link and verifier did when. The result is also a trace for a viewer.

The JSON opens in https://ui.perfetto.dev and chrome://tracing, like what `edge-client generate --trace` writes; the
client's own spans are the same. Added here is the other end, as its answers tell of it: how long a forward took. A way
over the link counts as half of the round trip that the client measured.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.kit.lab import Asking, Lab, load
from benchmarks.kit.options import one_of
from benchmarks.kit.verifier import Emulated, Pair, verifier
from edge_client.tools.compare import ask
from edge_client.tools.emulated_network import PROFILES
from edge_client.turn.trace import Trace
from moa.errors import MoaError
from moa.wire.messages import Activations, ServerMessage, StreamTokens

LANES = ("device", "link up", "verifier", "link down", "records")

_AT_ONCE_US = 8000.0

Event = dict[str, Any]


@dataclass(frozen=True)
class Forward:
    """A forward over what the device had guessed, in microseconds of the trace."""

    begin: float
    end: float
    continued: bool = False
    """It began when the one before ended: over guesses that were there already, and without a round trip."""


@dataclass(frozen=True, kw_only=True)
class Options(Asking):
    """Which answer, over which link."""

    prompts: int = 16
    """The answer is to the first of so many held-out prompts that has a continued round."""
    tokens: int = 64
    """Of the answer at most."""
    link: str = one_of("4g", PROFILES)
    step_ms: float = 30.0
    """Of a forward of the target, emulated."""


async def record(options: Options, lab: Lab, ids: list[int]) -> tuple[list[Event], list[tuple[float, Any]], float]:
    """The client's events, what it heard, and how long a way over the link takes; all in microseconds of the trace."""
    trace = Trace(enabled=True)
    heard: list[tuple[float, Any]] = []
    clock = perf_counter()
    trace.mark("clock")
    async with (
        lab.link(options.link) as link,
        lab.client(link, trace=trace, draft="device", max_new_tokens=options.tokens) as client,
    ):
        assert client.link is not None
        take = client.link.take

        def taking(arrived: float, message: ServerMessage, size: int) -> None:
            heard.append((arrived, message))
            take(arrived, message, size)

        client.link.take = taking  # type: ignore[method-assign]
        answer = await ask(client, ids)
        if not answer.verified:
            raise MoaError("the link was too bad for a timeline: not all of the answer was verified")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.write(path)
        events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    origin = next(event["ts"] for event in events if event["name"] == "clock")
    return events, [(origin + 1e6 * (at - clock), message) for at, message in heard], 500 * answer.stats["rtt_ms"]


def forwards_of(heard: list[tuple[float, Any]], way: float) -> list[Forward]:
    """Every forward over guesses, in order."""
    found: list[Forward] = []
    for at, message in heard:
        if not isinstance(message, StreamTokens) or not message.foreseen:
            continue
        end = at - way
        begin = end - 1000 * message.forward_ms
        found.append(Forward(begin, end, bool(found) and begin - found[-1].end < _AT_ONCE_US))
    return found


def merged(events: list[Event], heard: list[tuple[float, Any]], forwards: list[Forward], way: float) -> list[Event]:
    """The client's events in one lane, and link and verifier in others."""

    def span(lane: str, name: str, start: float, duration: float, **details: Any) -> Event:
        where = {"ph": "X", "pid": 1, "tid": 1 + LANES.index(lane)}
        return {"name": name, "ts": start, "dur": duration, **where, "args": details}

    out = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1 + n, "args": {"name": lane}}
        for n, lane in enumerate(LANES)
    ]
    out += [event for event in events if event["name"] != "clock"]
    out += [span("link up", "up", told["ts"], way) for told in told_of(events)]
    for one in forwards:
        out.append(span("verifier", "verify on" if one.continued else "verify", one.begin, one.end - one.begin))
        out.append(span("link down", "verdict", one.end, way))
    for at, message in heard:
        if isinstance(message, Activations):
            details = {"rows": message.rows, "bytes": len(message.payload)}
            out.append(span("records", "records", at - way, way, **details))
    return out


def told_of(events: list[Event]) -> list[Event]:
    """When guesses were sent."""
    return [event for event in events if event["name"] == "ask" and event["args"].get("kind") == "Foresee"]


def shown(events: list[Event], forwards: list[Forward], way: float) -> dict[str, float]:
    """The stretch to look at: from the guesses behind a forward that waited for them until the tokens of the continued
    one after it are there. Rather from the middle of the answer."""
    pairs = [n for n in range(1, len(forwards)) if forwards[n].continued and not forwards[n - 1].continued]
    if not pairs:
        raise MoaError("no round was continued", hint="more prompts may have one: --prompts")
    at = min(pairs, key=lambda n: abs(n - len(forwards) / 2))
    first, last = forwards[at - 1], forwards[at]
    sent = [told["ts"] for told in told_of(events) if told["ts"] <= first.begin - way + _AT_ONCE_US]
    grown = [
        e["ts"] for e in events if e["name"] == "foresee" and max(sent, default=0) - 4 * way < e["ts"] <= first.begin
    ]
    before = max((one.end + way for one in forwards[: at - 1]), default=0.0)
    begin = min((ts for ts in grown if ts >= before), default=first.begin - way)
    end = last.end + way
    return {"from_us": begin - 1000, "to_us": end + 0.04 * (end - begin)}


async def measure(options: Options) -> dict[str, Any]:
    """Record one answer."""
    emulated, pair = Emulated(step_ms=options.step_ms), Pair(options.target, options.drafter)
    with verifier("--slots=4", "--max-context-tokens=1024", pair=pair, emulated=emulated, threads=1) as running:
        lab = Lab(running.url, *load(options))
        for ids in lab.prompts:
            events, heard, way = await record(options, lab, ids)
            forwards = forwards_of(heard, way)
            if any(one.continued for one in forwards):
                break
    return {
        "link": options.link,
        "step_ms": options.step_ms,
        "rounds": len(forwards),
        "continued": sum(one.continued for one in forwards),
        "round": shown(events, forwards, way),
        "displayTimeUnit": "ms",
        "traceEvents": merged(events, heard, forwards, way),
    }


def tables(result: Mapping[str, Any]) -> str:
    """All in a sentence."""
    milliseconds = (result["round"]["to_us"] - result["round"]["from_us"]) / 1000
    return (
        f"{result['rounds']} rounds over {result['link']}, {result['step_ms']:g} ms a forward (emulated), "
        f"{result['continued']} of them continued without a round trip; the picture shows {milliseconds:.0f} ms."
    )
