"""The examples run, beside the embedded pair."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import subprocess
import sys
import types
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from cloud_verifier.app import Verifier
from edge_client import Conversation, Done, EdgeClient
from examples import (
    agent,
    ask,
    batch,
    conversation,
    openai_stream,
    robot,
    schema,
    stream,
    upstream,
)
from moa.errors import UsageError
from tests.edge.serve.pair import SETTINGS, served, verifier
from tests.edge.serve.test_endpoint import PATIENCE, serving
from tests.torture.tls import certificate
from tests.verifier.kit import principals
from tests.verifier.upstream.scripted import chunk, running
from tests.verifier.upstream.scripted import stream as streamed

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


async def test_an_engine_that_is_there_writes_the_answer_and_another_does_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = streamed(chunk(" The engine says this."), chunk("", "stop"), "data: [DONE]\n\n")
    async with running(writes) as engine:
        answer = await asyncio.to_thread(upstream.main, engine.url, SUM, api="completions")
    assert answer.verified
    assert "The engine says this." in answer.text
    assert capsys.readouterr().out.endswith("the engine's own\n")
    alone = partial(upstream.ask, settle_seconds=0.0, max_offline_tokens=10)
    monkeypatch.setattr(upstream, "ask", alone)
    answer = await asyncio.to_thread(upstream.main, "http://127.0.0.1:9/v1", SUM)
    assert not answer.verified
    assert capsys.readouterr().out.endswith("written by this device alone\n")


def test_a_batch_of_nothing_says_what_it_reads() -> None:
    ended = subprocess.run(
        [sys.executable, FILES["batch"], "ws://127.0.0.1:9"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    assert ended.stderr == "no prompts: give one a line, on standard input\n"


NEEDS_AN_ENDPOINT = sorted(
    name for name, file in FILES.items() if "OPENAI_BASE_URL" in file.read_text()
)


@pytest.mark.parametrize("name", NEEDS_AN_ENDPOINT)
def test_a_program_whose_endpoint_is_not_there_says_so_in_a_line(name: str) -> None:
    """It was eighty lines of libraries."""
    if name.startswith("langchain"):
        pytest.importorskip("langchain_openai")
    ended = subprocess.run(
        [sys.executable, FILES[name]],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=os.environ | {"OPENAI_BASE_URL": "http://127.0.0.1:9/v1"},
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith("nothing answers at http://127.0.0.1:9/v1: start edge-client serve")


def test_the_programs_that_need_an_address_are_found() -> None:
    assert {"agent", "openai_stream"} <= set(NEEDS_AN_ENDPOINT)
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


async def test_a_robot_leaves_no_conversation_open_whatever_it_does() -> None:
    begun: list[Conversation] = []

    class Watched(EdgeClient):
        def conversation(self) -> Conversation:
            begun.append(super().conversation())
            return begun[-1]

    async with Watched(offline=True, max_offline_tokens=1) as client:
        assert not await robot.step(client, "a door", print)
        (conversation,) = begun
        with pytest.raises(UsageError, match="closed"):
            await anext(conversation.generate("and now?"))


def usage(**more: Any) -> CompletionUsage:
    return CompletionUsage.model_validate(
        {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, **more}
    )


def answering(usage: CompletionUsage) -> Any:
    """Stands for an endpoint: a whole answer, or its stream of one chunk."""
    one = {"id": "a", "created": 0, "model": "other", "usage": usage.model_dump()}
    whole = ChatCompletion.model_validate(
        one
        | {
            "object": "chat.completion",
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": "Yes."},
                }
            ],
        }
    )
    chunk = ChatCompletionChunk.model_validate(
        one | {"object": "chat.completion.chunk", "choices": []}
    )
    api = MagicMock()
    api.chat.completions.create = lambda *, stream=False, **_: [chunk] if stream else whole
    return api


@pytest.mark.parametrize(
    ("marks", "mark", "alone"),
    [
        ({}, "[unknown]", "unknown how many tokens"),
        ({"moa": {"unverified_tokens": 0, "offline_tokens": 9}}, "[verified]", "0 tokens"),
        ({"moa": {"unverified_tokens": 2}}, "[the device alone]", "2 tokens"),
    ],
)
def test_nothing_is_called_verified_without_the_endpoints_word(
    marks: dict[str, Any],
    mark: str,
    alone: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    api = answering(usage(**marks))
    said: list[str] = []
    assert agent.run(api, "Is it hot?", say=said.append) == "Yes."
    assert said == [f"Yes.  {mark}"]
    monkeypatch.setattr(openai_stream, "OpenAI", lambda **_: api)
    openai_stream.main()
    assert f"{alone} are the device's own, and not verified" in capsys.readouterr().out


def test_langchain_asks_for_the_model_that_the_endpoint_lists(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = types.ModuleType("langchain_openai")
    chat = MagicMock()
    package.ChatOpenAI = chat  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "langchain_openai", package)
    monkeypatch.delitem(sys.modules, "examples.langchain_chat", raising=False)
    langchain_chat = importlib.import_module("examples.langchain_chat")
    monkeypatch.delitem(sys.modules, "examples.langchain_chat")
    api = MagicMock()
    api.models.list().data[0].id = "ours"
    monkeypatch.setattr(langchain_chat, "OpenAI", lambda **_: api)
    langchain_chat.main()
    assert chat.call_args.kwargs["model"] == "ours"


async def test_openais_client_streams_through_the_endpoint(address: str) -> None:
    async with serving(verifier=address) as (client, api):
        await client.wait_online(PATIENCE)
        text = await asyncio.to_thread(openai_stream.main, str(api.base_url), SUM)
    assert "42" in text


PAGE = (Path(ask.__file__).parents[1] / "docs" / "edge-client.md").read_text(encoding="utf-8")
SAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


async def test_the_pages_program_prints_the_targets_answer(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program = SAMPLES[0].replace("ws://127.0.0.1:8765", address)
    await asyncio.to_thread(exec, program, {"__name__": "sample"})
    story = capsys.readouterr().out
    async with EdgeClient(verifier=address, max_new_tokens=200, draft="none") as client:
        question = "Tell me a short story with Ada, a fox and a garden."
        async for event in client.generate(question):
            if isinstance(event, Done):
                assert event.verified
                assert story == f"{event.text}\n"


async def test_the_page_says_what_a_wrong_token_and_a_wrong_certificate_raise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain, key = certificate(tmp_path)
    (tmp_path / "other").mkdir()
    another, _ = certificate(tmp_path / "other")
    auth, token = principals(tmp_path, "phone")
    settings = replace(SETTINGS, tls_cert=chain, tls_key=key)
    async with Verifier(served(settings), settings, auth).open() as running:
        url = running.transport.url
        for authority, given, said in (
            (chain, token, ""),
            (chain, "wrong", "the verifier refused the token (HTTP 401)"),
            (another, token, "the verifier's certificate is not trusted: self-signed certificate"),
        ):
            program = SAMPLES[1].replace('"chain.pem"', f"{str(authority)!r}, connect_seconds=2.0")
            names: dict[str, Any] = {}
            exec(program, names)
            await names["first"](url, given)
            printed = capsys.readouterr().out
            assert printed.startswith(said) if said else not printed
    with pytest.raises(UsageError, match="certificate authority"):
        async with EdgeClient(verifier=url, tls_ca=str(tmp_path / "absent")):
            pass
