"""The cases of Open Responses' compliance suite that concern text: basic, system prompt, several turns.

Streaming and tool calls are in `test_openai.py` and `test_tools.py`; a picture is what this API does not do.
"""

from __future__ import annotations

import pytest

from tests.api.scripted import MODEL, says, talk

FIELDS = [
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id",
    "instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p",
    "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage",
    "max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier",
    "prompt_cache_key",
]  # fmt: skip
"""Every response has all of them, null or not."""


def message(role: str, text: str) -> dict[str, str]:
    return {"type": "message", "role": role, "content": text}


CASES = {
    "basic": [message("user", "Say hello.")],
    "system prompt": [message("system", "Be a pirate."), message("user", "Say hello.")],
    "several turns": [message("user", "I am Al."), message("assistant", "Hello Al."), message("user", "Who am I?")],
}


@pytest.mark.parametrize("case", CASES)
async def test_a_whole_response(case: str) -> None:
    async with talk(says("Hel", "lo")) as (answerer, client):
        response = (await client.post("/v1/responses", json={"model": MODEL, "input": CASES[case]})).json()
    assert [name for name in FIELDS if name not in response] == []
    assert (response["object"], response["status"], response["error"]) == ("response", "completed", None)
    (item,) = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + response["usage"]["output_tokens"]
    asked = [{"role": one["role"], "content": one["content"]} for one in CASES[case]]
    assert [dict(one) for one in answerer.asks[0].question.messages or ()] == asked
