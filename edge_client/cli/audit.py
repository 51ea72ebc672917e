"""`edge-client audit`: is the text really the target's own?"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

import msgspec
from rich.console import Console

from edge_client.cli import options
from edge_client.client import EdgeClient
from edge_client.compare import Answer, ask_all, first_difference
from edge_client.device import Device
from edge_client.settings import ClientSettings
from moa.errors import UsageError


def add(commands: Any) -> None:
    """The subcommand's flags."""
    command = commands.add_parser(
        "audit",
        help="compare with the target alone",
        description="Answer a prompt twice, with drafts and token by token by the target alone, and compare.",
    )
    command.add_argument("prompt", nargs="*", help="the prompt; without it, or as -, standard input is read")
    command.add_argument("--raw", action="store_true", help="no chat template: go on from the text as it is")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_connection(command)
    options.add_generation(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Audit a prompt; exit code 1 when the texts differ."""
    prompt = options.read_prompt(arguments.prompt)
    settings = options.settings_from(arguments)
    if not settings.verifier:
        raise UsageError("an audit needs the target", hint="pass --verifier ADDRESS, or --verifier local")
    device = Device.load(settings.bundle, variant=settings.variant, threads=settings.threads)
    drafted, alone = asyncio.run(_both(settings, device, prompt, raw=arguments.raw))
    at = first_difference(drafted.ids, alone.ids)
    if arguments.json:
        report = {"identical": at is None, "first_difference": at, "drafted": drafted.ids, "target": alone.ids}
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        return int(at is not None)
    _show(Console(highlight=False), device, drafted, alone, at)
    return int(at is not None)


async def _both(settings: ClientSettings, device: Device, prompt: str, *, raw: bool) -> tuple[Answer, Answer]:
    ids = EdgeClient(settings, device=device).encode(prompt, raw=raw)
    (drafted,) = await ask_all(settings, device, [ids])
    (alone,) = await ask_all(settings, device, [ids], draft="single", sync="off")
    return drafted, alone


def _show(console: Console, device: Device, drafted: Answer, alone: Answer, at: int | None) -> None:
    console.print(f"with drafts   {len(drafted.ids)} tokens in {drafted.stats['calls']} calls")
    console.print(f"target alone  {len(alone.ids)} tokens in {alone.stats['calls']} calls")
    if at is None:
        console.print("identical     yes", style="green")
        return
    console.print(f"identical     no: they part at token {at}", style="red")
    for name, answer in (("with drafts", drafted), ("target", alone)):
        token = answer.ids[at : at + 1]
        console.print(f"  {name:12} {token} {device.codec.decode(token)!r}" if token else f"  {name:12} ended")
    console.print(
        "-> in low precision two tokens that are nearly tied may swap: serve with --dtype float32 to exclude it"
    )
