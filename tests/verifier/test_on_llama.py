"""The verifier's own tests of rounds, streams, guesses, sampling, log-probabilities, resumes, evictions
and faults once more, with llama.cpp behind it: a dense model, and a hybrid one. The truth is what the
same file says a token at a time. Here alone: a grammar through cuts, a kill, a row that fails."""

from __future__ import annotations

import asyncio
import atexit
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray
from websockets.exceptions import ConnectionClosed

from cloud_verifier.model import Served, serve_model
from cloud_verifier.settings import Settings
from moa.grammar.spec import Grammar
from moa.llama.target import LlamaTarget
from moa.sampling import SamplingSettings, choose
from moa.target.contract import LoadOptions, Node
from moa.target.registry import open_target
from moa.target.rows import Row
from moa.wire import ClientSession
from moa.wire.codes import Code
from moa.wire.events import Ready, Recovered, Refused
from moa.wire.messages import Error, StreamTokens
from moa.wire_sampling import wire_sampling
from testing import client as wire_client
from testing import gguf_tiny
from testing import verifier as process
from testing.client import NEVER
from testing.speculator import GenerationSettings, Speculator
from testing.tiny import tiny_tokenizer
from tests.verifier import kit, test_exact, test_faults
from tests.verifier.test_foresee import (
    test_a_stream_that_waits_ends_when_it_is_cancelled_when_its_edge_goes_and_when_the_server_drains,
    test_a_waiting_stream_gives_its_slot_to_others_and_takes_another_when_it_goes_on,
    test_where_nothing_was_foreseen_the_server_goes_on_by_itself,
)
from tests.verifier.test_logprobs import test_drafted_and_streamed_tokens_have_the_targets_own
from tests.verifier.test_service import (
    test_a_conversation_runs_only_its_new_tokens,
    test_a_stop_string_ends_a_turn_with_the_token_that_completes_it,
    test_a_stream_stops_when_nobody_listens_and_resumes_exactly,
)

__all__ = [
    "test_a_conversation_runs_only_its_new_tokens",
    "test_a_stop_string_ends_a_turn_with_the_token_that_completes_it",
    "test_a_stream_stops_when_nobody_listens_and_resumes_exactly",
    "test_a_stream_that_waits_ends_when_it_is_cancelled_when_its_edge_goes_and_when_the_server_drains",
    "test_a_waiting_stream_gives_its_slot_to_others_and_takes_another_when_it_goes_on",
    "test_drafted_and_streamed_tokens_have_the_targets_own",
    "test_where_nothing_was_foreseen_the_server_goes_on_by_itself",
]
CAPACITY = 256
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}
GRAMMAR = Grammar.of_schema(SCHEMA)
JSON_COUNT = 80


@cache
def file_of(family: str) -> Path:
    """A tiny model of a family, in a file that lasts as long as the tests."""
    folder = Path(tempfile.mkdtemp(prefix="gguf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return gguf_tiny.save_family(family, folder / f"{family}.gguf")


def opened(family: str, *, slots: int = 1, capacity: int = CAPACITY) -> LlamaTarget:
    options = LoadOptions(slots=slots, capacity=capacity, threads=1)
    found = open_target(str(file_of(family)), options)
    assert isinstance(found, LlamaTarget)
    return found


@cache
def alone(family: str) -> LlamaTarget:
    """What says the truth."""
    return opened(family)


@cache
def said(
    family: str, ids: tuple[int, ...], count: int, sampling: SamplingSettings
) -> tuple[int, ...]:
    """The file's own text, a token at a time."""
    target = alone(family)
    slot = target.cache.acquire()
    log = list(ids)
    waiting = log
    while len(log) < len(ids) + count and not (log[len(ids) :] and log[-1] in target.facts.eos_ids):
        step = target.forward([Row.chain(slot, waiting)])
        target.commit(step, 0, range(len(waiting)))
        token = choose(step.host_logits([Node(0, -1)])[0], sampling, len(log), log)
        log.append(token)
        waiting = [token]
    target.cache.release(slot)
    return tuple(log[len(ids) :])


def known(family: str) -> Any:
    """What tests ask of the library's model."""
    facts = alone(family).facts
    return SimpleNamespace(
        config=SimpleNamespace(model_type=family, vocab_size=facts.vocab_size),
        generation_config=SimpleNamespace(eos_token_id=facts.eos_ids[0]),
    )


@pytest.fixture(params=["llama", "lfm2"])
def family(request: pytest.FixtureRequest) -> str:
    """Of all targets, where a test does not name others: a dense one, and a hybrid one, whose state
    cannot be cut."""
    name: str = request.param
    return name


@pytest.fixture(autouse=True)
def llama(monkeypatch: pytest.MonkeyPatch, family: str) -> Iterator[list[LlamaTarget]]:
    """Every target that the kit makes, and every truth."""
    gguf_tiny.need_llama()
    made: list[LlamaTarget] = []

    def served(settings: Settings = kit.SETTINGS, *, decode: Any = None, **_: Any) -> Served:
        target = opened(family, slots=settings.slots, capacity=settings.slot_capacity)
        made.append(target)
        found = serve_model(target, None, decode=decode)
        return replace(found, facts=replace(found.facts, computes=target.computes))

    def generated(
        ids: Sequence[int], count: int, sampling: SamplingSettings | None = None
    ) -> list[int]:
        return list(said(family, tuple(ids), count, sampling or SamplingSettings()))

    def generate(
        model: Any, ids: Sequence[int], count: int, sampling: SamplingSettings | None = None
    ) -> list[int]:
        return generated(ids, count, sampling)

    def logits(ids: Sequence[int]) -> NDArray[np.float32]:
        target = alone(family)
        slot = target.cache.acquire()
        step = target.forward([Row.chain(slot, ids, "all")])
        found = step.host_logits([Node(0, place) for place in range(len(ids))])
        target.cache.release(slot)
        return found

    def chain_draft(
        rng: Random, truth: Sequence[int], pending: int, nodes: int, vocab: int = kit.VOCAB
    ) -> tuple[list[int], list[int]]:
        right = [token if rng.random() < 0.8 else rng.randrange(4, vocab) for token in truth]
        tokens = [pending, *right[: nodes - 1]]
        return tokens, list(range(-1, len(tokens) - 1))

    monkeypatch.setattr(kit, "served", served)
    monkeypatch.setattr(kit, "generated", generated)
    monkeypatch.setattr(kit, "generate", generate)
    monkeypatch.setattr(kit, "logits", logits)
    if family in gguf_tiny.RECURRENT:
        monkeypatch.setattr(kit, "LOGPROB_ROUNDING", 5e-3)  # of keys and values in float16
    monkeypatch.setattr(kit, "random_draft", chain_draft)
    monkeypatch.setattr(test_exact, "library", known)
    test_exact.speech.cache_clear()
    yield made
    test_exact.speech.cache_clear()
    for target in made:
        target.close()


@pytest.mark.parametrize(
    ("family", "sampling"),
    [
        ("llama", test_exact.SAMPLED),
        ("llama", test_exact.GREEDY),
        ("qwen2", test_exact.SAMPLED),
        ("qwen3", test_exact.GREEDY),
        ("gemma3", test_exact.SAMPLED),
        ("mamba", test_exact.GREEDY),
        ("lfm2", test_exact.SAMPLED),
        ("lfm2", test_exact.GREEDY),
    ],
    ids=lambda one: one if isinstance(one, str) else "sampled" if one.temperature else "greedy",
)
async def test_sessions_alone_and_in_a_crowd_are_told_what_the_file_says(
    family: str, sampling: SamplingSettings
) -> None:
    await test_exact.test_sessions_alone_and_together_are_told_what_the_library_says(
        family, sampling
    )


async def test_sessions_lose_their_slots_and_regain_them() -> None:
    await test_exact.test_32_sessions_on_8_slots_lose_and_regain_them()


async def test_a_beginning_that_sessions_share_is_run_once() -> None:
    system = kit.prompt(5, 60)
    async with kit.verifier() as running, kit.client(running) as edge:
        for seed, shared in ((6, 0), (7, len(system))):
            ids = [*system, *kit.prompt(seed, 5)]
            session = await edge.start(ids, max_new_tokens=4, ignore_eos=True)
            while not session.finish:
                await edge.advance(session, [session.log[-1]])
            assert session.log[len(ids) :] == kit.generated(ids, 4)
            assert kit.metric(running, "moa_shared_prefix_tokens_total") == shared


async def test_what_it_cannot_do_is_told_and_refused() -> None:
    async with kit.verifier() as running, kit.client(running) as edge:
        features = set(edge.welcome.features)
        assert features & {"foresee", "records"} == {"foresee"}
        session = await edge.start([5, 6, 7], max_new_tokens=8)
        await edge.send(session.stream(waits=True))
        await edge.send(session.foresee([7, 8, 9, 10], [-1, 0, 0, 1], [0] * 4))
        answer = await edge.receive()
        assert isinstance(answer, StreamTokens)
        assert answer.foreseen == 2, "a chain of a tree"


async def test_one_row_that_fails_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp refuses a call with a certain token: its session alone fails."""
    async with (
        kit.verifier() as running,
        kit.client(running) as good_edge,
        kit.client(running) as bad_edge,
    ):
        target = running.engine.target
        assert isinstance(target, LlamaTarget)
        run = target.runtime.run

        def failing(runs: Any, **how: Any) -> Any:
            if any(99 in one.tokens for one in runs):
                raise RuntimeError("no")
            return run(runs, **how)

        monkeypatch.setattr(target.runtime, "run", failing)
        ids = kit.prompt(3, 12)
        truth = kit.generated(ids, 8)
        assert 99 not in truth
        good = await good_edge.start(ids, max_new_tokens=8)
        bad = await bad_edge.start([5, 6, 7], max_new_tokens=8)
        await bad_edge.send(bad.stream(waits=True), bad.foresee([7, 99], [-1, 0], [0, 0]))
        while not good.finish:
            await good_edge.advance(good, [good.log[-1]])
        assert good.log[len(ids) :] == truth
        refused = await bad_edge.receive()
        assert isinstance(refused, Error)
        assert refused.code == Code.QUARANTINED


# ---- grammars, cuts and kills


def written(
    family: str, ids: Sequence[int], sampling: SamplingSettings = test_exact.GREEDY
) -> list[int]:
    """JSON by the schema, a token at a time."""
    settings = GenerationSettings(
        max_new_tokens=JSON_COUNT, sampling=sampling, shape=None, grammar=GRAMMAR
    )
    target: Any = alone(family)
    return Speculator(target).generate([ids], settings)[0].ids


async def taken_up(edge: kit.Client, session: ClientSession) -> str:
    """Take a session over to a new connection; how it was found there."""
    edge.sessions[session.id] = session
    await edge.send(*session.recover())
    event = await edge.event(session)
    assert isinstance(event, Recovered)
    await edge.send(*event.resend)
    return event.outcome


async def to_the_end(edge: kit.Client, session: ClientSession) -> None:
    """By a stream: the one that was resumed, which may have stopped when its connection went, and
    others behind it."""
    while session.busy:
        event = await edge.event(session)
        if isinstance(event, Refused):
            await asyncio.sleep(min(edge.longest_pause, event.retry_after))
            await edge.send(*session.unsettled)
    while not session.finish:
        await edge.stream(session)


async def cut_off(
    running: kit.Verifier, edge: kit.Client, session: ClientSession, *, behind: int
) -> None:
    """A stream runs until the slot holds so many tokens; then the connection is cut, and the
    verifier knows of it before it runs another token."""
    with kit.held_forward(running, behind=behind) as (entered, _):
        streaming = asyncio.create_task(to_the_end(edge, session))
        assert await asyncio.to_thread(entered.wait, kit.PATIENCE)
        edge.connection.transport.abort()
        with pytest.raises(ConnectionClosed):
            await streaming
        await kit.until(lambda: not running.service.connections)
    assert not session.finish


@pytest.mark.parametrize(
    "sampling", [test_exact.GREEDY, test_exact.SAMPLED], ids=["greedy", "sampled"]
)
async def test_json_by_a_schema_goes_on_behind_cuts_here_and_in_another_verifier(
    family: str, sampling: SamplingSettings
) -> None:
    ids = kit.prompt(11, 20)
    truth = written(family, ids, sampling)
    value = json.loads(tiny_tokenizer().decode(truth[:-1]))
    jsonschema.validate(value, SCHEMA)
    asked, penalties = wire_sampling(sampling)
    async with kit.verifier() as first, kit.verifier() as second:
        async with kit.client(first) as edge:
            session = await edge.start(
                ids,
                max_new_tokens=JSON_COUNT,
                grammar=GRAMMAR,
                sampling=asked,
                penalties=penalties,
            )
            # The device's guesses: right, right, and wrong.
            await edge.advance(session, [session.log[-1], *truth[:2], truth[2] + 1])
            computes = edge.welcome.computes
            await cut_off(first, edge, session, behind=len(ids) + 8)
        async with kit.client(first) as edge:
            assert await taken_up(edge, session) == "resumed"
            await cut_off(first, edge, session, behind=len(ids) + 16)
        async with kit.client(second) as edge:
            assert edge.welcome.computes == computes
            assert await taken_up(edge, session) == "gone"
            await to_the_end(edge, session)
    assert session.log[len(ids) :] == truth
    assert session.finish == "eos"
    assert alone(family).facts.eos_ids[0] == truth[-1]


@pytest.mark.parametrize("family", ["llama"])
async def test_a_session_of_a_verifier_that_was_killed_goes_on_in_another_process(
    family: str,
) -> None:
    ids = kit.prompt(12, 20)
    truth = kit.generated(ids, 24)
    flags = ["--max-context-tokens=160", "--max-prompt-tokens=150", "--slots=2", "--threads=1"]
    with process.verifier(*flags, pair=process.Pair(target=str(file_of(family)))) as killed:
        async with wire_client.client(killed.url) as edge:
            computes = edge.welcome.computes
            session = await edge.start(ids, max_new_tokens=24, ignore_eos=True)
            await edge.send(session.stream(waits=True))
            await edge.send(session.foresee([ids[-1], *truth[:4]], range(-1, 4), [0] * 5))
            while len(session.log) < len(ids) + 4:
                await edge.event(session)
            assert session.streaming, "it waits for more guesses"
            killed.process.kill()
    async with kit.verifier() as running, kit.client(running) as edge:
        assert edge.welcome.computes == computes
        assert await taken_up(edge, session) == "gone"
        assert isinstance(await edge.event(session), Ready)
        await edge.send(session.foresee([session.log[-1], NEVER], [-1, 0], [0, 0], waits=False))
        await to_the_end(edge, session)
    assert session.log[len(ids) :] == truth


# ---- faults


@pytest.mark.parametrize(
    ("place", "method", "kind"),
    [
        ("target", "forward", "before"),
        ("target", "forward", "after"),
        ("target", "forward", "answer 2"),
        ("target", "commit", "before"),
        ("target", "commit", "after"),
        ("target", "commit", "answer 0"),
        ("engine", "accept_rows", "before"),
        ("pool", "acquire", "before"),
        ("pool", "begin", "before"),
        ("pool", "release", "before"),
    ],
)
def test_a_fault_costs_the_work_at_hand_and_nothing_else(
    place: str, method: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    test_faults.test_a_fault_costs_the_work_at_hand_and_nothing_else(
        place, method, kind, monkeypatch
    )
