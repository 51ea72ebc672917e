"""A verifier on this machine, started and ended by the client."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.link import local
from edge_client.link.local import local_verifier
from edge_client.settings import ClientSettings
from moa.errors import LinkError, UsageError
from tests.edge import kit
from tests.verifier import kit as verifier_kit


def flags() -> list[str]:
    limits = ["--max-context-tokens", "160", "--max-prompt-tokens", "150", "--slots", "2"]
    return [
        "--target",
        str(kit.pair() / "target"),
        "--drafter",
        str(kit.pair() / "drafter"),
        *limits,
    ]


async def test_a_bundle_that_it_would_refuse_is_refused_before_either_end_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The endpoint was served, and said later that the verifier refuses this device."""

    def of(_: ClientSettings) -> Any:
        raise AssertionError("the bundle was loaded")

    monkeypatch.setattr(Device, "of", of)
    bundle = str(kit.pair() / "bundle")
    with pytest.raises(UsageError) as refused:
        await EdgeClient(verifier="local", bundle=bundle).__aenter__()
    line = refused.value.line()
    assert line.startswith(f"the bundle {bundle} was made for ")
    assert "the toy target that `--verifier local` serves has another tokenizer" in line
    assert "cloud-verifier serve --target" in line, "what to do"


@pytest.mark.slow
async def test_it_serves_and_ends() -> None:
    ids = verifier_kit.prompt(0, 12)
    async with (
        local_verifier(*flags()) as url,
        EdgeClient(verifier=url, device=kit.device(), max_new_tokens=10) as client,
    ):
        await client.wait_online()
        assert client.link is not None
        assert client.link.welcome is not None
        assert client.link.welcome.notices == []
        transcript = await kit.transcribe(client, ids)
    assert transcript.tokens == verifier_kit.generated(ids, 10)
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))


@pytest.mark.slow
async def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(LinkError, match=r"did not start: .*nowhere"):
        async with local_verifier("--target", "/nowhere"):
            pass


_PARENT = """
import asyncio, sys
from edge_client.link.local import local_verifier

async def main():
    async with local_verifier(*sys.argv[1:]) as url:
        print(url, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.slow
def test_it_does_not_outlive_a_parent_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, *flags()], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        port = int(parent.stdout.readline().decode().rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        parent.kill()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except ConnectionError:
            return
        time.sleep(0.1)
    pytest.fail("the verifier still listens")


async def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Any = importlib.util.find_spec
    monkeypatch.setattr(
        local.importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )
    with pytest.raises(UsageError, match="needs torch") as error:
        async with local_verifier():
            pass
    assert "pip install" in error.value.hint
