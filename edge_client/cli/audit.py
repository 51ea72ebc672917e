"""`edge-client audit`: checks whether the text is the target's own."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from edge_client.cli import options
from edge_client.screen.views import make_console
from edge_client.screen.words import forwards, tokens
from edge_client.settings import ClientSettings
from edge_client.text.chat import Messages
from edge_client.text.codec import TextCodec
from edge_client.tools.compare import TimedAnswer, ask_target
from moa.errors import MoaError, UsageError
from moa.logprobs import MAX_TOP
from moa.safe_text import safe_line
from moa.sampling import SamplingSettings, gumbel
from moa.text_stream import common_prefix

FLOAT32_TIE = 1e-3
"""Scores this close can differ in float32 by the order of additions."""
LOW_PRECISION_TIE = 0.25
"""Scores this close can swap if hidden states are bfloat16 or float16."""


def add(command: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    command.description = (
        "Answer a prompt twice, with drafts and token by token by the target alone, and compare."
    )
    options.add_prompt(command)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_connection(command)
    options.add_generation(command)


def run(arguments: argparse.Namespace) -> int:
    """Answer a prompt with drafts and without, and compare. The exit code is 1 if the texts differ,
    and only then."""
    prompt = options.read_prompt(arguments.prompt, arguments.file)
    settings = options.settings_from(arguments)
    if not settings.verifier:
        raise UsageError(
            "an audit needs the target", hint="pass --verifier ADDRESS, or --verifier local"
        )
    try:
        audit = asyncio.run(_audit(settings, prompt, raw=arguments.raw))
    except MoaError as error:
        # Exit code 2: 1 would say that the texts differ.
        raise UsageError(f"nothing was compared: {error}", hint=error.hint) from error
    if arguments.json:
        options.print_json(audit.report())
    else:
        show(make_console(), audit)
    return int(audit.at is not None)


@dataclass(frozen=True)
class Audit:
    """Two answers to one prompt, with drafts and by the target alone, and the margin of the target's
    choice where they first differ."""

    codec: TextCodec
    drafted: TimedAnswer
    alone: TimedAnswer
    at: int | None
    """Position of the first difference, if there is one."""
    margin: float | None = None
    """The lead of the target's token over the other one there; None if one of the texts ends there,
    or the target tells no log-probabilities."""
    promise: str = ""
    """What the verifier says that "verified" means there."""

    def report(self) -> dict[str, Any]:
        """Returns the comparison as a dict, for JSON."""
        return {
            "identical": self.at is None,
            "first_difference": self.at,
            "margin": self.margin,
            "verified_means": self.promise,
            "drafted": self.drafted.ids,
            "target": self.alone.ids,
        }

    def verdict(self) -> str:
        """Explain the first difference by how far the target's token led the other one there: too
        little for the precision of its numbers, or more."""
        shorter = min(len(self.drafted.ids), len(self.alone.ids))
        if self.margin is None and self.at is not None and self.at < shorter:
            return (
                "-> by how much the target's token led is not known: no log-probabilities are told"
            )
        if self.margin is None:
            return "-> one text ends where the other goes on: no rounding explains this. Please report it"
        if self.margin < FLOAT32_TIE:
            return f"-> a numerical tie: the target's token led by {self.margin:.1g}, less than float32 sums can tell"
        if self.margin < LOW_PRECISION_TIE:
            return (
                f"-> a near tie: the target's token led by {self.margin:.2g}. In low precision such tokens may swap; "
                "serve with --dtype float32 to exclude it"
            )
        return f"-> the target's token led by {self.margin:.2g}: more than rounding explains. Please report it"


async def _audit(settings: ClientSettings, prompt: str, *, raw: bool) -> Audit:
    """Answer the prompt twice, with drafts and by the target alone, and find the first
    difference."""
    async with options.opened(settings) as client:
        ids = client.encode(prompt, raw=raw)
        await client.wait_online()
        # An engine that is asked by chats gets the message: it has tokens of its own.
        chat: Messages = [] if raw else [{"role": "user", "content": prompt}]
        told = client.link.welcome if client.link is not None else None
        # An engine that tells none is compared by its text alone.
        top = MAX_TOP if told is not None and "logprobs" in told.features else -1
        drafted = await ask_target(client, ids, messages=chat, logprobs=top)
        # No activation records either: they are of use to a drafter only.
        client.settings = dataclasses.replace(settings, sync="off")
        alone = await ask_target(client, ids, messages=chat, draft="none", logprobs=top)
        promise = told.promise if told is not None else ""
    # Tokens that are not the engine's own follow from how its text was cut into pieces.
    is_same = drafted.ids == alone.ids or (top < 0 and drafted.text == alone.text)
    at = None if is_same else common_prefix(drafted.ids, alone.ids)
    lead = None if at is None else margin(alone, drafted, at, len(ids), settings.sampling)
    return Audit(client.device.codec, drafted, alone, at, lead, promise)


def margin(
    alone: TimedAnswer, drafted: TimedAnswer, at: int, prompt: int, sampling: SamplingSettings
) -> float | None:
    """Returns by how much the target's token of `alone` led that of `drafted` at output position
    `at`, where the two answers part; None if one of them ends there, or the target tells no
    log-probabilities. `prompt` is the prompt's length.

    The score is the logit before any penalty. With sampling it is logit / temperature + noise,
    where the noise is a function of seed and position.
    """
    ours = alone.logprobs.get(prompt + at)
    theirs = drafted.logprobs.get(prompt + at)
    if ours is None or theirs is None:
        return None
    chosen = alone.ids[at]
    other = drafted.ids[at]
    # A token too unlikely for the list of the likeliest has the log-probability of the other run.
    lead = ours.logprob - dict(ours.top).get(other, theirs.logprob)
    if sampling.greedy:
        return lead
    noise = gumbel(sampling.seed, prompt + at, np.array([chosen, other]))
    return float(lead / sampling.temperature + noise[0] - noise[1])


def show(console: Console, audit: Audit) -> None:
    """Print the two answers' sizes, and the first difference, if there is one, with what explains
    it."""
    for name, answer in (("with drafts", audit.drafted), ("target alone", audit.alone)):
        took = f"{tokens(len(answer.ids))} in {forwards(answer.stats['forwards'])}"
        console.print(f"{name:13} {took}")
    if audit.promise:
        console.print(f"verified      {safe_line(audit.promise)}", markup=False, highlight=False)
    if audit.at is None:
        console.print("identical     yes", style="green")
        return
    console.print(f"identical     no: they part at token {audit.at}", style="red")
    for name, answer in (("with drafts", audit.drafted), ("target alone", audit.alone)):
        token = answer.ids[audit.at : audit.at + 1]
        console.print(
            f"  {name:12} {token} {audit.codec.decode(token)!r}" if token else f"  {name:12} ended"
        )
    console.print(audit.verdict())
