from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloud_verifier.server import Server
from cloud_verifier.stopping import Stopping
from tests.verifier import kit


@pytest.fixture(autouse=True)
def hang_ups_are_heard() -> Iterator[None]:
    """Under nohup, which the tests may be run by, they are ignored from the start."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


async def test_one_ctrl_c_drains_and_the_second_ends_at_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("cloud_verifier"), "propagate", True)
    caplog.set_level("INFO", "cloud_verifier")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    ended = asyncio.Event()
    stopping = Stopping(ended.set)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(60):
            os.kill(os.getpid(), signal.SIGINT)
            await stopping.asked.wait()
            assert caplog.messages == ["stopping: Ctrl-C again ends at once"]
            assert not ended.is_set()
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            await ended.wait()
            stopping.asked.clear()
            os.kill(os.getpid(), signal.SIGHUP)
            await stopping.asked.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
    assert caplog.messages[1].startswith("stopped at once"), "SIGTERM again is no reason to"


async def test_without_a_terminal_a_hang_up_ends_nothing_and_says_what_is_read_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who renews a certificate or rotates logs sends it: the verifier ended, and stayed down."""
    monkeypatch.setattr(logging.getLogger("cloud_verifier"), "propagate", True)
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    caplog.set_level("INFO", "cloud_verifier")
    stopping = Stopping()
    loop = asyncio.get_running_loop()
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        async with asyncio.timeout(60):
            while not caplog.messages:
                await asyncio.sleep(0)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)
    assert not stopping.asked.is_set()
    assert caplog.messages[0].startswith("SIGHUP: nothing is read again")


async def test_nohup_is_left_as_it_is() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    loop = asyncio.get_running_loop()
    try:
        stopping = Stopping()
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        assert not stopping.asked.is_set()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGHUP, before)


async def test_that_the_time_to_drain_is_over_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("cloud_verifier"), "propagate", True)
    caplog.set_level("INFO", "cloud_verifier")
    async with kit.verifier(kit.limited(drain_seconds=0.01)) as running:
        monkeypatch.setattr(type(running.service), "idle", False)
        await Server.drain(running)
    drained = [record for record in caplog.records if "drain" in getattr(record, "event", "")]
    assert [record.levelname for record in drained] == ["INFO", "WARNING"]
    assert "0.01 s" in drained[0].message
    assert "is cut off" in drained[1].message


_NEVER_IDLE = """
from cloud_verifier import cli
from cloud_verifier.sessions.service import Service
Service.idle = False
cli.main()
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_its_output_ends_no_server_and_ctrl_c_twice_does() -> None:
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(
            [sys.executable, "-c", _NEVER_IDLE, "serve", "--port", "0", "--drain-seconds", "3600"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert process.stderr is not None
    told = []
    try:
        for line in process.stderr:
            told.append(json.loads(line))
            event = told[-1].get("event")
            if event in ("stdout", "drain"):
                process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == -signal.SIGINT
    finally:
        process.kill()
        process.communicate()
    events = [line.get("event") for line in told]
    assert events[events.index("listening") :] == [
        "listening",
        "stdout",
        "stopping",
        "drain",
        "stopped",
    ]
    said = told[events.index("stdout")]["message"]
    assert said.startswith("standard output cannot be written (No space left on device), it was: l")
