"""An audit explains a difference by the margin of the target's choice."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from edge_client.cli.audit import Audit, show
from edge_client.client import EdgeClient
from edge_client.tools.compare import TimedAnswer
from edge_client.tools.margin import margin
from moa.sampling import SamplingSettings, gumbel
from tests.edge import kit
from tests.verifier import kit as verifier_kit

TWO = ("greedy", "sampled")


def scores(ids: list[int], sampling: SamplingSettings) -> Any:
    with torch.inference_mode():
        logits = verifier_kit.model()(torch.tensor([ids]), use_cache=False).logits[0, -1].double().numpy()
    if sampling.greedy:
        return logits
    return logits / sampling.temperature + gumbel(sampling.seed, len(ids), len(logits))


def close_call(sampling: SamplingSettings, below: float) -> tuple[list[int], int, int, float]:
    """A context after which the target's two best tokens are this close."""
    for seed in range(4000):
        ids = verifier_kit.prompt(seed, 6)
        found = scores(ids, sampling)
        best, second = np.argsort(-found)[:2]
        if found[best] - found[second] < below:
            return ids, int(best), int(second), float(found[best] - found[second])
    raise AssertionError("no close call among the prompts")


@pytest.mark.parametrize("sampling", [SamplingSettings(), SamplingSettings(temperature=0.7, seed=5)], ids=TWO)
async def test_the_margin_is_the_one_of_the_scores(sampling: SamplingSettings) -> None:
    ids, best, second, lead = close_call(sampling, 0.01)
    async with (
        kit.verifier() as running,
        EdgeClient(verifier=running.transport.url, device=kit.device(), draft="single", sync="off") as client,
    ):
        assert await margin(client, ids, best, second, sampling) == pytest.approx(lead, rel=0.02, abs=1e-5)
        worst = int(np.argmin(scores(ids, sampling)))
        assert await margin(client, ids, best, worst, sampling) is None


@pytest.mark.parametrize(
    ("lead", "what"), [(2e-5, "numerical tie"), (0.03, "near tie"), (1.5, "Please report"), (None, "not close")]
)
def test_what_a_difference_means(lead: float | None, what: str) -> None:
    drafted, alone = (TimedAnswer(ids, "", True, "length", {"calls": 3}) for ids in ([5, 6, 7], [5, 6, 8]))
    out = Console(file=io.StringIO(), width=200)
    show(out, audit := Audit(kit.device().codec, drafted, alone, 2, lead))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert "they part at token 2" in text
    assert what in text
    assert audit.report()["margin"] == lead
