"""Pull a bundle into the store, from a folder, an https address or a hub id.

The manifest decides which files are read; it is checked before the first of them, and each is
hashed. A download resumes an earlier attempt, and does not send a token to another host.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import IO, Any
from urllib.parse import urljoin, urlsplit

from edge_client.bundles.store import PARTIAL, check_name, store
from moa import __version__
from moa.api.access import is_loopback
from moa.bundle import MANIFEST, Bundle, read_manifest, sha256
from moa.errors import BundleError, LinkError, MoaError, UsageError
from moa.manifest import FileEntry
from moa.process.files import named
from moa.process.user_folders import expanded
from moa.safe_text import safe_line

Notify = Callable[[str], None]
_LARGEST_MANIFEST = 4 * 2**20
_CHUNK = 2**20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_TIMEOUT_SECONDS = 60.0
_LATER = (http.client.REQUEST_TIMEOUT, http.client.TOO_MANY_REQUESTS)
_PRIVATE = (http.client.UNAUTHORIZED, http.client.FORBIDDEN)
_AGAIN = "run the same command again to continue"
_RANGE = re.compile(r"bytes (\d+)-")

BundleSource = Callable[[str, int], AbstractContextManager[tuple[IO[bytes], int]]]
"""Opens a file by the name that a manifest uses: from about a byte on, with the byte at which it
actually begins."""


def pull(
    source: str, *, name: str = "", force: bool = False, say: Notify = lambda line: None
) -> Bundle:
    """Download a bundle from `source` and store it as `name`."""
    name = check_name(name or _name_of(source))
    place = store() / name
    partial = store() / (name + PARTIAL)
    if place.exists() and not force:
        raise UsageError(
            f"there is a bundle {name} already", hint="--force replaces it, --name keeps both"
        )
    try:
        with named(partial):
            _download(source, partial, say)
    except BundleError:
        shutil.rmtree(partial, ignore_errors=True)  # what was refused is not gone on with
        raise
    except BaseException:
        with contextlib.suppress(OSError):
            # If nothing has come yet; the rest is kept, and the next try goes on from there
            partial.rmdir()
        raise
    if place.exists():
        shutil.rmtree(place)
    partial.rename(place)
    return Bundle.open(place)


def _download(source: str, partial: Path, say: Notify) -> None:
    opened = find(source)
    partial.mkdir(parents=True, exist_ok=True)
    with opened(MANIFEST, 0) as (file, _):
        (partial / MANIFEST).write_bytes(file.read(_LARGEST_MANIFEST + 1))
    manifest = read_manifest(partial)
    needed = sum(entry.size for entry in manifest.files.values())
    if shutil.disk_usage(partial).free < needed:
        raise UsageError(f"no room in {partial.parent}: {needed / 1e6:.0f} MB are needed")
    for path, entry in manifest.files.items():
        _pull_file(opened, path, entry, partial / path, say)
    Bundle.open(partial).verify()


def _name_of(source: str) -> str:
    last = (
        (urlsplit(source).path if "://" in source else source)
        .rstrip("/")
        .removesuffix("/" + MANIFEST)
    )
    return last.rpartition("/")[2]


def _pull_file(source: BundleSource, name: str, entry: FileEntry, path: Path, say: Notify) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    have = path.stat().st_size if path.is_file() and not path.is_symlink() else 0
    if have == entry.size and sha256(path) == entry.sha256:
        return
    say(
        f"{name}, {entry.size / 1e6:.1f} MB"
        + (f", from {have / 1e6:.1f} MB on" if 0 < have < entry.size else "")
    )
    with source(name, have if have < entry.size else 0) as (file, begins):
        _copy(file, path, begins, entry.size)
    if path.stat().st_size < entry.size:
        raise LinkError(f"{name} ends early", hint="run the same command again to continue")
    if path.stat().st_size > entry.size or sha256(path) != entry.sha256:
        raise BundleError(
            f"{name} does not match the manifest", hint="pull again; else its source is damaged"
        )


def _copy(file: IO[bytes], path: Path, start: int, size: int) -> None:
    """Write from byte `start` on; refuse more than `size` bytes."""
    with path.open("r+b" if start else "wb") as out:
        out.seek(start)
        out.truncate()
        left = size - start + 1  # one byte more shows that there is too much
        while left > 0 and (chunk := file.read(min(_CHUNK, left))):
            out.write(chunk)
            left -= len(chunk)
        out.flush()
        os.fsync(out.fileno())


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
    path = expanded(text)
    if path.is_dir():
        return partial(_in_folder, path)
    if path.is_file():
        raise UsageError(
            f"no bundle at {text}: it is a file", hint="unpack an archive, and pull the folder"
        )
    if "://" in text:
        if not may_be_read(text):
            raise UsageError(
                f"bundles are pulled over https, not {urlsplit(text).scheme}",
                hint="or copy it here, and pull that",
            )
        return _on_web(text.removesuffix(MANIFEST).rstrip("/") + "/")
    if _HUB_ID.fullmatch(text):
        hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        return _on_web(f"{hub}/{text}/resolve/main/", os.environ.get("HF_TOKEN", ""))
    raise UsageError(
        f"no bundle at {text}", hint="a folder, an https address, or a hub id like NAME/BUNDLE"
    )


def may_be_read(url: str) -> str:
    """The scheme of an address that bundles may come from: https, or http on this machine; empty
    for others."""
    try:
        parts = urlsplit(url)
        local = is_loopback(parts.hostname or "")
    except ValueError:
        return ""
    return parts.scheme if parts.scheme == "https" or (parts.scheme == "http" and local) else ""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to other hosts, as hubs need, but never from https to http, and never with
    the token."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        """The redirected request."""
        if not may_be_read(newurl) or (may_be_read(req.full_url) == "https" != may_be_read(newurl)):
            raise BundleError(f"{safe_line(req.full_url)} leads away from https")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            request.remove_header("Authorization")
        return request


@contextlib.contextmanager
def open_url(url: str, start: int = 0, token: str = "") -> Iterator[tuple[IO[bytes], int]]:
    """The content of `url` from about byte `start` on, and the byte at which it actually begins."""
    headers = {"User-Agent": f"moa-edge/{__version__}", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    if token:
        headers["Authorization"] = f"Bearer {token}"
    opener = urllib.request.build_opener(_Redirects)
    try:
        with opener.open(
            urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_SECONDS
        ) as answer:
            begins = 0
            if answer.status == http.client.PARTIAL_CONTENT:
                found = _RANGE.match(answer.headers.get("Content-Range", ""))
                begins = int(found[1]) if found else -1
            if begins not in (0, start):
                raise BundleError(f"{url} answers with another part than was asked for")
            yield answer, begins
    except urllib.error.HTTPError as error:
        error.close()
        if start and error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            with open_url(url, 0, token) as whole:  # the local part is no beginning of this file
                yield whole
            return
        says = f"{url} answers {error.code} {safe_line(error.reason)}"
        if error.code in _LATER or error.code >= http.client.INTERNAL_SERVER_ERROR:
            raise LinkError(says, hint=_AGAIN) from None
        hint = (
            "HF_TOKEN holds the token of a private one"
            if error.code in _PRIVATE
            else "is this a bundle's address?"
        )
        raise BundleError(says, hint=hint) from None
    except MoaError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise LinkError(f"cannot read {url}: {safe_line(str(reason))}", hint=_AGAIN) from None
