"""Capacity: what counts as in time, how the largest number is found, and readers against a real verifier."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import capacity, capacity_hf
from benchmarks.capacity_readers import BUFFER, PATIENCE, SPEED, TOKENS, Text, Trial, lateness, trial
from benchmarks.server_kit import Pair, server
from cloud_verifier.app import Verifier
from cloud_verifier.model import serve_model
from cloud_verifier.settings import Settings
from moa.errors import MoaError
from moa.model.target import Target
from moa.speculate import GenerationSettings, Speculator
from moa.wire.limits import Limits
from tests.benchmarks.pairs import prompts, tiny_target


def test_reading_begins_with_the_first_token_or_when_patience_ends() -> None:
    steady = [5.0 + k / SPEED for k in range(TOKENS)]
    assert lateness(4.5, steady, 99.0) == pytest.approx([-1000 * BUFFER] * TOKENS)
    # The first token comes half a second after the reader's patience ended: everything is late by the rest of it.
    assert lateness(5.0 - PATIENCE - 0.5, steady, 99.0) == pytest.approx([1000 * (0.5 - BUFFER)] * TOKENS)
    assert max(lateness(4.5, steady[:-1], 99.0)) > 80_000  # one never came
    assert min(lateness(0.0, [], 9.0)) > 0


def test_a_trial_is_held_when_95_of_100_tokens_are_in_time() -> None:
    assert Trial(1, [-1.0] * 95 + [5.0] * 4, 0.0).held
    assert not Trial(1, [-1.0] * 94 + [5.0] * 6, 0.0).held


@pytest.mark.parametrize("true", [1, 16, 23, 47, 100])
async def test_the_largest_number_is_found_to_a_tenth(true: int) -> None:
    asked: list[int] = []

    async def attempt(readers: int) -> Trial:
        asked.append(readers)
        return Trial(readers, [-1.0 if readers <= true else 1.0], 0.0)

    users, trials = await capacity.largest(attempt, 8, 512)
    assert 0.88 * true - 1 <= users <= true
    assert [one.readers for one in trials] == asked
    assert len(asked) < 12


async def test_the_search_stops_at_the_most() -> None:
    async def attempt(readers: int) -> Trial:
        return Trial(readers, [-1.0], 0.0)

    users, trials = await capacity.largest(attempt, 8, 64)
    assert (users, len(trials)) == (64, 4)


@pytest.mark.parametrize("way", ["device", "none"])
async def test_readers_are_told_the_targets_text_in_time(way: str) -> None:
    model = tiny_target()
    asked = prompts(5, 6)
    settings = GenerationSettings(max_new_tokens=TOKENS + 8, shape=None, ignore_eos=True)
    truths = Speculator(Target.from_model(model, capacity=160)).generate(asked, settings)
    texts = []
    for ids, found in zip(asked, truths, strict=True):
        right = [found.ids[done : done + 4] for done in range(len(found.ids))]
        texts.append(Text(ids, found.ids, right))
    limits = Limits(max_context_tokens=96, max_prompt_tokens=48, max_chain_tokens=32)
    served = serve_model(Target.from_model(model, slots=4, capacity=160))
    async with Verifier(served, Settings(port=0, slots=4, limits=limits)).open() as verifier:
        url = verifier.transport.url
        found_trial = await trial(url, texts, 3, way, records="off", think=0.001)  # type: ignore[arg-type]
        assert found_trial.held
        assert len(found_trial.late_ms) == 3 * TOKENS
        wrong = [Text(t.ids, [*t.truth[:1], *(token + 1 for token in t.truth[1:])], t.drafts) for t in texts]
        with pytest.raises((MoaError, ExceptionGroup)):
            await trial(url, wrong, 2, way, records="off", think=0.001)  # type: ignore[arg-type]


def test_a_wrong_guess_is_wrong() -> None:
    import random

    assert capacity._guess(random.Random(0), [1, 2, 3], 1.0, 9) == [1, 2, 3]
    assert capacity._guess(random.Random(0), [1, 2, 8], 0.0, 9) == [2, 3, 0]


def test_tables_show_ratios_and_say_what_bounds_them() -> None:
    def run(target: str, way: str, users: int, **more: bool) -> dict[str, object]:
        return {"target": target, "way": way, "users": users, **more}

    result = {
        "reading_speed": 10.0,
        "tokens": 40,
        "think_ms": 60.0,
        "rate": 0.85,
        "hugging_face": {"failed": "no accelerator"},
        "capacity": [
            run("embedded", "plain decoding", 20),
            run("embedded", "device-drafted", 50, driver_bound=True),
            run("random", "plain decoding", 64, at_least=True),
        ],
    }
    text = capacity.tables(result)
    assert "50* (2.50x)" in text
    assert ">= 64" in text
    assert "did not run: no accelerator" in text


def test_the_flags_are_those_of_the_verifier() -> None:
    from cloud_verifier.cli import parser, settings_from

    settings = settings_from(parser().parse_args(["serve", *capacity.flags(100)]))
    assert settings.slots == settings.max_batch_rows == settings.limits.max_queue_per_principal == 108


def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from moa.errors import run_cli

    monkeypatch.setattr("sys.argv", ["capacity", "--start", "9", "--most", "8"])
    assert run_cli("capacity", capacity.main) == 2
    options = argparse.Namespace(skip_embedded=True, step_ms=0, random="big", most=4)
    with pytest.raises(MoaError, match="HIDDENxLAYERS"), capacity.targets(options):
        pass


@pytest.mark.slow
def test_hugging_face_says_the_same_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    import io

    from moa.demo import paths

    target = Target.load(paths().target, capacity=256)
    ids = prompts(9)[0]
    settings = GenerationSettings(max_new_tokens=TOKENS + 1, shape=None, ignore_eos=True)
    truth = Speculator(target).generate([ids], settings)[0].ids
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps([{"ids": ids, "truth": truth}])))
    monkeypatch.setattr("sys.argv", ["capacity_hf", str(paths().target), "--start", "1", "--most", "1"])
    assert capacity_hf.main() == 0


@pytest.mark.slow
async def test_the_embedded_texts_are_long_enough_and_their_drafts_mostly_right() -> None:
    with server(Pair(), *capacity.flags(4)) as process:
        (text,) = await capacity.embedded_texts(process.url, 1)
    assert len(text.truth) > TOKENS
    right = [draft[:1] == text.truth[done : done + 1] for done, draft in enumerate(text.drafts) if done]
    assert len(right) >= TOKENS
    assert sum(right) > 0.6 * len(right)
