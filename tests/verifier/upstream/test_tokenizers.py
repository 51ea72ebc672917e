"""An engine that takes tokens gets them only where they mean the same to it."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from cloud_verifier.settings import Settings
from cloud_verifier.upstream.app import DeviceTokens, UpstreamVerifier, upstreams_of
from edge_client import Done, EdgeClient
from moa import demo
from moa.bundle import Bundle
from tests.verifier.upstream.scripted import Request, end_of, running, stream, whole

TOKENS = DeviceTokens(Bundle.open(demo.paths().bundle))
SAID = " The upstream says this."


class Engine:
    """llama.cpp's server or vLLM, with a tokenizer that is the device's, another, or not told."""

    def __init__(self, owner: str, tokens: str) -> None:
        self.owner = owner
        self.tokens = tokens
        self.paths: set[str] = set()

    async def models(self, request: Request, writer: asyncio.StreamWriter) -> None:
        """One model."""
        await whole({"data": [{"id": "big", "owned_by": self.owner}]})(request, writer)

    async def answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        """Tokens of a text, or an answer."""
        if request.path == "/tokenize":
            text = request.body.get("content") or request.body["prompt"]
            told: dict[str, Any] = {"tokens": TOKENS.encode(text)}
            if self.tokens == "other":
                told = {"tokens": [1, 2, 3]}
            status = "404 Not Found" if self.tokens == "untold" else "200 OK"
            await whole(told, status)(request, writer)
            return
        self.paths.add(request.path)
        ids = TOKENS.encode(SAID)
        choice = {"text": "x", "token_ids": ids, "delta": {"content": SAID}}
        await stream(
            {"tokens": ids, "stop": False, "choices": [choice]},
            {"tokens": [], "stop": True, "stop_type": "eos"}
            | {"choices": [{"finish_reason": "stop", "token_ids": [], "delta": {}, "text": ""}]},
            "data: [DONE]\n\n",
        )(request, writer)


@pytest.mark.parametrize(
    ("owner", "tokens", "path"),
    [
        ("llamacpp", "same", "/completion"),
        ("llamacpp", "other", "/v1/chat/completions"),
        ("llamacpp", "untold", "/v1/chat/completions"),
        ("vllm", "same", "/v1/completions"),
        ("vllm", "other", "/v1/chat/completions"),
    ],
)
async def test_auto_asks_by_tokens_only_where_they_are_the_devices(
    owner: str, tokens: str, path: str
) -> None:
    engine = Engine(owner, tokens)
    done, _ = await asked(engine, "auto")
    assert done.verified
    assert done.text == SAID
    assert engine.paths == {path}


async def test_tokens_that_are_not_the_devices_are_refused_by_name() -> None:
    engine = Engine("llamacpp", "other")
    done, said = await asked(engine, "llama-server")
    assert not done.verified
    assert "tokenizer is not the one of the device's bundle" in said
    assert not engine.paths


async def test_an_end_token_that_comes_alone_is_followed_by_the_engines_count() -> None:
    """As llama.cpp's server writes it: the answer is complete for us before the event that counts."""
    engine = Engine("llamacpp", "same")

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        if request.path == "/tokenize":
            await engine.answer(request, writer)
            return
        counts = {"tokens_evaluated": 35, "tokens_predicted": 9}
        await stream(
            {"tokens": TOKENS.encode(SAID), "stop": False},
            {"tokens": [TOKENS.eos_ids[0]], "stop": False},
            0.01,
            {"tokens": [], "stop": True, "stop_type": "eos", **counts},
        )(request, writer)

    async with running(answer, engine.models) as upstream:
        settings = Settings(port=0, upstream=(upstream.url,), upstream_api="auto")
        async with (
            UpstreamVerifier(settings, upstreams_of(settings)).open() as front,
            EdgeClient(verifier=front.transport.url) as device,
        ):
            await device.wait_online(60)
            done, _ = await end_of(device)
    assert done.text == SAID
    assert done.stats["upstream_usage"] == {"prompt_tokens": 35, "completion_tokens": 9}


async def asked(engine: Engine, api: str) -> tuple[Done, str]:
    """An answer, and what was said beside it."""
    async with running(engine.answer, engine.models) as upstream:
        settings = Settings(port=0, upstream=(upstream.url,), upstream_api=api)
        async with (
            UpstreamVerifier(settings, upstreams_of(settings)).open() as front,
            EdgeClient(
                verifier=front.transport.url, settle_seconds=60, max_new_tokens=30
            ) as device,
        ):
            await device.wait_online(60)
            return await end_of(device)


@pytest.mark.parametrize("adds", [False, True])
def test_a_start_token_is_left_out_only_where_the_tokenizer_adds_it(
    adds: bool, tmp_path: Path
) -> None:
    """An engine that takes a text puts its start token before it where the tokenizer does."""
    folder = tmp_path / "bundle"
    shutil.copytree(demo.paths().bundle, folder)
    bundle = Bundle.open(folder)
    files = bundle.manifest.tokenizer
    assert files.file is not None
    assert files.bos_id is not None
    file = bundle.path(files.file)
    tokenizer = Tokenizer.from_file(str(file))
    start = tokenizer.id_to_token(files.bos_id)
    if adds:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{start} $A", special_tokens=[(start, files.bos_id)]
        )
        file.write_text(tokenizer.to_str(), encoding="utf-8")
    tokens = DeviceTokens(bundle)
    ids = [files.bos_id, *tokens.encode("hello")]
    assert tokens.prompt(ids) == ("hello" if adds else f"{start}hello")
