"""Many conversations over one device and one connection; cleanup after cancelling; settings of a
turn."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import tracemalloc
import weakref
from typing import Any

import pytest

from edge_client import ask
from edge_client.client import EdgeClient
from edge_client.events import Done, Link, Progress, Prompt, Token
from edge_client.settings import ClientSettings
from edge_client.shared import Shared
from moa.errors import ConfigError, UsageError
from tests.edge import kit
from tests.edge.test_exact import truth
from tests.torture.device import demo_device
from tests.verifier import kit as verifier_kit

COUNT = 16


@pytest.mark.parametrize("draft", ["device", "server"])
async def test_sixteen_at_once_are_exact_over_one_connection(draft: Any) -> None:
    prompts = [verifier_kit.prompt(seed, 12) for seed in range(16)]
    async with kit.linked(draft=draft, offline_after=60.0, max_new_tokens=COUNT) as (
        client,
        _,
        link,
    ):
        await client.wait_online()
        readers = await asyncio.gather(*(kit.transcribe(client, ids) for ids in prompts))
        assert link.connections == 1
    for ids, reader in zip(prompts, readers, strict=True):
        assert reader.tokens == truth(ids)[:COUNT]
        # A busy verifier says how far it has read.
        allowed = Prompt | Token | Link | Progress | Done
        assert all(isinstance(event, allowed) for event in reader.events), "nothing was offline"


@pytest.mark.parametrize("draft", ["device", "none"])
async def test_an_answer_ends_within_the_devices_context_if_the_verifiers_is_longer(
    draft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = verifier_kit.prompt(0, 12)
    async with kit.linked(draft=draft, offline_after=60.0, ignore_eos=True) as (client, _, _):
        await client.wait_online()
        monkeypatch.setattr(Shared, "max_context", len(ids) + 5)
        reader = await kit.transcribe(client, ids)
        assert reader.tokens == truth(ids)[:5]
        assert reader.done.verified
        assert reader.done.reason == "context"


async def test_a_conversation_takes_little_memory() -> None:
    async with EdgeClient(device=kit.device(), offline=True) as client:
        conversations = [client.conversation()]  # the first one loads the shared parts
        await kit.transcribe(conversations[0], verifier_kit.prompt(0, 12), max_new_tokens=4)
        tracemalloc.start()
        for seed in range(1, 9):
            conversations.append(client.conversation())
            await kit.transcribe(
                conversations[seed], verifier_kit.prompt(seed, 12), max_new_tokens=4
            )
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert size / 8 < 2_000_000


async def test_a_closed_conversation_gives_its_memory_back_at_once() -> None:
    """A drafter's caches are outside of Python's memory: the collector of circular garbage does not
    know how much it would win, and comes late."""

    async def one_answer(client: EdgeClient) -> list[weakref.ref[Any]]:
        async with client.conversation() as conversation:
            await kit.transcribe(conversation, client.encode("hello"), max_new_tokens=4)
            return [weakref.ref(conversation.drafter), weakref.ref(conversation)]

    # Limits of offline text were measured for this device's drafter, and ask for its records.
    async with EdgeClient(device=demo_device(), offline=True) as client:
        await one_answer(client)  # the first one loads the shared parts
        gc.collect()
        gc.disable()
        try:
            kept = await one_answer(client)
            assert [one() for one in kept] == [None, None]
        finally:
            gc.enable()


async def test_a_second_turn_of_the_same_conversation_at_once_is_refused() -> None:
    async with (
        EdgeClient(device=kit.device(), offline=True) as client,
        client.conversation() as conversation,
    ):
        turn = conversation.generate(ids=verifier_kit.prompt(0, 12))
        await anext(turn)
        with pytest.raises(UsageError, match="answering already"):
            await anext(conversation.generate(ids=[5]))
        await turn.aclose()
        assert (await kit.transcribe(conversation, [5, 6], max_new_tokens=3)).tokens


async def test_who_reads_no_further_than_the_end_may_ask_the_next_question() -> None:
    """A loop that returns at `Done` leaves the generator where it is."""

    async def until_done(conversation: Any, ids: list[int]) -> Done:
        async for event in conversation.generate(ids=ids, max_new_tokens=3):
            if isinstance(event, Done):
                return event
        raise AssertionError("there was no end")

    gc.disable()  # it would end the first turn, sooner or later
    try:
        async with (
            EdgeClient(device=kit.device(), offline=True) as client,
            client.conversation() as conversation,
        ):
            for _ in range(2):
                await until_done(conversation, verifier_kit.prompt(0, 12))
    finally:
        gc.enable()


async def test_ask_says_in_an_event_loop_what_to_do_and_elsewhere_why_nothing_is_verified() -> None:
    with pytest.raises(UsageError) as refused:
        ask("hi", offline=True)
    assert refused.value.__notes__ == ["use `async with EdgeClient(...)`"]
    nobody = {"verifier": "ws://127.0.0.1:9", "settle_seconds": 0.1, "max_new_tokens": 2}
    answer = await asyncio.to_thread(lambda: ask("hi", **nobody))  # type: ignore[arg-type]
    assert not answer.verified
    assert answer.link is not None
    assert "127.0.0.1:9" in answer.link.detail
    assert answer.link.detail in str(answer)
    with pytest.raises(ConfigError, match="a tuple of texts, not the text 'fox'"):
        ClientSettings(stop="fox")  # type: ignore[arg-type]


async def test_a_client_that_is_closed_answers_nothing() -> None:
    async with EdgeClient(device=kit.device(), offline=True) as client:
        conversation = client.conversation()
    for generate in (client.generate, conversation.generate):
        with pytest.raises(UsageError, match="closed"):
            await anext(generate(ids=[5, 6]))


@pytest.mark.parametrize("draft", ["device", "server"])
async def test_cancelled_turns_leave_nothing_behind(draft: Any) -> None:
    """Cancelled at every moment, from before the opening is answered to the end."""
    async with kit.linked(draft=draft) as (client, running, _):
        await client.wait_online()
        for leave_after in range(0, 40, 3):
            turn = client.generate(ids=verifier_kit.prompt(leave_after, 12), max_new_tokens=20)
            if leave_after % 2:
                task = asyncio.ensure_future(_take(turn, 10**6))
                for _ in range(leave_after):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                await _take(turn, 1 + leave_after // 2)
            await turn.aclose()
        ids = verifier_kit.prompt(99, 12)
        assert (await kit.transcribe(client, ids, max_new_tokens=COUNT)).tokens == truth(ids)[
            :COUNT
        ]
        async with asyncio.timeout(300):
            while len(running.service.table):
                await asyncio.sleep(0.01)


async def _take(turn: Any, events: int) -> None:
    async for _ in turn:
        events -= 1
        if not events:
            return


async def test_settings_of_a_turn_and_between_turns() -> None:
    ids = verifier_kit.prompt(3, 12)
    async with (
        kit.linked(offline_after=60.0) as (client, _, _),
        client.conversation() as conversation,
    ):
        warm = {"temperature": 0.9, "seed": 4}
        for sampling in ({}, warm, {}):
            reader = await kit.transcribe(conversation, ids, max_new_tokens=COUNT, **sampling)
            assert reader.tokens == truth(ids, **sampling)[:COUNT]
        client.settings = dataclasses.replace(client.settings, max_new_tokens=5, **warm)
        assert (await kit.transcribe(conversation, ids)).tokens == truth(ids, **warm)[:5]


async def test_the_next_turn_of_a_chat_only_adds_ids() -> None:
    async with (
        EdgeClient(offline=True, max_new_tokens=12) as client,
        client.conversation() as conversation,
    ):
        said: list[int] = []
        for question in ("What is 17 plus 25?", "And what is 3 plus 4?", "Thanks!"):
            async for event in conversation.generate(question):
                if isinstance(event, Done):
                    done = event
            assert conversation.ids[: len(said)] == said
            said = conversation.ids
            assert conversation.chat.messages[-1] == {"role": "assistant", "content": done.text}
        assert [message["role"] for message in conversation.chat.messages] == [
            "user",
            "assistant",
        ] * 3
        whole = client.encode([*conversation.chat.messages, {"role": "user", "content": "x"}])
        codec = client.device.codec
        assert codec.decode(whole, skip_special=False).startswith(
            codec.decode(said, skip_special=False).removesuffix("<|end|>")
        )


async def test_what_stayed_provisional_is_checked_later() -> None:
    ids = verifier_kit.prompt(5, 12)
    async with (
        kit.linked(offline_after=0.05, reconnect_seconds=0.05) as (client, _, link),
        client.conversation() as conversation,
    ):
        link.go_down()
        how = {"max_new_tokens": COUNT, "max_offline_tokens": 0, "settle_seconds": 0.1}
        reader = await kit.transcribe(conversation, ids, **how)
        assert not any(reader.verified)
        assert conversation.unverified
        link.restore()
        await client.wait_online(30)
        while (
            conversation.unverified
        ):  # each time waits for 0.1 s, which a busy machine may need for less than all
            reader.done = None
            async for event in conversation.recheck():
                reader.take(event)
        assert reader.tokens == truth(ids)[:COUNT]
        assert all(reader.verified)
        assert conversation.ids == [*ids, *reader.tokens]


def test_one_question_without_an_event_loop() -> None:
    answer = ask("What is 17 plus 25?", offline=True, max_new_tokens=12)
    assert str(answer) == answer.text + "\n[not all of this was verified by the target]"
    assert answer.stats["tokens"] <= 12
    assert not answer.verified


async def test_a_client_says_goodbye_as_one_should() -> None:
    """A connection that ends well is closed with 1000, not with an error."""
    async with kit.linked() as (client, _, _):
        await client.wait_online(60)
        assert client.link is not None
        connection = client.link._connection
    assert connection is not None
    assert connection.close_code == 1000


async def test_a_text_that_the_answer_may_resemble_is_taken_as_a_text() -> None:
    async with EdgeClient(verifier="", max_new_tokens=4) as client:
        events = [e async for e in client.generate("What is 17 plus 25?", prediction="It is 42.")]
        assert isinstance(events[-1], Done)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ids": [1_000_000]}, "token id 1000000 is outside the vocabulary"),
        ({"ids": [5, -1]}, "token id -1 is outside the vocabulary"),
        ({"messages": [{"role": "user", "content": "Hello"}]}, "there are no ids"),
        (
            {"prompt": "Hello", "grammar": {"type": "object"}},
            "a grammar is a `Grammar`, not a dict",
        ),
    ],
)
async def test_arguments_that_are_mixed_up_are_named(arguments: dict[str, Any], said: str) -> None:
    async with EdgeClient(verifier="") as client:
        turn = client.generate(**arguments)
        with pytest.raises(UsageError) as refused:
            await anext(turn)
    assert said in str(refused.value)
    assert refused.value.hint
