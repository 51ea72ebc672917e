"""docs/extending.md, followed: a toy drafter is registered by the page's own words, and drafts a
verifier's streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cloud_verifier.app import Verifier
from cloud_verifier.cli import parser, settings_from
from cloud_verifier.model import load
from moa.drafters import registry
from moa.drafters.registry import find
from moa.target.rows import Row
from moa.target.torch_target import Step
from testing.tiny import save_tiny
from tests.drafters.toy import ToyConfig, ToyKind
from tests.verifier import kit

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
TOKENS = 48


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the line of the page."""
    monkeypatch.setattr(registry, "KINDS", dict(registry.KINDS))
    line = next(
        line.strip()
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.strip().startswith("register(")
    )
    exec(line, {"register": registry.register, "ToyKind": ToyKind})


async def test_a_drafter_that_is_registered_drafts_streams_and_the_text_stays_the_targets(
    registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.draft_in_every_round(monkeypatch)
    target = save_tiny("llama", tmp_path / "target")
    folder = tmp_path / "toy"
    folder.mkdir()
    ToyConfig().write(folder)
    assert find(folder).kind.name == "toy"
    flags = ["serve", "--target", str(target), "--drafter", str(folder), "--device", "cpu"]
    settings = replace(settings_from(parser().parse_args(flags)), port=0, limits=kit.LIMITS)
    served = load(settings)
    assert served.drafts == "toy"
    forwards: list[int] = []
    real = served.target.forward

    def forward(rows: Sequence[Row]) -> Step:
        forwards.append(len(rows))
        found: Step = real(rows)
        return found

    served.target.forward = forward  # type: ignore[method-assign, assignment]
    async with Verifier(served, settings).open() as running, kit.client(running) as edge:
        ids = kit.prompt(0, 20)
        truth = kit.generated(ids, TOKENS)
        for _ in range(2):
            forwards.clear()
            session = await edge.start(ids, max_new_tokens=TOKENS, ignore_eos=True)
            await edge.stream(session)
            assert session.log[len(ids) :][: len(truth)] == truth
    assert len(forwards) < TOKENS / 2, "the second reader gets what was drafted from the first's"
