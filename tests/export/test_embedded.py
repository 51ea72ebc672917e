"""The embedded pair, as a user exports it: every form keeps the share of acceptance that it
promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from export.build import BuildSettings, build
from export.cli import embedded_prompts, embedded_sources
from export.static_forms import StaticShape

GOALS = {
    "cpu-int8": 0.99,
    "cpu-int4": 0.97,
    "portable": 0.97,
    "web": 0.97,
    "mobile": 0.97,
    "npu-qnn": 0.97,
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_form_of_the_embedded_pair_keeps_its_acceptance(tmp_path: Path) -> None:
    target, drafter = embedded_sources()
    settings = BuildSettings(
        target=target,
        drafter=drafter,
        out=tmp_path / "bundle",
        variants=tuple(GOALS),
        time_steps=False,
        prompts=embedded_prompts(24)[0],
        static_shape=StaticShape(tokens=8, past=256, records=256),
    )
    for name, variant in build(settings).manifest.variants.items():
        assert variant.agreement is not None
        assert variant.agreement.acceptance > 4, name
        assert variant.agreement.acceptance_ratio >= GOALS[name], name
