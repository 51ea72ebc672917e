"""Streams with guesses ahead, over real websockets: what fits is verified, what does not is
dropped."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from cloud_verifier.engine.job import Guesses
from moa.speculation.guess_tree import neg_log_probs_of
from moa.tree import DraftTree
from moa.wire import ClientSession, Recovered
from moa.wire.messages import Error, Foresee, StreamTokens
from tests.verifier import kit

IDS = kit.prompt(0, 20)
COUNT = 40


def chain(*tokens: int) -> DraftTree:
    return DraftTree(
        list(tokens), list(range(-1, len(tokens) - 1)), [-0.1 * n for n in range(len(tokens))]
    )


def guesses(session: ClientSession, tree: DraftTree) -> Foresee:
    return session.foresee(tree.tokens, tree.parents, neg_log_probs_of(tree))


async def part(edge: kit.Client, session: ClientSession) -> StreamTokens:
    message = await edge.receive()
    assert isinstance(message, StreamTokens), message
    session.receive(message)
    return message


async def silence(edge: kit.Client) -> None:
    """What was sent before has been looked at, and nothing came of it."""
    other = await edge.start(kit.prompt(9, 5))
    assert other.settled


async def rest(edge: kit.Client, session: ClientSession, truth: Sequence[int]) -> None:
    """Foresee what is right until the turn ends."""
    while not session.finish:
        done = len(session.log) - len(IDS)
        if not session.busy:
            await edge.send(session.stream(speculate=False, waits=True))
        await edge.send(guesses(session, chain(session.log[-1], *truth[done : done + 5])))
        await part(edge, session)
        while session.streaming is not None and len(session.log) - len(IDS) < min(done + 5, COUNT):
            await part(edge, session)
    assert session.log[len(IDS) :] == truth


async def test_a_stream_that_waits_runs_over_what_is_foreseen_and_nothing_else() -> None:
    truth = kit.generated(IDS, COUNT)
    async with kit.verifier(drafter=True) as running, kit.client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=COUNT)
        stream = session.stream(speculate=False, waits=True)
        await edge.send(stream)
        await silence(edge)
        assert not running.work.queued
        await edge.send(guesses(session, chain(IDS[-1], *truth[:3], truth[3] ^ 1)))
        first = await part(edge, session)
        assert (first.tokens, first.foreseen, first.done) == (truth[:4], 4, False)
        # Rooted where the log has been: what was overtaken is walked through, and only the rest is
        # verified.
        await edge.send(guesses(session, chain(session.log[-1], *truth[4:9])))
        second = await part(edge, session)
        assert (second.tokens, second.foreseen) == (truth[4:10], 5)
        # An outcome of the round before, another text, and another round: of no use, and no error
        # either.
        message = guesses(session, chain(session.log[-1], truth[10]))
        await edge.send(
            Foresee(
                session.id, stream.round, stream.base, [IDS[-1], truth[0] ^ 1], [-1, 0], [0, 0]
            ),
            Foresee(
                session.id, stream.round + 1, session.base, message.tokens, message.parents, [0, 0]
            ),
        )
        await silence(edge)
        assert session.streaming is stream
        await edge.send(
            guesses(
                session, DraftTree([session.log[-1], 3, truth[10]], [-1, 0, 0], [0.0, -0.3, -0.5])
            )
        )
        assert (await part(edge, session)).tokens == truth[10:12]
        await rest(edge, session, truth)
        assert session.round == 1, "all of it was one round"


async def test_where_nothing_was_foreseen_the_server_goes_on_by_itself() -> None:
    truth = kit.generated(IDS, COUNT)
    async with kit.verifier(drafter=True) as running, kit.client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=COUNT, ignore_eos=True)
        await edge.send(session.stream())
        rng = random.Random(0)
        parts = []
        while session.busy:
            parts.append(await part(edge, session))
            done = len(session.log) - len(IDS)
            if session.streaming is not None and rng.random() < 0.7:
                ahead = done + rng.randrange(1, 9)
                await edge.send(guesses(session, chain(session.log[-1], *truth[done:ahead], 5)))
        assert session.log[len(IDS) : len(IDS) + len(truth)] == truth
        assert any(not one.foreseen for one in parts)


async def test_a_stream_that_waits_ends_when_it_is_cancelled_when_its_edge_goes_and_when_the_server_drains() -> (
    None
):
    truth = kit.generated(IDS, COUNT)
    async with kit.verifier() as running:
        async with kit.client(running) as edge:
            session = await edge.start(IDS, max_new_tokens=COUNT)
            await edge.send(session.stream(speculate=False, waits=True))
            await silence(edge)
            cancel = session.cancel()
            assert cancel is not None
            await edge.send(cancel)
            ended = await part(edge, session)
            assert (ended.tokens, ended.done) == ([], True)
            await edge.send(session.stream(speculate=False, waits=True))
            await edge.send(guesses(session, chain(IDS[-1], *truth[:2])))
            await part(edge, session)
        await kit.until(lambda: not any(one.running for one in running.service.table))
        async with kit.client(running) as edge:
            await edge.send(*session.recover())
            assert isinstance(await edge.event(session), Recovered)
            await edge.send(session.stream(speculate=False, waits=True))
            await silence(edge)
            running.service.drain("the test is over", 5.0)
            while session.busy:
                await edge.event(session)
            assert session.log[len(IDS) :] == truth[: len(session.log) - len(IDS)]


async def test_a_waiting_stream_gives_its_slot_to_others_and_takes_another_when_it_goes_on() -> (
    None
):
    truth = kit.generated(IDS, COUNT)
    async with kit.verifier() as running, kit.client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=COUNT)
        await edge.send(session.stream(speculate=False, waits=True))
        await edge.send(guesses(session, chain(IDS[-1], *truth[:2])))
        await part(edge, session)
        await silence(edge)
        table = running.service.table
        (own,) = (one for one in table if one.id == session.id)
        await kit.until(lambda: own.at_rest)
        table.evict(own, "the test")
        await rest(edge, session, truth)


async def test_who_has_not_agreed_to_it_may_not_use_it() -> None:
    async with kit.verifier() as running, kit.client(running, features=[]) as edge:
        session = await edge.start(IDS, max_new_tokens=COUNT)
        await edge.send(
            session.stream(speculate=False, waits=True), guesses(session, chain(IDS[-1], 5))
        )
        for answer in [await edge.receive(), await edge.receive()]:
            assert isinstance(answer, Error)
            assert answer.code == "unsupported"


async def test_guesses_of_a_stream_that_advances_are_work_and_no_flood() -> None:
    settings = kit.limited(max_empty_frames_per_second=4, burst_seconds=0.5, flood_seconds=0.1)
    truth = kit.generated(IDS, COUNT)
    async with kit.verifier(settings, drafter=True) as running, kit.client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=COUNT)
        await edge.send(session.stream(speculate=False, waits=True))
        while not session.finish:
            done = len(session.log) - len(IDS)
            for depth in range(1, 9):
                await edge.send(
                    guesses(session, chain(session.log[-1], *truth[done : done + depth]))
                )
            await part(edge, session)
        assert session.log[len(IDS) :] == truth


def test_only_so_many_guesses_between_two_advances_count_as_work() -> None:
    held = Guesses(waits=True)
    message = Foresee(bytes(16), 1, 0, [1, 2], [-1, 0], [0, 8])
    assert sum(held.add(message) for _ in range(100)) == 32
    held.advanced()
    assert held.add(message)


def test_no_more_guesses_are_picked_than_may_be_run_and_none_is_waited_for_then() -> None:
    held = Guesses(waits=True)
    held.add(Foresee(bytes(16), 1, 0, [1, 2, 3, 4], [-1, 0, 1, 2], [0] * 4))

    def picked() -> list[int]:
        return list(held.pick([1], 8, 0.0, branches=True).tokens)

    assert (picked(), held.waits) == ([1, 2, 3, 4], True)
    held.most = 2.9
    assert (picked(), held.waits) == ([1, 2, 3], True)
    held.most = 0.9
    assert (picked(), held.waits) == ([1], False)
    held.most = math.inf
    assert (picked(), held.waits) == ([1, 2, 3, 4], True), "they are kept, for later"


async def test_guesses_for_a_session_that_is_not_there_are_dropped_without_an_answer() -> None:
    settings = kit.limited(max_refusals_per_second=1, burst_seconds=1.0, flood_seconds=0.1)
    async with kit.verifier(settings) as running, kit.client(running) as edge:
        for _ in range(20):
            await edge.send(Foresee(bytes(16), 1, 0, [1, 2], [-1, 0], [0, 8]))
        session = await edge.start(IDS, max_new_tokens=3)  # the first answer is to the opening
        assert session.settled
