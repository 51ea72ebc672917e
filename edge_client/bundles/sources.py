"""Sources of bundles: a folder, an address, a hub id. Each only provides files by name.

The manifest decides which files are read; it is checked before the first of them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol
from urllib.parse import urljoin, urlsplit

from edge_client.bundles.download import may_be_read, open_url
from moa.bundle import MANIFEST
from moa.errors import BundleError, UsageError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


class BundleSource(Protocol):
    """Files by the names that a manifest uses."""

    def open(self, name: str, start: int = 0) -> contextlib.AbstractContextManager[tuple[IO[bytes], int]]:
        """The file from about byte `start` on, and the byte at which it actually begins."""


class Folder:
    """A folder on this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextlib.contextmanager
    def open(self, name: str, start: int = 0) -> Iterator[tuple[IO[bytes], int]]:
        """A regular file in the folder, not reached through a link that leads out of it."""
        path = self._path / name
        if not path.resolve().is_relative_to(self._path.resolve()) or not path.is_file():
            raise BundleError(f"{self._path} has no file {name}")
        with path.open("rb") as file:
            file.seek(start)
            yield file, start


class Web:
    """A folder on an https server, for example a hub's repository."""

    def __init__(self, url: str, token: str = "") -> None:
        self._url, self._token = url, token

    @contextlib.contextmanager
    def open(self, name: str, start: int = 0) -> Iterator[tuple[IO[bytes], int]]:
        """A file, from where an earlier attempt ended if the server supports ranges."""
        with open_url(urljoin(self._url, name), start, self._token) as (file, begins):
            yield file, begins


def find(text: str) -> BundleSource:
    """The source that `text` names."""
    path = Path(text).expanduser()
    if path.is_dir():
        return Folder(path)
    if path.is_file():
        raise UsageError(f"no bundle at {text}: it is a file", hint="unpack an archive, and pull the folder")
    if "://" in text:
        if not may_be_read(text):
            raise UsageError(
                f"bundles are pulled over https, not {urlsplit(text).scheme}", hint="or copy it here, and pull that"
            )
        return Web(text.removesuffix(MANIFEST).rstrip("/") + "/")
    if _HUB_ID.fullmatch(text):
        hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        return Web(f"{hub}/{text}/resolve/main/", os.environ.get("HF_TOKEN", ""))
    raise UsageError(f"no bundle at {text}", hint="a folder, an https address, or a hub id like NAME/BUNDLE")
