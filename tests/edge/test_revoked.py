"""A token that is revoked in mid-answer, through real sockets: the verifier closes the connection,
what is opened anew is refused by name, the device goes on alone with what it has, and nobody else
notices."""

from __future__ import annotations

import asyncio
import io
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cloud_verifier.cli import main
from cloud_verifier.serving.auth import token_line
from edge_client.cli.chat import ChatLoop
from edge_client.cli.dialogue import Dialogue
from edge_client.client import EdgeClient
from edge_client.events import Link
from moa.errors import RemoteError
from tests.edge import kit
from tests.edge.test_chat import Lines
from tests.edge.test_exact import COUNT, truth
from tests.verifier import kit as verifier_kit

HERS = verifier_kit.prompt(3, 70)
"""Longer than his prompt and his answer together: so a slot with more tokens is hers."""
HIS = verifier_kit.prompt(4, 12)
CALM: dict[str, Any] = {
    "offline_after": 60.0,
    "settle_seconds": 100.0,
    "reconnect_seconds": 0.05,
    "connect_seconds": 60.0,
    "max_new_tokens": COUNT,
}
"""A device that does not take a busy machine for an outage."""


class Asked:
    """A turn that runs beside the test."""

    def __init__(self, client: Any, ids: list[int]) -> None:
        self.reader = kit.Reader()
        self.said = asyncio.Event()
        """Set with the first token."""
        self.task = asyncio.create_task(self._ask(client, ids))

    async def _ask(self, client: Any, ids: list[int]) -> None:
        async for event in client.generate(ids=ids):
            self.reader.take(event)
            if self.reader.tokens:
                self.said.set()

    async def ended(self) -> kit.Reader:
        """What it was told."""
        async with asyncio.timeout(verifier_kit.PATIENCE):
            await self.task
        return self.reader


async def in_mid_answer(asked: Asked, entered: threading.Event) -> None:
    """Wait until the engine stands before the next forward of this answer, and some of it was
    told."""
    assert await asyncio.to_thread(entered.wait, verifier_kit.PATIENCE)
    async with asyncio.timeout(verifier_kit.PATIENCE):
        await asked.said.wait()
    assert not asked.task.done()


def revoke(file: Path, name: str) -> None:
    """As an operator does it."""
    with pytest.raises(SystemExit) as ended:
        main(["token", "revoke", str(file), name])
    assert ended.value.code in (0, None)


async def refused(url: str, token: str) -> str:
    """What a device is told that begins now."""
    client = EdgeClient(verifier=url, token=token, device=kit.device(), connect_seconds=60.0)
    async with client:
        with pytest.raises(RemoteError) as caught:
            await client.wait_online()
        assert caught.value.code == "unauthorized"
        return str(caught.value)


@pytest.mark.parametrize("draft", ["device", "server"])
async def test_a_revoked_token_ends_its_connection_and_the_device_goes_on_alone(
    tmp_path: Path, draft: Any
) -> None:
    auth, alice, bob = verifier_kit.principals(tmp_path, "alice", "bob")
    file = tmp_path / "tokens"
    device = kit.oracle([*HERS, *truth(HERS)], right=1.0)
    async with (
        kit.verifier(auth=auth) as running,
        EdgeClient(
            verifier=running.transport.url, token=alice, device=device, draft=draft, **CALM
        ) as hers,
        EdgeClient(verifier=running.transport.url, token=bob, device=kit.device(), **CALM) as his,
        hers.conversation() as conversation,
    ):
        await asyncio.gather(hers.wait_online(), his.wait_online())
        before = await Asked(his, HIS).ended()
        with verifier_kit.held_forward(running, behind=len(HERS)) as (entered, release):
            asked = [Asked(conversation, HERS), Asked(his, HIS)]
            await in_mid_answer(asked[0], entered)
            revoke(file, "alice")
            alone = await asked[0].ended()
            assert "refused the token" in await refused(running.transport.url, alice)
            principals = {session.principal for session in running.service.table}
            assert principals == {"bob"}, "hers have ended, and keep no slot"
            page = running.service.metrics.page().decode()
            assert "moa_session_evictions_total{" not in page, "nobody else wanted it"
            release.set()
            other = await asked[1].ended()
        # Her drafter knows the target's text: so it is seen whether any of it is lost.
        assert alone.tokens == truth(HERS)
        assert 0 < sum(alone.verified) < COUNT
        assert alone.done is not None
        assert not alone.done.verified
        why = [event.detail for event in alone.events if isinstance(event, Link)][-1]
        assert "refused the token (HTTP 401) (it was revoked or replaced" in why
        assert alone.states[-1] == "refused"
        assert conversation.ids == [*HERS, *truth(HERS)], "all of it is kept"

        assert other.tokens == truth(HIS)
        assert all(other.verified)
        assert other.states == before.states, "nobody else notices"

        with file.open("a") as tokens:
            tokens.write(token_line("alice", alice) + "\n")
        again = await Asked(conversation, HERS).ended()
        assert again.tokens == truth(HERS)
        assert all(again.verified), "a token that is given back opens again"


class Idle(Lines):
    """A user at a terminal who types nothing until the screen says this."""

    interactive = True

    def __init__(self, awaited: str) -> None:
        super().__init__()
        self.screen = io.StringIO()
        self.typing = asyncio.Event()
        self._awaited = awaited

    async def read(self) -> str | None:
        self.typing.set()
        async with asyncio.timeout(verifier_kit.PATIENCE):
            while self._awaited not in self.screen.getvalue():
                await asyncio.sleep(0.01)
        return None


async def test_a_chat_that_stands_idle_is_told_when_its_token_is_revoked(tmp_path: Path) -> None:
    """It was told with the next question."""
    auth, alice, _ = verifier_kit.principals(tmp_path, "alice", "bob")
    user = Idle("refused")
    async with (
        kit.verifier(auth=auth) as running,
        EdgeClient(
            verifier=running.transport.url, token=alice, device=kit.device(), **CALM
        ) as client,
        client.conversation() as conversation,
    ):
        await client.wait_online()
        console = Console(file=user.screen, width=200, markup=False, highlight=False)
        dialogue = Dialogue(client.settings)
        chat: Any = ChatLoop(client, conversation, dialogue, user, console)  # type: ignore[arg-type]
        talking = asyncio.create_task(chat.run())
        async with asyncio.timeout(verifier_kit.PATIENCE):
            await user.typing.wait()
            revoke(tmp_path / "tokens", "alice")
            await talking
    told = [line for line in user.screen.getvalue().splitlines() if "refused" in line]
    assert len(told) == 1
    assert told[0].startswith("refused: the verifier refused the token (HTTP 401) (it was revoked")
