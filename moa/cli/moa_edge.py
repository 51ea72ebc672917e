"""`moa-edge`: one command that lists the programs, starts them, and completes them in a shell. No
torch.

The programs are in packages that import this one, so they are named by strings and imported when
one is started.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from moa.cli import up
from moa.cli.command_line import CommandParser
from moa.cli.working import working
from moa.errors import how_to_install, run_cli
from moa.version import running_version

SHELLS = ("bash", "zsh", "fish")
MAIN_MODULES = {"verifier": "torch", "train": "torch", "export": "onnxscript"}
"""A module of each extra, which tells whether it is installed."""


@dataclass(frozen=True, slots=True)
class Program:
    """One program: where its parser and its entry point are, and which extra it needs."""

    name: str
    parser: str
    main: str
    says: str
    extra: str = ""

    @property
    def short(self) -> str:
        """Its name as a subcommand of `moa-edge`."""
        return self.name.rpartition("-")[2]


PROGRAMS = (
    Program(
        "edge-client",
        "edge_client.cli:parser",
        "edge_client.cli:main",
        "the device: generate, chat, demo, serve",
    ),
    Program(
        "cloud-verifier",
        "cloud_verifier.cli:parser",
        "cloud_verifier.cli:main",
        "the server",
        "verifier",
    ),
    Program(
        "moa-train",
        "moa.training.options:parser",
        "moa.training.cli:main",
        "train a drafter",
        "train",
    ),
    Program(
        "moa-export",
        "export.cli:parser",
        "export.cli:main",
        "make a bundle of it for the device",
        "export",
    ),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `moa-edge`: run one of the programs, start everything (`up`), or print help or
    shell completion. Ends the process with the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for program in PROGRAMS:
        if arguments and arguments[0] in (program.short, program.name):
            sys.exit(start(program, arguments[1:]))
    installed = [extra for extra, module in MAIN_MODULES.items() if find_spec(module) is not None]
    top = parser(installed)
    options = top.parse_args(arguments)
    if options.command == "up":
        sys.exit(up.run(options))

    def show() -> None:
        if options.command == "completion":
            print(completion(options.shell).rstrip())
        else:
            print(top.format_help().rstrip())

    sys.exit(run_cli("moa-edge", show, stdout_needed=True))


def parser(installed: Collection[str] = ()) -> argparse.ArgumentParser:
    """The command line of `moa-edge` itself; it says how to install the extras that are not among
    the `installed`."""
    top = CommandParser(
        prog="moa-edge",
        description="A large language model that keeps answering when the network does not.",
        epilog="Each has a --help of its own. Start with: moa-edge up (everything on this machine), "
        "edge-client chat --offline (this device alone), or edge-client demo (with an emulated link)",
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {running_version()}")
    top.commands_elsewhere = _commands_of_programs
    commands = top.add_subparsers(dest="command", metavar="PROGRAM")
    for program in PROGRAMS:
        missing = program.extra and program.extra not in installed
        needs = f" ({how_to_install(program.extra)})" if missing else ""
        commands.add_parser(
            program.short, help=f"{program.name}: {program.says}{needs}", add_help=False
        )
    up.add(
        commands.add_parser(
            "up",
            help="everything on this machine: verifier, endpoint and chat page",
            description=up.DESCRIPTION,
        )
    )
    complete = commands.add_parser(
        "completion",
        help="what makes a shell complete all of these",
        description='In ~/.bashrc: eval "$(moa-edge completion bash)"; in fish: moa-edge completion fish | source',
    )
    complete.add_argument("shell", choices=SHELLS, help="your shell")
    return top


def _commands_of_programs() -> dict[str, str]:
    """The commands of all programs by name, with what starts each: two programs may have one of the
    same name."""
    found: dict[str, str] = {}
    for program in PROGRAMS:
        for action in _load(program.parser)()._actions:
            if not isinstance(action, argparse._SubParsersAction):
                continue
            for name in action.choices:
                call = f"{program.name} {name}"
                found[name] = f"{found[name]} or {call}" if name in found else call
    return found


def train() -> None:
    """Entry point of `moa-train`, whose module cannot be imported where torch is missing."""
    sys.exit(start(PROGRAMS[2], sys.argv[1:]))


def start(program: Program, arguments: Sequence[str]) -> int:
    """Run one of the programs with these arguments, and return its exit code. Where a package that
    it needs is missing, that is one line, which says how to install it."""

    def run() -> int:
        if program.extra:
            # The parser alone first: it imports little, and `--help` and mistakes end here.
            _load(program.parser)().parse_args(arguments)
        # The libraries of some take half a minute to import on a busy machine.
        with working(program.name, "importing the libraries", at_once=False):
            main = _load(program.main)
        return int(main(arguments) or 0)

    return run_cli(program.name, run, extra=program.extra)


def completion(shell: str) -> str:
    """A script that completes every program of ours."""
    import shtab

    parsers = [parser()]
    for program in PROGRAMS:
        parsers.append(_load(program.parser)())
    return "\n".join(shtab.complete(each, shell) for each in parsers)


def _load(where: str) -> Any:
    """What `module:name` names."""
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)
