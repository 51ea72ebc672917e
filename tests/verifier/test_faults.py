"""Faults in each collaborator of the engine, at each of its first calls: whose work it was is told,
neighbours get the target's own tokens, slots and pages come back, and the engine goes on."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cloud_verifier.engine import run
from cloud_verifier.engine.contract import Answered, Dropped, Failed, Report, Waiting
from cloud_verifier.engine.job import Guesses, Lease
from cloud_verifier.engine.loop import Engine
from cloud_verifier.metrics import Metrics
from moa.target.torch_target import Step
from moa.tree import Accepted
from moa.wire.finish import TurnRules
from moa.wire.messages import Foresee
from tests.verifier import kit
from tests.verifier.bench import Bench, new_job, new_lease

COUNT = 6
"""Tokens of an answer."""
CALLS = (0, 2)
"""Each of these calls of a collaborator fails, in a run of its own."""


@dataclasses.dataclass
class Session:
    """One answer, of a stream that waits for right drafts, or of one that the server drafts."""

    lease: Lease
    ids: list[int]
    streamed: bool
    start: int
    failed: int = 0
    done: bool = False

    @property
    def right(self) -> bool:
        return self.ids[self.start :] == kit.generated(self.ids[: self.start], COUNT)


class World(Bench):
    """An engine in virtual time, beside sessions of each kind."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sessions: dict[Lease, Session] = {}
        self.metrics = Metrics()
        super().__init__(clock=self.clock, metrics=self.metrics, prefill_tokens=256)
        self.pool = self.served.target.cache

    def clock(self) -> float:
        self.now += 1e-5
        return self.now

    def open(
        self, name: int, *, streamed: bool, guesses: bool = False, share: Lease | None = None
    ) -> Session:
        ids = kit.prompt(name % 4, 40)
        lease = new_lease(name, f"p{name}", share=share, share_tokens=20)
        session = self.sessions[lease] = Session(lease, ids, streamed, len(ids))
        self.ask(session, guesses)
        return session

    def ask(self, session: Session, guesses: bool = False) -> None:
        right = kit.generated(session.ids[: session.start], COUNT)[
            len(session.ids) - session.start :
        ][:2]
        rules = TurnRules(session.start, COUNT, 150)
        job = new_job(
            session.lease, session.ids, None if session.streamed else right, rules, self.now
        )
        if guesses:
            job.guesses = Guesses(waits=False)
            job.guesses.add(
                Foresee(
                    job.lease.session, 1, job.base, [session.ids[-1], right[0]], [-1, 0], [1, 1]
                )
            )
        self.work.submit(job)

    def post(self, reports: list[Report]) -> None:
        for report in reports:
            match report:
                case Waiting(job):
                    self.ask(self.sessions[job.lease])
                case Answered(job, answer):
                    self.sessions[job.lease].ids += answer.tokens
                    self.sessions[job.lease].done = answer.done
                case Failed(lease, _, reason):
                    assert SECRET not in reason
                    self.sessions[lease].failed += 1
                    self.work.release(lease)
                case Dropped(job):
                    raise AssertionError(f"dropped: {job}")

    def run(self) -> None:
        for _ in range(1000):
            self.now += 0.1
            self.engine.turn(0)
            if all(one.done or one.failed for one in self.sessions.values()):
                return
        raise AssertionError("somebody hangs")

    def end(self) -> None:
        """All sessions end: everything that they had is given back."""
        for lease in self.sessions:
            self.work.release(lease)
        for _ in range(5):
            self.engine.turn(0)
        assert self.pool.free == self.pool.slots
        assert self.pool.free_pages == self.pool.pages

    @property
    def counted(self) -> float:
        (family,) = self.metrics.engine_faults.collect()
        faults = sum(one.value for one in family.samples if one.name.endswith("_total"))
        return float(faults + self.metrics.quarantined._value.get())


SECRET = "device-side assert in /home/somebody"


class Nonsense(Exception):
    """What a collaborator raises."""

    def __init__(self) -> None:
        super().__init__(SECRET)


def broken(step: Any) -> Any:
    hidden = torch.full_like(step._forward.hidden, torch.nan)
    step._forward = dataclasses.replace(step._forward, hidden=hidden)
    return step


def halved(step: Any) -> Any:
    whole = step._forward
    return Step(
        step._target,
        step.batch,
        step.versions,
        dataclasses.replace(whole, hidden=whole.hidden[: len(whole.hidden) // 2]),
    )


def forked(found: list[Accepted]) -> list[Accepted]:
    return [Accepted([0, 5], one.next_token) for one in found]


PLACES: dict[str, tuple[Callable[[World], Any], tuple[str, ...]]] = {
    "target": (lambda world: world.served.target, ("forward", "commit")),
    "engine": (lambda world: run, ("accept_rows", "cut_path", "log_probabilities")),
    "pool": (lambda world: world.pool, ("acquire", "share", "begin", "release")),
    "scheduler": (
        lambda world: world.scheduler,
        ("schedule", "finished", "background_room", "background_ran"),
    ),
    "drafting": (lambda world: world.drafting, ("draft", "ran", "matching", "close")),
    "recorder": (
        lambda world: world.recorder,
        ("add", "go", "report", "forget", "can_copy", "copy"),
    ),
    "metrics": (lambda world: world.metrics.forward_seconds, ("labels",)),
    "post": (lambda world: world, ("post",)),
}
ANSWERS: dict[str, list[Callable[[Any], Any]]] = {
    "forward": [broken, halved, lambda step: None],
    "commit": [lambda committed: None],
    "accept_rows": [lambda found: found[:-1], lambda found: None, forked],
    "cut_path": [lambda found: None],
    "draft": [
        lambda drafts: drafts[:-1],
        lambda drafts: None,
        lambda drafts: [([], []) for _ in drafts],
    ],
    "matching": [lambda gain: float("nan")],
}
HARMLESS = {"drafting", "recorder", "metrics"}
"""No session fails for these."""


def faults() -> Iterator[Any]:
    for place, (_, methods) in PLACES.items():
        for method in methods:
            kinds = (
                ["before", "after", "hang"]
                if place not in ("scheduler", "pool")
                else ["before", "hang"]
            )
            for kind in [*kinds, *(f"answer {i}" for i in range(len(ANSWERS.get(method, []))))]:
                yield pytest.param(place, method, kind, id=f"{place}.{method} {kind}")


def inject(
    world: World, monkeypatch: pytest.MonkeyPatch, place: str, method: str, kind: str, at: int
) -> list[int]:
    """Make the call number `at` of a method fail; returns a list that holds the calls made."""
    owner = PLACES[place][0](world)
    real = getattr(owner, method)
    calls = []

    def faulty(*given: Any, **named: Any) -> Any:
        calls.append(len(calls))
        if len(calls) - 1 != at:
            return real(*given, **named)
        if kind == "before":
            raise Nonsense
        answer = real(*given, **named)
        if kind == "after":
            raise Nonsense
        if kind == "hang":
            world.now += 30.0
            return answer
        return ANSWERS[method][int(kind.split()[1])](answer)

    monkeypatch.setattr(owner, method, faulty)
    return calls


def filled() -> World:
    world = World()
    first = world.open(1, streamed=False)
    world.open(2, streamed=True)
    world.open(3, streamed=True, guesses=True)
    for _ in range(3):
        world.now += 0.01
        world.engine.turn(0)
    world.open(5, streamed=False, share=first.lease)  # the same prompt
    return world


@pytest.mark.parametrize(("place", "method", "kind"), list(faults()))
def test_a_fault_costs_the_work_at_hand_and_nothing_else(
    place: str, method: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired = 0
    for at in CALLS:
        with monkeypatch.context() as patch:
            world = filled()
            calls = inject(world, patch, place, method, kind, at)
            world.run()
            world.end()
        happened = len(calls) > at
        fired += happened
        failed = [one for one in world.sessions.values() if one.failed]
        assert all(one.failed <= 1 for one in failed)
        assert all(one.right for one in world.sessions.values() if not one.failed)
        if place in HARMLESS or kind == "hang":
            assert not failed
        if place not in ("post", "pool", "scheduler") and method != "accept_rows":
            assert len(failed) <= 1
        if happened and kind in ("before", "after"):
            assert world.counted, "no silent end"
        for one in list(world.sessions):
            del world.sessions[one]
        world.open(7, streamed=True)
        world.run()
        assert all(one.right for one in world.sessions.values()), "the engine goes on"
    assert fired or method == "log_probabilities"


def test_a_loop_that_takes_no_reports_ends_the_thread_and_says_so() -> None:
    died = threading.Event()

    def post(reports: list[Report]) -> None:
        raise Nonsense

    world = World()
    engine = Engine(world.served.target, world.recorder, world.work, post, died=died.set)
    world.open(1, streamed=False)
    engine.start()
    assert died.wait(kit.PATIENCE)
    engine._thread.join(kit.PATIENCE)
    assert engine.wrong() == "the engine has stopped"
