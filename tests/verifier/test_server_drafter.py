"""A published EAGLE-3 drafter drafts the streams of a verifier: the text is the target's, drafts are used."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.baselines.eagle3 import eagle3_config, new_eagle3, save_eagle3
from cloud_verifier.app import Verifier
from cloud_verifier.cli import parser, settings_from
from cloud_verifier.engine.stream_drafting import FeatureServerDrafting
from cloud_verifier.model import load
from cloud_verifier.settings import Settings
from moa.errors import UsageError
from moa.model.eagle3 import PublishedEagle3
from moa.model.shared import SharedWeights
from moa.model.target import Row, Step, Target
from moa.sampling import SamplingSettings
from moa.wire.messages import Sampling
from tests.model import published
from tests.tiny import save_tiny, tiny
from tests.verifier import kit

TOKENS = 32


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    kit.draft_in_every_round(monkeypatch)


@cache
def words() -> list[int]:
    """Tokens that the target writes: a random drafter over these few is right now and then."""
    written = {token for number in range(4) for token in kit.generated(kit.prompt(number, 20 + number), TOKENS)}
    return sorted(written)


def made(folder: Path, layout: str) -> Settings:
    """Settings as of a command line, of the kit's target with a random drafter of a layout."""
    save_tiny("llama", folder / "target")
    published.write(folder / "drafter", layout, tiny("llama"), words())
    flags = ["--target", str(folder / "target"), "--server-drafter", str(folder / "drafter"), "--device", "cpu"]
    return replace(kit.SETTINGS, **{
        name: getattr(settings_from(parser().parse_args(["serve", *flags])), name)
        for name in ("target", "server_drafter", "device")
    })  # fmt: skip


@pytest.mark.parametrize("layout", published.LAYOUTS)
@pytest.mark.usefixtures("always")
async def test_streams_are_the_targets_text_and_drafts_are_accepted(layout: str, tmp_path: Path) -> None:
    settings = made(tmp_path, layout)
    served = load(settings)
    assert served.drafts == "eagle3"
    forwards: list[int] = []
    real = served.target.forward

    def forward(rows: Sequence[Row]) -> Step:
        forwards.append(len(rows))
        return real(rows)

    served.target.forward = forward  # type: ignore[method-assign]
    prompts = [kit.prompt(number, 20 + number) for number in range(2)]
    prompts.append([*prompts[0], 9, 8])  # shares the first prompt's tokens
    async with Verifier(served, settings).open() as running, kit.client(running) as edge:
        for temperature in (0.0, 0.8):
            for ids in prompts:
                sampling = Sampling(temperature=temperature, seed=3)
                session = await edge.start(ids, max_new_tokens=TOKENS, ignore_eos=True, sampling=sampling)
                await edge.stream(session)
                wanted = kit.generated(ids, TOKENS, SamplingSettings(temperature=temperature, seed=3))
                # The library stops at the end of text.
                assert session.log[len(ids) :][: len(wanted)] == wanted
    assert len(forwards) < TOKENS * 2 * len(prompts), "no draft was accepted"


@pytest.mark.usefixtures("always")
async def test_one_that_was_made_here_is_written_as_it_is_read_and_drafts(tmp_path: Path) -> None:
    settings = made(tmp_path, "specforge-3.1")
    folder, model = tmp_path / "drafter", tiny("llama")
    facts, shared = Target.from_model(model).facts, SharedWeights.of(model)
    config = eagle3_config(facts, intermediate_size=40, heads=4, kv_heads=2)
    drafter = new_eagle3(config, shared)
    shutil.rmtree(folder)
    save_eagle3(drafter, folder)
    assert {name.split(".")[0] for name in load_file(folder / "model.safetensors")} == {
        "fc", "fc_norm", "midlayer", "norm"
    }  # fmt: skip
    again = PublishedEagle3.load(folder, facts, shared)
    assert replace(again.config, layer=config.layer) == config
    torch.testing.assert_close(dict(again.state_dict()), dict(drafter.state_dict()))
    served = load(settings)
    async with Verifier(served, settings).open() as running, kit.client(running) as edge:
        ids = kit.prompt(1, 20)
        session = await edge.start(ids, max_new_tokens=TOKENS, ignore_eos=True)
        await edge.stream(session)
        assert session.log[len(ids) :] == kit.generated(ids, TOKENS)


@pytest.mark.usefixtures("always")
async def test_a_session_that_goes_on_after_the_edges_drafts_is_drafted_for(tmp_path: Path) -> None:
    settings = made(tmp_path, "speculators")
    served = load(settings)
    async with Verifier(served, settings).open() as running, kit.client(running) as edge:
        drafting = running.engine._drafting
        assert isinstance(drafting, FeatureServerDrafting)
        ids = kit.prompt(1, 40)
        session = await edge.start(ids, max_new_tokens=TOKENS, ignore_eos=True)
        await edge.advance(session, [session.log[-1], 7])
        await edge.advance(session, [session.log[-1], words()[0], words()[1]])
        await edge.stream(session)
        assert session.log[len(ids) :] == kit.generated(ids, TOKENS)
        assert drafting._drafting.pool.lengths[0] == len(session.log) - 1, "it has followed every forward"


async def test_the_policy_decides_whether_it_pays(tmp_path: Path) -> None:
    """Words that the target never writes: no draft is ever right, and after a while none is made."""
    settings = made(tmp_path, "authors")
    never = [word for word in range(4, 100) if word not in words()][:8]
    published.write(tmp_path / "drafter", "authors", tiny("llama"), never)
    served = load(settings)
    async with Verifier(served, settings).open() as running, kit.client(running) as edge:
        drafting = running.engine._drafting
        assert isinstance(drafting, FeatureServerDrafting)
        asked: list[int] = []
        real = drafting._drafting.draft
        drafting._drafting.draft = lambda requests: (asked.append(len(requests)), real(requests))[1]  # type: ignore[method-assign]
        for number in range(4):
            session = await edge.start(kit.prompt(number, 20), max_new_tokens=TOKENS, ignore_eos=True)
            await edge.stream(session)
        assert 0 < len(asked) < 2 * TOKENS


def test_what_is_no_drafter_is_one_line(tmp_path: Path) -> None:
    settings = made(tmp_path, "specforge")
    with pytest.raises(UsageError, match="there is no such folder"):
        load(replace(settings, server_drafter=str(tmp_path / "nowhere" / "x")))
