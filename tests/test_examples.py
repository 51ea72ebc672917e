"""The examples run, beside the embedded pair."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from edge_client import EdgeClient
from examples import ask, batch, conversation, openai_stream, robot, schema, stream
from tests.edge.serve.pair import verifier
from tests.edge.serve.test_endpoint import PATIENCE, serving

SUM = "What is 17 plus 25?"


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with verifier() as url:
        yield url


async def test_ask_and_batch_give_the_targets_answer(address: str) -> None:
    answer = await asyncio.to_thread(ask.main, address, SUM)
    assert "42" in answer.text
    assert answer.verified
    assert await batch.main(address, [SUM] * 9) == [answer.text] * 9


async def test_a_stream_and_a_conversation_end_with_their_texts(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = await stream.main(address, SUM)
    assert "42" in text
    assert "-- verified --" in capsys.readouterr().out
    answers = await conversation.main(address, [SUM, SUM])
    assert len(answers) == 2
    assert answers[0] == text


FILES = {path.stem: path for path in Path(ask.__file__).parent.glob("[a-z]*.py")}
"""All examples, also those that are added later."""
NEEDS_AN_ADDRESS = sorted(
    name for name, file in FILES.items() if re.search(r"main\(verifier: str[,)]", file.read_text())
)


@pytest.mark.parametrize("name", NEEDS_AN_ADDRESS)
def test_a_program_without_an_address_says_how_it_is_called(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, FILES[name]], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"usage: python examples/{name}.py ws://HOST:PORT")


def test_the_programs_that_need_an_address_are_found() -> None:
    assert {"ask", "batch", "conversation", "robot", "stream"} <= set(NEEDS_AN_ADDRESS)


async def test_a_conversation_marks_what_is_not_verified(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    offline = partial(EdgeClient, offline=True, max_offline_tokens=10)
    monkeypatch.setattr(conversation, "EdgeClient", lambda verifier: offline())
    (answer,) = await conversation.main("", [SUM])
    mark = "[written by this device alone, not verified]"
    assert capsys.readouterr().out.splitlines()[:2] == [SUM, f"  {answer}  {mark}"]


async def test_a_schema_holds_with_a_verifier_and_without(address: str) -> None:
    for where in (address, ""):
        found = await schema.main(where)
        assert found["colour"] in {"red", "green", "blue"}
        assert 0 <= found["amount"] <= 100


async def test_a_robot_does_alone_only_what_can_be_undone() -> None:
    acted: list[str] = []
    async with EdgeClient(offline=True, max_offline_tokens=100) as client:
        for number in range(6):
            before = len(acted)
            done = await robot.step(
                client, f"thing {number}", lambda plan: acted.append(plan["action"])
            )
            assert done == (len(acted) > before)
    assert all(robot.ACTIONS[action] for action in acted)


async def test_openais_client_streams_through_the_endpoint(address: str) -> None:
    async with serving(verifier=address) as (client, api):
        await client.wait_online(PATIENCE)
        text = await asyncio.to_thread(openai_stream.main, str(api.base_url), SUM)
    assert "42" in text
