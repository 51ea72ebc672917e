"""Schemas and tools through the endpoint of the device, with the embedded pair: verifier up, lost,
and away."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel, Field

from examples import agent
from tests.edge.cutting import CuttingLink
from tests.edge.serve.pair import verifier
from tests.edge.serve.test_endpoint import MODEL, PATIENCE, serving, switch

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]


class Answer(BaseModel):
    """What is asked for."""

    colour: Literal["red", "green", "blue"]
    age: int = Field(ge=0, le=150)
    sure: bool


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Paris"]
    days: int = Field(ge=1, le=9)


async def asked(
    api: openai.AsyncOpenAI, patience: float = PATIENCE, seed: int = 1
) -> tuple[str, list[str]]:
    """A parsed answer, a call, and the answer to its result; whole and streamed they are the same.
    A verifier that is there has patience: on a busy machine it is late, and its text comes all the
    same."""
    extra: dict[str, Any] = {"extra_body": {"moa": {"patience": patience}}}
    how: dict[str, Any] = {
        "model": MODEL,
        "messages": QUESTION,
        "max_tokens": 120,
        "seed": seed,
        **extra,
    }
    parsed = await api.chat.completions.parse(**how, response_format=Answer)
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    async with api.chat.completions.stream(**how, response_format=Answer) as events:
        async for _ in events:
            pass
        streamed = (await events.get_final_completion()).choices[0].message
    assert streamed.content == parsed.choices[0].message.content
    tools = [pydantic_function_tool(Weather)]
    how |= {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    choice = (await api.chat.completions.parse(**how)).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    messages = [
        *QUESTION,
        choice.message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"weather": "warm"})},
    ]
    after = await api.chat.completions.create(
        model=MODEL, messages=messages, tools=tools, max_tokens=20, **extra
    )  # type: ignore[arg-type]
    assert after.choices[0].message.content
    return str(streamed.content), [call.function.arguments, after.choices[0].message.content]


async def test_structured_answers_and_calls_before_in_and_after_an_outage() -> None:
    async with (
        verifier() as address,
        serving(verifier=address, max_offline_tokens=500) as (client, api),
    ):
        await client.wait_online(PATIENCE)
        online = await asked(api)
        await switch(api, connected=False)
        await asked(api, patience=0.1)
        await switch(api, connected=True)
        await client.wait_online(PATIENCE)
        assert await asked(api) == online


@pytest.mark.parametrize("cuts", [6, pytest.param(60, marks=pytest.mark.slow)])
async def test_answers_and_calls_are_the_same_through_cuts(cuts: int) -> None:
    """Every connection is cut, in a message or between two: what one carries is shorter than the
    answers to a question. The device that loses them does not go on alone, so all is verified."""
    async with (
        verifier() as address,
        CuttingLink(int(address.rpartition(":")[2]), seed=7, share=1.0, longest=1500) as link,
        serving(verifier=address) as (whole, direct),
        serving(verifier=link.url, offline_after=PATIENCE) as (_, through_cuts),
    ):
        await whole.wait_online(PATIENCE)
        for seed in range(cuts):
            if link.cuts >= cuts:
                break
            assert await asked(through_cuts, seed=seed) == await asked(direct, seed=seed)
        assert link.cuts >= cuts


async def test_an_agent_goes_on_through_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is cut while its first tool runs, and is back while its second one does."""
    loop = asyncio.get_running_loop()
    lines = list[str]()

    def between(tool: agent.Tool, *, connected: bool) -> agent.Tool:
        def called(**given: Any) -> Any:
            asyncio.run_coroutine_threadsafe(turn(connected), loop).result(PATIENCE)
            return tool(**given)

        called.__doc__ = tool.__doc__
        return called

    async def turn(connected: bool) -> None:
        await switch(served[1], connected=connected)
        if connected:
            await served[0].wait_online(PATIENCE)

    async with (
        verifier() as address,
        serving(0.1, verifier=address, max_offline_tokens=500) as served,
    ):
        await served[0].wait_online(PATIENCE)
        for name, connected in zip(list(agent.TOOLS), (False, True), strict=True):
            tool, properties = agent.TOOLS[name]
            monkeypatch.setitem(agent.TOOLS, name, (between(tool, connected=connected), properties))
        with openai.OpenAI(base_url=str(served[1].base_url), api_key="any", max_retries=0) as api:
            question = "Is it hot in Rome?"
            steps = list(agent.TOOLS)
            answer = await asyncio.to_thread(
                agent.run, api, question, steps=steps, say=lines.append
            )
    assert answer
    assert len(lines) == 3
    assert lines[1].endswith("[the device alone]")
