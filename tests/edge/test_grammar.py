"""Under a grammar: online the target's own text, however it is drafted and cut; offline a text that
matches."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from functools import cache
from typing import Any

import jsonschema
import pytest

from cloud_verifier.app import Verifier
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.events import Notice, Token
from edge_client.tools.emulated_network import LinkProxy
from moa.errors import UsageError
from moa.grammar.spec import Grammar, GrammarError
from moa.sampling import SamplingSettings
from testing.speculator import GenerationSettings, Speculator
from tests.edge.kit import FAST, Reader, transcribe
from tests.edge.serve.pair import SETTINGS, embedded, served, verifier
from tests.edge.test_exact import WAYS

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colour": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "age", "colour", "tags"],
    "additionalProperties": False,
}
GRAMMAR = Grammar.of_schema(SCHEMA)
COUNT = 120
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 11}
device = cache(Device.load)


@cache
def ids() -> tuple[int, ...]:
    return tuple(device().codec.encode("Once upon a time there was a"))


@cache
def truth(**sampling: Any) -> list[int]:
    settings = GenerationSettings(
        max_new_tokens=COUNT, sampling=SamplingSettings(**sampling), shape=None, grammar=GRAMMAR
    )
    return Speculator(served().target).generate([ids()], settings)[0].ids


def valid(transcript: Reader) -> None:
    assert transcript.done is not None
    assert transcript.done.reason == "eos"
    jsonschema.validate(json.loads(transcript.text), SCHEMA)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
async def test_online_text_is_the_targets_own(sampling: dict[str, Any]) -> None:
    async with verifier() as url:
        for way, how in WAYS.items():
            settings = {**how, "max_new_tokens": COUNT, **sampling}
            async with EdgeClient(verifier=url, device=device(), **settings) as client:
                transcript = await transcribe(client, ids(), grammar=GRAMMAR)
                assert transcript.tokens == truth(**sampling), way
                assert all(transcript.verified)
                valid(transcript)


@pytest.mark.parametrize("fault", ["cut", "go_down"])
async def test_cuts_change_nothing(fault: str) -> None:
    """What was written alone matches, too, and is confirmed or replaced by the target's."""
    async with (
        verifier() as url,
        LinkProxy("127.0.0.1", int(url.rsplit(":", 1)[1])) as link,
        EdgeClient(
            verifier=link.url,
            device=device(),
            **FAST | {"draft": "device", "max_new_tokens": COUNT},
        ) as client,
    ):
        transcript = Reader()
        cuts = 0
        async for event in client.generate(ids=ids(), grammar=GRAMMAR):
            transcript.take(event)
            if isinstance(event, Token) and len(transcript.tokens) // 6 > cuts:
                cuts += 1
                getattr(link, fault)()
                asyncio.get_running_loop().call_later(0.5, link.restore)
        assert cuts > 4
        assert transcript.tokens == truth()
        assert all(transcript.verified)
        valid(transcript)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
async def test_offline_text_matches(sampling: dict[str, Any]) -> None:
    settings = {"offline": True, "max_offline_tokens": 500, "max_new_tokens": 500, **sampling}
    async with EdgeClient(device=device(), **settings) as client:
        valid(await transcribe(client, ids(), grammar=GRAMMAR))


async def test_a_conversation_has_a_grammar_for_each_turn() -> None:
    async with (
        verifier() as url,
        EdgeClient(verifier=url, device=device(), max_new_tokens=COUNT) as client,
    ):
        conversation = client.conversation()
        first = await transcribe(conversation, ids(), grammar=GRAMMAR)
        text = [*conversation.ids, *ids()]
        second = await transcribe(conversation, text, grammar=Grammar("regex", "yes|no"))
        third = await transcribe(conversation, [*conversation.ids, *ids()], max_new_tokens=4)
        valid(first)
        assert second.text in ("yes", "no")
        assert len(third.tokens) == 4
        await conversation.aclose()


async def test_what_cannot_be_followed_is_refused_before_anything_is_sent() -> None:
    async with EdgeClient(device=device(), offline=True) as client:
        with pytest.raises(GrammarError, match="Unimplemented"):
            await transcribe(client, ids(), grammar=Grammar.of_schema({"not": {}}))
        with pytest.raises(UsageError, match="ignore_eos"):
            await transcribe(client, ids(), grammar=GRAMMAR, ignore_eos=True)


async def test_a_verifier_that_knows_no_grammars_is_not_asked() -> None:
    facts = dataclasses.replace(embedded().facts, grammars=False)
    async with (
        Verifier(dataclasses.replace(served(), facts=facts), SETTINGS).open() as running,
        EdgeClient(
            verifier=running.transport.url,
            device=device(),
            max_new_tokens=COUNT,
            max_offline_tokens=COUNT,
        ) as client,
    ):
        await client.wait_online()
        transcript = await transcribe(client, ids(), grammar=GRAMMAR, settle_seconds=0.1)
        valid(transcript)
        assert not any(transcript.verified)
        assert not any(isinstance(event, Notice) for event in transcript.events)
