"""A drafter of streams alone, published or ours, beside a verifier: the text is the target's,
drafts are used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cloud_verifier.app import Verifier
from cloud_verifier.cli import parser, settings_from
from cloud_verifier.engine.draft import StateFollower
from cloud_verifier.model import load
from moa.errors import UsageError
from moa.sampling import SamplingSettings
from moa.target.torch_target import Row, Step
from moa.training.cli import main as train
from moa.wire.messages import Sampling
from testing.tiny import available, save_tiny, tiny
from tests.model import published
from tests.verifier import kit

TOKENS = 32


@pytest.mark.parametrize("kind", ["eagle3", "states"])
async def test_streams_are_the_targets_text_and_drafts_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Also of a session whose first tokens another one has run, and of one that goes on after the
    edge's drafts."""
    kit.draft_in_every_round(monkeypatch)
    greedy = SamplingSettings()
    sampled = SamplingSettings(temperature=0.8, seed=3)
    prompts = [kit.prompt(number, 20 + number) for number in range(2)]
    truths = {
        (i, how): kit.generated(prompts[i], TOKENS, how)
        for i in range(2)
        for how in (greedy, sampled)
    }
    # A random drafter over the few tokens that the target writes is right now and then.
    words = sorted({token for truth in truths.values() for token in truth})
    target = save_tiny("llama", tmp_path / "target")
    drafter = tmp_path / "drafter"
    if kind == "eagle3":
        published.write(drafter, "specforge-3.1", tiny("llama"), words)
    else:
        texts = [[*prompts[i], *truth] for (i, _), truth in truths.items()]
        await asyncio.to_thread(learn, target, texts, drafter)
    flags = ["serve", "--target", str(target), "--server-drafter", str(drafter), "--device", "cpu"]
    limits = replace(kit.LIMITS, max_tokens_per_second=1e-6, max_burst_tokens=10_000)
    settings = replace(settings_from(parser().parse_args(flags)), port=0, slots=8, limits=limits)
    served = load(settings)
    assert served.drafts == kind
    forwards: list[int] = []
    real = served.target.forward

    def forward(rows: Sequence[Row]) -> Step:
        forwards.append(len(rows))
        return real(rows)

    served.target.forward = forward  # type: ignore[method-assign]
    async with Verifier(served, settings).open() as running, kit.client(running) as edge:
        drafting = running.engine.drafting
        assert isinstance(drafting, StateFollower)
        for (i, how), truth in truths.items():
            sampling = Sampling(temperature=how.temperature, seed=how.seed)
            session = await edge.start(
                prompts[i], max_new_tokens=TOKENS, ignore_eos=True, sampling=sampling
            )
            await edge.stream(session)
            assert (
                session.log[len(prompts[i]) :][: len(truth)] == truth
            )  # the library stops at the end of text
        assert len(forwards) < TOKENS * len(truths), "no draft was accepted"
        (principal,) = running.service._principals.values()
        paid = 10_000 - principal.tokens.level(running.service.clock())
        # Of a prompt that another session has run only the last token is run again.
        run = {i: len(prompts[i]) for i, _ in truths}
        again = len(truths) - len(run)
        of_texts = sum(run.values()) + again + TOKENS * len(truths)
        assert round(paid) == of_texts, "what is drafted here is paid by nobody"
        ids = [*prompts[0], 9, 8]
        session = await edge.start(ids, max_new_tokens=TOKENS, ignore_eos=True)
        await edge.advance(session, [session.log[-1], 7])
        await edge.advance(session, [session.log[-1], *words[:2]])
        await edge.stream(session)
        truth = kit.generated(ids, TOKENS)
        assert session.log[len(ids) :][: len(truth)] == truth
        assert len(session.log) - 1 in drafting._drafting.pool.lengths, (
            "it has followed every forward"
        )


def learn(target: Path, texts: list[list[int]], out: Path) -> None:
    """`moa-train` on these texts."""
    data = out.with_suffix(".jsonl")
    data.write_text(
        "\n".join(json.dumps({"ids": ids, "prompt_tokens": 1}) for ids in texts), encoding="utf-8"
    )
    flags = [
        "--length",
        "64",
        "--batch",
        "2",
        "--steps",
        "12",
        "--quiet",
        "--device",
        "cpu",
    ]
    assert train([str(target), "--data", str(data), "--out", str(out), *flags]) == 0


def test_what_is_no_drafter_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no such"):
        load(
            replace(
                kit.SETTINGS,
                server_drafter=str(tmp_path / "nowhere" / "x"),
                device="cpu",
                kv_tokens=2048,
            )
        )


@pytest.mark.parametrize("family", ["lfm2", "gemma4"])
async def test_a_sibling_whose_layers_differ_drafts_in_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """The text stays the target's; that what it drafts is right is in tests/drafters."""
    if not available(family):
        pytest.skip("this release of transformers does not have it")
    kit.draft_in_every_round(monkeypatch)
    target = save_tiny("llama", tmp_path / "target")
    sibling = save_tiny(family, tmp_path / "sibling")
    drafter = f"independent:{sibling}"
    flags = ["serve", "--target", str(target), "--server-drafter", drafter, "--device", "cpu"]
    settings = replace(
        settings_from(parser().parse_args(flags)), port=0, slots=8, limits=kit.LIMITS
    )
    served = load(settings)
    ids = kit.prompt(0, 20)
    truth = kit.generated(ids, TOKENS)
    async with Verifier(served, settings).open() as running, kit.client(running) as edge:
        session = await edge.start(ids, max_new_tokens=TOKENS, ignore_eos=True)
        await edge.stream(session)
        assert session.log[len(ids) :][: len(truth)] == truth
        assert max(running.engine.drafting._drafting.pool.lengths) >= len(ids)
