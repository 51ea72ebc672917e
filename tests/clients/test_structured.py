"""Structured answers and tools through packages that others wrote, and an agent: verifier up,
killed in the middle, and away. The embedded pair knows nothing of tools: which function it must
call is said; what the call holds is its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal

import pytest

from moa.process.listening import Port
from testing.verifier import Emulated, verifier
from tests.clients.conftest import MODEL, PATIENCE, Device, online

pytest.importorskip("langchain_openai", reason="needs `make clients`")
from tests.clients.test_packages import client, langchain
from tests.edge.serve.test_structured import Answer, Weather

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(600)]
QUESTION = "What is the weather in Rome?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]

_STRICT = {"strict": True, "parallel_tool_calls": False}
_CALL: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}


@pytest.fixture
def far() -> Iterator[tuple[Device, str]]:
    """A device that writes whole answers alone, and the port that its verifier shall have."""
    with Port("127.0.0.1", 0) as free:
        port = str(free.number)
    with Device(f"ws://127.0.0.1:{port}", max_new_tokens=300, max_offline_tokens=300) as device:
        yield device, port


def ask_openai(address: str) -> list[str]:
    """Its helpers `parse` and `stream`, and a call."""
    openai = client("openai")
    tool = openai.pydantic_function_tool(Weather)
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any") as api:
        parsed = api.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Answer)
        with api.chat.completions.stream(
            model=MODEL, messages=MESSAGES, response_format=Answer
        ) as events:
            for _ in events:
                pass
            streamed = events.get_final_completion()
        called = api.chat.completions.parse(model=MODEL, messages=MESSAGES, **_CALL, tools=[tool])
        (call, *_) = called.choices[0].message.tool_calls
        response = api.responses.parse(model=MODEL, input=QUESTION, text_format=Answer)
    assert isinstance(call.function.parsed_arguments, Weather)
    answers = [
        parsed.choices[0].message.parsed,
        streamed.choices[0].message.parsed,
        response.output_parsed,
    ]
    assert all(isinstance(answer, Answer) for answer in answers)
    return [repr(answer) for answer in (*answers, call.function.parsed_arguments)]


def ask_langchain(address: str) -> list[str]:
    """`with_structured_output` by schema and by a call, whole and streamed."""
    chat = langchain.ChatOpenAI(model=MODEL, base_url=f"{address}/v1", api_key="any")
    by_schema = chat.with_structured_output(Answer)
    by_call = chat.with_structured_output(Answer, method="function_calling")
    answers = [
        by_schema.invoke(QUESTION),
        list(by_schema.stream(QUESTION))[-1],
        by_call.invoke(QUESTION),
    ]
    assert all(isinstance(answer, Answer) for answer in answers)
    return [repr(answer) for answer in answers]


def ask_agent(address: str) -> list[str]:
    """An agent of LangChain's with two tools, which it calls before it answers."""
    agents = client("langchain.agents")
    ran = list[str]()
    middleware = client("langchain.agents.middleware")
    tool = client("langchain_core.tools").tool

    @tool
    def weather(city: Literal["Rome", "Paris"], days: Literal[1, 2, 3]) -> str:
        """The weather of a city."""
        ran.append(f"weather {city} {days}")
        return "warm"

    @tool
    def clock(zone: Literal["UTC", "CET"]) -> str:
        """The time."""
        ran.append(f"clock {zone}")
        return "12:00"

    @middleware.wrap_model_call
    def one_after_another(request: Any, handler: Callable[[Any], Any]) -> Any:
        choice = ("weather", "clock", "none")[len(ran)]
        return handler(request.override(tool_choice=choice, model_settings=_STRICT))

    chat = langchain.ChatOpenAI(model=MODEL, base_url=f"{address}/v1", api_key="any")
    agent = agents.create_agent(chat, [weather, clock], middleware=[one_after_another])
    state = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
    assert [one.split()[0] for one in ran] == ["weather", "clock"]
    assert [message.type for message in state["messages"]] == [
        "human",
        "ai",
        "tool",
        "ai",
        "tool",
        "ai",
    ]
    assert state["messages"][-1].content
    return [*ran, state["messages"][-1].content]


def ask_litellm(address: str) -> list[str]:
    """A schema and a call."""
    litellm = client("litellm")
    how: dict[str, Any] = {
        "model": f"openai/{MODEL}",
        "messages": MESSAGES,
        "api_base": f"{address}/v1",
    }
    tool = client("openai").pydantic_function_tool(Weather)
    answer = (
        litellm.completion(**how, api_key="any", response_format=Answer).choices[0].message.content
    )
    message = litellm.completion(**how, **_CALL, api_key="any", tools=[tool]).choices[0].message
    arguments = message.tool_calls[0].function.arguments
    return [repr(Answer(**json.loads(answer))), repr(Weather(**json.loads(arguments)))]


PACKAGES = {
    "openai": ask_openai,
    "langchain": ask_langchain,
    "agent": ask_agent,
    "litellm": ask_litellm,
}


@pytest.mark.parametrize("package", PACKAGES)
def test_structure_and_tools_with_the_verifier_up_killed_and_away(
    package: str, far: tuple[Device, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, port = far
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch prices
    ask = PACKAGES[package]
    seconds = dict[str, float]()

    def timed(situation: str) -> list[str]:
        began = time.monotonic()
        found = ask(device.address)
        seconds[situation] = round(time.monotonic() - began, 2)
        return found

    with ThreadPoolExecutor(1) as thread:
        assert timed("away") == timed("away, again"), "greedy answers are repeated"
        with verifier(
            "--port", port, emulated=Emulated(step_ms=100), threads=1
        ) as running:  # slow enough to be killed
            device.until(online)
            verified = timed("up")
            before = device.until(lambda status: status["running"] == 0)
            begun: Future[list[str]] = thread.submit(timed, "killed in the middle")
            device.until(
                lambda status: status["running"] == 1 and status["tokens"] > before["tokens"] + 8
            )
            running.process.kill()
            running.process.wait(PATIENCE)
            assert begun.result(PATIENCE)
        with verifier("--port", port, threads=1):
            device.until(online)
            assert timed("back again") == verified
    print(package, seconds)  # `pytest -rP` shows them
