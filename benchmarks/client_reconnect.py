"""The link dies after m tokens and comes back: what the finished answer is worth, how long it took, what was withdrawn.

python -m benchmarks.client_reconnect --json benchmarks/results/client_reconnect.json

Somebody reads 10 tokens a second, and no token is made before it is wanted: so a second without a link is ten
provisional tokens, until the answer ends. The device drafts, connections are reset and refused for the stated time, and
the client finds its own way back. `rewind` withdraws what the target does not confirm, `keep` lets it stand as context.
Conversations overlap: they wait for their reader, not for the processor.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean
from time import perf_counter
from typing import Any, get_args
from urllib.parse import urlsplit

from benchmarks import client_kit, report
from benchmarks.provenance import write_result
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.events import Done, Retract, Token
from edge_client.link.local import LocalVerifier
from edge_client.settings import ClientSettings
from edge_client.tools.compare import TimedAnswer, ask_all
from edge_client.tools.emulated_network import PROFILES, LinkProxy
from edge_client.turn.transcript import OnReconnect
from moa.demo.skills import Example, is_right
from moa.errors import MoaError, UsageError, run_cli

POLICIES: tuple[OnReconnect, ...] = get_args(OnReconnect)
_SETTLE = 60.0
_SERVER = ("--max-context-tokens=1024", "--max-prompt-tokens=512", "--max-chain-tokens=256")


@dataclasses.dataclass(frozen=True)
class Case:
    """One conversation."""

    prompt: int
    policy: OnReconnect
    cut: int
    gap: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How it went."""

    ids: list[int]
    text: str
    verified: bool
    seconds: float
    shown_seconds: float
    """Until the last token that stands in the answer was shown."""
    verified_before: int
    """Tokens that were verified when the link was found dead."""
    stats: dict[str, Any]


async def converse(url: str, device: Device, ids: Sequence[int], case: Case, options: argparse.Namespace) -> Outcome:
    """One answer, read at the reader's pace, with the link dead for a while in the middle."""
    parts = urlsplit(url)
    async with LinkProxy(parts.hostname or "", parts.port or 0, PROFILES[options.link]) as link:
        settings = ClientSettings(
            verifier=link.url,
            draft="device",
            on_reconnect=case.policy,
            max_new_tokens=options.tokens,
            settle_seconds=_SETTLE,
        )
        async with EdgeClient(settings, device=device) as client:
            await client.wait_online(30)
            cutting: asyncio.Task[None] | None = None
            tokens: list[int] = []
            before: int | None = None
            done: Done | None = None
            began = shown = perf_counter()
            async for event in client.generate(ids=ids):
                match event:
                    case Token():
                        if event.status == "provisional" and before is None:
                            before = len(tokens)
                        tokens.append(event.id)
                        shown = perf_counter()
                        if len(tokens) >= case.cut and cutting is None and case.gap:
                            link.go_down()
                            cutting = asyncio.create_task(_restore(link, case.gap))
                        await asyncio.sleep(1 / options.speed)
                    case Retract():
                        del tokens[event.start - len(ids) :]
                    case Done():
                        done = event
                    case _:
                        pass
            if done is None:
                raise MoaError("an answer never ended")
            seconds = perf_counter() - began
            if cutting is not None:
                await cutting
    verified = len(tokens) if before is None else before
    return Outcome(tokens, done.text, done.verified, seconds, shown - began, verified, done.stats)


async def _restore(link: LinkProxy, gap: float) -> None:
    await asyncio.sleep(gap)
    link.restore()


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every policy, cut and gap, over the same prompts."""
    device, examples, prompts = client_kit.load(options)
    flags = [f"--slots={options.at_once + 4}", f"--max-batch-rows={options.at_once + 4}", *_SERVER]
    async with LocalVerifier(flags).running() as url:
        near = ClientSettings(verifier=url, max_new_tokens=options.tokens)
        truth = await ask_all(near, device, prompts, draft="none", sync="off")
        # The longest waits first, so that the shorter ones fill the gaps.
        cases = [
            Case(n, policy, cut, gap)
            for gap in sorted(options.gaps, reverse=True)
            for cut in options.cuts
            for policy in POLICIES
            for n in range(len(prompts))
        ]
        room, done = asyncio.Semaphore(options.at_once), 0

        async def one(case: Case) -> Outcome:
            nonlocal done
            async with room:
                outcome = await converse(url, device, prompts[case.prompt], case, options)
            done += 1
            if done % 16 == 0:
                print(f"{done} of {len(cases)} conversations", file=sys.stderr)
            return outcome

        outcomes = await asyncio.gather(*(one(case) for case in cases))
    pairs = list(zip(cases, outcomes, strict=True))
    for case, outcome in pairs:
        if outcome.verified and outcome.ids != truth[case.prompt].ids:
            raise MoaError("an answer is called verified and is not the target's own")
    runs = [
        _row(policy, cut, gap, [p for p in pairs if (p[0].policy, p[0].cut, p[0].gap) == (policy, cut, gap)], examples)
        for policy in POLICIES
        for cut in options.cuts
        for gap in sorted(options.gaps)
    ]
    return {
        "prompts": len(prompts),
        "tokens": options.tokens,
        "reading_speed": options.speed,
        "link": options.link,
        "at_once": options.at_once,
        "target_right": sum(_right(example, one) for example, one in zip(examples, truth, strict=True)),
        "client_reconnect": runs,
    }


def _right(example: Example, answer: TimedAnswer | Outcome) -> bool:
    return is_right(example, answer.text.strip())


def _row(
    policy: str, cut: int, gap: float, pairs: Sequence[tuple[Case, Outcome]], examples: Sequence[Example]
) -> dict[str, Any]:
    outcomes = [outcome for _, outcome in pairs]
    return {
        "policy": policy,
        "cut": cut,
        "gap_seconds": gap,
        "asked": len(pairs),
        "right": sum(_right(examples[case.prompt], outcome) for case, outcome in pairs),
        "wholly_verified": sum(outcome.verified for outcome in outcomes),
        "seconds": fmean(outcome.seconds for outcome in outcomes),
        "shown_seconds": fmean(outcome.shown_seconds for outcome in outcomes),
        "verified_before": fmean(outcome.verified_before for outcome in outcomes),
        "tokens": fmean(len(outcome.ids) for outcome in outcomes),
        "offline_tokens": fmean(outcome.stats["offline_tokens"] for outcome in outcomes),
        "retracted": fmean(outcome.stats["retracted"] for outcome in outcomes),
        "adopted": fmean(outcome.stats["adopted"] for outcome in outcomes),
    }


def tables(result: Mapping[str, Any]) -> str:
    """A row for each policy, cut and gap; means over the prompts."""
    header = ["policy, cut after, back after", "right", "wholly verified", "seconds", "shown after"]
    header += ["offline tokens", "withdrawn", "kept unverified"]
    rows = [
        [
            f"{run['policy']}, {run['cut']} tokens, {run['gap_seconds']:g} s",
            f"{run['right'] / run['asked']:.1%}",
            f"{run['wholly_verified'] / run['asked']:.1%}",
            f"{run['seconds']:.1f}",
            f"{run['shown_seconds']:.1f}",
            *(f"{run[name]:.1f}" for name in ("offline_tokens", "retracted", "adopted")),
        ]
        for run in result["client_reconnect"]
    ]
    share = result["target_right"] / result["prompts"]
    return "\n".join(
        [
            report.table(header, rows),
            "",
            f"Means of {result['prompts']} held-out prompts; the target itself has {share:.1%}. Read at "
            f"{result['reading_speed']:g} tokens/s over an emulated {result['link']} link, {result['at_once']} "
            "conversations at a time. Shown after: until the last token that stands was on the screen.",
        ]
    )


def main() -> int:
    """Measure, print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    client_kit.add_flags(parser)
    parser.add_argument("--cuts", type=int, nargs="+", default=[8], metavar="M", help="tokens before (default: 8)")
    parser.add_argument("--gaps", type=float, nargs="+", default=[1.0, 5.0, 20.0], metavar="SECONDS")
    parser.add_argument("--speed", type=float, default=10.0, help="tokens/s that are read (default: %(default)s)")
    parser.add_argument("--link", choices=sorted(PROFILES), default="wifi")
    parser.add_argument("--at-once", type=int, default=32, metavar="N", help="conversations (default: %(default)s)")
    options = parser.parse_args()
    if options.verifier != "local":
        raise UsageError("this measurement starts its own verifier", hint="leave out --verifier")
    if options.speed <= 0 or options.at_once < 1 or min(options.gaps) < 0 or min(options.cuts) < 1:
        raise UsageError("--speed, --at-once and --cuts must be above 0, --gaps at least 0")
    result = asyncio.run(measure(options))
    write_result(options.json, result)
    print(tables(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.client_reconnect", main))
