"""Capacity of one verifier in readers, with drafts from the device, from the server, or none.

A reader reads 10 tokens a second. He asks, and begins to read 0.2 s after the first token is there,
or 1.2 s after he asked, whichever is sooner; token k is in time when it is there k/10 s later. A
verifier holds N readers when 95 of 100 of all their first 40 tokens are in time, all of them asking
within one second. Prompts have been run before they ask. The largest N is found by doubling, then
by bisection to about a tenth, each by two of three trials.

Drafts are chains made beforehand, for every place in the text: by the device's own drafter with the
records of the prompt alone, because those of the answer come late where the verifier is full, and
with the chances that it gives them; or, where a target is random and so has no drafter, right with
the probability --rate. Readers whose answers the server drafts hold a drafter too, for the time
without a network, and so get records, unless it says otherwise. The emulated target is the embedded
one with forwards of --step-ms whatever their size, as on an accelerator bound by its memory.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.device.replay import TargetAnswer, fresh_drafter, record_heads, target_answers
from benchmarks.kit.figures import pivot
from benchmarks.kit.lab import Asking, Lab, load
from benchmarks.kit.options import one_of
from benchmarks.kit.progress import say
from benchmarks.server.readers import SPEED, TOKENS, Trial, largest, trial
from edge_client.device import Device
from moa.errors import UsageError
from moa.graph.cache import RecordBuffer
from moa.graph.drafter import run
from moa.sampling import SamplingSettings
from moa.speculation.guess_tree import neg_log_probs_of
from moa.tree import TreeShape
from moa.wire.messages import RecordDtype
from testing.devices import Script, Way, scripts
from testing.verifier import Emulated, Pair, Running, many_short, random_pair, verifier

WAYS: dict[str, tuple[Way, RecordDtype]] = {
    "plain decoding": ("none", "off"),
    "server-drafted": ("server", "int8"),
    "server-drafted, no records": ("server", "off"),
    "device-drafted": ("device", "int8"),
    "device-drafted, guesses ahead": ("ahead", "int8"),
}
DEPTH = 6
_TEXTS = 12
"""Different conversations."""
_DRIVER_LAG_MS = 50.0
"""If this process itself is this late, a failed trial does not count against the verifier."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which targets, and how readers come."""

    random: str = ""
    """Also a random target, HIDDENxLAYERS."""
    step_ms: float = 120.0
    """Milliseconds of the emulated target's forward; 0 leaves that target out."""
    embedded: bool = True
    """Measure the embedded target."""
    rate: float = 0.85
    """Probability of a right draft on a random target."""
    think_ms: float = 60.0
    """Milliseconds of a device between rounds."""
    start: int = 16
    """Readers of the first trial."""
    most: int = 1024
    """Readers at most."""
    threads: int = 1
    """Threads of the verifier's process."""
    ways: tuple[str, ...] = one_of(tuple(WAYS), WAYS)
    """Who drafts; without plain decoding nothing is compared with it."""

    def __post_init__(self) -> None:
        if self.start > self.most:
            raise UsageError("--start must be at most --most")


def script_of(device: Device, answered: TargetAnswer) -> Script:
    """What the device drafts after each token of an answer, with the records of the prompt."""
    drafter = fresh_drafter(device, RecordBuffer(record_heads(device)))
    assert drafter.records is not None
    rows = len(answered.prompt)
    drafter.records.put(0, answered.keys[:rows], answered.values[:rows])
    drafts: list[list[int]] = [[]]
    neg_log_probs: list[list[int]] = [[]]
    for done in range(1, min(len(answered.answer), TOKENS + 1)):
        log = [*answered.prompt, *answered.answer[:done]]
        shape = TreeShape.chain(DEPTH, min_score=-1e9)
        chain = run(drafter.draft(log, shape, SamplingSettings()))
        drafts.append(chain.tokens[1:])
        neg_log_probs.append(neg_log_probs_of(chain)[1:])
    return Script(answered.prompt, answered.answer[: TOKENS + 1], drafts, neg_log_probs)


async def embedded_scripts(url: str, count: int) -> list[Script]:
    """Held-out prompts with answers that are long enough."""
    device, examples, prompts = load(Asking(per_skill=3))
    found: list[Script] = []
    for example, ids in zip(examples, prompts, strict=True):
        (answered,) = await target_answers(Lab(url, device, [example], [ids]), TOKENS + 8)
        if len(answered.answer) > TOKENS + 1:
            found.append(script_of(device, answered))
        if len(found) == count:
            break
    if not found:
        raise UsageError("no held-out prompt has an answer long enough to read")
    return found


@contextlib.contextmanager
def targets(options: Options) -> Iterator[dict[str, contextlib.AbstractContextManager[Running]]]:
    """How to start the verifier of each target asked for."""
    flags = many_short(options.most)
    with contextlib.ExitStack() as stack:
        found: dict[str, contextlib.AbstractContextManager[Running]] = {}
        if options.embedded:
            found["embedded, 7M"] = verifier(*flags, threads=options.threads)
        if options.step_ms:
            emulated = Emulated(step_ms=options.step_ms)
            found[f"emulated, {options.step_ms:g} ms a forward"] = verifier(
                *flags, emulated=emulated, threads=1
            )
        if options.random:
            pair: Pair = stack.enter_context(random_pair(options.random))
            found[f"random, {options.random}"] = verifier(
                *flags, pair=pair, threads=options.threads
            )
        yield found


async def measure(options: Options) -> dict[str, Any]:
    """Every way on every target."""
    runs: list[dict[str, Any]] = []
    with targets(options) as found:
        for name, starting in found.items():
            is_random = name.startswith("random")
            with starting as running:
                if is_random:  # prompts shorter than what two sessions share
                    how: dict[str, Any] = {
                        "length": 16,
                        "tokens": TOKENS + 1,
                        "rate": options.rate,
                        "nodes": DEPTH + 1,
                    }
                    said = await scripts(running.url, _TEXTS, **how)
                else:
                    said = await embedded_scripts(running.url, _TEXTS)
                for way in options.ways:
                    if not (
                        is_random and WAYS[way][0] == "server"
                    ):  # a random drafter is never right
                        runs.append(await of_way(name, way, running.url, said, options))
    return {
        "reading_speed": SPEED,
        "tokens": TOKENS,
        "rate": options.rate,
        "think_ms": options.think_ms,
        "threads": options.threads,
        "runs": runs,
    }


async def of_way(
    target: str, way: str, url: str, said: Sequence[Script], options: Options
) -> dict[str, Any]:
    """The largest number of readers, and whether it was the verifier that ended the search."""
    kind, records = WAYS[way]
    say(f"{target}, {way}")
    began = time.perf_counter()

    async def attempt(readers: int) -> Trial:
        return await trial(url, said, readers, kind, records=records, think=options.think_ms / 1000)

    await attempt(min(2, options.start))  # warm
    count, trials = await largest(attempt, options.start, options.most)
    limit = min(
        (one for one in trials if one.readers > count and not one.held),
        key=lambda one: one.readers,
        default=None,
    )
    return {
        "target": target,
        "way": way,
        "users": count,
        "at_least": limit is None,
        "driver_bound": limit is not None and limit.lag_ms > _DRIVER_LAG_MS,
        "trials": [
            {
                "readers": one.readers,
                "p95_late_ms": round(one.p95, 1),
                "driver_lag_ms": round(one.lag_ms, 1),
            }
            for one in trials
        ],
        "seconds": round(time.perf_counter() - began, 1),
    }


def tables(result: Mapping[str, Any]) -> str:
    """Readers by way and target."""
    runs = result["runs"]
    plain = {run["target"]: run["users"] for run in runs if run["way"] == "plain decoding"}

    def cell(run: Mapping[str, Any]) -> str:
        mark = (
            (">= " if run.get("at_least") else "")
            + str(run["users"])
            + ("*" if run.get("driver_bound") else "")
        )
        base = plain.get(run["target"])
        return f"{mark} ({run['users'] / base:.2f}x)" if base else mark

    parts = [pivot(runs, "way", "target", cell, f"readers at {result['reading_speed']:g} tokens/s")]
    if any(run.get("driver_bound") for run in runs):
        parts.append(
            "\\* the readers themselves, not the verifier, were late here: the true figure is higher."
        )
    parts.append(
        f"95 of 100 of the first {result['tokens']} tokens in time; verifier and readers share this machine; every "
        f"token compared with the target's own. A device waits {result['think_ms']:g} ms between rounds, for link and "
        f"drafting. Drafts on a random target are right with probability {result['rate']:g}, by assumption."
    )
    return "\n\n".join(parts)
