"""`edge-client doctor`: checks the installation and says what to do about problems."""

from __future__ import annotations

import argparse
import asyncio
import sys

import msgspec
from rich.console import Console
from rich.text import Text

from edge_client.cli import options
from edge_client.screen.console import make_console
from edge_client.settings import ClientSettings
from edge_client.tools.doctor import Check, examine
from moa.safe_text import safe_line

_STYLES = {"ok": "green", "warning": "yellow", "failed": "red"}


def add(command: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    command.description = "Check bundle, runtime, speed, verifier, and say what to do."
    command.add_argument("--json", action="store_true", help="print the findings as JSON")
    options.add_connection(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run every check; exit code 1 when one failed."""
    checks = asyncio.run(_examine(options.settings_from(arguments), make_console(), quiet=arguments.json))
    if arguments.json:
        sys.stdout.buffer.write(msgspec.json.encode([msgspec.to_builtins(check) for check in checks]) + b"\n")
    return int(any(check.state == "failed" for check in checks))


async def _examine(settings: ClientSettings, console: Console, *, quiet: bool) -> list[Check]:
    checks = []
    async for check in examine(settings):
        checks.append(check)
        if not quiet:
            console.print(
                Text(f"{check.state:8}", style=_STYLES[check.state])
                + Text(safe_line(f"{check.name:11}{check.finding}"))
            )
            if check.advice and check.state != "ok":
                console.print(Text(safe_line(f"{'':19}-> {check.advice}"), style="bold"))
    return checks
