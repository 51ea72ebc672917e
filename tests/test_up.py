"""`moa-edge up`: one command starts everything, Ctrl-C and even SIGKILL end all of it; a bundle is made
once; mistakes are one line."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from moa.cli import up as up_command
from testing.tiny import save_tiny
from tests.edge.test_screen import on_screen

SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
_PROGRAM = "from moa.cli.moa_edge import main; main()"


@contextmanager
def up(*words: str, cache: Path) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    environment.pop("DISPLAY", None)
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, "up", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def places(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr and process.stderr.read()
    found: dict[str, Any] = json.loads(line)
    return found


def listens(address: str) -> bool:
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=5).close()
    except OSError:
        return False
    return True


def until_gone(*addresses: str) -> None:
    until = time.monotonic() + 120
    while any(map(listens, addresses)):
        assert time.monotonic() < until, "a child outlives its parent"
        time.sleep(0.1)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_embedded_pair_answers_and_all_of_it_ends(end: signal.Signals, tmp_path: Path) -> None:
    with up("--port", "0", "--json", "--no-browser", cache=tmp_path) as process:
        found = places(process)
        assert listens(found["verifier"])
        body = {"model": "target", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
        request = urllib.request.Request(
            f"{found['api']}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            said = json.load(answer)["choices"][0]["message"]["content"]
        assert "42" in said
        process.send_signal(end)
        assert process.wait(timeout=120) == (-end if end == signal.SIGKILL else 0)
    until_gone(found["page"], found["verifier"])


def test_a_dead_verifier_ends_the_rest_with_an_error(tmp_path: Path) -> None:
    with up("--port", "0", "--json", "--no-browser", cache=tmp_path) as process:
        found = places(process)
        for child in children(process.pid):
            if b"cloud_verifier" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(child, signal.SIGKILL)
        assert process.wait(timeout=120) == 1
        assert process.stderr is not None
        assert "the verifier has ended" in process.stderr.read()
    until_gone(found["page"])


def children(parent: int) -> list[int]:
    tasks = Path(f"/proc/{parent}/task/{parent}/children")
    if not tasks.exists():
        pytest.skip("this system does not list a process's children")
    return list(map(int, tasks.read_text().split()))


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("/nowhere",), 2, "TARGET and --device-model belong together"),
        (("/nowhere", "--device-model", "/there"), 2, "no model at /nowhere"),
        (("some/model", "--device-model", "other/model"), 2, "the hub cannot be reached"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], code: int, says: str, tmp_path: Path
) -> None:
    with up(*words, cache=tmp_path) as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == code
    assert says in errors.splitlines()[-1]
    assert "Traceback" not in errors


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_what_a_program_says_has_a_line_of_its_own_on_a_terminal(tmp_path: Path) -> None:
    """The line that changes is there meanwhile."""
    ours, theirs = os.openpty()
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "TERM": "xterm", "COLUMNS": "200"}
    command = [sys.executable, "-c", _PROGRAM, "up", "/nowhere", "--device-model", "/there"]
    sent = b""
    with subprocess.Popen(command, env=environment, stderr=theirs):
        os.close(theirs)
        # At the end of the process a pseudo-terminal has either nothing more or an error.
        with suppress(OSError):
            while piece := os.read(ours, 4096):
                sent += piece
        os.close(ours)
    rows = ["".join(letter for letter, _ in row) for row in on_screen(sent.decode())]
    assert rows[0].startswith("moa-edge up: error: no model at /nowhere"), rows


_STUCK = """
import os, pathlib, signal, sys, time
def main():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in a long computation
    out = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
    folder = out.parent / f".{out.name}.building-{os.getpid()}-0a"
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(1000))
    time.sleep(1000)
"""


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
async def test_a_bundle_that_is_given_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stuck.py").write_text(_STUCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(up_command, "_BUILD", "stuck:main")
    bundles = tmp_path / "bundles"
    others = bundles / ".one.building-1-0b"
    others.mkdir(parents=True)
    options = argparse.Namespace(target="t", device_model="d")
    plan = {"bundle": str(bundles / "one"), "made": False, "seconds": 1.0}
    making = asyncio.create_task(up_command._build(options, plan))
    async with asyncio.timeout(60):
        while not list(bundles.glob(".one.building-*/weights")):
            await asyncio.sleep(0.01)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert list(bundles.iterdir()) == [others], "that of another process stays"


@pytest.mark.slow
def test_a_bundle_is_made_once_and_kept(tmp_path: Path) -> None:
    target = str(save_tiny("qwen2", tmp_path / "target"))
    small = str(save_tiny("qwen2", tmp_path / "small", seed=5, **SMALL))
    words = (target, "--device-model", small, "--port", "0", "--json", "--no-browser")
    cache = tmp_path / "cache"
    for made in (False, True):
        with up(*words, "--dry-run", cache=cache) as process:
            plan = json.loads(process.communicate(timeout=300)[0])
            assert plan["made"] is made
            assert plan["memory"]["at_start_mb"] > plan["memory"]["weights_mb"]
        with up(*words, cache=cache) as process:
            found = places(process)
            assert found["bundle"] == plan["bundle"]
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
            assert ("made the bundle in" in errors) is not made
