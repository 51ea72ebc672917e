"""An audit explains a difference by the margin of the target's choice."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from edge_client.cli.audit import Audit, margin, show
from edge_client.client import EdgeClient
from edge_client.tools.compare import TimedAnswer, ask
from moa.logprobs import TokenLogprobs
from moa.sampling import SamplingSettings, gumbel
from tests.edge import kit
from tests.verifier import kit as verifier_kit

TWO = ("greedy", "sampled")


def scores(ids: list[int], sampling: SamplingSettings) -> Any:
    with torch.inference_mode():
        logits = (
            verifier_kit.model()(torch.tensor([ids]), use_cache=False)
            .logits[0, -1]
            .double()
            .numpy()
        )
    if sampling.greedy:
        return logits
    return logits / sampling.temperature + gumbel(sampling.seed, len(ids), len(logits))


@pytest.mark.parametrize(
    "sampling", [SamplingSettings(), SamplingSettings(temperature=0.7, seed=5)], ids=TWO
)
async def test_the_margin_is_the_one_of_the_scores(sampling: SamplingSettings) -> None:
    ids = verifier_kit.prompt(1, 6)
    how: Any = {
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "max_new_tokens": 1,
        "logprobs": 20,
    }
    async with (
        kit.verifier() as running,
        EdgeClient(
            verifier=running.transport.url, device=kit.device(), draft="none", sync="off"
        ) as client,
    ):
        alone = await ask(client, ids, **how)
    found = scores(ids, sampling)
    assert alone.ids == [best := int(np.argmax(found))]
    logits = scores(ids, SamplingSettings())
    for other in (
        int(np.argsort(-logits)[1]),
        int(np.argmin(logits)),
    ):  # among the likeliest, and far from them
        theirs = TokenLogprobs(float(logits[other] - np.logaddexp.reduce(logits)))
        drafted = dataclasses.replace(alone, ids=[other], logprobs={len(ids): theirs})
        lead = margin(alone, drafted, 0, len(ids), sampling)
        assert lead == pytest.approx(found[best] - found[other], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    ("lead", "other", "what"),
    [
        (2e-5, [5, 6, 8], "numerical tie"),
        (0.03, [5, 6, 8], "near tie"),
        (1.5, [5, 6, 8], "Please report"),
        (None, [5, 6, 8], "is not known"),
        (None, [5, 6], "ends where"),
    ],
)
def test_what_a_difference_means(lead: float | None, other: list[int], what: str) -> None:
    drafted, alone = (
        TimedAnswer(ids, "", True, "length", {"forwards": forwards}, {})
        for forwards, ids in ((1, [5, 6, 7]), (3, other))
    )
    out = Console(file=io.StringIO(), width=200)
    show(out, audit := Audit(kit.device().codec, drafted, alone, 2, lead))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert f"with drafts   3 tokens in 1 forward\ntarget alone  {len(other)} tokens in 3" in text
    assert "they part at token 2" in text
    assert what in text
    assert audit.report()["margin"] == lead
