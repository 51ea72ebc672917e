"""The server's own drafts on a CPU, by the graph of a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from cloud_verifier.app import Verifier
from cloud_verifier.cli import parser, settings_from
from cloud_verifier.engine.stream_drafting import GraphServerDrafting, MoaServerDrafting
from cloud_verifier.model import load, load_graph
from cloud_verifier.settings import Settings
from moa.errors import UsageError
from moa.model.graph_drafting import GraphDrafting
from moa.wire.messages import Sampling
from tests.edge import kit as edge_kit
from tests.verifier import kit

CPU = torch.device("cpu")


@cache
def settings() -> Settings:
    """Those of the edge kit's pair."""
    folder = edge_kit.pair()
    parts = {name: str(folder / name) for name in ("target", "drafter", "bundle")}
    return replace(kit.SETTINGS, device="cpu", **parts)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    kit.draft_in_every_round(monkeypatch)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_streams_drafted_by_the_graph_say_what_the_target_says(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted: list[int] = []
    real = GraphDrafting.draft

    def draft(self: GraphDrafting, requests: Sequence[Any]) -> Any:
        drafted.append(len(requests))
        return real(self, requests)

    monkeypatch.setattr(GraphDrafting, "draft", draft)
    served = load(settings())
    texts = []
    for graph, kind in ((served.graph, GraphServerDrafting), (None, MoaServerDrafting)):
        async with Verifier(replace(served, graph=graph), settings()).open() as running, kit.client(running) as edge:
            assert type(running.engine._drafting) is kind
            for number in range(3):
                ids = kit.prompt(number, 20 + 9 * number)
                sampling = Sampling(temperature=temperature, seed=3)
                session = await edge.start(ids, max_new_tokens=40, ignore_eos=True, sampling=sampling)
                await edge.send(session.stream())
                await edge.event(session)
                await edge.send(session.cancel())
                while session.busy:
                    await edge.event(session)
                if not session.finish:  # a round that the edge drafted, which the graph has to catch up with
                    await edge.advance(session, [session.log[-1], 7])
                if not session.finish:
                    await edge.stream(session)
                texts.append(session.log[len(ids) :])
    assert texts[:3] == texts[3:]
    assert len(drafted) > 30
    if not temperature:
        assert texts[0] == kit.generated(kit.prompt(0, 20), 40)


async def test_the_graph_has_the_records_and_tokens_of_the_session() -> None:
    served = load(settings())
    async with Verifier(served, settings()).open() as running, kit.client(running) as edge:
        drafting = running.engine._drafting
        assert isinstance(drafting, GraphServerDrafting)
        ids = kit.prompt(1, 40)
        session = await edge.start(ids, max_new_tokens=60, ignore_eos=True)
        await edge.stream(session)
        ((_, known),) = drafting._drafting._used.values()
        assert known == session.log[: len(known)]
        assert len(known) > len(ids)
        held = drafting._drafting.held(0)
        assert held.newest_missing(len(ids) - 1, 1) is None, "all of the prompt's"


def test_the_embedded_bundle_drafts_for_the_embedded_pair_on_a_cpu() -> None:
    small = {"device": "cpu", "kv_tokens": 2048, "slots": 1}
    assert load(Settings(**small)).graph is not None
    assert load(replace(settings(), bundle="")).graph is None, "another pair needs --bundle"
    assert settings_from(parser().parse_args(["serve", "--bundle", "b"])).bundle == "b"


def test_a_bundle_that_cannot_draft_is_one_line() -> None:
    with pytest.raises(UsageError, match="was made of another drafter"):
        load_graph(settings(), CPU, "another")
    with pytest.raises(UsageError, match="without --drafter"):
        load_graph(settings(), CPU, "")
    with pytest.raises(UsageError, match="--bundle is for a CPU"):
        load_graph(settings(), torch.device("meta"), "d")
    with pytest.raises(UsageError, match="no bundle at"):
        load_graph(replace(settings(), bundle="nowhere"), CPU, "d")
