"""The link is lost after m tokens and returns: right answers, time, and withdrawn tokens.

A user reads 10 tokens a second, and tokens are generated only when they are read: so a second
without a link is ten provisional tokens, until the answer ends. The device drafts, connections are
reset and refused for the stated time, and the client reconnects by itself. `rewind` withdraws text
that the target does not confirm, `keep` keeps it as context. Conversations run in parallel: they
wait for their reader, not for the processor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from time import perf_counter
from typing import Any, get_args

from benchmarks.kit.figures import listing
from benchmarks.kit.lab import Asking, Lab, open_lab
from benchmarks.kit.options import one_of
from benchmarks.kit.progress import Progress
from edge_client.events import Done, Retract, Token
from edge_client.tools.emulated_network import PROFILES, LinkProxy
from edge_client.turn.transcript import OnReconnect
from moa.errors import MoaError

POLICIES: tuple[OnReconnect, ...] = get_args(OnReconnect)
_AT_ONCE = 32
_SERVER = ("--max-context-tokens=1024", "--max-prompt-tokens=512")


@dataclass(frozen=True, kw_only=True)
class Options(Asking):
    """When the link dies, for how long, and how somebody reads."""

    cuts: tuple[int, ...] = (8,)
    """Tokens before the link dies."""
    gaps: tuple[float, ...] = (1.0, 5.0, 20.0)
    """Seconds without a link."""
    speed: float = 10.0
    """Tokens a second that are read."""
    link: str = one_of("wifi", PROFILES)


@dataclass(frozen=True)
class Case:
    """One conversation."""

    gap: float
    cut: int
    policy: OnReconnect
    prompt: int


@dataclass(frozen=True)
class Outcome:
    """The result of a conversation."""

    case: Case
    ids: list[int]
    done: Done
    shown_seconds: float
    """Seconds until the last token of the final answer was shown."""
    verified_before: int
    """Verified tokens when the link was found to be down."""


async def converse(lab: Lab, case: Case, options: Options) -> Outcome:
    """One answer, read at the reader's speed, with an outage in the middle."""
    settings: dict[str, Any] = {
        "draft": "device",
        "max_new_tokens": options.tokens,
        "settle_seconds": 60.0,
    }
    prompt = lab.prompts[case.prompt]
    tokens = list[int]()
    done = None
    before: int | None = None
    restoring: asyncio.Task[None] | None = None
    async with (
        lab.link(options.link) as link,
        lab.client(link, on_reconnect=case.policy, **settings) as client,
    ):
        began = shown = perf_counter()
        async for event in client.generate(ids=prompt):
            match event:
                case Token():
                    if event.status == "provisional" and before is None:
                        before = len(tokens)
                    tokens.append(event.id)
                    shown = perf_counter()
                    if len(tokens) >= case.cut and restoring is None and case.gap:
                        link.go_down()
                        restoring = asyncio.create_task(_restore(link, case.gap))
                    await asyncio.sleep(1 / options.speed)
                case Retract():
                    del tokens[event.start - len(prompt) :]
                case Done():
                    done = event
        if restoring is not None:
            await restoring
    if done is None:
        raise MoaError("an answer never ended")
    return Outcome(case, tokens, done, shown - began, len(tokens) if before is None else before)


async def _restore(link: LinkProxy, gap: float) -> None:
    await asyncio.sleep(gap)
    link.restore()


async def measure(options: Options) -> dict[str, Any]:
    """Every policy, cut and gap, over the same prompts."""
    many = _AT_ONCE + 4
    with open_lab(options, f"--max-batch-rows={many}", *_SERVER, slots=many) as lab:
        truth = await lab.answers(draft="none", sync="off", max_new_tokens=options.tokens)
        # The longest waits first, so that the shorter ones fill the gaps.
        gaps = sorted(options.gaps, reverse=True)
        cases = [
            Case(*way) for way in product(gaps, options.cuts, POLICIES, range(len(lab.prompts)))
        ]
        room = asyncio.Semaphore(_AT_ONCE)
        progress = Progress(len(cases), "conversations")

        async def one(case: Case) -> Outcome:
            async with room:
                outcome = await converse(lab, case, options)
            if outcome.done.verified and outcome.ids != truth[case.prompt].ids:
                raise MoaError("an answer is called verified and is not the target's own")
            progress.step()
            return outcome

        outcomes = await asyncio.gather(*map(one, cases))
    return {
        "prompts": len(truth),
        "tokens": options.tokens,
        "reading_speed": options.speed,
        "link": options.link,
        "at_once": _AT_ONCE,
        "target_right": sum(lab.right(number, answer.text) for number, answer in enumerate(truth)),
        "runs": [
            row(
                lab,
                [one for one in outcomes if (one.case.policy, one.case.cut, one.case.gap) == kind],
            )
            for kind in product(POLICIES, options.cuts, sorted(options.gaps))
        ],
    }


def row(lab: Lab, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Counts and means of the conversations of one policy, cut and gap."""
    case = outcomes[0].case
    means = ("seconds", "offline_tokens", "retracted", "adopted")
    return {
        "policy": case.policy,
        "cut": case.cut,
        "gap_seconds": case.gap,
        "asked": len(outcomes),
        "right": sum(lab.right(one.case.prompt, one.done.text) for one in outcomes),
        "wholly_verified": sum(one.done.verified for one in outcomes),
        "shown_seconds": fmean(one.shown_seconds for one in outcomes),
        "verified_before": fmean(one.verified_before for one in outcomes),
        "tokens": fmean(len(one.ids) for one in outcomes),
        **{name: fmean(one.done.stats[name] for one in outcomes) for name in means},
    }


def tables(result: Mapping[str, Any]) -> str:
    """A row for each policy, cut and gap; means over the prompts."""
    shown = listing(
        result["runs"],
        {
            "policy, cut after, back after": "{policy}, {cut} tokens, {gap_seconds:g} s",
            "right": lambda run: f"{run['right'] / run['asked']:.1%}",
            "wholly verified": lambda run: f"{run['wholly_verified'] / run['asked']:.1%}",
            "seconds": "{seconds:.1f}",
            "shown after": "{shown_seconds:.1f}",
            "offline tokens": "{offline_tokens:.1f}",
            "withdrawn": "{retracted:.1f}",
            "kept unverified": "{adopted:.1f}",
        },
    )
    return (
        f"{shown}\n\nMeans of {result['prompts']} held-out prompts; the target itself has "
        f"{result['target_right'] / result['prompts']:.1%}. Read at {result['reading_speed']:g} tokens/s over an "
        f"emulated {result['link']} link, {result['at_once']} conversations at a time. Shown after: until the last "
        "token that stands was on the screen."
    )
