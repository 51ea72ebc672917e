"""Pull a bundle into the store, from a folder, an https address or a hub id.

The manifest decides which files are read; it is checked before the first of them, and each is
hashed. A download resumes an earlier attempt, and does not send a token to another host.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
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
_TRY_LATER = (http.client.REQUEST_TIMEOUT, http.client.TOO_MANY_REQUESTS)
_NEEDS_TOKEN = (http.client.UNAUTHORIZED, http.client.FORBIDDEN)
_FULL = (errno.ENOSPC, errno.EDQUOT)
"""A full disk, and a user's full share of one."""
_CONTINUE = "run the same command again to continue"
_CONTENT_RANGE = re.compile(r"bytes (\d+)-")

BundleSource = Callable[[str, int], AbstractContextManager[tuple[IO[bytes], int]]]
"""Opens a file of a bundle, given the name that the manifest uses and the first byte that is wanted.
Returns the open file and the byte at which it begins: a web server may send all from byte 0."""


def pull(
    source: str, *, name: str = "", force: bool = False, say: Notify = lambda line: None
) -> Bundle:
    """Download the bundle that `source` names (a folder, an https address, a hub id), store it as
    `name`, and return it. `force` replaces a bundle of that name; `say` gets a line for each file.

    It is downloaded into a folder of its own and moved to its place when it is whole, so that the
    store never has half a bundle.
    """
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
        # What was refused must not be the beginning of the next try.
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except BaseException:
        # What has come is kept for the next try. Only an empty folder can be removed like this.
        with contextlib.suppress(OSError):
            partial.rmdir()
        raise
    if place.exists():
        shutil.rmtree(place)
    partial.rename(place)
    return Bundle.open(place)


def _download(source: str, partial: Path, say: Notify) -> None:
    """Download the bundle's manifest, and then the files that it names, into the folder `partial`.
    What an earlier try has left there is gone on with."""
    opened = find(source)
    partial.mkdir(parents=True, exist_ok=True)
    with opened(MANIFEST, 0) as (file, _):
        # One byte more than allowed, so that reading the manifest refuses one that is too large.
        content = file.read(_LARGEST_MANIFEST + 1)
    with writing(partial / MANIFEST):
        (partial / MANIFEST).write_bytes(content)
    manifest = read_manifest(partial)
    _check_room(manifest.files, partial)
    for path, entry in manifest.files.items():
        _pull_file(opened, path, entry, partial / path, say)
    Bundle.open(partial).verify()


def _check_room(files: Mapping[str, FileEntry], folder: Path) -> None:
    """A `UsageError` if the disk has no room for what is still to be downloaded of these files."""
    needed = 0
    for path, entry in files.items():
        present = folder / path
        needed += entry.size
        if present.is_file():  # of an earlier try: it is gone on with, or replaced
            needed -= min(entry.size, present.stat().st_size)
    if shutil.disk_usage(folder).free < needed:
        raise UsageError(f"no room in {folder.parent}: {needed / 1e6:.0f} MB more are needed")


def _name_of(source: str) -> str:
    """The last part of an address, a path or a hub id: the name of a bundle that is given none."""
    path = urlsplit(source).path if "://" in source else source
    return path.rstrip("/").removesuffix("/" + MANIFEST).rpartition("/")[2]


def _pull_file(source: BundleSource, name: str, entry: FileEntry, path: Path, say: Notify) -> None:
    """Download one file of a bundle to `path`, or the rest of it if an earlier try was cut off.
    `entry` is what the bundle's manifest says of it: size and hash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    present = path.stat().st_size if path.is_file() and not path.is_symlink() else 0
    if present == entry.size and sha256(path) == entry.sha256:
        return
    if present >= entry.size:
        present = 0  # another file: it is written anew
    progress = f", from {present / 1e6:.1f} MB on" if present else ""
    say(f"{name}, {entry.size / 1e6:.1f} MB{progress}")
    with source(name, present) as (file, begins):
        _copy(file, path, begins, entry.size)
    if path.stat().st_size < entry.size:
        raise LinkError(f"{name} ends early", hint=_CONTINUE)
    if path.stat().st_size > entry.size or sha256(path) != entry.sha256:
        raise BundleError(
            f"{name} does not match the manifest", hint="pull again; else its source is damaged"
        )


def _copy(file: IO[bytes], path: Path, start: int, size: int) -> None:
    """Write `file` into `path` from byte `start` on, and make sure that it is on the disk. Of a
    file that is longer than `size` only one byte more is written, by which the caller sees that it
    is."""
    with writing(path):
        out = path.open("r+b" if start else "wb", buffering=0)
    with out:
        with writing(path):
            out.seek(start)
            out.truncate()  # what an earlier try has left behind this byte
        left = size - start + 1
        while left > 0 and (chunk := file.read(min(_CHUNK, left))):
            with writing(path):
                _write_all(out, chunk)
            left -= len(chunk)
        with writing(path):
            os.fsync(out.fileno())


def _write_all(out: IO[bytes], chunk: bytes) -> None:
    """Write all of it: a file without a buffer may take a part."""
    rest = memoryview(chunk)
    while rest:
        rest = rest[out.write(rest) :]


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A context for writing `path`: an error of the operating system becomes one that names the
    file. A source is read meanwhile, and such errors would be taken for the source's."""
    try:
        yield
    except OSError as error:
        hint = "make room, and " + _CONTINUE if error.errno in _FULL else ""
        raise UsageError(
            f"cannot write {path}: {os.strerror(error.errno or errno.EIO)}", hint=hint
        ) from error


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
    """Returns what opens the files of the bundle that `text` names: a folder on this machine, an
    https address, or a hub id like NAME/BUNDLE."""
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
    """Return the scheme of an address that bundles may come from, and an empty text for others:
    https is allowed, and http on this machine."""
    try:
        parts = urlsplit(url)
        local = is_loopback(parts.hostname or "")
    except ValueError:
        return ""
    if parts.scheme == "https" or (parts.scheme == "http" and local):
        return parts.scheme
    return ""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to other hosts, as hubs need, but never from https to http, and never with
    the token."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        """Returns the request for the address that a server has sent us on to; an error if that is
        not as safe."""
        scheme = may_be_read(newurl)
        leaves_https = may_be_read(req.full_url) == "https" and scheme != "https"
        if not scheme or leaves_https:
            raise BundleError(f"{safe_line(req.full_url)} leads away from https")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            request.remove_header("Authorization")
        return request


@contextlib.contextmanager
def open_url(url: str, start: int = 0, token: str = "") -> Iterator[tuple[IO[bytes], int]]:
    """Open `url` and yield its content, with the number of the byte at which that begins: `start`,
    or 0 if the server does not send parts, or has no byte `start`."""
    opener = urllib.request.build_opener(_Redirects)
    try:
        with opener.open(_request(url, start, token), timeout=_TIMEOUT_SECONDS) as answer:
            begins = _first_byte(answer)
            if begins not in (0, start):
                raise BundleError(f"{url} answers with another part than was asked for")
            yield answer, begins
    except urllib.error.HTTPError as error:
        error.close()
        if start and error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            # The local part is longer than this file, so it is not the beginning of it.
            with open_url(url, 0, token) as whole:
                yield whole
            return
        raise _refusal(url, error) from None
    except MoaError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise LinkError(f"cannot read {url}: {safe_line(str(reason))}", hint=_CONTINUE) from None


def _request(url: str, start: int, token: str) -> urllib.request.Request:
    """Returns the request for what `url` has from byte `start` on."""
    headers = {"User-Agent": f"moa-edge/{__version__}", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return urllib.request.Request(url, headers=headers)


def _first_byte(answer: Any) -> int:
    """Returns the number of the byte at which an answer's content begins; -1 if it is a part of a
    file and does not say which."""
    if answer.status != http.client.PARTIAL_CONTENT:
        return 0
    found = _CONTENT_RANGE.match(answer.headers.get("Content-Range", ""))
    return int(found[1]) if found else -1


def _refusal(url: str, error: urllib.error.HTTPError) -> MoaError:
    """Returns the error for a server that answers with an HTTP status instead of the file."""
    says = f"{url} answers {error.code} {safe_line(error.reason)}"
    if error.code in _TRY_LATER or error.code >= http.client.INTERNAL_SERVER_ERROR:
        return LinkError(says, hint=_CONTINUE)
    if error.code in _NEEDS_TOKEN:
        return BundleError(says, hint="HF_TOKEN holds the token of a private one")
    return BundleError(says, hint="is this a bundle's address?")
