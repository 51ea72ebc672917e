"""Sources of bundles: a folder, an archive, an address, a hub id. Each only provides files by name.

The manifest decides which files are read; it is checked before the first of them.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import lzma
import os
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Protocol
from urllib.parse import urljoin, urlsplit

from edge_client.bundles.download import may_be_read, open_url
from moa.bundle import MANIFEST
from moa.errors import BundleError, UsageError
from moa.safe_text import safe_line

ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")
_MOST_MEMBERS = 10_000
_LONGEST_HEADER = 2**20
_EXTENDED = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, gzip.BadGzipFile, EOFError)
"""What the libraries raise for damaged archives while they are read."""
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


class _Member(tarfile.TarInfo):
    """A member whose extended headers are bounded: the library reads them whole, however long they are."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _EXTENDED and self.size > _LONGEST_HEADER:
            raise BundleError(f"a header of {self.size} bytes")
        if self.type == tarfile.GNUTYPE_SPARSE:
            raise BundleError("it has sparse files")
        return super()._proc_member(archive)  # type: ignore[misc, no-any-return]

    def _proc_gnusparse_10(self, *_: object) -> None:
        raise BundleError("it has sparse files")


class Archive:
    """A tar or zip file. Only regular members that the manifest names are read; nothing is extracted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # Stays open until `close`.
            zipped = zipfile.is_zipfile(path)
            self._archive = zipfile.ZipFile(path) if zipped else tarfile.open(path, tarinfo=_Member)  # noqa: SIM115
            if isinstance(self._archive, zipfile.ZipFile):
                names = [info.filename for info in self._archive.infolist() if not info.is_dir()]
            else:
                names = [member.name for member in itertools.islice(self._archive, _MOST_MEMBERS) if member.isreg()]
        except (*_BROKEN, BundleError, OSError, ValueError, NotImplementedError, RecursionError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0].removesuffix(":")
            raise BundleError(f"{path} is not an archive: {safe_line(first)}") from None
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
        try:
            with self._member(name) as file:
                yield file, 0
        except _BROKEN as error:
            raise self._unreadable(name, error) from None
        except OSError as error:
            if error.errno is not None:  # of the disk, not of the archive
                raise
            raise self._unreadable(name, error) from None

    def _member(self, name: str) -> IO[bytes]:
        file: IO[bytes] | None = None
        try:
            if isinstance(self._archive, zipfile.ZipFile):
                return self._archive.open(self._root + name)
            member = self._archive.getmember(self._root + name)
            file = self._archive.extractfile(member) if member.isreg() else None
        except KeyError:
            pass
        except (RuntimeError, NotImplementedError) as error:  # encrypted, or packed in an unknown way
            raise self._unreadable(name, error) from None
        if file is None:
            raise BundleError(f"{self._path} has no file {name}")
        return file

    def _unreadable(self, name: str, error: Exception) -> BundleError:
        return BundleError(f"{name} of {self._path} cannot be read: {safe_line(str(error))}")


def find(text: str) -> BundleSource | str:
    """The source that `text` names; the address of an archive, which must be downloaded first, is returned as it is."""
    path = Path(text).expanduser()
    if path.is_dir():
        return Folder(path)
    if path.is_file():
        return Archive(path)
    if "://" in text:
        parts = urlsplit(text)
        if not may_be_read(text):
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
