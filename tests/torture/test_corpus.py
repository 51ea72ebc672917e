from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import AsyncIterator

import pytest

from cloud_verifier.sessions.channel import log
from edge_client.turn.records import Records
from moa.errors import ProtocolError
from moa.graph.cache import RecordBuffer
from moa.graph.step import Heads
from moa.wire import ClientSession, Code, Refusal, decode_client, decode_server, encode
from moa.wire.events import Advanced, RecordsArrived
from moa.wire.messages import Message, Resume
from tests.torture.corpus import TO_A_VERIFIER
from tests.torture.fake_verifier import BEHAVIOURS, honest
from tests.torture.fuzz import Fuzzer, fuzz
from tests.torture.raw import BINARY, Raw, binary, frame
from tests.verifier import kit

IDS = kit.prompt(1, 10)
OPEN_WIDE = dataclasses.replace(
    kit.LIMITS,
    max_empty_frames_per_second=10**9,
    max_bytes_per_second=10**9,
    max_refusals_per_second=10**9,
    max_bad_messages=10**9,
    connection_budgets_per_principal=1,
)


@contextlib.asynccontextmanager
async def unharmed(
    caplog: pytest.LogCaptureFixture,
) -> AsyncIterator[tuple[kit.Verifier, kit.Client]]:
    """A verifier and a good client; in the end it runs, has put no session aside, and logged no
    exception."""
    settings = kit.Settings(port=0, slots=8, limits=OPEN_WIDE)
    with (
        pytest.MonkeyPatch.context() as patch,
        caplog.at_level(logging.WARNING, logger="cloud_verifier"),
    ):
        patch.setattr(log, "propagate", True)
        async with kit.verifier(settings) as running, kit.client(running) as good:
            yield running, good
            assert running.engine.running
            assert "moa_quarantined_sessions_total 0.0" in running.service.metrics.page().decode()
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_verifier_answers_what_has_once_done_harm_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with unharmed(caplog) as (running, good), Raw.of(running) as bad:
        neighbour = await good.start(IDS, max_new_tokens=100)
        for number, (name, make) in enumerate(TO_A_VERIFIER.items()):
            session = number.to_bytes(16, "big")
            marker = number.to_bytes(16, "little")
            opened = ClientSession(IDS, id=session)
            made = make(session, IDS)
            harm = binary(made) if isinstance(made, Message) else frame(BINARY, made)
            bad.write(binary(opened.open()) + harm + binary(opened.close()))
            bad.write(
                binary(Resume(marker, 1, marker, 0))
            )  # has its answer when all before it was looked at
            while True:
                opcode, payload = await bad.receive()
                assert opcode == BINARY, name
                if getattr(decode_server(payload), "session", b"") == marker:
                    break
            assert isinstance(await good.advance(neighbour, [neighbour.log[-1]]), Advanced), name
        told = neighbour.log[len(IDS) :]
        assert len(told) >= len(TO_A_VERIFIER)
        assert told == kit.generated(IDS, len(told))


@pytest.mark.timeout(600)
async def test_a_fuzzed_verifier_goes_on_and_nothing_raises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with unharmed(caplog) as (running, good):
        session = await good.start(IDS, max_new_tokens=100)
        for seed in range(3):
            counts = await fuzz(running.transport.port, "", 150, seed, a_connection=50)
            assert counts["connections"] >= 3
            assert isinstance(await good.advance(session, [session.log[-1]]), Advanced)
        assert session.log[len(IDS) :] == kit.generated(IDS, len(session.log) - len(IDS))


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_frame_holds_it_is_a_message_or_a_refusal(seed: int) -> None:
    fuzzer = Fuzzer(seed)
    refused = list[str]()
    for _ in range(1000):
        try:
            decode_client(fuzzer.message())
        except Refusal as refusal:
            refused.append(refusal.code)
    assert set(refused) == {Code.BAD_MESSAGE}
    assert 25 < len(refused) < 975, "some are messages and some are none"


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_a_device_refuses_what_has_once_done_harm_or_is_unharmed(name: str) -> None:
    for waits in (False, True):
        session = ClientSession(IDS, max_new_tokens=20, vocab_size=kit.VOCAB)
        records = Records(RecordBuffer(Heads(2, 32)))
        with contextlib.suppress(Refusal, ProtocolError):
            for number in range(2):
                request = session.open() if not number else session.stream(waits=waits)
                for reply in BEHAVIOURS[name](request, honest(request, 40)):
                    if isinstance(reply, Message):
                        event = session.receive(decode_server(encode(reply)))
                        if isinstance(event, RecordsArrived):
                            records.keep(event.message, len(session.log))
                        if isinstance(event, Advanced):
                            assert 0 <= event.forward_ms < math.inf
                            assert 0 <= event.queue_ms < math.inf
        assert session.log[: len(IDS)] == IDS
        assert len(session.log) <= len(IDS) + 20
        assert max(session.log) < kit.VOCAB
        assert records.buffer is not None
        assert all(stop <= len(session.log) for _, stop in records.held())
