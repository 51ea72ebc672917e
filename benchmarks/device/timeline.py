"""One answer on a timeline: what device, link and verifier did when. The result is also a trace for a viewer.

The JSON opens in https://ui.perfetto.dev and chrome://tracing, like what `edge-client generate --trace` writes; the
client's own spans are the same. The server's side is added from its verdicts: how long a draft waited and how long its
forward took. The rest of a round trip is divided evenly between both directions.
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
from moa.wire.messages import Activations, ServerMessage, Verdict

LANES = ("device", "link up", "verifier", "link down", "records")

Event = dict[str, Any]


@dataclass(frozen=True)
class Round:
    """A draft's way, in microseconds of the trace."""

    sent: float
    arrived: float
    queue: float
    forward: float

    @property
    def one_way(self) -> float:
        """Half of the round trip without wait and forward."""
        return max(0.0, self.arrived - self.sent - self.queue - self.forward) / 2


@dataclass(frozen=True, kw_only=True)
class Options(Asking):
    """Which answer, over which link."""

    prompts: int = 6
    """The answer is to the last of so many held-out prompts."""
    tokens: int = 64
    """Tokens of the answer at most."""
    link: str = one_of("4g", PROFILES)
    step_ms: float = 30.0
    """Emulated milliseconds of a target's forward."""


async def record(options: Options, lab: Lab) -> tuple[list[Event], list[tuple[float, Any]]]:
    """The client's events, and what it heard, both in microseconds of the trace."""
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
        answer = await ask(client, lab.prompts[-1])
        if not answer.verified:
            raise MoaError("the link was too bad for a timeline: not all of the answer was verified")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.write(path)
        events: list[Event] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    origin = next(event["ts"] for event in events if event["name"] == "clock")
    return events, [(origin + 1e6 * (at - clock), message) for at, message in heard]


def rounds_of(events: list[Event], heard: list[tuple[float, Any]]) -> list[Round]:
    """Every verified draft."""
    asked = {event["args"]["round"]: event["ts"] for event in events if event["name"] == "ask"}
    return [
        Round(asked[message.round], at, 1000 * message.queue_ms, 1000 * message.forward_ms)
        for at, message in heard
        if isinstance(message, Verdict) and message.round in asked
    ]


def merged(events: list[Event], heard: list[tuple[float, Any]], rounds: list[Round]) -> list[Event]:
    """The client's events in one lane, and link and verifier in others."""

    def span(lane: str, name: str, start: float, duration: float, **details: Any) -> Event:
        where = {"ph": "X", "pid": 1, "tid": 1 + LANES.index(lane)}
        return {"name": name, "ts": start, "dur": duration, **where, "args": details}

    out = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": 1 + n, "args": {"name": lane}}
        for n, lane in enumerate(LANES)
    ]
    out += [event for event in events if event["name"] != "clock"]
    for one in rounds:
        there = one.sent + one.one_way
        out.append(span("link up", "up", one.sent, one.one_way))
        if one.queue > 0:
            out.append(span("verifier", "queue", there, one.queue))
        out.append(span("verifier", "verify", there + one.queue, one.forward))
        out.append(span("link down", "verdict", one.arrived - one.one_way, one.one_way))
    way = min((one.one_way for one in rounds), default=0.0)
    for at, message in heard:
        if isinstance(message, Activations):
            details = {"rows": message.rows, "bytes": len(message.payload)}
            out.append(span("records", "records", at - way, way, **details))
    return out


def shown(events: list[Event], heard: list[tuple[float, Any]], rounds: list[Round]) -> dict[str, float]:
    """The stretch to look at: from the start of a draft until its records are there. Prefers a draft that was made then
    to one that was ready, and the middle of the answer."""
    drafts = [event for event in events if event["name"] == "draft"]
    middle = len(rounds) // 2

    def draft_of(one: Round) -> Event | None:
        return next((event for event in reversed(drafts) if event["ts"] <= one.sent), None)

    def ready(one: Round) -> bool:
        draft = draft_of(one)
        return draft is None or bool(draft["args"].get("ahead"))

    one = min(enumerate(rounds), key=lambda pair: (ready(pair[1]), abs(pair[0] - middle)))[1]
    draft = draft_of(one)
    begin = draft["ts"] if draft is not None else one.sent
    after = [at for at, message in heard if isinstance(message, Activations) and at > one.arrived]
    end = min(after, default=one.arrived)
    return {"from_us": begin - 1000, "to_us": end + 0.08 * (end - begin)}


async def measure(options: Options) -> dict[str, Any]:
    """Record one answer."""
    emulated, pair = Emulated(step_ms=options.step_ms), Pair(options.target, options.drafter)
    with verifier("--slots=4", "--max-context-tokens=1024", pair=pair, emulated=emulated, threads=1) as running:
        events, heard = await record(options, Lab(running.url, *load(options)))
    rounds = rounds_of(events, heard)
    if not rounds:
        raise MoaError("no round was recorded")
    return {
        "link": options.link,
        "step_ms": options.step_ms,
        "rounds": len(rounds),
        "round": shown(events, heard, rounds),
        "displayTimeUnit": "ms",
        "traceEvents": merged(events, heard, rounds),
    }


def tables(result: Mapping[str, Any]) -> str:
    """All in a sentence."""
    milliseconds = (result["round"]["to_us"] - result["round"]["from_us"]) / 1000
    return (
        f"{result['rounds']} rounds over {result['link']}, {result['step_ms']:g} ms a forward (emulated); the one in "
        f"the picture takes {milliseconds:.0f} ms with its records."
    )
