"""Files that are replaced as a whole: whatever ends the process, the old content or the new is
there. No torch."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

_SUFFIX = ".partial"
_STALE_SECONDS = 60.0
"""No write takes so long: the process of an older partial file was killed."""
_ACCESS_LIST = "system.posix_acl_access"
"""The extended attribute in which Linux keeps who else may read a file."""


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Errors of the operating system that name no file, such as a full disk, name this one."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_whole(
    path: Path, content: bytes, check: Callable[[Path], object] = lambda written: None
) -> None:
    """Replace the file at `path` as a whole by this content: it is written beside it first, then
    renamed. A link stays, and the file that it names is replaced. A file that is there keeps its
    owner, group, mode and access list: a service that reads it must be able to read the new one,
    whoever writes it; where that cannot be, it is a `PermissionError`. A new file is readable by
    its owner only. `check` may look at what was written, and raise. Whatever is raised, nothing has
    changed."""
    place = Path(os.path.realpath(path))
    prefix = f".{place.name}."
    _remove_stale(place.parent, prefix)
    with tempfile.NamedTemporaryFile(
        "wb", dir=place.parent, prefix=prefix, suffix=_SUFFIX, delete=False
    ) as partial:
        written = Path(partial.name)
    try:
        with named(path), written.open("wb") as file:
            _take_access(file.fileno(), place)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        check(written)
        os.replace(written, place)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


def _take_access(file: int, model: Path) -> None:
    """Give an open file the owner, group, mode and access list of another one, if there is that
    one; a `PermissionError` if this process may not."""
    if not hasattr(os, "fchown"):  # not a Unix
        return
    try:
        wanted = model.stat()
    except FileNotFoundError:
        return
    now = os.fstat(file)
    access_list = _access_list(model)
    try:
        if (now.st_uid, now.st_gid) != (wanted.st_uid, wanted.st_gid):
            os.fchown(file, wanted.st_uid, wanted.st_gid)
        if access_list:
            os.setxattr(file, _ACCESS_LIST, access_list)
        os.fchmod(file, stat.S_IMODE(wanted.st_mode))
    except OSError:
        words = "its owner, group and mode cannot be kept"
        raise PermissionError(errno.EPERM, words, str(model)) from None


def _access_list(path: Path) -> bytes:
    """Who else may read a file, as Linux keeps it; empty where there is no such list."""
    try:
        return os.getxattr(path, _ACCESS_LIST)
    except (AttributeError, OSError):  # another system, or a file system without such lists
        return b""


@contextlib.contextmanager
def appended(path: Path, line: str) -> Iterator[None]:
    """A context before which a line is written to the end of the file at `path`; a new one is
    readable by its owner only. If it cannot be written as a whole, or the body raises, the file is
    as it was before, or empty where there was none."""
    with contextlib.ExitStack() as opened:
        with named(path):
            file = opened.enter_context(_locked_to_append(path))
            end = file.seek(0, os.SEEK_END)
        try:
            with named(path):
                _write_line(file, line, end)
            yield
        except BaseException:
            file.truncate(end)
            raise


@contextlib.contextmanager
def _locked_to_append(path: Path) -> Iterator[io.FileIO]:
    """The file at `path`, locked; not one that was replaced meanwhile, whose line nobody would
    read."""
    while True:  # until the file that was locked is the one at this path
        # Without a buffer: what a full disk refuses would be written once more at the end.
        with open(path, "a+b", buffering=0, opener=_for_the_owner) as file:
            _lock(file)
            if _still_at(path, file):
                yield file
                return


def _for_the_owner(path: str, flags: int) -> int:
    """Open a file; one that is made is readable by its owner only."""
    return os.open(path, flags, 0o600)


def _write_line(file: io.FileIO, line: str, end: int) -> None:
    """Write a line to the end of a file of this size, on the disk when this returns."""
    content = line.encode() + b"\n"
    if end:
        file.seek(end - 1)
        if file.read(1) != b"\n":
            content = b"\n" + content
    if file.write(content) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file.fileno())


def _remove_stale(folder: Path, prefix: str) -> None:
    """Remove what earlier writes have left behind whose processes were killed: old files with this
    beginning."""
    for old in folder.glob(f"{glob.escape(prefix)}*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _STALE_SECONDS:
                old.unlink()


class Changed(Exception):
    """The file is not what its writer knows."""


def digest_of(content: bytes) -> bytes:
    """What `replace_known` compares."""
    return hashlib.sha256(content).digest()


def replace_known(path: Path, content: bytes, known: bytes | None) -> None:
    """Replace a file whose content the writer knows, by its digest `known`; None: there is no file
    yet. If another process has written it since, `Changed` is raised, and the file stays. It is
    compared and replaced under a lock, so that of two writers that know the same content one is
    told."""
    if known is None:
        _create(path, content)
        return
    try:
        with _locked(path) as file:
            if digest_of(file.read()) != known:
                raise Changed
            write_whole(path, content)
    except FileNotFoundError:
        _create(path, content)  # it was removed: nothing can be lost


def _create(path: Path, content: bytes) -> None:
    """Create a file with this content; `Changed` if there is one already. An empty file is made
    first, because a lock needs a file."""
    try:
        path.open("xb").close()  # fails if there is one
    except FileExistsError:
        raise Changed from None
    try:
        with _locked(path) as file:
            if file.read(1):
                raise Changed
            write_whole(path, content)
    except OSError:
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0:  # ours: nothing is in it
                path.unlink()
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """The file, locked for the processes that lock it, too; not one that was replaced meanwhile."""
    while True:  # until the file that was locked is the one at this path
        with path.open("rb") as file:
            _lock(file)
            if _still_at(path, file):
                yield file
                return


def _lock(file: BinaryIO | io.FileIO) -> None:
    """Lock a file until it is closed."""
    try:
        import fcntl
    except ImportError:  # not a Unix: between comparing and replacing another process can write
        return
    fcntl.flock(file, fcntl.LOCK_EX)


def lock_now(descriptor: int) -> bool:
    """Lock an open file or folder until it is closed. Returns False, at once, while another process
    holds it; True also where there are no locks, as in some folders of a network."""
    try:
        import fcntl
    except ImportError:  # not a Unix
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _still_at(path: Path, file: BinaryIO) -> bool:
    """Whether an open file is still the one at this path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
