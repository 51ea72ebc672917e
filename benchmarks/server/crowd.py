"""Clients that verify as fast as they are answered, all in one process and with little work a round: it is the verifier
that is measured, and it shares the machine with them.

What the target says is asked for once, by plain streaming. Drafts are chains made beforehand from that, whose tokens
are right with a stated probability, and every answer is compared with it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.server.scrape import Page, look
from benchmarks.server_kit import Client, client, prompt
from moa.errors import MoaError
from moa.wire import FEATURES, ClientSession
from moa.wire.messages import RecordDtype, Verdict, Verify

_WITHOUT_RECORDS = FEATURES - {"records", "stream"}


@dataclass(frozen=True)
class Speech:
    """A prompt, what the target says to it, and what the drafts guess at each of its positions."""

    ids: list[int]
    truth: list[int]
    guesses: list[int]


@dataclass(frozen=True)
class Run:
    """What a crowd was told while all of it was talking."""

    seconds: float
    tokens: int
    rounds: int
    round_ms: list[float]
    """From sending a draft to having read its verdict, by the client."""
    before: Page
    after: Page
    """What the verifier said when it began and when it ended."""

    @property
    def rate(self) -> float:
        """Verified tokens a second."""
        return self.tokens / self.seconds


async def speeches(url: str, count: int, *, length: int, tokens: int, rate: float) -> list[Speech]:
    """Prompts of about `length` tokens, no two of one length, with the target's answers of `tokens` tokens."""
    return list(await asyncio.gather(*(_listen(url, seed, length, tokens, rate) for seed in range(count))))


async def _listen(url: str, seed: int, length: int, tokens: int, rate: float) -> Speech:
    rng = random.Random(seed)
    async with client(url) as edge:
        vocab = edge.welcome.vocab_size
        ids = prompt(seed, max(1, length // 2) + seed, vocab)
        session = ClientSession(list(ids), max_new_tokens=tokens, ignore_eos=True, records="off")
        await edge.start(session)
        await edge.stream(session, speculate=False)
        await edge.send(session.close())
    truth = session.log[len(ids) :]
    return Speech(ids, truth, [token if rng.random() < rate else rng.randrange(4, vocab) for token in truth])


async def crowd(url: str, said: Sequence[Speech], nodes: int, records: RecordDtype = "off") -> Run:
    """Have one client for each speech verify it in drafts of `nodes` tokens.

    They start together when every prompt has run, and the clock stops when the first has heard everything, so that
    the whole crowd is there for all of the time that counts.
    """
    ready, steady, over = asyncio.Barrier(len(said) + 1), asyncio.Event(), asyncio.Event()
    talks = [asyncio.create_task(_talk(url, speech, nodes, records, (ready, steady, over))) for speech in said]
    watch = asyncio.create_task(_watch(url, (ready, steady, over)))
    heard = await asyncio.gather(*talks)
    before, after = await watch
    began, until = max(rounds[0][0] for rounds in heard), min(rounds[-1][1] for rounds in heard)
    counted = [one for rounds in heard for one in rounds if began <= one[0] and one[1] <= until]
    return Run(
        seconds=until - began,
        tokens=sum(tokens for _, _, tokens in counted),
        rounds=len(counted),
        round_ms=[1000 * (end - start) for start, end, _ in counted],
        before=before,
        after=after,
    )


async def _watch(url: str, phases: Phases) -> tuple[Page, Page]:
    ready, steady, over = phases
    await ready.wait()
    before = await look(url)
    steady.set()
    await over.wait()
    return before, await look(url)


Phases = tuple[asyncio.Barrier, asyncio.Event, asyncio.Event]
"""All prompts have run; go; the first has heard everything."""
Round = tuple[float, float, int]
"""When its draft was sent, when its verdict was read, and how many tokens it won."""


async def _talk(url: str, speech: Speech, nodes: int, records: RecordDtype, phases: Phases) -> list[Round]:
    ready, steady, over = phases
    features = FEATURES if records != "off" else _WITHOUT_RECORDS
    async with client(url, features) as edge:
        session = ClientSession(list(speech.ids), max_new_tokens=len(speech.truth), ignore_eos=True, records=records)
        await edge.start(session)
        first = await edge.advance(session, [session.log[-1]])  # the prompt has run
        done = len(first.tokens)
        _compare(list(first.tokens), speech.truth[:done])
        await ready.wait()
        await steady.wait()
        rounds: list[Round] = []
        while done < len(speech.truth):
            tokens = [speech.truth[done - 1], *speech.guesses[done : done + nodes - 1]]
            message = Verify(session.id, len(rounds) + 2, len(speech.ids) + done - 1, tokens)
            started = time.perf_counter()
            await edge.send(message)
            won = await _verdict(edge, tokens)
            rounds.append((started, time.perf_counter(), len(won)))
            _compare(won, speech.truth[done : done + len(won)])
            done += len(won)
        over.set()
        await edge.send(session.close())
        return rounds


async def _verdict(edge: Client, tokens: list[int]) -> list[int]:
    answer = await edge.receive()
    if not isinstance(answer, Verdict):
        raise MoaError(f"a round was answered with {answer}")
    return [*(tokens[node] for node in answer.path[1:]), answer.next_token]


def _compare(told: list[int], truth: list[int]) -> None:
    if told != truth:
        raise MoaError("a client was told another text than the target's own")
