"""Files that are replaced as a whole: whatever ends the process, the old content or the new is
there. No torch."""

from __future__ import annotations

import contextlib
import glob
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_SUFFIX = ".partial"
_STALE_SECONDS = 60.0
"""No write takes so long: the process of an older partial file was killed."""


@contextlib.contextmanager
def named(folder: Path) -> Iterator[None]:
    """Errors of the operating system that name no file, such as a full disk, name this folder."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(folder)
        raise


def write_whole(
    path: Path, content: bytes, check: Callable[[Path], object] = lambda written: None
) -> None:
    """Replace `path`, readable by its owner only. `check` may look at what was written, and raise:
    then nothing changes."""
    prefix = f".{path.name}."
    for old in path.parent.glob(f"{glob.escape(prefix)}*{_SUFFIX}"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _STALE_SECONDS:
                old.unlink()
    with tempfile.NamedTemporaryFile(
        "wb", dir=path.parent, prefix=prefix, suffix=_SUFFIX, delete=False
    ) as partial:
        written = Path(partial.name)
    try:
        with written.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        check(written)
        os.replace(written, path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
