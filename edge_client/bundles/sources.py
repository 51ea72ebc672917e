"""Sources of bundles: a folder, an address, a hub id. Each only provides files by name.

The manifest decides which files are read; it is checked before the first of them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import IO
from urllib.parse import urljoin, urlsplit

from edge_client.bundles.download import may_be_read, open_url
from moa.bundle import MANIFEST
from moa.errors import BundleError, UsageError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


BundleSource = Callable[[str, int], AbstractContextManager[tuple[IO[bytes], int]]]
"""Opens a file by the name that a manifest uses: from about a byte on, with the byte at which it actually begins."""


@contextlib.contextmanager
def _in_folder(folder: Path, name: str, start: int) -> Iterator[tuple[IO[bytes], int]]:
    """A regular file in a folder on this machine, not reached through a link that leads out of it."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
        raise BundleError(f"{folder} has no file {name}")
    with path.open("rb") as file:
        file.seek(start)
        yield file, start


def _on_web(url: str, token: str = "") -> BundleSource:
    """The files below an address, for example a hub's repository."""
    return lambda name, start: open_url(urljoin(url, name), start, token)


def find(text: str) -> BundleSource:
    """The source that `text` names."""
    path = Path(text).expanduser()
    if path.is_dir():
        return partial(_in_folder, path)
    if path.is_file():
        raise UsageError(f"no bundle at {text}: it is a file", hint="unpack an archive, and pull the folder")
    if "://" in text:
        if not may_be_read(text):
            raise UsageError(
                f"bundles are pulled over https, not {urlsplit(text).scheme}", hint="or copy it here, and pull that"
            )
        return _on_web(text.removesuffix(MANIFEST).rstrip("/") + "/")
    if _HUB_ID.fullmatch(text):
        hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        return _on_web(f"{hub}/{text}/resolve/main/", os.environ.get("HF_TOKEN", ""))
    raise UsageError(f"no bundle at {text}", hint="a folder, an https address, or a hub id like NAME/BUNDLE")
