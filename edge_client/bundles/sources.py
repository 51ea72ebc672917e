"""Sources of bundles: a folder, an archive, an address, a hub id. Each only provides files by name.

The manifest decides which files are read; it is checked before the first of them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Protocol
from urllib.parse import urljoin, urlsplit

from edge_client.bundles.download import open_url
from moa.bundle import MANIFEST
from moa.errors import BundleError, UsageError

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
_MOST_MEMBERS = 10_000
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


class BundleSource(Protocol):
    """Files by the names that a manifest uses."""

    def open(self, name: str, start: int = 0) -> contextlib.AbstractContextManager[tuple[IO[bytes], int]]:
        """The file from about byte `start` on, and the byte at which it actually begins."""

    def close(self) -> None:
        """End of reading."""


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

    def close(self) -> None:
        """Nothing is open between two files."""


class Web:
    """A folder on an https server, for example a hub's repository."""

    def __init__(self, url: str, token: str = "") -> None:
        self._url, self._token = url, token

    @contextlib.contextmanager
    def open(self, name: str, start: int = 0) -> Iterator[tuple[IO[bytes], int]]:
        """A file, from where an earlier attempt ended if the server supports ranges."""
        with open_url(urljoin(self._url, name), start, self._token) as (file, begins):
            yield file, begins

    def close(self) -> None:
        """Nothing is open between two files."""


class Archive:
    """A tar or zip file. Only regular members that the manifest names are read; nothing is extracted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # Stays open until `close`.
            zipped = zipfile.is_zipfile(path)
            self._archive = zipfile.ZipFile(path) if zipped else tarfile.open(path)  # noqa: SIM115
            if isinstance(self._archive, zipfile.ZipFile):
                names = [info.filename for info in self._archive.infolist() if not info.is_dir()]
            else:
                names = [member.name for member in itertools.islice(self._archive, _MOST_MEMBERS) if member.isreg()]
        except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError, ValueError) as error:
            raise BundleError(f"{path} is not an archive: {error}") from None
        manifests = [name for name in names if PurePosixPath(name).name == MANIFEST]
        if len(manifests) != 1:
            self.close()
            raise BundleError(f"{path} holds {len(manifests) or 'no'} bundles: there must be one {MANIFEST}")
        self._root = manifests[0].removesuffix(MANIFEST)

    def close(self) -> None:
        """Close the archive."""
        self._archive.close()

    @contextlib.contextmanager
    def open(self, name: str, start: int = 0) -> Iterator[tuple[IO[bytes], int]]:
        """A member, always from its first byte."""
        file: IO[bytes] | None = None
        try:
            if isinstance(self._archive, zipfile.ZipFile):
                file = self._archive.open(self._root + name)
            else:
                member = self._archive.getmember(self._root + name)
                file = self._archive.extractfile(member) if member.isreg() else None
        except KeyError:
            pass
        if file is None:
            raise BundleError(f"{self._path} has no file {name}")
        with file:
            yield file, 0


def find(text: str) -> BundleSource | str:
    """The source that `text` names; the address of an archive, which must be downloaded first, is returned as it is."""
    path = Path(text).expanduser()
    if path.is_dir():
        return Folder(path)
    if path.is_file():
        return Archive(path)
    if "://" in text:
        parts = urlsplit(text)
        local = parts.hostname in ("127.0.0.1", "::1", "localhost")
        if parts.scheme != "https" and not (parts.scheme == "http" and local):
            raise UsageError(
                f"bundles are pulled over https, not {parts.scheme}", hint="or copy it here, and pull that"
            )
        if parts.path.endswith(ARCHIVES):
            return text
        return Web(text.removesuffix(MANIFEST).rstrip("/") + "/")
    if _HUB_ID.fullmatch(text):
        hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        return Web(f"{hub}/{text}/resolve/main/", os.environ.get("HF_TOKEN", ""))
    raise UsageError(
        f"no bundle at {text}", hint="a folder, an archive, an https address, or a hub id like NAME/BUNDLE"
    )
