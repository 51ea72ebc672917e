"""Pull a bundle into the store: the manifest first, then its files, each hashed. Partial downloads are resumed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from edge_client.bundles.sources import BundleSource, find
from edge_client.bundles.store import PARTIAL, check_name, store
from moa.bundle import MANIFEST, Bundle, read_manifest, sha256
from moa.errors import BundleError, LinkError, UsageError
from moa.manifest import FileEntry, Manifest
from moa.process.files import named

Notify = Callable[[str], None]
_LARGEST_MANIFEST = 4 * 2**20
_CHUNK = 2**20


def pull(source: str, *, name: str = "", force: bool = False, say: Notify = lambda line: None) -> Bundle:
    """Download a bundle from `source` and store it as `name`."""
    name = check_name(name or _name_of(source))
    place, partial = store() / name, store() / (name + PARTIAL)
    if place.exists() and not force:
        raise UsageError(f"there is a bundle {name} already", hint="--force replaces it, --name keeps both")
    try:
        with named(partial):
            _download(source, partial, say)
    except BundleError:
        shutil.rmtree(partial, ignore_errors=True)  # what was refused is not gone on with
        raise
    except BaseException:
        with contextlib.suppress(OSError):
            partial.rmdir()  # if nothing has come yet; the rest is kept, and the next try goes on from there
        raise
    if place.exists():
        shutil.rmtree(place)
    partial.rename(place)
    return Bundle.open(place)


def _download(source: str, partial: Path, say: Notify) -> None:
    opened = find(source)
    partial.mkdir(parents=True, exist_ok=True)
    manifest = _pull_manifest(opened, partial)
    needed = sum(entry.size for entry in manifest.files.values())
    if shutil.disk_usage(partial).free < needed:
        raise UsageError(f"no room in {partial.parent}: {needed / 1e6:.0f} MB are needed")
    for path, entry in manifest.files.items():
        _pull_file(opened, path, entry, partial / path, say)
    Bundle.open(partial).verify()


def _name_of(source: str) -> str:
    last = (urlsplit(source).path if "://" in source else source).rstrip("/").removesuffix("/" + MANIFEST)
    return last.rpartition("/")[2]


def _pull_manifest(source: BundleSource, folder: Path) -> Manifest:
    with source(MANIFEST, 0) as (file, _):
        content = file.read(_LARGEST_MANIFEST + 1)
    (folder / MANIFEST).write_bytes(content)
    return read_manifest(folder)


def _pull_file(source: BundleSource, name: str, entry: FileEntry, path: Path, say: Notify) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    have = path.stat().st_size if path.is_file() and not path.is_symlink() else 0
    if have == entry.size and sha256(path) == entry.sha256:
        return
    say(f"{name}, {entry.size / 1e6:.1f} MB" + (f", from {have / 1e6:.1f} MB on" if 0 < have < entry.size else ""))
    with source(name, have if have < entry.size else 0) as (file, begins):
        _copy(file, path, begins, entry.size)
    if path.stat().st_size < entry.size:
        raise LinkError(f"{name} ends early", hint="run the same command again to continue")
    if path.stat().st_size > entry.size or sha256(path) != entry.sha256:
        raise BundleError(f"{name} does not match the manifest", hint="pull again; else its source is damaged")


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
