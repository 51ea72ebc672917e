"""Log-probabilities are the target's own: those of a bare forward of the library, however the
tokens were won."""

from __future__ import annotations

import random

import pytest
import torch

from moa.wire import ClientSession
from moa.wire.events import Advanced
from moa.wire.messages import Sampling
from tests.verifier import kit

TOP = 3
COUNT = 24


def check(session: ClientSession, start: int) -> None:
    """Every token's own, and the likeliest ones, by one forward of the whole log."""
    truth = torch.from_numpy(kit.logits(session.log)).log_softmax(-1)
    assert sorted(session.token_logprobs) == list(range(start, len(session.log)))
    for position, told in session.token_logprobs.items():
        row = truth[position - 1]
        assert told.logprob == pytest.approx(
            float(row[session.log[position]]), abs=kit.LOGPROB_ROUNDING
        )
        assert [logprob for _, logprob in told.top] == pytest.approx(
            row.topk(TOP).values.tolist(), abs=kit.LOGPROB_ROUNDING
        )
        assert [float(row[id]) for id, _ in told.top] == pytest.approx(
            [p for _, p in told.top], abs=kit.LOGPROB_ROUNDING
        )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_drafted_and_streamed_tokens_have_the_targets_own(temperature: float) -> None:
    rng = random.Random(5)
    ids = kit.prompt(5, 20)
    truth = kit.generated(ids, COUNT)
    async with kit.verifier() as running, kit.client(running) as edge:
        session = await edge.start(
            ids,
            max_new_tokens=COUNT,
            ignore_eos=True,
            logprobs=TOP,
            sampling=Sampling(temperature=temperature, seed=3),
        )
        for _ in range(3):
            rest = truth[len(session.log) - len(ids) :]
            await edge.advance(session, *kit.random_draft(rng, rest, session.log[-1], 8))
        await edge.send(session.stream())
        while not session.finish:
            assert isinstance(await edge.event(session), Advanced)
        check(session, len(ids))
        turn = kit.prompt(6, 4)
        for top in (TOP, -1):
            await edge.send(
                session.append(turn, max_new_tokens=2, ignore_eos=True, logprobs=top),
                session.stream(),
            )
            while not session.finish:
                await edge.event(session)
            if top >= 0:
                check(session, len(session.log) - 2)
        assert not session.token_logprobs, "who does not ask is told none"
