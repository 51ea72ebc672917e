from __future__ import annotations

import contextlib
import multiprocessing
import os
from multiprocessing.queues import Queue
from pathlib import Path

import pytest

from moa.process.files import Changed, digest_of, replace_known, write_whole


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
