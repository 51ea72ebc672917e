"""Emulated targets: slow by as much as was said, and true to the text whoever drafts."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from benchmarks.baselines.registry import open_drafting, save
from benchmarks.kit.emulation import BaselineVerifier, SlowTarget
from cloud_verifier.model import Served, model_facts
from cloud_verifier.settings import Settings
from moa.drafters.body_drafting import BodyDrafting
from moa.drafters.onnx_drafting import OnnxDrafting
from moa.target.torch_target import Row
from moa.wire.limits import Limits
from testing.client import client
from testing.speculator import GenerationSettings, Speculator
from testing.verifier import Emulated
from testing.verifier import verifier as emulated_verifier
from tests.benchmarks.pairs import opponent, prompts, tiny_target
from tests.edge import kit as edge_kit


def test_a_forward_takes_as_long_as_was_said() -> None:
    target = SlowTarget.from_model(tiny_target(), capacity=64)
    target.step_seconds = 0.05
    slot = target.cache.acquire()
    began = time.perf_counter()
    target.forward([Row.chain(slot, [5, 6, 7])])
    assert time.perf_counter() - began >= 0.05
    target.step_seconds = 0.0
    target.forward([Row.chain(slot, [5])])
    assert target.forwards == 2
    assert target.late >= 1, "the second one, and the first too where the machine is busy"


@pytest.mark.parametrize("kind", ["eagle2", "independent"])
async def test_a_server_that_drafts_with_a_baseline_says_what_the_target_says(
    kind: str, tmp_path: Path
) -> None:
    model = tiny_target()
    asked = prompts(7)[0]
    plain = Speculator(SlowTarget.from_model(model, capacity=160))
    truth = plain.generate(
        [asked], GenerationSettings(max_new_tokens=12, shape=None, ignore_eos=True)
    )[0].ids
    target = SlowTarget.from_model(model, slots=2, capacity=160)
    target.watching = True
    save(opponent(kind, target), tmp_path)
    limits = Limits(max_context_tokens=96, max_prompt_tokens=48)
    settings = Settings(port=0, slots=2, limits=limits)
    served = Served(target, None, None, model_facts(target, None))
    verifier = BaselineVerifier(served, target, open_drafting(tmp_path, target), settings)
    async with verifier.open(), asyncio.timeout(300):
        for _ in range(2):  # the second conversation takes what the first gave back
            async with client(verifier.transport.url) as edge:
                session = await edge.start(asked, max_new_tokens=12, ignore_eos=True, records="off")
                await edge.advance(
                    session, [session.log[-1]]
                )  # a round that the server did not draft
                await edge.stream(session)
                assert session.log[len(asked) :] == truth
                await edge.send(session.close())
                while target.cache.free < 2:
                    await asyncio.sleep(0.01)
        assert target.seen == {}


def test_a_baseline_drafts_by_the_graph_of_its_bundle() -> None:
    folder = edge_kit.pair()
    target = SlowTarget.load(str(folder / "target"), slots=2, capacity=96)
    for graph, kind in ((str(folder / "bundle"), OnnxDrafting), ("", BodyDrafting)):
        drafting = open_drafting(folder / "drafter", target, graph=graph)
        assert type(drafting) is kind
        assert {drafting.open(), drafting.open()} == {0, 1}


def test_an_emulated_verifier_starts_wherever_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`benchmarks` is not installed: the process is given the folder that it is imported from."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    with emulated_verifier(emulated=Emulated(step_ms=1.0)) as running:
        assert running.process.poll() is None
