"""Lines of a streamed HTTP answer, bounded; and the events that they carry."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from cloud_verifier.upstream.contract import Ending, UpstreamError, Usage
from moa.safe_text import safe_line

MOST_LINE_BYTES = 2**20
"""Of one line: an event holds some tokens and their text, far less than this."""
DONE = "[DONE]"


async def bounded_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """Yield the lines of a body that comes in chunks; a character may be cut anywhere between two
    of them. A line that is far too long is an error."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    rest = ""
    async for chunk in chunks:
        rest += decoder.decode(chunk)
        *lines, rest = rest.split("\n")
        for line in lines:
            yield line.rstrip("\r")
        if len(rest) > MOST_LINE_BYTES:
            raise UpstreamError("the upstream sent a line without an end")
    rest += decoder.decode(b"", final=True)
    if rest:
        yield rest.rstrip("\r")


async def _data(lines: AsyncIterator[str]) -> AsyncIterator[str]:
    """Yield the data of server-sent events. Comments and other fields are left out."""
    async for line in lines:
        if line.startswith("data:"):
            yield line.removeprefix("data:").strip()


async def events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON objects of server-sent events, up to `[DONE]`; an object with an `error`
    raises."""
    async for data in _data(lines):
        if data == DONE:
            return
        yield event(data)


async def choices(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """The first choice of each of OpenAI's chunks, with the chunk's `usage`; the chunk that has
    nothing else is a choice without text. So is the stream's end, whose `finish_reason` is `[DONE]`:
    a stream that is cut has none."""
    async for data in _data(lines):
        if data == DONE:
            yield {"finish_reason": DONE}
            return
        found = event(data)
        usage = found.get("usage")
        if found.get("choices"):
            yield {**first_choice(found), "usage": usage}
        elif usage:
            yield {"usage": usage}


def first_choice(answer: Any) -> dict[str, Any]:
    """The first choice of one of OpenAI's answers or chunks."""
    found = listed(answer.get("choices")) if isinstance(answer, dict) else []
    if not found or not isinstance(found[0], dict):
        raise UpstreamError("the upstream sent a choice that is none")
    _check_verified(found[0])
    return found[0]


def _check_verified(choice: dict[str, Any]) -> None:
    """Raise if a choice says that its text is not the model's: an endpoint of ours whose verifier
    is away writes with its own small model, and marks that."""
    marks = choice.get("moa")
    if isinstance(marks, dict) and (marks.get("unverified") or marks.get("all_verified") is False):
        raise UpstreamError("the upstream writes without its verifier")


def listed(value: Any) -> list[Any]:
    """A list; an empty one for anything else."""
    return value if isinstance(value, list) else []


def ending(choice: dict[str, Any]) -> Ending:
    """Why a choice of OpenAI's has ended; "" while it goes on. A reason that is not known, such as a
    filter, cuts the answer off."""
    endings: dict[Any, Ending] = {
        None: "",
        "": "",
        "stop": "eos",
        "length": "length",
        DONE: "done",
    }
    reason = choice.get("finish_reason")
    if not isinstance(reason, str | None):
        return "cut"
    return endings.get(reason, "cut")


async def objects(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a body with one a line."""
    async for line in lines:
        if line.strip():
            yield event(line)


def event(data: str) -> dict[str, Any]:
    """Returns one JSON object of a stream; an error if it is none, or says that the upstream
    failed."""
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        raise UpstreamError("the upstream sent something that is not JSON") from None
    if not isinstance(found, dict):
        raise UpstreamError("the upstream sent JSON that is not an object")
    if found.get("error") or found.get("object") == "error":
        raise UpstreamError(f"the upstream failed: {error_text(found)}")
    return found


def error_text(body: Any) -> str:
    """The text of an error's body, from whichever of the usual places has it; one line."""
    error = body
    if isinstance(body, dict):
        error = body.get("error", body)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error.get("type") or error
    return safe_line(str(error))[:200]


def token_ids(value: Any) -> tuple[int, ...]:
    """A list of token ids; anything else is refused."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
        raise UpstreamError("the upstream sent token ids that are none")
    return tuple(value)


def text_of(value: Any) -> str:
    """A text; anything else is refused."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UpstreamError("the upstream sent a text that is none")
    return value


def openai_usage(choice: dict[str, Any]) -> Usage | None:
    """The tokens that OpenAI's `usage` tells."""
    return usage_of(choice.get("usage"), "prompt_tokens", "completion_tokens")


def usage_of(told: Any, read: str, written: str) -> Usage | None:
    """Returns how many tokens an answer says it has read and written, under these names; None if it
    does not say, or says nonsense."""
    if not isinstance(told, dict):
        return None
    counts: list[int] = []
    for name in (read, written):
        count = told.get(name)
        if type(count) is not int or not 0 <= count < 2**31:
            return None
        counts.append(count)
    return Usage(read=counts[0], written=counts[1])
