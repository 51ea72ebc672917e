"""An agent behind `--upstream`: the service's calls are the ones that it gets, in whichever style they
are written, and a `tool_choice` is told to the service."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import pytest

from edge_client import EdgeClient
from moa.api.tools import Function, Tool, ToolFormat, Tools
from tests.verifier.upstream.scripted import running
from tests.verifier.upstream.test_call_style import CALL, ROME, WRITTEN
from tests.verifier.upstream.test_chats import Service
from tests.verifier.upstream.test_telling import served

TOOL = {
    "type": "function",
    "function": {
        "name": "temperature",
        "description": "How warm it is in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
QUESTION: dict[str, Any] = {
    "messages": [{"role": "user", "content": "How warm is it in Rome?"}],
    "tools": [TOOL],
}
NAMED = {"type": "function", "function": {"name": "temperature"}}
OWN = json.dumps(CALL)
MARKED = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
BEHIND_WORDS = f"I will look.\n\n```json\n{json.dumps(CALL, indent=2)}\n```"


async def replied(service: Service, asked: dict[str, Any]) -> httpx.Response:
    """What a device's endpoint sends with this service behind it."""
    async with (
        running(service) as upstream,
        EdgeClient(upstream=upstream.url, upstream_api="chat", settle_seconds=60) as device,
        served(device) as http,
    ):
        await device.wait_online(60)
        answer = await http.post("/v1/chat/completions", json=QUESTION | asked)
    assert answer.status_code == 200, answer.text
    return answer


async def answered(service: Service, asked: dict[str, Any]) -> dict[str, Any]:
    """The choice of a whole answer."""
    answer = await replied(service, asked)
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def streamed(service: Service, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a stream's chunks."""
    answer = await replied(service, asked)
    data = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    events = [json.loads(one) for one in data if one.startswith("{")]
    return [choice for event in events for choice in event["choices"]]


def joined(choices: list[dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A stream's last choice, and the message that its chunks are."""
    deltas = [choice["delta"] for choice in choices]
    content = "".join(delta.get("content", "") for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    return choices[-1], {"content": content, "tool_calls": calls}


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("how", ["ours", "with arguments", "in a fence", "in a mark"])
async def test_an_agent_gets_the_services_call(how: str, choice: str) -> None:
    told = await answered(Service(answer=WRITTEN[how]), {"tool_choice": choice})
    assert told["moa"] == {"reason": "eos", "verified": True}
    assert told["finish_reason"] == "tool_calls"
    (call,) = told["message"]["tool_calls"]
    assert call["function"]["name"] == "temperature"
    assert json.loads(call["function"]["arguments"]) == ROME


async def test_a_call_behind_words_is_the_services_where_one_is_demanded() -> None:
    service = Service(answer=BEHIND_WORDS)
    told = await answered(service, {"tool_choice": NAMED})
    assert told["moa"]["verified"] is True
    (call,) = told["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == ROME
    assert len(service.asked) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "written", [BEHIND_WORDS, f"I will look.\n\n{MARKED}", f"I will look.\n\n[TOOL_CALLS] [{OWN}]"]
)
async def test_words_before_a_call_are_text_where_none_is_demanded(
    written: str, stream: bool
) -> None:
    """The bundle's template has no mark for calls, so that no grammar of ours knows them there."""
    asked: dict[str, Any] = {"tool_choice": "auto", "stream": stream}
    if not stream:
        told = await answered(Service(answer=written), asked)
        assert told["moa"] == {"reason": "eos", "verified": True}
        message = told["message"]
    else:
        told, message = joined(await streamed(Service(answer=written), asked))
        assert told["moa"] == {"reason": "eos", "all_verified": True}
    assert told["finish_reason"] == "tool_calls"
    assert message["content"] == "I will look.\n\n"
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "temperature"
    assert json.loads(call["function"]["arguments"]) == ROME


async def test_an_answer_in_words_stays_one() -> None:
    told = await answered(Service(answer="It is warm in Rome."), {})
    assert told["message"]["content"] == "It is warm in Rome."
    assert told["moa"]["verified"] is True


async def test_a_service_that_calls_nothing_where_it_must_is_said_to() -> None:
    told = await answered(
        Service(answer="It is warm in Rome."), {"tool_choice": "required", "max_tokens": 60}
    )
    assert told["moa"]["verified"] is False
    assert told["moa"]["why"] == "the upstream does not write what the grammar demands"


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("auto", ""),
        ("required", "Answer with a call of one of the functions, and with nothing else."),
        (NAMED, "Answer with a call of the function temperature, and with nothing else."),
    ],
)
async def test_a_demand_for_a_call_is_told_to_the_service(choice: Any, said: str) -> None:
    service = Service(answer=WRITTEN["ours"])
    await answered(service, {"tool_choice": choice})
    last = service.asked[0]["messages"][-1]
    assert last["role"] == "user"
    assert last["content"].endswith(said or "How warm is it in Rome?")


def test_a_demand_stands_behind_the_last_question_and_not_in_a_models_own_prompt() -> None:
    tools = Tools((Tool(Function("clock")),), "required")
    messages = [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "How late is it?"},
    ]
    form = ToolFormat.of("")
    told = form.for_service(messages, tools)
    assert told[0]["content"].endswith("Hello.")
    assert told[2]["content"].startswith("How late is it?\n\nAnswer with a call")
    assert form.messages(messages, tools)[2]["content"] == "How late is it?"
