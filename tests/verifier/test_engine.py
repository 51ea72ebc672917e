"""The engine's thread, stepped by hand: only the session that raises is quarantined, and records
never come before verdicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from cloud_verifier.engine import run
from cloud_verifier.engine.contract import Dropped, Failed, Recorded
from cloud_verifier.engine.draft import TreeDrafter
from cloud_verifier.engine.faults import Faults
from cloud_verifier.engine.job import Guesses, Job, Lease
from cloud_verifier.engine.loop import PROBE_SECONDS
from cloud_verifier.engine.schedule import EngineStep, StepOutcome
from cloud_verifier.model import serve_model
from moa import demo
from moa.drafters.drafting import DraftRequest
from moa.grammar.spec import Grammar
from moa.sampling import SamplingSettings
from moa.target.torch_target import Step, Target
from moa.tree import DraftTree, TreeShape
from moa.wire import Code
from moa.wire.finish import TurnRules
from moa.wire.messages import Foresee, Stream, StreamTokens
from testing.client import NEVER
from testing.speculator import GenerationSettings, Speculator
from testing.tiny import tiny
from tests.verifier import kit
from tests.verifier.bench import Bench, new_lease


def test_the_time_of_a_prompt_is_that_until_the_accelerator_has_computed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forward of prompts alone reads nothing back: only waiting tells how long it took."""
    now = [0.0]
    bench = Bench(clock=lambda: now[0])
    monkeypatch.setattr(Step, "wait", lambda step: now.__setitem__(0, now[0] + 3.0))
    bench.work.prefill(new_lease(1), kit.prompt(1, 9), 8)
    bench.engine.turn(0)
    assert bench.engine._runner._metrics.forward_seconds.labels("prompt")._sum.get() == 3.0
    assert bench.engine.alive_at == 3.0


@pytest.mark.parametrize("draft", [[5], None], ids=["guesses", "stream"])
def test_an_answer_comes_before_the_records_of_its_tokens_and_prompts_newest_first(
    draft: list[int] | None,
) -> None:
    """Also before those that the drafts of a stream need: on a thin link these would hold the first
    token up."""
    bench = Bench()
    job = bench.submit(new_lease(0), kit.prompt(0, 100), draft)
    job.rules = dataclasses.replace(job.rules, max_new_tokens=1)
    bench.run()
    kinds = [type(getattr(report, "message", report)) for report in bench.reports]
    spans = [(r.start, r.stop) for r in bench.of(Recorded)]
    assert sum(stop - start for start, stop in spans) == 100
    (answer,) = bench.of(StreamTokens)
    assert all(kind is Recorded for kind in kinds[bench.reports.index(answer) + 1 :])
    assert any(r.stop == 100 for r in bench.reports[bench.reports.index(answer) + 1 :])
    first_chunk = [span for span in spans if span[1] <= 31]
    assert first_chunk == sorted(first_chunk, reverse=True)


def test_records_that_only_the_server_s_drafter_may_want_are_made_when_it_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    made = list[int]()
    project = bench.served.drafter.project  # type: ignore[union-attr]
    monkeypatch.setattr(
        bench.served.drafter, "project", lambda *of: made.append(of[0].shape[1]) or project(*of)
    )
    lease = new_lease(1)
    lease.eager_records = False
    ids = kit.prompt(1, 4)
    for _ in range(40):
        ids = bench.next(lease, ids)
        bench.run()
    assert made == []
    assert len(lease.backlog) < 16, "what waits is joined"
    assert lease.backlog[0].hidden.untyped_storage().nbytes() == lease.backlog[0].hidden.nbytes, (
        "and no other's states"
    )
    while not bench.recorder.finish(lease):  # as its drafter does, when it is worth it
        pass
    assert made == [16, 16, 11]
    assert lease.made.newest_missing(43, 1) is None


def test_an_idle_engine_runs_a_token_to_know_that_it_can() -> None:
    now = [0.0]
    target = Target.from_model(kit.model(), slots=3, capacity=80, kv_tokens=80)
    bench = Bench(serve_model(target), clock=lambda: now[0])
    taken: list[Callable[[], Any]] = [
        lambda: None,
        lambda: [
            bench.submit(new_lease(i), kit.prompt(i, size), []) for i, size in enumerate((60, 5))
        ],
        target.cache.acquire,
    ]
    for take, free in zip(taken, [(3, 5), (1, 0), (0, 0)], strict=True):
        take()
        bench.run()
        assert (target.cache.free, target.cache.free_pages) == free
        now[0] += PROBE_SECONDS
        bench.engine.turn(0)
        assert bench.engine.alive_at == now[0], "also when every page, or every slot is taken"


def test_a_model_that_does_not_run_is_noticed_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    monkeypatch.setattr(bench.served.target, "forward", None)
    with pytest.raises(TypeError):
        bench.engine.start()


def test_who_finds_the_memory_full_comes_back_or_keeps_what_was_said_and_harms_nobody() -> None:
    bench = Bench(
        served=serve_model(Target.from_model(kit.model(), slots=8, capacity=96, kv_tokens=96))
    )
    good = new_lease(0)
    waiting = new_lease(1)
    bench.submit(good, kit.prompt(0, 60), [5])
    bench.run()
    refused = bench.submit(waiting, kit.prompt(1, 50), [5])
    bench.run()
    (dropped,) = bench.of(Dropped)
    assert (dropped.job, dropped.refusal.code, dropped.refusal.limit) == (
        refused,
        Code.BUSY,
        "kv_tokens",
    )
    assert (bench.work.queued, bench.scheduler._prompts) == (0, {})
    bench.work.release(waiting)
    stream = bench.submit(new_lease(2), kit.prompt(0, 20), None)
    bench.run()
    answers = [answer for answer in bench.of(StreamTokens) if answer.job is stream]
    said = [token for answer in answers for token in answer.message.tokens]
    assert said == kit.generated(kit.prompt(0, 20), len(said))
    assert len(said) == 32 - 19, "two pages are full"
    assert answers[-1].message.done
    assert bench.of(Failed) == []
    bench.work.release(good)
    again = bench.submit(new_lease(3), kit.prompt(1, 50), [5])
    bench.run()
    assert bench.of(StreamTokens)[-1].job is again


def test_who_waited_too_long_or_is_cancelled_is_not_run_and_told_so() -> None:
    bench = Bench()
    jobs = [
        bench.submit(new_lease(i), kit.prompt(i, 2), draft)
        for i, draft in enumerate(([5], [5], None, [5]))
    ]
    late, cancelled, stream, good = jobs
    late.deadline = 0.0
    cancelled.cancelled = True
    stream.cancelled = True
    bench.run()
    told = {report.job: report.refusal.code for report in bench.of(Dropped)}
    assert told == {late: Code.DEADLINE}
    answers = {one.job: one.message for one in bench.of(StreamTokens)}
    assert answers.keys() == {cancelled, stream, good}
    for ended in (cancelled, stream):
        assert (answers[ended].tokens, answers[ended].done) == ([], True)
    assert bench.work.queued == 0


class VirtualDrafting(TreeDrafter):
    """Every level is drafted in half a second, and a token read in a fiftieth."""

    def __init__(self, now: list[float]) -> None:
        super().__init__(
            kit.served().target, NothingRight(now), TreeShape.chain(6), clock=lambda: now[0]
        )
        self.now = now
        self.read = 0

    def _known(self, lease: Lease) -> int:
        return self.read

    def _catch_up(self, job: Job, stop: int) -> bool:
        self.now[0] += 0.02 * (stop - self.read)
        self.read = stop
        job.lease.draft_slot = 0
        return True


class NothingRight:
    """Only its time matters."""

    def __init__(self, now: list[float]) -> None:
        self.now = now

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        depth = requests[0].shape.depth
        self.now[0] += 0.5 * depth
        return [
            DraftTree([1] * (depth + 1), list(range(-1, depth)), [0.0] * (depth + 1))
            for _ in requests
        ]


def test_streams_whose_drafts_miss_are_as_fast_as_plain_ones() -> None:
    now = [0.0]
    drafting = VirtualDrafting(now)
    lease = Lease(bytes(16), "p")
    ids = kit.prompt(0, 60)
    job = Job(
        lease=lease,
        request=Stream(lease.session, 1, 59),
        ids=ids,
        rules=TurnRules(60, 900, 2000),
        sampling=SamplingSettings(),
        guesses=Guesses(waits=False),
        enqueued=0.0,
        deadline=1e12,
    )
    began = rounds = 0.0
    for number in range(1, 1201):
        lease.length = job.base
        (draft,) = drafting.draft([job])
        forward = 1.0 + 0.1 * (len(draft[0]) - 1)
        now[0] += forward
        drafting.ran({job: 0}, len(draft[0]), forward)
        job.ids.append(5)  # nothing of the draft was right
        if number == 200:
            began = now[0]
            rounds = 200.0
    assert (1200 - rounds) / (now[0] - began) > 0.98


def test_a_stream_whose_edge_has_guessed_nothing_is_not_compared_with_drafts_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    ids = kit.prompt(0, 10)
    compared = []
    monkeypatch.setattr(bench.drafting, "matching", lambda job: compared.append(job) or 0.0)
    job = bench.submit(new_lease(0), ids, None)
    job.guesses = Guesses(waits=False)
    while not bench.of(StreamTokens):
        bench.engine.turn(0)
    assert not compared, "in a full batch that took a sixth of the time"
    (guess,) = kit.generated(job.ids, 1)
    job.guesses.add(Foresee(job.lease.session, 1, job.base, [job.ids[-1], guess], [-1, 0], [1, 1]))
    while len(bench.of(StreamTokens)) == 1:
        bench.engine.turn(0)
    assert compared == [job]
    assert bench.of(StreamTokens)[-1].message.foreseen == 1


def test_a_stream_that_waits_for_its_device_is_left_out_of_what_a_step_has_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    left_out = []
    real = bench.work.finished

    def finished(step: EngineStep, outcome: StepOutcome) -> list[Job]:
        if step.jobs:
            left_out.append((step.jobs, outcome.left_out))
        return real(step, outcome)

    monkeypatch.setattr(bench.work, "finished", finished)
    jobs = []
    for name in (0, 1):
        ids = kit.prompt(name, 10)
        jobs.append(job := bench.submit(new_lease(name), ids, kit.generated(ids, 2)))
        bench.run()
        assert left_out == [([job], set()), ([job], {job.lease})], "a forward, and then none"
        left_out.clear()
    waits, goes_on = jobs
    goes_on.guesses.add(
        Foresee(goes_on.lease.session, 1, goes_on.base, [goes_on.ids[-1], NEVER], [-1, 0], [0, 0])
    )
    for job in jobs:
        bench.work.submit(job)
    bench.engine.turn(0)
    assert left_out == [([waits, goes_on], {waits.lease})], "a forward of one of them alone"


def test_what_comes_between_two_rounds_of_a_stream_is_a_part_of_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    rests = []
    bench = Bench(clock=lambda: now[0])
    real = bench.served.target.forward

    def forward(rows: Any) -> Any:
        now[0] += 1.0
        return real(rows)

    monkeypatch.setattr(bench.served.target, "forward", forward)
    monkeypatch.setattr(
        bench.drafting, "ran", lambda won, tokens, took: won and rests.append(took - 1.0)
    )
    bench.submit(new_lease(0), kit.prompt(0, 10), None).enqueued = now[0]
    now[0] += 0.5
    while not rests:
        bench.engine.turn(0)
    for _ in range(2):
        now[0] += 0.25
        bench.engine.turn(0)
    assert rests == [0.0, 0.25, 0.25], "the first round has waited for nothing but its request"


@pytest.mark.parametrize(
    "sampling", [SamplingSettings(), SamplingSettings(temperature=0.7, seed=1)]
)
def test_numbers_that_are_none_end_their_session_alone_and_leave_nothing_behind(
    sampling: SamplingSettings,
) -> None:
    bench = Bench(kit.served(own=tiny("llama")))
    with torch.no_grad():
        bench.served.target.embedding_weight[77] = torch.nan
    good = new_lease(1)
    bad = new_lease(2)
    right = bench.submit(good, kit.prompt(1, 9), [5])
    wrong = bench.submit(bad, [*kit.prompt(2, 9), 77, 5], [6])
    wrong.sampling = sampling
    bench.run()
    assert [report.job for report in bench.of(StreamTokens)] == [right]
    assert bench.of(StreamTokens)[0].message.tokens[0] == kit.generated(kit.prompt(1, 9), 1)[0]
    (failed,) = bench.of(Failed)
    assert failed.job is wrong
    assert "NaN or Inf" in failed.reason
    bench.work.release(bad)
    bench.run()
    for memory in (bench.served.target.cache.k, bench.served.target.cache.v):
        assert memory.isfinite().all(), "the next to have these pages finds nothing"


def test_masks_that_are_late_hold_up_no_other_row_and_change_no_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without any time for masks a batch makes the first of one row: the others' rows run again."""
    faults: list[str] = []
    monkeypatch.setattr(run, "_MASK_SECONDS", 0.0)
    monkeypatch.setattr(Faults, "count", lambda _, where, error: faults.append(where))
    target = Target.load(str(demo.paths().target), slots=8, capacity=256)
    bench = Bench(serve_model(target))
    prompt = target.tokenizer("Once upon a time")["input_ids"]
    choice = target.grammars.compile(Grammar("regex", "alpha|omega"))
    expected = Speculator(target).generate(
        [prompt], GenerationSettings(grammar=Grammar("regex", "alpha|omega"))
    )
    plain = bench.submit(new_lease(0), prompt, [])
    held = [bench.submit(new_lease(name), prompt, []) for name in range(1, 5)]
    for job in held:
        job.matcher = choice.matcher(len(prompt))
    while not bench.of(StreamTokens):
        bench.engine.turn(0)
    assert plain in {report.job for report in bench.of(StreamTokens)}
    assert len(bench.of(StreamTokens)) == 2, "one row's mask is always made"
    broken = bench.submit(new_lease(5), prompt, [])
    broken.matcher = choice.matcher(0)  # as if the prompt had to match
    bench.run()
    settled = {report.job: report for report in bench.of(StreamTokens)}
    assert {settled[job].message.tokens[0] for job in held} == {expected[0].ids[0]}
    (dropped,) = bench.of(Dropped)
    assert (dropped.job, dropped.refusal.code) == (broken, Code.GRAMMAR)
    assert not bench.of(Failed)
    assert faults == []
