"""`edge-client demo`: drafting, an outage and recovery on one machine, in about a minute."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable
from urllib.parse import urlsplit

from rich.console import Console
from rich.rule import Rule
from rich.table import Table

from edge_client.cli import options
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.events import Event, Notice, Token
from edge_client.link.local import local_verifier
from edge_client.screen.views import make_view
from edge_client.settings import ClientSettings
from edge_client.tools.compare import RATES, TimedAnswer, ask, ask_all, cells, rates
from edge_client.tools.emulated_network import PROFILES, LinkProxy
from moa.errors import UsageError

_PROMPTS = ("What is 17 + 25 - 9?", "Write a short story about Ada, a fox and a garden.")
_CUT_PROMPT = "Make up a little story: the hero is Ben, the animal is a cat, the place is a forest."
_CUT_AFTER = 12
"""The link is cut after so many verified tokens."""
_RESTORE_AFTER = 8
"""It returns after so many provisional tokens."""


def add(command: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    command.description = (
        "Start a verifier behind an emulated link, answer, cut the link in the middle of an answer, go on offline, "
        "restore it, reconcile, and compare with plain API streaming."
    )
    command.add_argument(
        "--link",
        choices=sorted(PROFILES),
        default="4g",
        help="the emulated link (default: %(default)s)",
    )
    command.add_argument(
        "--target", default="", metavar="ID_OR_DIR", help="another target (default: embedded pair)"
    )
    command.add_argument("--drafter", default="", metavar="DIR", help="its drafter")
    options.add_connection(command)


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; the exit code is 1 if a text differs from the target's."""
    settings = options.settings_from(
        arguments, max_new_tokens=80, settle_seconds=20.0, reconnect_seconds=0.5
    )
    if settings.upstream:
        raise UsageError(
            "the demo starts a target of its own, and takes no --upstream",
            hint="try `edge-client chat --upstream URL`",
        )
    serve = []
    if arguments.target:
        serve.append(f"--target={arguments.target}")
    if arguments.drafter:
        serve.append(f"--drafter={arguments.drafter}")
    return asyncio.run(_story(settings, serve, arguments.link, Console(highlight=False)))


async def _story(settings: ClientSettings, serve: list[str], profile: str, console: Console) -> int:
    """Answer prompts, the last of them with the link cut in the middle, then answer them in other
    ways and compare. Returns the exit code: 1 if a text differs from the target's."""
    device = Device.of(settings)
    async with contextlib.AsyncExitStack() as stack:
        console.print("Starting a verifier on this machine ...", style="dim")
        with options.waiting("starting it"):
            address = await stack.enter_async_context(local_verifier(*serve))
        parts = urlsplit(address)
        link = await stack.enter_async_context(
            LinkProxy(parts.hostname or "", parts.port or 0, PROFILES[profile])
        )
        near = dataclasses.replace(settings, verifier=address)  # not through the emulated link
        far = dataclasses.replace(settings, verifier=link.url)
        encoder = EdgeClient(settings, device=device)
        questions = (*_PROMPTS, _CUT_PROMPT)
        prompts = [encoder.encode(text) for text in questions]
        rtt = PROFILES[profile].at(0).rtt_ms
        console.print(
            f"An emulated {profile} link lies before it: {rtt:.0f} ms RTT.\n", style="dim"
        )
        async with EdgeClient(dataclasses.replace(far, draft="device"), device=device) as client:
            drafted = await _show_all(console, client, prompts, link)
        console.print("\nThe same answers in other ways, to compare ...", style="dim")
        alone = await ask_all(near, device, questions, draft="none", sync="off")
        ways = {
            "plain API streaming": await ask_all(far, device, questions, draft="none", sync="off"),
            "drafted on the device": drafted[:-1],
            "drafted on the device, link cut": drafted[-1:],
            "auto": await ask_all(far, device, questions, draft="auto"),
        }
    same = [answer.ids for answer in drafted] == [answer.ids for answer in alone]
    _table(console, ways)
    verdict = "[green]yes[/green]" if same else "[red]no[/red]"
    console.print(f"identical to target-only: {verdict}")
    return int(not same)


async def _show_all(
    console: Console, client: EdgeClient, prompts: list[list[int]], link: LinkProxy
) -> list[TimedAnswer]:
    """Ask all prompts, the last of them with the link cut in the middle; print the answers as they
    come, and return them."""
    await client.wait_online()
    answers = []
    for text, ids in zip(_PROMPTS, prompts, strict=False):
        answers.append(await _show(console, client, text, ids))
    console.print(Rule("the link will be cut", style="red"))
    answers.append(await _show(console, client, _CUT_PROMPT, prompts[-1], _cutter(link)))
    return answers


async def _show(
    console: Console,
    client: EdgeClient,
    text: str,
    ids: list[int],
    cut: Callable[[Event], str] = lambda _: "",
) -> TimedAnswer:
    """Ask a prompt, print the answer as it comes, and return it. `cut` is called with each event;
    what it returns is shown as a notice."""
    console.print(f"> {text}", style="bold")
    with make_view(console=console) as view:

        def see(event: Event) -> None:
            view.take(event)
            news = cut(event)
            if news:
                view.take(Notice(message=news))

        answer = await ask(client, ids, see)
    console.print()
    return answer


def _cutter(link: LinkProxy) -> Callable[[Event], str]:
    """Returns a function that takes the events of an answer: it cuts the link after some verified
    tokens and restores it after some that were written offline. It returns a text when it has done
    so."""
    seen = Counter[str]()  # tokens so far, by status
    # The status of the tokens to count, how many of them, what to do then, and what to say of it.
    steps = [
        ("verified", _CUT_AFTER, link.go_down, "[the link is cut: the device goes on alone]"),
        (
            "provisional",
            _RESTORE_AFTER,
            link.restore,
            "[the link is back: what was written offline is checked]",
        ),
    ]

    def take(event: Event) -> str:
        if isinstance(event, Token):
            seen[event.status] += 1
        if not steps:
            return ""
        status, count, act, says = steps[0]
        if seen[status] < count:
            return ""
        steps.pop(0)
        act()
        return says

    return take


def _table(console: Console, ways: dict[str, list[TimedAnswer]]) -> None:
    """Print what each way took."""
    table = Table("", *RATES, title="what it took")
    for name, answers in ways.items():
        table.add_row(name, *cells(rates(answers)))
    console.print(table)
