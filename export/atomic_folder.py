"""Writes a folder atomically: it gets its name when it is complete."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from moa.bundle import MANIFEST
from moa.errors import MoaError, UsageError

_FULL = 2**20
"""A disk with fewer free bytes counts as full."""


@contextlib.contextmanager
def new_folder(
    out: Path, *, needed: int = 0, force: bool = False, trial: bool = False
) -> Iterator[Path]:
    """Yield a new folder beside `out` that is renamed to `out` when the body has ended, and removed
    after an error. It needs `needed` bytes; `force` replaces a bundle that is there. A `trial` only
    checks whether that would work.

    A killed process leaves a `.NAME.building-PROCESS-*` folder behind, which has no manifest and so
    is no bundle.
    """
    out = out.absolute()
    parent = out.parent
    _refuse_to_lose(out, force)
    folder = _make_beside(out)
    try:
        _check_room(parent, needed)
        yield folder
        if not trial:
            _rename(folder, out)
    except MoaError:
        raise
    except Exception as error:
        refusal = _refused_by_the_disk(error, parent, needed)
        if refusal is None:
            raise
        raise refusal from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_beside(out: Path) -> Path:
    """Make an empty folder in the one of `out`, on whose disk it can be renamed. Returns its
    path."""
    # By its process, so that whoever has killed that knows what it has left.
    folder = out.parent / f".{out.name}.building-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as error:
        raise UsageError(f"cannot write to {out.parent}: {error.strerror}") from None
    return folder


def _check_room(parent: Path, needed: int) -> None:
    """Raise a `UsageError` if the disk of `parent` has fewer than `needed` bytes free."""
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise UsageError(
            f"not enough room in {parent}: about {gigabytes(needed)} wanted, {gigabytes(free)} free"
        )


def _rename(folder: Path, out: Path) -> None:
    """Give a complete folder the name `out`. A bundle that has this name is renamed first, and
    removed at the end: a kill in between loses neither."""
    if not out.exists():
        folder.replace(out)
        return
    old = folder.with_name(folder.name.replace(".building-", ".old-"))
    out.replace(old)
    folder.replace(out)
    shutil.rmtree(old)


def clean_up_when_ended() -> None:
    """Make SIGTERM, with which batch systems end a job, do the same as Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def gigabytes(size: float) -> str:
    """A size for people."""
    if size >= 1e8:
        return f"{size / 1e9:.2f} GB"
    return f"{size / 1e6:.1f} MB"


def _refused_by_the_disk(error: Exception, parent: Path, needed: int) -> UsageError | None:
    """Returns the error of one line for a full disk, which each library reports in its own way;
    None for another error."""
    says_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    if says_full or shutil.disk_usage(parent).free < _FULL:
        hint = f"about {gigabytes(needed)} are wanted" if needed else ""
        return UsageError(f"no room left in {parent}", hint=hint)
    is_from_writing = isinstance(error, OSError) and not error.filename  # opening names the file
    if is_from_writing:
        return UsageError(f"cannot write to {parent}: {getattr(error, 'strerror', None) or error}")
    return None


def _refuse_to_lose(out: Path, force: bool) -> None:
    """Raise a `UsageError` if `out` holds something that may not be replaced."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UsageError(f"{out} exists and is no bundle: choose another --out")
    is_empty = not any(out.iterdir())
    if is_empty:
        return
    if not (out / MANIFEST).is_file():
        raise UsageError(f"{out} exists and is no bundle: choose another --out")
    if not force:
        raise UsageError(f"{out} holds a bundle already", hint="--force replaces it")
