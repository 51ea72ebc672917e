from __future__ import annotations

import contextlib
import multiprocessing
import os
import stat
import struct
import sys
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest

from moa.process import files
from moa.process.files import Changed, appended, digest_of, replace_known, write_whole


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a file"
    for content in (b"one", b"two"):
        write_whole(path, content)
        assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["a file"]
    assert path.stat().st_mode & 0o077 == 0


def test_what_goes_wrong_changes_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_whole(path, b"old")

    def refuse(written: Path) -> None:
        assert written.read_bytes() == b"new"
        raise ValueError("not so")

    with pytest.raises(ValueError, match="not so"):
        write_whole(path, b"new", refuse)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as raised:
        write_whole(path, b"new")
    assert raised.value.filename == str(path), "an error of a descriptor names no file by itself"
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def _access(path: Path) -> tuple[int, int, int]:
    """Owner, group and mode of a file."""
    found = path.stat()
    return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)


def _change(path: Path, way: str) -> None:
    """Replace a file, or add to it."""
    if way == "replaced":
        write_whole(path, b"new")
        return
    with appended(path, "new"):
        pass


_WAYS = pytest.mark.parametrize("way", ["replaced", "appended"])


@_WAYS
@pytest.mark.skipif(sys.platform == "win32", reason="modes of Unix")
def test_who_may_read_a_file_may_read_it_still(tmp_path: Path, way: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 12345, 23456)
    before = _access(path)
    _change(path, way)
    assert b"new" in path.read_bytes()
    assert _access(path) == before


@pytest.mark.skipif(sys.platform != "linux", reason="an attribute of Linux")
def test_an_access_list_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    nobody = 0xFFFFFFFF
    # The owner, user 12345, the group, the mask, the others: as `setfacl -m u:12345:r` writes it.
    entries = [(1, 6, nobody), (2, 4, 12345), (4, 4, nobody), (16, 4, nobody), (32, 0, nobody)]
    content = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *one) for one in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", content)
    except OSError:
        pytest.skip("this file system has no access lists")
    before = _access(path)
    write_whole(path, b"new")
    assert os.getxattr(path, "system.posix_acl_access") == content
    assert _access(path) == before


def test_where_the_owner_cannot_be_kept_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    real = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        found = list(real(descriptor))
        found[stat.ST_UID] += 1  # as if another user wrote it
        return os.stat_result(found)

    def fchown(descriptor: int, owner: int, group: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", fchown, raising=False)
    monkeypatch.setattr(os, "fstat", fstat)
    with pytest.raises(PermissionError, match="its owner, group and mode cannot be kept") as raised:
        write_whole(path, b"new")
    assert raised.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@_WAYS
def test_a_link_stays_and_the_file_that_it_names_changes(tmp_path: Path, way: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    real, between, link = folder / "real", tmp_path / "between", tmp_path / "link"
    real.write_bytes(b"old")
    between.symlink_to(Path("folder") / "real")
    link.symlink_to(between)
    _change(link, way)
    assert link.is_symlink()
    assert between.is_symlink()
    assert b"new" in real.read_bytes()
    assert os.listdir(folder) == ["real"]
    assert set(os.listdir(tmp_path)) == {"folder", "between", "link"}


@_WAYS
def test_a_link_to_no_file_makes_one_for_the_owner(tmp_path: Path, way: str) -> None:
    link = tmp_path / "link"
    link.symlink_to("real")
    _change(link, way)
    assert link.is_symlink()
    assert (tmp_path / "real").stat().st_mode & 0o077 == 0


def test_a_line_is_not_added_to_a_file_that_was_replaced_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old\n")
    real = files._lock
    rivals = [b"theirs\n"]

    def lock(file: Any) -> None:
        if rivals:  # another process had it until now, and has replaced it
            write_whole(path, rivals.pop())
        real(file)

    monkeypatch.setattr(files, "_lock", lock)
    with appended(path, "ours"):
        pass
    assert path.read_bytes() == b"theirs\nours\n"


def test_what_a_killed_process_left_is_removed_and_what_another_writes_is_not(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file [1]"
    old, young, other = (
        tmp_path / name
        for name in (".file [1].a.partial", ".file [1].b.partial", ".file.c.partial")
    )
    for left in (old, young, other):
        left.touch()
    os.utime(old, (0, 0))
    os.utime(other, (0, 0))
    write_whole(path, b"new")
    assert set(os.listdir(tmp_path)) == {path.name, young.name, other.name}


def test_of_two_that_know_a_file_only_the_first_replaces_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_known(path, b"one", None)
    with pytest.raises(Changed):
        replace_known(path, b"other", None)
    known = digest_of(b"one")
    replace_known(path, b"two", known)
    with pytest.raises(Changed):
        replace_known(path, b"three", known)
    assert path.read_bytes() == b"two"
    path.unlink()
    replace_known(path, b"four", known)
    assert path.read_bytes() == b"four"
    assert os.listdir(tmp_path) == ["file"]


def _rival(path: Path, name: int, wins: Queue[int]) -> None:
    with contextlib.suppress(Changed):
        replace_known(path, f"{name}".encode(), digest_of(b"start"))
        wins.put(name)


def test_rivals_in_other_processes_lose_nothing_silently(tmp_path: Path) -> None:
    spawning = multiprocessing.get_context("spawn")
    path = tmp_path / "file"
    path.write_bytes(b"start")
    wins: Queue[int] = spawning.Queue()
    rivals = [spawning.Process(target=_rival, args=(path, name, wins)) for name in range(4)]
    for rival in rivals:
        rival.start()
    winner = wins.get(timeout=60)
    for rival in rivals:
        rival.join(60)
    assert path.read_bytes() == f"{winner}".encode()
    assert wins.empty()
