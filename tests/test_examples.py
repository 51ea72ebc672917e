"""The examples run, beside the embedded pair."""

from __future__ import annotations

import asyncio
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


def test_a_program_without_an_address_says_how_it_is_called() -> None:
    for program in (ask, conversation):
        assert program.__file__
        ended = subprocess.run([sys.executable, program.__file__], capture_output=True, text=True)
        assert ended.returncode == 1
        name = Path(program.__file__).name
        (line,) = ended.stderr.splitlines()
        assert line.startswith(f"usage: python examples/{name} ws://HOST:PORT")


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
