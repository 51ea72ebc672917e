"""The service over real websockets: opening, rounds, resuming, records, streams. A real tiny model
behind it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from moa import records
from moa.wire import ClientSession
from moa.wire.messages import (
    Cancel,
    Close,
    Error,
    Hello,
    Resume,
    Resumed,
    Stream,
    StreamTokens,
    Sync,
    Welcome,
)
from moa.wire.session import Ready, Recovered
from testing.tiny import tiny_tokenizer
from tests.verifier import kit

IDS = kit.prompt(3, 20)


async def _rows(edge: kit.Client, session: ClientSession, stop: int, start: int = 0) -> None:
    """Wait until these rows of the session have arrived; newer ones may come first."""
    while np.isnan(_collect(edge, session.id, stop)[0][start:]).any():
        async with asyncio.timeout(kit.PATIENCE):
            await edge.take_rows(kit.decode_server(await edge.connection.recv()))  # type: ignore[arg-type]


def _collect(edge: kit.Client, session: bytes, rows: int) -> tuple[np.ndarray, np.ndarray]:
    keys = np.full((rows, 1, 16), np.nan)
    values = keys.copy()
    for m in edge.rows:
        if m.session == session and m.dtype != "off" and m.start < rows:
            k, v = records.decode(m.payload, m.dtype, m.rows, m.heads, m.head_dim)
            stop = min(rows, m.start + m.rows)
            keys[m.start : stop], values[m.start : stop] = k[: stop - m.start], v[: stop - m.start]
    return keys, values


async def _rest(edge: kit.Client, session: ClientSession) -> None:
    while not session.finish:
        await edge.advance(session, [session.log[-1]])


async def _recovered(edge: kit.Client, session: ClientSession) -> Recovered:
    await edge.send(*session.recover())
    event = await edge.event(session)
    assert isinstance(event, Recovered)
    return event


async def test_a_drafter_that_fits_no_records_gets_tokens_and_a_notice() -> None:
    async with kit.verifier() as running, kit.connection(running) as raw:
        edge = kit.Client(raw)
        await edge.send(
            Hello([7, 3], ["foresee", "records", "resume", "telepathy"], drafter="another")
        )
        welcome = await edge.receive()
        assert isinstance(welcome, Welcome)
        assert (welcome.version, welcome.records) == (3, None)
        assert welcome.features == ["foresee", "resume"]
        assert welcome.limits.max_context_tokens == kit.LIMITS.max_context_tokens
        session = await edge.start(IDS, max_new_tokens=4)
        await _rest(edge, session)
        assert session.log[len(IDS) :] == kit.generated(IDS, 4)
        assert edge.rows == []


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
    system = kit.prompt(5, 60)
    a = kit.prompt(6, 5)
    b = kit.prompt(7, 6)
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


async def test_a_beginning_is_shared_also_with_a_session_that_is_closed_in_the_same_moment() -> (
    None
):
    """So a device goes on after an edited question: the texts differ from there on."""
    system = kit.prompt(5, 60)
    branch = [*system, *kit.prompt(7, 6)]
    async with kit.verifier() as running, kit.client(running) as edge:
        first = await edge.start([*system, *kit.prompt(6, 5)], max_new_tokens=3)
        await _rest(edge, first)
        with running.engine._work._changed:  # the model's thread takes no step meanwhile
            second = await edge.start(branch, max_new_tokens=3)
            await edge.send(Close(first.id))
            async with asyncio.timeout(kit.PATIENCE):
                while len(running.service.table) > 1:
                    await asyncio.sleep(0)
        await _rest(edge, second)
        assert second.log[-3:] == kit.generated(branch, 3)
        assert kit.metric(running, "moa_shared_prefix_tokens_total") == len(system)


async def test_a_stop_string_ends_a_turn_with_the_token_that_completes_it() -> None:
    decode = tiny_tokenizer().decode
    truth = kit.generated(IDS, 12)
    stop = decode(truth[4:6])
    cut = next(n for n in range(1, 13) if stop in decode(truth[:n]))
    async with kit.verifier(decode=decode) as running, kit.client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=12, stop=[stop])
        event = await edge.advance(session, [IDS[-1], *truth])
        assert (event.finish, list(event.tokens)) == ("stop", truth[:cut])


# ---- records


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp16", 2e-3), ("int8", 2e-2)])
async def test_records_are_the_drafters_projection_of_the_targets_state(
    dtype: str, tolerance: float
) -> None:
    served = kit.served()
    assert served.drafter is not None
    ids = kit.prompt(4, 60)
    slot = served.target.cache.acquire()
    step = served.target.forward([kit.Row.chain(slot, ids[:-1])])
    committed = served.target.commit(step, 0, range(len(ids) - 1))
    with torch.inference_mode():
        made = served.drafter.project(*committed.kv, committed.hidden, committed.positions)
    async with kit.verifier() as running, kit.client(running, drafter="d") as edge:
        session = await edge.start(ids, records=dtype)
        await _rows(edge, session, len(ids) - 1)
        for found, half in zip(_collect(edge, session.id, len(ids) - 1), made, strict=True):
            np.testing.assert_allclose(
                found, half.numpy(), atol=tolerance * float(half.abs().max())
            )


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
    async with kit.verifier() as running, kit.client(running, ack=False) as edge:
        (outbox,) = running.service.connections
        outbox.record_sender.window.size = 256
        session = await edge.start(kit.prompt(8, 150), max_new_tokens=8, records="fp16")
        await _rest(edge, session)
        assert session.finish == "length"


# ---- losing and resuming


async def test_a_session_goes_on_after_its_connection_and_after_its_slot_is_gone() -> None:
    async with kit.verifier() as running:
        async with kit.client(running) as edge:
            session = await edge.start(IDS, max_new_tokens=12)
            await edge.advance(session, [session.log[-1]])
            await _rows(edge, session, len(IDS))
        held = len(session.held)
        async with kit.client(running) as edge, kit.client(running) as new:
            assert (await _recovered(edge, session)).outcome == "resumed"
            await edge.advance(session, [session.log[-1]])
            await _rows(edge, session, len(session.log) - 1, start=held)
            assert min(m.start for m in edge.rows) >= len(IDS), (
                "rows that the edge holds do not travel twice"
            )
            (ours,) = running.service.table
            running.service.table.evict(ours, "test")
            assert (await _recovered(new, session)).outcome == "reprefilled"
            await edge.send(Stream(session.id, 3, session.base))
            error = await edge.receive()
            assert isinstance(error, Error)
            assert error.code == "conflict", "it has moved to the connection that resumed it"
            await _rest(new, session)
            assert session.epoch == 1
        assert session.log[len(IDS) :] == kit.generated(IDS, 12)


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
        ((outbox, name),) = running.service.connections.items()
        assert running.service.principal(name).budget.wait(running.service.clock())[0] == 0
        assert len(running.service.table) == len(outbox.sessions) == (not known), (
            "nothing keeps a session that is gone"
        )


async def test_open_twice_is_open_once_and_close_frees_everything() -> None:
    async with kit.verifier() as running, kit.client(running) as edge:
        sessions = [await edge.start(kit.prompt(i, 10)) for i in range(8)]
        table = running.service.table
        again = ClientSession(kit.prompt(0, 10), id=sessions[0].id)
        await edge.send(again.open())
        assert isinstance(await edge.event(again), Ready)
        assert (len(table), table.slots_free) == (8, 0)
        assert running.service.others("somebody else")
        assert not running.service.others("anonymous")
        await edge.send(*(session.close() for session in sessions), sessions[0].close())
        survivor = await edge.start(IDS, max_new_tokens=2)
        await _rest(edge, survivor)
        assert (len(table), table.slots_free, running.engine.target.cache.free) == (1, 7, 7)


# ---- server-drafted streams


async def test_a_stream_says_what_the_target_says_and_drafts_unless_it_is_asked_not_to() -> None:
    async with kit.verifier(drafter=True) as running, kit.client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=60)
        await edge.advance(session, [session.log[-1]])
        for speculate in (True, False):
            stream = session.stream(speculate=speculate)
            await edge.send(stream)
            drafted = 0
            cancelled = False
            while session.busy:
                part = await edge.receive()
                if isinstance(part, StreamTokens):
                    drafted += part.drafted
                    session.receive(part)
                if speculate and drafted and not cancelled:
                    cancelled = True
                    await edge.send(Cancel(session.id, stream.round))
            assert bool(drafted) == speculate
            if not session.finish:
                await edge.advance(session, [session.log[-1], 7])
        assert session.log[len(IDS) :] == kit.generated(IDS, 60)


async def test_a_stream_stops_when_nobody_listens_and_resumes_exactly() -> None:
    async with kit.verifier() as running:
        async with kit.client(running) as edge:
            session = await edge.start(IDS, max_new_tokens=60)
            await edge.send(session.stream())
            await edge.event(session)
        async with kit.client(running) as edge:
            assert isinstance(await _recovered(edge, session), Recovered)
            while session.busy:
                await edge.event(session)
            while not session.finish:
                await edge.stream(session)
        assert session.log[len(IDS) :] == kit.generated(IDS, 60)
