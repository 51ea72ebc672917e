"""`cloud-verifier serve --workers 2` as a user starts it: a session continues after its worker dies, token for
token."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.kit.devices import Script, ScriptedDevice
from benchmarks.kit.verifier import Running
from cloud_verifier.workers.affinity import choose_worker
from tests.tiny import save_tiny
from tests.verifier import kit

FAST = ["--max-context-tokens", "128", "--max-prompt-tokens", "100", "--slots", "4", "--device", "cpu"]
COMMAND = [sys.executable, "-c", "from cloud_verifier.cli import main; main()", "serve", "--workers", "2", *FAST]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target in a folder."""
    return save_tiny("llama", tmp_path_factory.mktemp("pair") / "target")


@pytest.fixture
def serving(target: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Two workers, and their address."""
    process = subprocess.Popen(
        [*COMMAND, "--port", "0", "--target", str(target), "--log-level", "error"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening on ws://127.0.0.1:")
    try:
        yield process, line.split()[-1]
    finally:
        process.kill()  # its workers see their lines end, and end too
        process.communicate()


@pytest.mark.timeout(400)  # three processes, two of which load torch
async def test_a_session_goes_on_elsewhere_when_its_worker_is_killed(
    serving: tuple[subprocess.Popen[str], str],
) -> None:
    process, url = serving
    ids, truth = kit.prompt(1, 10), kit.generated(kit.prompt(1, 10), 40)
    key = next(str(i) for i in range(100) if choose_worker(str(i), {0: 0, 1: 0}) == 0)
    guesses = [token if i % 3 else token ^ 1 for i, token in enumerate(truth)]
    device = ScriptedDevice((url,), Script.along(ids, truth, guesses, nodes=3), think=0.05, key=key)
    async with asyncio.timeout(5 * kit.PATIENCE):
        life = asyncio.create_task(device.run())
        while len(device.rounds) < 2:
            await asyncio.sleep(0.01)
        os.kill(Running([url], process).workers()[0], signal.SIGKILL)
        await life
    assert device.exact
    assert len(set(device.instances)) == 2
    request = urllib.request.Request(url.replace("ws", "http", 1) + "/metrics", headers={"X-Session-Id": key})
    page = await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=kit.PATIENCE).read().decode())
    assert 'moa_session_opens_total{worker="1"} 1.0' in page
    assert 'moa_worker_restarts_total{worker="front"} 1.0' in page
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, kit.PATIENCE) == 0
