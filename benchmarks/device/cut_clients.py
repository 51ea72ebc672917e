"""Other clients under the same cuts. Runs by itself, with the Python of an environment that has
their packages: `python cut_clients.py < cases.json`; nothing of ours is imported.

The input is one JSON object: which client, how many answers at once, and the cases. The output is
a JSON object a line: a piece of text with the time when it came, or the end of an answer.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

Case = dict[str, Any]
_SECONDS = 300.0
"""An answer that takes longer is given up, and counted: it is the machine's fault."""
_REPLAY_PAUSE = 0.5
"""Seconds between two questions for the rest of an answer."""
_REPLAY_SECONDS = 45.0
"""Seconds without any byte after which the rest is given up: as long as ours waits."""


async def plain(case: Case) -> AsyncIterator[str]:
    """The `openai` package: what most programs are."""
    openai: Any = importlib.import_module("openai")
    async with openai.AsyncOpenAI(base_url=case["url"], api_key="none") as client:
        stream = await client.chat.completions.create(model=case["model"], **_request(case))
        async for text in _texts(stream):
            yield text


async def litellm_router(case: Case) -> AsyncIterator[str]:
    """LiteLLM's router, with the small model as fallback."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks a server for prices
    litellm: Any = importlib.import_module("litellm")
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    models = [
        {
            "model_name": name,
            "litellm_params": {"model": f"openai/{model}", "api_base": url, "api_key": "none"},
        }
        for name, model, url in (
            ("large", case["model"], case["url"]),
            ("small", case["small"], case["fallback"]),
        )
    ]
    router = litellm.Router(model_list=models, fallbacks=[{"large": ["small"]}])
    stream = await router.acompletion(model="large", **_request(case))
    async for text in _texts(stream):
        yield text


async def langchain(case: Case) -> AsyncIterator[str]:
    """LangChain's `with_fallbacks`."""
    package: Any = importlib.import_module("langchain_openai")
    large, small = (
        package.ChatOpenAI(
            model=model,
            base_url=url,
            api_key="none",
            temperature=case["temperature"],
            seed=case["seed"],
            max_tokens=case["tokens"],
        )
        for model, url in ((case["model"], case["url"]), (case["small"], case["fallback"]))
    )
    async for chunk in large.with_fallbacks([small]).astream([("user", case["prompt"])]):
        yield chunk.content or ""


async def replay(case: Case) -> AsyncIterator[str]:
    """llama.cpp's server writes on when a reader is gone, and keeps what it wrote for him: who has
    named a conversation asks for the rest of its bytes, as the server's own page does."""
    http: Any = importlib.import_module("httpx2")
    conversation = f"cut-{os.getpid()}-{case['id']}"
    body = {"model": case["model"], **_request(case)}
    received = 0
    line = b""
    async with http.AsyncClient(timeout=60) as client:
        began = client.stream(
            "POST",
            f"{case['url']}/chat/completions",
            json=body,
            headers={"X-Conversation-Id": conversation},
        )
        given_up = 0.0
        while True:
            try:
                async with began as answer:
                    answer.raise_for_status()
                    async for data in answer.aiter_bytes():
                        received += len(data)
                        given_up = 0.0
                        *lines, line = (line + data).split(b"\n")
                        for one in lines:
                            if one == b"data: [DONE]":
                                return
                            for text in _texts_of(one):
                                yield text
                raise http.ReadError("the stream ended before its end")
            except http.TransportError:
                given_up = given_up or time.monotonic() + _REPLAY_SECONDS
                if time.monotonic() > given_up:
                    raise
            await asyncio.sleep(_REPLAY_PAUSE)
            began = client.stream(
                "GET",
                f"{case['url']}/stream",
                params={"conv_id": conversation, "from": received},
            )


def _texts_of(line: bytes) -> list[str]:
    """The pieces of text in one line of a streamed chat."""
    if not line.startswith(b"data: {"):
        return []
    choices = json.loads(line[6:])["choices"]
    return [choice["delta"].get("content") or "" for choice in choices]


CLIENTS: dict[str, Callable[[Case], AsyncIterator[str]]] = {
    "openai": plain,
    "litellm": litellm_router,
    "langchain": langchain,
    "replay": replay,
}
PACKAGES = {
    "openai": "openai",
    "litellm": "litellm",
    "langchain": "langchain-openai",
    "replay": "xllamacpp",
}


def _request(case: Case) -> dict[str, Any]:
    """A streamed chat request of this case, but for the model, by OpenAI's names."""
    return {
        "messages": [{"role": "user", "content": case["prompt"]}],
        "stream": True,
        "temperature": case["temperature"],
        "seed": case["seed"],
        "max_tokens": case["tokens"],
    }


async def _texts(chunks: AsyncIterator[Any]) -> AsyncIterator[str]:
    """The pieces of text in the chunks of a streamed chat."""
    async for chunk in chunks:
        for choice in chunk.choices:
            yield choice.delta.content or ""


def _tell(case: Case, **what: Any) -> None:
    print(json.dumps({"id": case["id"], "at": time.monotonic(), **what}), flush=True)


async def run(task: dict[str, Any]) -> None:
    """All cases, so many at a time."""
    client = CLIENTS[task["client"]]
    room = asyncio.Semaphore(task["at_once"])

    async def one(case: Case) -> None:
        async with room:
            try:
                async with asyncio.timeout(_SECONDS):
                    async for text in client(case):
                        if text:
                            _tell(case, text=text)
            except Exception as error:
                _tell(case, error=f"{type(error).__name__}: {error}"[:300])
            else:
                _tell(case, error="")

    await asyncio.gather(*map(one, task["cases"]))


def version(client: str) -> str:
    """The package's version in this environment."""
    from importlib.metadata import version as version_of

    named = f"{PACKAGES[client]} {version_of(PACKAGES[client])}"
    return f"llama.cpp's replay ({named})" if client == "replay" else named


if __name__ == "__main__":
    task = json.load(sys.stdin)
    print(json.dumps({"version": version(task["client"])}), flush=True)
    asyncio.run(run(task))
