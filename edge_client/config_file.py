"""Edits the settings file without changing its other lines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from edge_client.settings import read_config_file
from moa.errors import ConfigError
from moa.process.files import write_whole


def remember(path: Path, changes: Mapping[str, str | None]) -> None:
    """Set each of the `changes`, or remove it if None; comments and all other lines stay."""
    before = read_config_file(path)
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    for name, value in changes.items():
        line = "" if value is None else f"{name} = {_quoted(value)}\n"
        kept = [old for old in text.splitlines(keepends=True) if not re.match(rf"[ \t]*{name}[ \t]*=", old)]
        text = "".join(kept)
        if line:
            text += ("" if not text or text.endswith("\n") else "\n") + line
    wanted = {name: value for name, value in {**before, **changes}.items() if value is not None}
    path.parent.mkdir(parents=True, exist_ok=True)

    def check(written: Path) -> None:
        if read_config_file(written) != wanted:  # a value over several lines is not supported
            raise ConfigError(f"{path} cannot be changed from here", hint=f"set {', '.join(changes)} in an editor")

    write_whole(path, text.encode(), check)


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
