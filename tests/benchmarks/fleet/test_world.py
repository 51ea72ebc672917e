"""The simulated fleet against what queueing theory and arithmetic know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fleet import scenarios
from benchmarks.fleet.model import Draws, Service, Work
from benchmarks.fleet.scenarios import World, told
from benchmarks.fleet.world import Answer, Fleet

SERVICE = Service("test", base=0.02, per_row=0.001, per_prompt_token=0.0001, slots=16)
WORK = Work(links=("loopback",), draft=0.05)


def test_service_times_come_from_a_result(tmp_path: Path) -> None:
    rows = [{"batch_rows": b, "client_ms": {"p50": 10 + 2 * b}} for b in (1.0, 4.0, 16.0)]
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"target": "t", "options": {"nodes": 8}, "server_load": {"batching": {"rows": rows}}}))
    service = Service.measured(file, slots=4)
    assert service.base == pytest.approx(0.010)
    assert service.per_row == pytest.approx(0.002)
    assert service.forward(3) == pytest.approx(0.016)
    assert service.forward(0, 8) == pytest.approx(0.010 + 0.002)


def test_a_round_wins_what_acceptance_says() -> None:
    draws = Draws(Work(acceptance=0.7, nodes=8), seed=1)
    mean = sum(draws.won() for _ in range(8192)) / 8192
    assert mean == pytest.approx(Work(acceptance=0.7, nodes=8).tau, rel=0.03)
    assert Work(acceptance=1.0, nodes=8).tau == 8


def test_one_device_alone_takes_the_time_of_its_rounds() -> None:
    work = Work(links=("loopback",), draft=0.05, acceptance=0.0, tokens=20, prompt=100)
    fleet = Fleet(SERVICE, work, verifiers=1, devices=0)
    fleet.verifiers[0].bring([Answer(0.0, work.tokens, work.prompt)])
    fleet.run(60)
    prompt, rounds = SERVICE.base + 100 * SERVICE.per_prompt_token, 20 * (SERVICE.base + SERVICE.per_row)
    assert 1 / fleet.speeds[0] == pytest.approx((prompt + rounds + 19 * 0.05) / 20, rel=0.03)
    assert (fleet.answers, fleet.tokens) == (1, 20)
    assert max(fleet.waits) == pytest.approx(0)


def test_what_is_asked_for_is_what_is_served() -> None:
    world = World(SERVICE, WORK)
    fleet = world.fleet(20, 8000)
    fleet.run(120)
    offered = 8000 * WORK.turns_per_hour / 3600 * WORK.tokens
    figures = told(fleet, 120)
    assert figures["tokens_per_second"] == pytest.approx(offered, rel=0.08)
    assert 0.3 < figures["busy"] < 1


def test_a_verifier_never_holds_more_than_its_slots_and_forgets_nobody() -> None:
    fleet = Fleet(SERVICE, WORK, verifiers=1, devices=0)
    fleet.verifiers[0].bring([Answer(0.0, 50, 10) for _ in range(100)])
    fleet.run(0.5)
    assert fleet.verifiers[0].active == SERVICE.slots
    assert len(fleet.verifiers[0].backlog) >= 100 - SERVICE.slots - 2
    fleet.run(120)
    assert (fleet.answers, fleet.tokens) == (100, 5000)


def test_answers_of_verifiers_that_are_lost_end_elsewhere() -> None:
    fleet = Fleet(SERVICE, WORK, verifiers=3, devices=0)
    for verifier in fleet.verifiers:
        verifier.bring([Answer(0.0, 96, 64) for _ in range(10)])
    fleet.run(0.3)
    moved = fleet.lose(fleet.verifiers[:1], noticed=0.1)
    assert moved <= 10
    fleet.run(120)
    assert (fleet.answers, fleet.tokens, fleet.moved) == (30, 30 * 96, 10)
    fleet.restore(fleet.verifiers[:1])
    fleet.verifiers[0].bring([Answer(fleet.now, 10, 10)])
    fleet.run(10)
    assert fleet.answers == 31


def test_nobody_can_be_reached_for_a_while() -> None:
    case, _ = scenarios.thundering(World(SERVICE, WORK), 300, 0.5, outage=20.0)
    assert 2.5 < case["all_connected_after"] < 6
    assert case["after"][-1]["first_token_ms"]["p95"] < case["after"][0]["first_token_ms"]["p95"] + 1000


def test_more_acceptance_serves_more_devices() -> None:
    few, many = (
        scenarios.capacity(World(SERVICE, Work(acceptance=p, links=("wifi",), turns_per_hour=60))) for p in (0.4, 0.9)
    )
    assert many > 1.5 * few


def test_counting_begins_anew() -> None:
    fleet = World(SERVICE, WORK).fleet(1, 100)
    fleet.run(30)
    assert fleet.tokens > 0
    fleet.count_anew()
    assert (fleet.tokens, len(fleet.waits)) == (0, 0)
