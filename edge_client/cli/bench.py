"""`edge-client bench`: speed of each way of decoding on this device, over this link."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
from typing import Any
from urllib.parse import urlsplit

from rich.table import Table

from edge_client.cli import options
from edge_client.device import Device
from edge_client.link.local import check_bundle, local_verifier
from edge_client.screen.views import make_console
from edge_client.settings import ClientSettings
from edge_client.tools.compare import RATES, ask_all, cells, rates
from edge_client.tools.emulated_network import PROFILES, LinkProxy
from moa.errors import UsageError

WAYS = ("none", "server", "device", "auto")
_WAYS_OF_AN_UPSTREAM = ("none", "device", "auto")
_OWN_VERIFIER_SECONDS = 60.0
"""Seconds until the first word of a verifier that runs on this machine, whose programs may all be
busy: it is not away."""
_PROMPTS = (
    "What is 17 plus 25?",
    "Tell me a short story with Ada, a fox and a garden.",
    "Sort these numbers: 41, 12, 30.",
    "Write a function add_7 that returns x plus 7, with a doctest.",
)


def add(command: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    command.description = (
        "Answer prompts in each way; compare speed, tokens a forward, bytes. none: plain API streaming; "
        "server: drafted and streamed there; device: drafted here; auto: what pays."
    )
    command.add_argument(
        "--ways",
        help=f"comma-separated (default: {','.join(WAYS)}; nothing drafts for an upstream but the device)",
    )
    command.add_argument(
        "--link", choices=sorted(PROFILES), help="emulate this link to the verifier"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_connection(command)
    options.add_generation(command)


def run(arguments: argparse.Namespace) -> int:
    """Measure each way of drafting that was asked for, and print a table or JSON."""
    settings = options.settings_from(arguments, max_new_tokens=64)
    usual = _WAYS_OF_AN_UPSTREAM if settings.upstream else WAYS
    ways = arguments.ways.split(",") if arguments.ways else list(usual)
    unknown = [way for way in ways if way not in WAYS]
    if unknown:
        raise UsageError(f"unknown way {unknown[0]!r}", hint=f"known: {', '.join(WAYS)}")
    if not settings.verifier:
        raise UsageError(
            "a benchmark needs the target",
            hint="pass --verifier ADDRESS, --verifier local or --upstream URL",
        )
    if settings.upstream and arguments.link:
        raise UsageError(
            "--link is the link to a verifier: an upstream is asked over the network that there is"
        )
    results = asyncio.run(_measure(settings, ways, arguments.link))
    if arguments.json:
        options.print_json({"ways": results})
    else:
        make_console().print(_table(results))
    return 0


def _table(results: dict[str, dict[str, Any]]) -> Table:
    """The figures of each way, in a row."""
    table = Table("draft", *RATES, "first token ms", "same text")
    for way, figures in results.items():
        same = "yes" if figures["same"] else "NO"
        table.add_row(way, *cells(figures), f"{figures['first_token_ms']:.0f}", same)
    return table


def _link_to(address: str, profile: str) -> LinkProxy:
    """Returns the emulated link of this name to a verifier."""
    parts = urlsplit(address)
    if parts.scheme != "ws" or parts.hostname is None:
        raise UsageError("--link works with ws:// addresses only")
    return LinkProxy(parts.hostname, parts.port or 80, PROFILES[profile])


async def _measure(
    settings: ClientSettings, ways: list[str], profile: str | None
) -> dict[str, dict[str, Any]]:
    """Returns the figures of each way of drafting, by its name. All ways answer the same prompts
    over the same link, one after another; `profile` names the link to emulate."""
    is_toy_target = settings.verifier == "local" and not settings.upstream
    if is_toy_target:
        check_bundle(settings.bundle)
    device = Device.of(settings)
    results: dict[str, dict[str, Any]] = {}
    reference: list[list[int]] | None = None
    async with contextlib.AsyncExitStack() as stack:
        address = settings.verifier
        if is_toy_target:
            address = await stack.enter_async_context(local_verifier())
        if profile is not None:
            # The emulated link listens itself: asked through it, a verifier that is not there closes
            # a connection at an address that nobody has given.
            await ask_all(settings, device, [])
            link = await stack.enter_async_context(_link_to(address, profile))
            address = link.url
        if settings.upstream or settings.verifier == "local":
            patient = max(settings.connect_seconds, _OWN_VERIFIER_SECONDS)
            settings = dataclasses.replace(settings, connect_seconds=patient)
        if address != settings.verifier:
            settings = dataclasses.replace(settings, verifier=address)
        await ask_all(settings, device, _PROMPTS[:1])  # warm both ends up
        for way in ways:
            answers = await ask_all(settings, device, _PROMPTS, draft=way)
            ids = [answer.ids for answer in answers]
            reference = reference or ids
            results[way] = {**rates(answers), "same": ids == reference}
            if settings.upstream:  # what passes over the network is not seen from here
                results[way]["kilobytes"] = None
    return results
