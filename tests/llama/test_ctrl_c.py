"""Ctrl-C while llama.cpp runs, which calls back into Python."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moa.llama.ctrl_c import KeptCtrlC
from moa.llama.library import PROGRESS_CALLBACK, find, load
from moa.llama.runtime import Vocabulary
from moa.target.contract import LoadOptions
from moa.target.registry import open_target
from testing import gguf_tiny
from testing.tiny import tiny

_CALLBACK = ctypes.CFUNCTYPE(None)


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press(times: int = 1) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


def test_it_is_raised_behind_a_call_that_it_came_in() -> None:
    ended = []

    def library_function() -> None:
        _CALLBACK(press)()  # ctypes would drop what is raised there
        ended.append(True)

    kept = KeptCtrlC()
    with pytest.raises(KeyboardInterrupt):
        kept.keeping(library_function)()
    assert ended
    assert not kept.has_come  # the next call is another one
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_one_ends_the_process_in_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []
    monkeypatch.setattr(os, "kill", lambda *how: killed.append(how[1]))
    with pytest.raises(KeyboardInterrupt):
        KeptCtrlC().keeping(press)(1)
    assert killed == []
    with pytest.raises(KeyboardInterrupt):
        KeptCtrlC().keeping(lambda: _CALLBACK(lambda: press(2))())()
    assert killed == [signal.SIGINT]


def test_it_ends_the_loading_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_tiny.need_llama()
    file = tmp_path / "tiny.gguf"
    gguf_tiny.save(tiny("llama"), file, kind="F32")
    library = load(find())
    goes_on = library._goes_on
    told: list[bool] = []

    def pressed(progress: float, nothing: Any) -> bool:
        if not told:
            press()
        told.append(goes_on(progress, nothing))
        return told[-1]

    monkeypatch.setattr(library, "_goes_on", PROGRESS_CALLBACK(pressed))
    with pytest.raises(KeyboardInterrupt):
        open_target(str(file), LoadOptions(slots=1, capacity=256, threads=1))
    assert told == [False]  # llama.cpp read no further
    monkeypatch.undo()
    Vocabulary(library, file)  # the next one loads
