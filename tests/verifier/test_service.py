"""The service over real websockets: opening, rounds, resuming, records, streams. A real tiny model behind it."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest
import torch

from edge_client.link.websocket import hello
from moa import records
from moa.wire import ClientSession
from moa.wire.messages import (
    Append,
    Cancel,
    Error,
    Hello,
    Open,
    Resume,
    Resumed,
    Stream,
    StreamTokens,
    Sync,
    Verdict,
    Verify,
    Welcome,
)
from moa.wire.session import Advanced, Ready, Recovered
from tests.tiny import tiny_tokenizer
from tests.verifier import kit

IDS = kit.prompt(3, 20)


async def _rows(edge: kit.Client, session: ClientSession, stop: int, start: int = 0) -> None:
    """Wait until these rows of the session have arrived; newer ones may come first."""
    while np.isnan(_collect(edge, session.id, stop)[0][start:]).any():
        async with asyncio.timeout(kit.PATIENCE):
            await edge.take_rows(kit.decode_server(await edge.connection.recv()))  # type: ignore[arg-type]


async def _rest(edge: kit.Client, session: ClientSession) -> None:
    while not session.finish:
        await edge.advance(session, [session.log[-1]])


async def test_the_welcome_tells_what_is_served() -> None:
    async with kit.verifier() as running, kit.connection(running) as raw:
        edge = kit.Client(raw)
        await edge.send(Hello([7, 2], ["stream", "telepathy"], tokenizer="", drafter="d"))
        welcome = await edge.receive()
        assert isinstance(welcome, Welcome)
        assert (welcome.version, welcome.features) == (2, ["stream"])
        assert (welcome.vocab_size, welcome.eos_ids) == (kit.VOCAB, [2])
        assert welcome.limits.max_context_tokens == kit.LIMITS.max_context_tokens
        assert welcome.limits.max_tree_nodes == kit.LIMITS.max_tree_nodes


async def test_no_agreement_is_a_typed_refusal_and_the_end() -> None:
    refused = {
        "version": Hello([1], []),
        "tokenizer_mismatch": Hello([2], [], tokenizer="another"),
        "target_mismatch": Hello([2], [], target="another"),
    }
    async with kit.verifier() as running:
        running.service.facts = dataclasses.replace(running.service.facts, tokenizer="tok", target="tgt")
        for code, message in refused.items():
            async with kit.connection(running) as raw:
                edge = kit.Client(raw)
                await edge.send(message)
                error = await edge.receive()
                assert isinstance(error, Error)
                assert error.code == code
                await asyncio.wait_for(raw.wait_closed(), kit.PATIENCE)
                assert raw.close_code == 1002


async def test_another_drafter_gets_tokens_but_no_records() -> None:
    async with kit.verifier() as running, kit.connection(running) as raw:
        edge = kit.Client(raw)
        await edge.send(Hello([2], ["records", "resume"], drafter="another"))
        welcome = await edge.receive()
        assert isinstance(welcome, Welcome)
        assert welcome.records is None
        assert "records" not in welcome.features
        assert "drafter_mismatch" in welcome.notices[0]
        session = await edge.start(IDS, max_new_tokens=4)
        await _rest(edge, session)
        assert session.log[len(IDS) :] == kit.generated(IDS, 4)
        assert edge.rows == []


async def test_a_drafter_that_reads_no_records_gets_no_notice_about_them() -> None:
    async with kit.verifier() as running, kit.connection(running) as raw:
        edge = kit.Client(raw)
        asked = hello(client="", tokenizer="", target="", drafter="another", records=False)
        assert "records" not in asked.features
        await edge.send(asked)
        welcome = await edge.receive()
        assert isinstance(welcome, Welcome)
        assert welcome.records is None
        assert welcome.notices == []


async def test_open_and_verify_may_be_sent_in_one_breath() -> None:
    async with kit.verifier() as running, kit.client(running) as edge:
        session = ClientSession(list(IDS), max_new_tokens=4)
        await edge.send(session.open(), session.verify([IDS[-1]]))
        assert isinstance(await edge.event(session), Ready)
        event = await edge.event(session)
        assert isinstance(event, Advanced)
        assert list(event.tokens) == kit.generated(IDS, 1)


async def test_a_conversation_runs_only_its_new_tokens() -> None:
    async with kit.verifier() as running, kit.client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=4)
        await _rest(edge, session)
        turn = kit.prompt(9, 7)
        before = kit.metric(running, "moa_prompt_tokens_total")
        await edge.send(session.append(turn, max_new_tokens=5))
        assert isinstance(await edge.event(session), Ready)
        await _rest(edge, session)
        assert session.log[-5:] == kit.generated(session.log[:-5], 5)
        assert kit.metric(running, "moa_prompt_tokens_total") - before == len(turn)


async def test_a_shared_beginning_is_run_once() -> None:
    system, a, b = kit.prompt(5, 60), kit.prompt(6, 5), kit.prompt(7, 6)
    async with kit.verifier() as running, kit.client(running) as edge:
        first = await edge.start([*system, *a], max_new_tokens=3)
        await _rest(edge, first)
        await _rows(edge, first, len(system) + len(a))
        run = kit.metric(running, "moa_prompt_tokens_total")
        second = await edge.start([*system, *b], max_new_tokens=3)
        await _rest(edge, second)
        assert second.log[-3:] == kit.generated([*system, *b], 3)
        assert kit.metric(running, "moa_prompt_tokens_total") - run == len(b) - 1
        assert kit.metric(running, "moa_shared_prefix_tokens_total") == len(system)
        await _rows(edge, second, len(system) + len(b))
        rows = {id: _collect(edge, id, 60)[0] for id in (first.id, second.id)}
        np.testing.assert_array_equal(rows[first.id], rows[second.id])


async def test_stop_strings_and_the_end_token_end_a_turn() -> None:
    tokenizer = tiny_tokenizer()

    truth = kit.generated(IDS, 12)
    stop = str(tokenizer.decode(truth[4:6]))
    cut = next(n for n in range(1, 13) if stop in str(tokenizer.decode(truth[:n])))
    async with kit.verifier(decode=tokenizer.decode) as running, kit.client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=12, stop=[stop])
        event = await edge.advance(session, [IDS[-1], *truth])
        assert event.finish == "stop"
        assert list(event.tokens) == truth[:cut]


async def test_a_long_chain_is_a_bulk_check() -> None:
    truth = kit.generated(IDS, 30)
    wrong = [*truth[:20], (truth[20] + 1) % kit.VOCAB, *truth[21:]]
    async with kit.verifier() as running, kit.client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=40)
        event = await edge.advance(session, [IDS[-1], *wrong])
        assert list(event.tokens) == truth[:21]


# ---- records


def _collect(edge: kit.Client, session: bytes, rows: int) -> tuple[np.ndarray, np.ndarray]:
    keys = np.full((rows, 1, 16), np.nan)
    values = keys.copy()
    for m in edge.rows:
        if m.session == session and m.dtype != "off" and m.start < rows:
            k, v = records.decode(m.payload, m.dtype, m.rows, m.heads, m.head_dim)
            stop = min(rows, m.start + m.rows)
            keys[m.start : stop], values[m.start : stop] = k[: stop - m.start], v[: stop - m.start]
    return keys, values


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp16", 2e-3), ("int8", 2e-2)])
async def test_records_are_the_drafters_projection_of_the_targets_state(dtype: str, tolerance: float) -> None:
    served = kit.served()
    assert served.drafter is not None
    ids = kit.prompt(4, 60)
    slot = served.target.pool.acquire()
    step = served.target.forward([kit.Row.chain(slot, ids[:-1])])
    committed = served.target.commit(step, 0, range(len(ids) - 1))
    with torch.inference_mode():
        keys, values = served.drafter.project(committed.k, committed.v, committed.hidden, committed.positions)
    async with kit.verifier() as running, kit.client(running, drafter="d") as edge:
        session = await edge.start(ids, records=dtype)
        await _rows(edge, session, len(ids) - 1)
        got = _collect(edge, session.id, len(ids) - 1)
    scale = float(keys.abs().max())
    np.testing.assert_allclose(got[0], keys.numpy(), atol=tolerance * scale)
    np.testing.assert_allclose(got[1], values.numpy(), atol=tolerance * float(values.abs().max()))


async def test_records_stop_and_start_on_demand_and_held_ones_are_not_sent_again() -> None:
    async with kit.verifier() as running, kit.client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=30, records="off")
        for _ in range(3):
            await edge.advance(session, [session.log[-1]])
        assert edge.rows == []
        await edge.send(Sync(session.id, "int8", 0, [(0, 10)]))
        await _rows(edge, session, len(session.log) - 1, start=10)
        assert min(m.start for m in edge.rows) == 10


async def test_a_client_that_acknowledges_nothing_stalls_its_records_and_nothing_else() -> None:
    limits = dataclasses.replace(kit.LIMITS, record_window_bytes=1)
    async with kit.verifier(dataclasses.replace(kit.SETTINGS, limits=limits)) as running:
        running.service.limits = limits
        async with kit.client(running, ack=False) as edge:
            ids = kit.prompt(8, 150)
            session = await edge.start(ids, max_new_tokens=8, records="fp16")
            for outbox in running.service.connections:
                outbox.record_sender.window.size = 256
            await _rest(edge, session)
            assert session.finish == "length"


# ---- losing and resuming


async def test_resume_on_the_same_server_goes_on() -> None:
    truth = kit.generated(IDS, 12)
    async with kit.verifier() as running:
        async with kit.client(running) as edge:
            session = await edge.start(IDS, max_new_tokens=12)
            await edge.advance(session, [session.log[-1]])
            await _rows(edge, session, len(IDS))
        held = len(session.held)
        async with kit.client(running) as edge:
            await edge.send(*session.recover())
            event = await edge.event(session)
            assert isinstance(event, Recovered)
            assert event.outcome == "resumed"
            await _rest(edge, session)
            await _rows(edge, session, len(session.log) - 1, start=held)
            assert min(m.start for m in edge.rows) >= len(IDS), "rows that the edge holds do not travel twice"
        assert session.log[len(IDS) :] == truth


@pytest.mark.parametrize("known", [True, False])
async def test_a_resume_that_says_it_is_endless_costs_no_more_than_it_takes(known: bool) -> None:
    """It used up the frames of hours, for all devices of its principal."""
    async with kit.verifier() as running, kit.client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=4)
        id = session.id if known else bytes(16)
        await edge.send(Resume(session=id, length=2**31 - 1, chain=bytes(16), round=0))
        while not isinstance(answer := await edge.receive(), Resumed):
            pass
        assert answer.outcome == "gone"
        (principal,) = running.service.connections.values()
        assert running.service.principal(principal).budget.wait(running.service.clock())[0] == 0


async def test_a_verdict_that_was_lost_with_the_connection_is_in_the_tail() -> None:
    truth = kit.generated(IDS, 4)
    async with kit.verifier() as running:
        async with kit.client(running) as edge:
            session = await edge.start(IDS, max_new_tokens=12)
            await edge.send(session.verify([IDS[-1], *truth]))
        async with kit.client(running) as edge:
            await edge.send(*session.recover())
            tokens: list[int] = []
            while len(tokens) < 5:
                event = await edge.event(session)
                assert isinstance(event, Recovered | Advanced)
                tokens += event.tokens
                if isinstance(event, Recovered):
                    await edge.send(*event.resend)
        assert tokens[:4] == truth


async def test_a_session_whose_slot_was_taken_is_prefilled_again_under_a_new_epoch() -> None:
    truth = kit.generated(IDS, 8)
    async with kit.verifier() as running, kit.client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=8)
        await edge.advance(session, [session.log[-1]])
        held = running.service.table.find(session.id, "anonymous")
        assert held is not None
        running.service.table.evict(held, "test")
        await edge.send(*session.recover())
        event = await edge.event(session)
        assert isinstance(event, Recovered)
        assert event.outcome == "reprefilled"
        await _rest(edge, session)
        assert session.log[len(IDS) :] == truth
        assert session.epoch == 1


async def test_a_log_that_differs_is_gone() -> None:
    async with kit.verifier() as running, kit.client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=10)
        session.log[3] += 1
        await edge.send(*session.recover())
        answer = await edge.receive()
        assert isinstance(answer, Resumed)
        assert answer.outcome == "gone"
        (outbox,) = running.service.connections
        assert len(running.service.table) == len(outbox.sessions) == 0, "nothing keeps a session that is gone"


async def test_a_session_moves_to_the_connection_that_resumes_it() -> None:
    async with kit.verifier() as running, kit.client(running) as old, kit.client(running) as new:
        session = await old.start(IDS, max_new_tokens=10)
        await new.send(*session.recover())
        await new.event(session)
        await old.send(Verify(session.id, 1, session.base, [session.log[-1]]))
        error = await old.receive()
        assert isinstance(error, Error)
        assert error.code == "conflict"
        assert isinstance(await new.advance(session, [session.log[-1]]), Advanced)


async def test_open_twice_is_open_once() -> None:
    async with kit.verifier() as running, kit.client(running) as edge:
        session = await edge.start(IDS)
        again = ClientSession(list(IDS), id=session.id)
        await edge.send(again.open())
        assert isinstance(await edge.event(again), Ready)
        (one,) = running.service.table
        assert running.service.others("somebody else")
        assert not running.service.others(one.principal)
        other = ClientSession([1, 2], id=session.id)
        await edge.send(other.open())
        error = await edge.receive()
        assert isinstance(error, Error)
        assert error.code == "conflict"


async def test_close_frees_everything() -> None:
    async with kit.verifier() as running, kit.client(running) as edge:
        sessions = [await edge.start(kit.prompt(i, 10)) for i in range(8)]
        assert running.service.table.slots_free == 0
        await edge.send(*(session.close() for session in sessions), sessions[0].close())
        survivor = await edge.start(IDS, max_new_tokens=2)
        await _rest(edge, survivor)
        assert len(running.service.table) == 1
        assert running.service.table.slots_free == 7
        assert running.engine.target.pool.free == 7


# ---- server-drafted streams


@pytest.mark.parametrize("drafter", [True, False], ids=["drafted", "plain"])
async def test_a_stream_says_what_the_target_says(drafter: bool) -> None:
    truth = kit.generated(IDS, 60)
    async with kit.verifier(drafter=drafter) as running, kit.client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=60)
        await edge.advance(session, [session.log[-1]])
        await edge.send(session.stream())
        await edge.event(session)
        await edge.send(session.cancel())
        while session.busy:
            await edge.event(session)
        assert not session.finish
        await edge.advance(session, [session.log[-1], 7])
        await edge.send(session.stream())
        while session.busy:
            await edge.event(session)
        assert session.finish == "length"
        assert session.log[len(IDS) :] == truth


@pytest.mark.parametrize("speculate", [True, False])
async def test_a_stream_drafts_unless_it_is_asked_not_to(speculate: bool) -> None:
    async with kit.verifier(drafter=True) as running, kit.client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=8)
        await edge.send(session.stream(speculate=speculate))
        parts = []
        while session.busy:
            part = await edge.receive()
            if isinstance(part, StreamTokens):
                parts.append(part)
                session.receive(part)
        assert session.log[len(IDS) :] == kit.generated(IDS, 8)
        assert any(part.drafted for part in parts) == speculate


async def test_a_stream_stops_when_nobody_listens_and_resumes_exactly() -> None:
    async with kit.verifier() as running:
        async with kit.client(running) as edge:
            session = await edge.start(IDS, max_new_tokens=60)
            await edge.send(session.stream())
            await edge.event(session)
        async with kit.client(running) as edge:
            await edge.send(*session.recover())
            event = await edge.event(session)
            assert isinstance(event, Recovered)
            while session.busy:
                await edge.event(session)
            if not session.finish:
                await edge.send(session.stream())
                while session.busy:
                    await edge.event(session)
        assert session.log[len(IDS) :] == kit.generated(IDS, 60)


async def test_a_repeated_round_gets_the_answer_that_it_had() -> None:
    async with kit.verifier() as running, kit.client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=20)
        message = session.verify([IDS[-1], 5])
        await edge.send(message)
        first = await edge.receive()
        await edge.send(message)
        second = await edge.receive()
        assert isinstance(first, Verdict)
        assert first == second
        session.receive(first)
        stream = session.stream()
        await edge.send(stream)
        while session.busy:
            await edge.event(session)
        await edge.send(stream)
        again = await edge.receive()
        assert isinstance(again, StreamTokens)
        assert again.tokens == session.log[stream.base + 1 :]


async def test_what_cannot_be_done_is_a_typed_error() -> None:
    id = bytes(16)
    unknown = [Verify(id, 1, 0, [5]), Stream(id, 1, 0), Append(id, 1, [5]), Cancel(id, 1), Sync(id)]
    async with kit.verifier() as running, kit.client(running) as edge:
        for message in [*unknown, Open(id, [5] * 160)]:
            await edge.send(message)
            error = await edge.receive()
            assert isinstance(error, Error), message
            assert error.code == ("limit" if isinstance(message, Open) else "unknown_session"), message
