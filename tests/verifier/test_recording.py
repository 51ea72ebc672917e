"""Activation records in virtual time: what making them costs the rounds of others."""

from __future__ import annotations

from typing import Any

import pytest

from cloud_verifier.engine.contract import Answered, Report
from cloud_verifier.engine.job import Lease
from cloud_verifier.model import serve_model
from moa.target.torch_target import Target
from moa.wire.finish import TurnRules
from tests.verifier import kit
from tests.verifier.bench import Bench, new_job, new_lease
from tests.verifier.virtual import Clock

_PROMPT = 320
_FORWARD, _BATCH, _ROW = 0.005, 0.0004, 0.00008
"""Seconds of a forward; of a batch of records, and of each: 64 of them take longer than a forward."""


class Client(Bench):
    """An engine, stepped by hand, and a session that asks again `pause` seconds after each verdict."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pause: float) -> None:
        self.clock = Clock()
        self.pause = pause
        target = Target.from_model(kit.model(), slots=2, capacity=512)
        drafter = kit.served().drafter
        assert drafter is not None
        super().__init__(
            serve_model(target, drafter), clock=self.clock, prefill_tokens=256, rows=64
        )
        self.lease = Lease(bytes(16), "p")
        self.ids = kit.prompt(0, 2)
        self.asks: float | None = None
        self.waits: list[float] = []
        self.batches: list[tuple[float, int]] = []
        forward = target.forward
        project = drafter.project

        def batch(*parts: Any) -> Any:
            self.clock.now += _BATCH + _ROW * len(parts[2])
            self.batches.append((self.clock.now, len(parts[2])))
            return project(*parts)

        monkeypatch.setattr(target, "forward", lambda rows: self.passes(_FORWARD) or forward(rows))
        monkeypatch.setattr(drafter, "project", batch)
        monkeypatch.setattr(self.work._changed, "wait", self.wait)

    def passes(self, seconds: float) -> None:
        self.clock.now += seconds

    def post(self, reports: list[Report]) -> None:
        for report in reports:
            if isinstance(report, Answered):
                self.waits.append(self.clock.now - report.job.enqueued)
                self.ids += report.message.tokens
                self.asks = self.clock.now + self.pause

    def wait(self, seconds: float) -> bool:
        until = self.clock.now + seconds
        self.clock.now = until if self.asks is None else max(self.clock.now, min(until, self.asks))
        return self.ask()

    def ask(self) -> bool:
        """Send the round, if it is time, as of the time when it was sent."""
        now = self.clock.now
        if self.asks is None or self.asks > now:
            return False
        self.clock.now = self.asks
        self.asks = None
        self.work.submit(
            new_job(self.lease, self.ids, [], TurnRules(2, 10_000, 10_000), self.clock.now)
        )
        self.clock.now = now
        return True

    def turn(self) -> None:
        self.ask()
        self.engine.turn(0.001 if self.recorder.pending else 5.0)

    def p95(self) -> float:
        return sorted(self.waits)[int(0.95 * len(self.waits))]


@pytest.mark.parametrize("pause", [0.0005, 0.002, 0.02])
def test_records_of_a_long_prompt_are_made_between_rounds_and_cost_a_verdict_a_third_at_most(
    monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    client = Client(monkeypatch, pause)
    reader = new_lease(1, "q")
    client.asks = client.clock.now
    while len(client.waits) < 50:
        client.turn()
    alone = client.p95()
    client.waits = []
    client.asks = None
    client.turn()  # they have left
    client.clock.now += 1.0
    client.work.prefill(reader, kit.prompt(1, _PROMPT + 1), _PROMPT)
    while reader.length < _PROMPT:
        client.turn()
    assert len(reader.backlog) > 0
    began = client.asks = client.clock.now
    while reader.made.newest_missing(_PROMPT, 1) is not None:
        client.turn()
    assert client.p95() <= 1.3 * alone
    assert max(client.waits) <= 1.5 * alone
    assert client.clock.now < began + 4.0


def test_records_take_a_small_share_of_the_time_while_rounds_leave_no_idle_moment_and_are_all_made_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "_FORWARD", 0.05)
    monkeypatch.setitem(globals(), "_BATCH", 0.02)
    client = Client(monkeypatch, 0.0)
    client.lease = new_lease(0)
    began = client.asks = client.clock.now
    while len(client.waits) < 120:
        client.turn()
    spent = sum(_BATCH + _ROW * rows for _, rows in client.batches)
    assert 0 < spent / (client.clock.now - began) < 0.05
    assert client.lease.made.newest_missing(121, 1) is not None
    client.asks = None
    while client.recorder.pending:
        client.turn()
    assert client.lease.made.newest_missing(121, 1) is None, "an idle moment makes what is left"


def test_records_are_made_in_large_batches_when_nobody_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Client(monkeypatch, 0.0)
    reader = new_lease(1, "q")
    client.work.prefill(reader, kit.prompt(1, _PROMPT + 1), _PROMPT)
    while reader.made.newest_missing(_PROMPT, 1) is not None:
        client.turn()
    assert [rows for _, rows in client.batches][-4:] == [64] * 4


def test_records_are_made_where_a_clock_is_too_coarse_to_time_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cost in ("_BATCH", "_ROW"):
        monkeypatch.setitem(globals(), cost, 0.0)
    client = Client(monkeypatch, 0.001)
    reader = new_lease(1, "q")
    client.asks = client.clock.now
    client.work.prefill(reader, kit.prompt(1, _PROMPT + 1), _PROMPT)
    while reader.made.newest_missing(_PROMPT, 1) is not None:
        client.turn()
    assert client.waits
