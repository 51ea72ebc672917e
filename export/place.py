"""A folder that appears under its name only when it is whole."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from moa.bundle import MANIFEST
from moa.errors import MoaError, UsageError

_FULL = 2**20
"""A disk with fewer bytes left is full."""


@contextlib.contextmanager
def new_folder(out: Path, *, needed: int = 0, force: bool = False, trial: bool = False) -> Iterator[Path]:
    """Yield a folder beside `out` that becomes `out` at the end; after an error it is gone.
    A `trial` only finds out whether it could.

    A killed process leaves a `.NAME.building-*` folder behind, which has no manifest and is nobody's bundle.
    """
    out = out.absolute()
    _refuse_to_lose(out, force)
    parent = out.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=f".{out.name}.building-"))
    except OSError as error:
        raise UsageError(f"cannot write to {parent}: {error.strerror}") from None
    try:
        free = shutil.disk_usage(parent).free
        if free < needed:
            raise UsageError(f"not enough room in {parent}: about {gigabytes(needed)} wanted, {gigabytes(free)} free")
        yield folder
        if trial:
            return
        folder.chmod(0o777 & ~_umask())  # mkdtemp's folders are private
        if out.exists():
            old = Path(tempfile.mkdtemp(dir=parent, prefix=f".{out.name}.old-"))
            out.replace(old / out.name)
            folder.replace(out)
            shutil.rmtree(old)
        else:
            folder.replace(out)
    except MoaError:
        raise
    except Exception as error:
        if refused := _refused_by_the_disk(error, parent, needed):
            raise refused from error
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def clean_up_when_ended() -> None:
    """Have SIGTERM, a batch system's way to end a build, do what Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def gigabytes(size: float) -> str:
    """A size for people."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _refused_by_the_disk(error: Exception, parent: Path, needed: int) -> UsageError | None:
    """What the disk did, where it was the disk: libraries say it each in their own way, some with a traceback alone."""
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or shutil.disk_usage(parent).free < _FULL:
        hint = f"about {gigabytes(needed)} are wanted" if needed else ""
        return UsageError(f"no room left in {parent}", hint=hint)
    if isinstance(error, OSError) and not error.filename:  # not from opening a file, so from writing to one
        return UsageError(f"cannot write to {parent}: {error.strerror or error}")
    return None


def _refuse_to_lose(out: Path, force: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not (out / MANIFEST).is_file()):
        raise UsageError(f"{out} exists and is no bundle: choose another --out")
    if any(out.iterdir()) and not force:
        raise UsageError(f"{out} holds a bundle already", hint="--force replaces it")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
