"""Memory is reported if the system says it, and missing support is no error."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from moa.process import memory

_WINDOWS = """
import sys
sys.modules["resource"] = None
from moa.process import memory
import edge_client.cli.doctor, moa.training.loop
print(memory.peak_bytes())
"""


def test_memory_of_this_process_or_its_peak_where_the_present_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert 5e6 < memory.resident_bytes() <= 1.1 * memory.peak_bytes()
    monkeypatch.setattr("builtins.open", Mock(side_effect=FileNotFoundError))
    assert memory.resident_bytes() == memory.peak_bytes()


_HOLES = """
import sys
from moa.process import memory
kept = [bytes(50_000) for _ in range(2000)][::9]
before = memory.resident_bytes()
memory.give_back_free_memory()
print(before - memory.resident_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_free_memory_between_what_is_kept_is_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _HOLES], capture_output=True, timeout=300, check=True
    )
    assert int(done.stdout) > 50e6


def test_no_program_needs_the_unix_module() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WINDOWS], capture_output=True, timeout=300, check=False
    )
    assert done.stdout == b"0\n", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is in memory")
def test_pages_of_a_mapped_file_are_let_go_of_but_for_what_was_written(tmp_path: Path) -> None:
    size = 8 * 2**20
    files = [tmp_path / name for name in ("read", "written", "other")]
    maps = []
    for file in files:
        file.write_bytes(b"x" * size)
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY)
        assert mapped[::4096].count(b"x") == size // 4096
        maps.append(mapped)
    maps[1][5] = ord("y")
    before = memory.resident_bytes()
    assert [memory.let_go_of_pages(file) for file in files[:2]] == [size, 0]
    given_back = before - memory.resident_bytes()
    assert size / 2 < given_back < 1.5 * size
    assert [bytes(mapped[4:7]) for mapped in maps] == [b"xxx", b"xyx", b"xxx"]
