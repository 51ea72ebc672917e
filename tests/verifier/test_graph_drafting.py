"""The server's own drafts on a CPU, by the graph of a bundle."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from cloud_verifier.app import Verifier
from cloud_verifier.cli import parser, settings_from
from cloud_verifier.engine.draft import RecordFollower
from cloud_verifier.model import load, load_graph
from cloud_verifier.settings import Settings
from moa import demo
from moa.drafters.body_drafting import BodyDrafting
from moa.drafters.onnx_drafting import OnnxDrafting
from moa.errors import UsageError
from moa.wire.messages import Sampling
from tests.edge import kit as edge_kit
from tests.verifier import kit


@cache
def settings() -> Settings:
    """Those of the edge kit's pair."""
    folder = edge_kit.pair()
    parts = {name: str(folder / name) for name in ("target", "drafter", "bundle")}
    return replace(kit.SETTINGS, device="cpu", **parts)


async def test_streams_drafted_by_the_graph_say_what_those_of_torch_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy and sampled, and after a round that the edge drafted, which the graph has to catch up
    with."""
    kit.draft_in_every_round(monkeypatch)
    drafted: list[int] = []
    real = OnnxDrafting.draft
    monkeypatch.setattr(
        OnnxDrafting, "draft", lambda self, asked: drafted.append(len(asked)) or real(self, asked)
    )
    served = load(settings())
    texts = []
    for graph, kind in ((served.graph, OnnxDrafting), (None, BodyDrafting)):
        async with (
            Verifier(replace(served, graph=graph), settings()).open() as running,
            kit.client(running) as edge,
        ):
            drafting = running.engine.drafting
            assert isinstance(drafting, RecordFollower)
            assert type(drafting._drafting) is kind
            for number, temperature in ((0, 0.0), (1, 0.0), (1, 0.7)):
                ids = kit.prompt(number, 20 + 9 * number)
                sampling = Sampling(temperature=temperature, seed=3)
                session = await edge.start(
                    ids, max_new_tokens=40, ignore_eos=True, sampling=sampling
                )
                await edge.send(session.stream())
                await edge.event(session)
                await edge.send(session.cancel())
                while session.busy:
                    await edge.event(session)
                while not session.finish:
                    await edge.advance(session, [session.log[-1], 7])
                    if not session.finish:
                        await edge.stream(session)
                texts.append(session.log[len(ids) :])
            if isinstance(drafting._drafting, OnnxDrafting):
                (*_, (_, known)) = drafting._drafting._used.values()
                assert known == session.log[: len(known)]
                assert len(known) > len(ids)
                assert drafting._drafting.held(2).newest_missing(len(ids) - 1, 1) is None, (
                    "all records of the prompt"
                )
    assert texts[:3] == texts[3:]
    assert texts[0] == kit.generated(kit.prompt(0, 20), 40)
    assert len(drafted) > 20


def test_the_embedded_bundle_drafts_for_the_embedded_pair_on_a_cpu() -> None:
    small = {"device": "cpu", "kv_tokens": 2048, "slots": 1}
    assert load(Settings(**small)).graph is not None
    assert load(replace(settings(), bundle="")).graph is None, "another pair needs --bundle"
    assert settings_from(parser().parse_args(["serve", "--bundle", "b"])).bundle == "b"


@pytest.mark.parametrize(
    ("wrong", "device", "drafter", "said"),
    [
        ({}, "cpu", "another", "was made of another drafter"),
        ({}, "cpu", "", "without --drafter"),
        ({}, "meta", "d", "--bundle is for a CPU"),
        ({"bundle": "nowhere"}, "cpu", "d", "no bundle at"),
    ],
)
def test_a_bundle_that_cannot_draft_is_one_line(
    wrong: dict[str, Any], device: str, drafter: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        load_graph(replace(settings(), **wrong), device, drafter)


@pytest.mark.parametrize("reads_target", [True, False])
def test_a_bundle_for_another_tokenizer_is_refused_before_the_target_is_loaded(
    reads_target: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a drafter which reads its target was found behind the load."""

    def load_target(*_: Any) -> Any:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("cloud_verifier.model.load_target", load_target)
    embedded = demo.paths()
    bundle = str(embedded.bundle)
    chosen = replace(settings(), bundle=bundle, drafter=settings().drafter if reads_target else "")
    with pytest.raises(UsageError, match="has another tokenizer than the target") as refused:
        load(chosen)
    assert bundle in refused.value.line()
