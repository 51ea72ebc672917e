"""An agent with two tools that goes on through a cut.

    edge-client serve --verifier ADDRESS
    python examples/agent.py

While the link is down the device answers, in the same shapes; what it wrote alone is counted in
`usage.moa`. Without that field, as from another endpoint, nobody knows whether it is verified.
These tools only look. Before one that acts, ask with `extra_body={"moa": {"mode": "hold"}}`, which
sends verified calls alone, or look at `choices[0].moa.verified`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from openai import APIConnectionError, OpenAI
from openai.types import CompletionUsage

CITIES = {"Rome": 31, "Paris": 24}
Tool = Callable[..., Any]


def temperature(city: str) -> int:
    """The temperature of a city, in degrees."""
    return CITIES[city]


def colder(degrees: int, limit: int) -> bool:
    """Whether a temperature is below a limit."""
    return degrees < limit


TOOLS: dict[str, tuple[Tool, dict[str, Any]]] = {
    "temperature": (temperature, {"city": {"enum": list(CITIES)}}),
    "colder": (colder, {"degrees": {"enum": list(CITIES.values())}, "limit": {"enum": [20, 30]}}),
}


def listed(name: str) -> dict[str, Any]:
    """A tool as OpenAI's API takes it."""
    tool, properties = TOOLS[name]
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": tool.__doc__, "parameters": schema, "strict": True}
    return {"type": "function", "function": function}


def _where(usage: CompletionUsage | None) -> str:
    """Who vouches for an answer, by the usage that came with it."""
    marks = (usage.model_extra or {}).get("moa") if usage else None
    if marks is None:
        return "unknown"
    return "the device alone" if marks.get("unverified_tokens") else "verified"


def _choice(steps: Sequence[str], step: int) -> Any:
    """Which tool the model has to call next; any or none where no steps are demanded."""
    if not steps:
        return "auto"
    if step >= len(steps):
        return "none"
    return {"type": "function", "function": {"name": steps[step]}}


def run(
    api: OpenAI,
    question: str,
    *,
    steps: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> str:
    """Call tools for as long as the model wants to. `steps` demands tools by name: the demo model
    knows none."""
    model = api.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": question}]
    tools: list[Any] = [listed(name) for name in TOOLS]
    for step in range(10):
        answer = api.chat.completions.create(
            model=model,
            messages=messages,
            tools=tools,
            tool_choice=_choice(steps, step),
            parallel_tool_calls=False,
        )
        where = _where(answer.usage)
        message = answer.choices[0].message
        messages.append(
            message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
        )
        if not message.tool_calls:
            say(f"{message.content}  [{where}]")
            return message.content or ""
        for call in message.tool_calls:
            given = json.loads(call.function.arguments)  # type: ignore[union-attr]
            result = TOOLS[call.function.name][0](**given)  # type: ignore[union-attr]
            say(f"{call.function.name}({call.function.arguments}) = {result}  [{where}]")  # type: ignore[union-attr]
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)}
            )
    return ""


if __name__ == "__main__":
    endpoint = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")
    try:
        run(
            OpenAI(base_url=endpoint, api_key="any"),
            "Is it hot in Rome?",
            steps=list(TOOLS),
        )
    except APIConnectionError:
        sys.exit(f"nothing answers at {endpoint}: start edge-client serve, or set OPENAI_BASE_URL")
