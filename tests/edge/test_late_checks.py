"""Random chats: questions, outages, `/new`, `/load`, `/retry` and checks that end whenever they like.
No text ever stands under a question that it does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from edge_client.cli.chat import ChatLoop
from edge_client.cli.dialogue import Dialogue
from edge_client.events import Done, Event, Prompt, Token
from edge_client.screen.ctrl_c import Interrupted
from edge_client.settings import ClientSettings
from moa.errors import UsageError
from moa.grammar.spec import Grammar
from tests.edge.test_screen import done

LINES = 14
FILES = 30
"""Saved by the first chats, and loaded by all; each costs a write to the disk."""
Messages = list[dict[str, str]]


def question_of(messages: Messages) -> str:
    """The latest question and the number of questions before it: an answer names both."""
    asked = [message["content"] for message in messages if message["role"] == "user"]
    return f"{asked[-1]}/{len(asked)}"


class World:
    """A link that comes and goes, a user who types at any speed, a conversation that answers with
    the name of its question: what the device writes is corrected by every check."""

    interactive = False

    def __init__(self, seed: int, saved: list[Path], folder: Path) -> None:
        self.draw = random.Random(seed)
        self.up = self.draw.random() < 0.5
        self.saved = saved
        self.folder = folder
        self.dialogue = Dialogue(ClientSettings())
        self.asked = 0
        self.lines = 0
        self.unverified = False
        self._latest = ""
        self.checked = 0

    # ---- the link

    async def flicker(self) -> None:
        while True:
            await self.pause()
            self.up = self.draw.random() < 0.5

    async def pause(self) -> None:
        for _ in range(self.draw.randrange(12)):
            await asyncio.sleep(0)

    async def wait_online(self) -> None:
        while not self.up:
            await asyncio.sleep(0)

    # ---- the conversation

    async def generate(
        self, messages: Messages, grammar: Grammar | None = None, **changes: Any
    ) -> AsyncGenerator[Event, None]:
        self.hold(messages)
        if self.draw.random() < 0.1:
            raise UsageError("too long")
        question = question_of(messages)
        yield Prompt(ids=[1])
        self._latest = question
        self.unverified = not self.up
        for part in range(self.draw.randrange(3)):
            await self.pause()
            if self.draw.random() < 0.05:
                raise UsageError("the drafter has failed")
            status: Any = "provisional" if self.unverified else "verified"
            yield Token(position=part, id=2, text="", status=status)
        text = f"device {question}" if self.unverified else f"target {question}"
        yield done(text, verified=not self.unverified)

    async def recheck(self, *, persists: bool) -> AsyncGenerator[Done, None]:
        question = self._latest
        for _ in range(3):
            await self.pause()
            if not self.up:
                yield done(f"device {question}", verified=False)
                return
        self.unverified = False
        self.checked += 1
        yield done(f"target {question}", verified=True)

    # ---- the user

    async def read(self) -> str | None:
        await self.pause()
        self.hold(self.dialogue.messages)
        self.lines += 1
        if self.lines > LINES:
            return None
        kind = self.draw.random()
        if kind < 0.08:
            raise Interrupted
        if kind < 0.55:
            self.asked += 1
            return f"question {self.asked}"
        if kind < 0.65:
            return "/new"
        if kind < 0.77:
            return "/retry"
        if len(self.saved) < FILES:
            self.saved.append(self.folder / f"{len(self.saved)}.json")
            return f"/save {self.saved[-1]}"
        return f"/load {self.draw.choice(self.saved)}"

    def begun(self) -> bool:
        return self.draw.random() < 0.5

    def show(self, status: str) -> None:
        pass

    def prefill(self, text: str) -> None:
        raise AssertionError("nobody edits here")

    def above(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    # ---- what must be true

    def hold(self, messages: Messages) -> None:
        for index, message in enumerate(messages):
            if message["role"] != "assistant" or not message["content"]:
                continue
            who, _, answers = message["content"].partition(" ")
            assert who in ("device", "target")
            assert answers == question_of(messages[:index]), "text under another question"


class Letters:
    """Each letter is a token."""

    def encode_behind(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


async def play(world: World) -> int:
    """A chat from beginning to end; how many checks ended in it."""
    client = SimpleNamespace(
        link=world,
        device=SimpleNamespace(codec=Letters()),
        shared=SimpleNamespace(max_context=100, link=None, welcome=None, has_engine_behind=False),
        settings=ClientSettings(max_new_tokens=64),
        wait_online=world.wait_online,
    )
    console = Console(file=io.StringIO(), width=200, markup=False, highlight=False)
    parts: Any = (client, world, world.dialogue, world, console)
    weather = asyncio.create_task(world.flicker())
    try:
        await ChatLoop(*parts).run()
    finally:
        weather.cancel()
    world.hold(world.dialogue.messages)
    return world.checked


@pytest.mark.parametrize("chats", [200, pytest.param(1000, marks=pytest.mark.slow)])
async def test_no_late_check_writes_under_another_question(
    chats: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checked = 0
    saved: list[Path] = []
    for seed in range(chats):
        checked += await play(World(seed, saved, tmp_path))
    assert checked > chats / 2, "the chats must have late checks"
