"""The folder of pulled bundles, by name."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from moa.bundle import Bundle
from moa.errors import BundleError, UsageError
from moa.process.user_folders import NoHomeError, data_folder, expanded

EMBEDDED = "embedded"
"""The name of the bundle that is part of the installation."""
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
PARTIAL = ".partial"


def store() -> Path:
    """The folder of all pulled bundles."""
    return data_folder() / "bundles"


def _pulled(name: str) -> Path | None:
    """The folder of a pulled bundle, if there is one of this name."""
    with contextlib.suppress(NoHomeError):
        folder = store() / name
        if _NAME.fullmatch(name) and folder.is_dir():
            return folder
    return None


def check_name(name: str) -> str:
    """Return a name for a bundle as it is; a `UsageError` for what cannot be one."""
    if not _NAME.fullmatch(name) or name.endswith(PARTIAL) or name == EMBEDDED:
        raise UsageError(
            f"{name[:64]!r} is no name for a bundle", hint="--name: up to 64 of A-Z a-z 0-9 . _ -"
        )
    return name


def locate(name: str) -> str:
    """The folder that `name` stands for: a path, or a bundle that was pulled. Empty is the embedded
    one."""
    if name in ("", EMBEDDED):
        return ""
    path = expanded(name)
    if not path.is_dir() and (pulled := _pulled(name)) is not None:
        return str(pulled)
    return str(path)


def installed() -> Iterator[tuple[str, Bundle | BundleError]]:
    """Yield each pulled bundle with its name, or the error why it cannot be opened."""
    try:
        folders = sorted(store().iterdir())
    except (OSError, NoHomeError):
        return
    for folder in folders:
        if folder.is_dir() and _NAME.fullmatch(folder.name) and not folder.name.endswith(PARTIAL):
            try:
                yield folder.name, Bundle.open(folder)
            except BundleError as error:
                yield folder.name, error
