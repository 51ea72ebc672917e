"""Capacity: what counts as in time, how the largest number is found, and readers against a real
verifier."""

from __future__ import annotations

import pytest

from benchmarks.server import capacity
from benchmarks.server.readers import (
    BUFFER,
    PATIENCE,
    SPEED,
    TOKENS,
    Trial,
    largest,
    lateness,
    trial,
)
from moa.errors import MoaError, UsageError
from testing.devices import Script, scripts
from testing.verifier import many_short
from tests.verifier import kit


def test_reading_begins_with_the_first_token_or_when_patience_ends() -> None:
    steady = [5.0 + k / SPEED for k in range(TOKENS)]
    assert lateness(4.5, steady, 99.0) == pytest.approx([-1000 * BUFFER] * TOKENS)
    # The first token comes half a second after the reader's patience ended: everything is late by
    # the rest of it.
    assert lateness(5.0 - PATIENCE - 0.5, steady, 99.0) == pytest.approx(
        [1000 * (0.5 - BUFFER)] * TOKENS
    )
    assert max(lateness(4.5, steady[:-1], 99.0)) > 80_000  # one never came
    assert min(lateness(0.0, [], 9.0)) > 0


def test_a_trial_is_held_when_95_of_100_tokens_are_in_time() -> None:
    assert Trial(1, [-1.0] * 95 + [5.0] * 4, 0.0).held
    assert not Trial(1, [-1.0] * 94 + [5.0] * 6, 0.0).held


@pytest.mark.parametrize("true", [1, 16, 23, 47, 100, 1000])
async def test_the_largest_number_is_found_to_a_tenth_and_no_single_trial_decides(
    true: int,
) -> None:
    asked: list[int] = []

    async def attempt(readers: int) -> Trial:
        asked.append(readers)
        lucky = asked.count(readers) == 2  # one good trial among bad ones, or the other way round
        return Trial(readers, [-1.0 if (readers <= true) != (lucky and true == 23) else 1.0], 0.0)

    users, trials = await largest(attempt, 8, 512)
    assert 0.88 * min(true, 512) - 1 <= users <= min(true, 512)
    assert [one.readers for one in trials] == asked
    assert len(asked) < 24


@pytest.mark.parametrize("way", ["device", "none"])
async def test_readers_are_told_the_targets_text_in_time(way: str) -> None:
    async with kit.verifier(drafter=False) as running:
        url = running.transport.url
        said = await scripts(url, 2, length=10, tokens=TOKENS + 1, rate=1.0, nodes=5)
        found = await trial(url, said, 3, way, records="off", think=0.001)  # type: ignore[arg-type]
        assert found.held
        assert len(found.late_ms) == 3 * TOKENS
        wrong = [
            Script(s.ids, [*s.truth[:1], *(token + 1 for token in s.truth[1:])], s.drafts)
            for s in said
        ]
        with pytest.raises(MoaError, match="another text"):
            await trial(url, wrong, 2, way, records="off", think=0.001)  # type: ignore[arg-type]


def test_the_flags_are_those_of_the_verifier() -> None:
    from cloud_verifier.cli import parser, settings_from

    settings = settings_from(parser().parse_args(["serve", *many_short(100)]))
    assert (
        settings.slots == settings.max_batch_rows == settings.limits.max_queue_per_principal == 108
    )


def test_mistakes_are_one_line() -> None:
    with pytest.raises(UsageError, match="at most --most"):
        capacity.Options(start=9, most=8)
    options = capacity.Options(embedded=False, step_ms=0.0, random="big")
    with pytest.raises(UsageError, match="HIDDENxLAYERS"), capacity.targets(options):
        pass
