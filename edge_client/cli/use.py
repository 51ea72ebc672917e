"""`edge-client use`: remember a bundle, and a verifier or an upstream."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edge_client.bundles.store import EMBEDDED, locate
from edge_client.cli import options
from edge_client.settings import ClientSettings, config_file, read_config_file
from moa.bundle import Bundle
from moa.errors import ConfigError, UsageError
from moa.process.files import write_whole
from moa.safe_text import safe_line


def add(command: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    command.description = (
        "Remember what to use where no flag says otherwise, in the settings file. Alone: show it."
    )
    command.add_argument(
        "name", nargs="?", metavar="NAME_OR_DIR", help="the same as --bundle NAME_OR_DIR"
    )
    command.add_argument(
        "--bundle", metavar="NAME_OR_DIR", help="a pulled bundle, a folder, or `embedded`"
    )
    command.add_argument(
        "--verifier", metavar="ADDRESS", help="ws://, wss:// or `local`; empty for none"
    )
    command.add_argument(
        "--upstream",
        metavar="URL",
        help="an engine's address in place of a verifier; empty for none; all else about it is set"
        " in the file",
    )
    options.add_config(command)


def run(arguments: argparse.Namespace) -> int:
    """Write what is to be used into the settings file, and print what it says now."""
    path = config_file(arguments.config)
    changes: dict[str, str | None] = {}
    bundle = _bundle_of(arguments)
    if bundle is not None:
        folder = locate(bundle)
        if folder:
            Bundle.open(folder)
        # A pulled bundle is remembered by its name, any other folder by its path.
        name = bundle if Path(folder).name == bundle else str(Path(folder).absolute())
        changes["bundle"] = None if bundle in ("", EMBEDDED) else name
    changes |= _who_verifies(arguments, read_config_file(path))
    if changes:
        remember(path, changes)
    now = read_config_file(path)
    print(f"bundle    {safe_line(str(now.get('bundle') or EMBEDDED))}")
    if now.get("upstream"):
        print(f"upstream  {safe_line(str(now['upstream']))}")
    else:
        print(f"verifier  {safe_line(str(now.get('verifier') or 'none'))}")
    print(f"in        {path}")
    return 0


def _who_verifies(
    arguments: argparse.Namespace, before: Mapping[str, Any]
) -> dict[str, str | None]:
    """Returns what the command line changes of verifier and upstream. An error for an invalid
    address, and for settings that do not go together: no command would take that file."""
    changes: dict[str, str | None] = {}
    for name in ("verifier", "upstream"):
        if (address := getattr(arguments, name)) is not None:
            changes[name] = address or None
    if arguments.upstream and not arguments.verifier:
        changes["verifier"] = None  # it takes its place
    if changes:
        wanted = {**before, **changes}
        names = [name for name in wanted if name == "verifier" or name.startswith("upstream")]
        ClientSettings(**{name: wanted[name] for name in names if wanted[name] is not None})
    return changes


def _bundle_of(arguments: argparse.Namespace) -> str | None:
    """Returns the bundle that the command line names, with --bundle or without a flag; None if it
    names none. An error if it names two."""
    bare: str | None = arguments.name
    flag: str | None = arguments.bundle
    if bare is None:
        return flag
    if flag is not None:
        raise UsageError(
            f"two bundles: {safe_line(bare, 60)} and --bundle {safe_line(flag, 60)}",
            hint="name one",
        )
    if "://" in bare:
        raise UsageError(
            f"{safe_line(bare, 60)} is an address", hint=f"--verifier {safe_line(bare, 60)}"
        )
    return bare


def remember(path: Path, changes: Mapping[str, str | None]) -> None:
    """Set each of these settings in the file, or remove it if its value is None; comments and all
    other lines stay."""
    before = read_config_file(path)
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for name, value in changes.items():
        line = "" if value is None else f"{name} = {json.dumps(value, ensure_ascii=False)}\n"
        kept = [
            old
            for old in text.splitlines(keepends=True)
            if not re.match(rf"[ \t]*{name}[ \t]*=", old)
        ]
        text = "".join(kept)
        if line:
            text += ("" if not text or text.endswith("\n") else "\n") + line
    wanted = {name: value for name, value in {**before, **changes}.items() if value is not None}
    path.parent.mkdir(parents=True, exist_ok=True)

    def check(written: Path) -> None:
        if read_config_file(written) != wanted:  # a value over several lines is not supported
            raise ConfigError(
                f"{path} cannot be changed from here", hint=f"set {', '.join(changes)} in an editor"
            )

    write_whole(path, text.encode(), check)
