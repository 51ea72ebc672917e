"""A synchronous call for scripts and notebooks: one question, one answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Unpack

from edge_client.client import EdgeClient
from edge_client.events import Done, Reason
from edge_client.settings import ClientSettings, SettingChanges
from edge_client.text.chat import Messages


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer's text, whether all of it is verified, why it ended, and its figures."""

    text: str
    verified: bool
    reason: Reason
    stats: dict[str, Any]

    def __str__(self) -> str:
        """For people: text that the device wrote alone never goes unmarked."""
        return self.text if self.verified else f"{self.text}\n[not all of this was verified by the target]"


def ask(
    prompt: str | Messages,
    settings: ClientSettings | None = None,
    *,
    raw: bool = False,
    **changes: Unpack[SettingChanges],
) -> Answer:
    """Answer a prompt: `print(ask("What is 17 plus 25?", verifier="local"))`. Inside an event loop use `EdgeClient`."""
    return asyncio.run(_ask(EdgeClient(settings, **changes), prompt, raw=raw))


async def _ask(client: EdgeClient, prompt: str | Messages, *, raw: bool) -> Answer:
    done: Done | None = None
    async with client:
        async for event in client.generate(prompt, raw=raw):
            done = event if isinstance(event, Done) else done
    assert done is not None  # the last event of every answer
    return Answer(done.text, done.verified, done.reason, done.stats)
