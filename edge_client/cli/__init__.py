"""The `edge-client` command: one module for each subcommand, loaded when it is used."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from edge_client.cli import audit, bench, chat, demo, doctor, generate, inspect
from moa import __version__
from moa.errors import run_cli


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    options = parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = options.run
    sys.exit(run_cli("edge-client", lambda: run(options)))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="edge-client",
        description="A large language model that keeps answering when the network does not.",
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for module in (generate, chat, demo, bench, audit, doctor, inspect):
        module.add(commands)
    return top
