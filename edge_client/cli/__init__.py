"""The `edge-client` command: one module for each subcommand, imported when it is used, for a fast
start."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Sequence
from importlib import import_module

from moa.cli.command_line import CommandParser
from moa.errors import run_cli
from moa.process import watch
from moa.version import running_version

_COMMANDS = {
    "generate": "answer one prompt",
    "chat": "talk",
    "serve": "serve an OpenAI-compatible endpoint and a chat page",
    "page": "write the device as a web app",
    "pull": "get a bundle",
    "list": "list the bundles on this device",
    "use": "set the default bundle and verifier",
    "demo": "show drafting, an outage and recovery on one machine",
    "bench": "measure ways of decoding",
    "audit": "compare with the target alone",
    "doctor": "check this device",
    "inspect": "show a bundle",
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command of these words, by default those of the command line, and exit with its
    code."""
    words = sys.argv[1:] if argv is None else argv

    def body() -> int:
        options = parser(words).parse_args(words)
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)

    watch.end_by_ctrl_c()
    code = run_cli("edge-client", body, extra="verifier", stdout_needed=True)
    if watch.is_busy():  # the interpreter would wait for the end of a step
        os._exit(code)
    sys.exit(code)


def parser(words: Collection[str] = tuple(_COMMANDS)) -> argparse.ArgumentParser:
    """Returns the parser of the command line. Only subcommands that are among the `words` get their
    flags, because each is a module that takes time to import."""
    top = CommandParser(
        prog="edge-client",
        description="A large language model that keeps answering when the network does not.",
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {running_version()}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    for name, says in _COMMANDS.items():
        command = commands.add_parser(name, help=says)
        if name in words:
            module = import_module(f"edge_client.cli.{name}")
            module.add(command)
            command.set_defaults(run=module.run)
    return top
