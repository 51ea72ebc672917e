"""`edge-client pull`: get a bundle and keep it."""

from __future__ import annotations

import argparse

from edge_client.bundles.pull import pull
from edge_client.cli.options import say


def add(command: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    command.description = (
        "Get a bundle, check every file's hash, and keep it by name. Repeat to continue a download."
    )
    command.add_argument(
        "source", help="a folder, its https address, or a hub id (HF_ENDPOINT, HF_TOKEN)"
    )
    command.add_argument(
        "--name", default="", help="its name here (default: the last part of the source)"
    )
    command.add_argument("--force", action="store_true", help="replace a bundle of this name")


def run(arguments: argparse.Namespace) -> int:
    """Pull a bundle."""
    bundle = pull(arguments.source, name=arguments.name, force=arguments.force, say=say)
    print(bundle.folder.name)
    say(f"--bundle {bundle.folder.name} uses it, `edge-client use {bundle.folder.name}` always")
    return 0
