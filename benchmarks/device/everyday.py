"""What people ask a demo first: one-digit sums and sixty everyday questions, online and offline.

Online is the target's own text; offline is the device alone, from the first token on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.device.offline import alone
from benchmarks.device.replay import TargetAnswer
from benchmarks.kit.figures import table
from benchmarks.kit.lab import Asking, open_lab
from benchmarks.kit.progress import steps
from demo.everyday import EVERYDAY, SUM_WORDINGS, right_sum, sums
from edge_client.tools.compare import ask


@dataclass(frozen=True, kw_only=True)
class Options(Asking):
    """What is asked, and of whom."""

    tokens: int = 130
    """Tokens of an answer at most."""
    every: int = 1
    """Ask every n-th question and sum."""


async def measure(options: Options) -> dict[str, Any]:
    """Acceptable answers and right sums by way."""
    questions = EVERYDAY[:: options.every]
    asked = {wording: sums(wording)[:: options.every] for wording in SUM_WORDINGS}
    prompts = [question.prompt for question in questions] + [p for some in asked.values() for p, _ in some]
    heard: dict[str, dict[str, str]] = {"online": {}, "offline": {}}
    with open_lab(options) as lab:
        finish = alone(lab.device, options.tokens, records=False)
        nothing = np.empty(0, np.float32)
        async with lab.client(draft="server", max_new_tokens=options.tokens) as client:
            for prompt in steps(prompts, "questions asked"):
                ids = client.encode(prompt)
                heard["online"][prompt] = (await ask(client, ids)).text
                drafted = finish(TargetAnswer(ids, [], nothing, nothing), 0)
                heard["offline"][prompt] = lab.device.codec.decode(drafted)
    runs = []
    for way, replies in heard.items():
        runs.append({
            "way": way,
            "acceptable": sum(question.acceptable(replies[question.prompt]) for question in questions),
            "refused": sum(bool(q.skill) and q.declined(replies[q.prompt]) for q in questions),
            "sums": {w: sum(right_sum(total, replies[p]) for p, total in some) for w, some in asked.items()},
            "replies": {question.prompt: replies[question.prompt] for question in questions},
        })  # fmt: skip
    return {"questions": len(questions), "sums": len(asked[SUM_WORDINGS[0]]), "runs": runs}


def tables(result: Mapping[str, Any]) -> str:
    """Counts by way."""
    heads = ["way", f"acceptable of {result['questions']}", "listed skills refused"]
    heads += [f"`{wording}` of {result['sums']}" for wording in SUM_WORDINGS]
    rows = [
        [str(cell) for cell in (run["way"], run["acceptable"], run["refused"], *run["sums"].values())]
        for run in result["runs"]
    ]
    return table(heads, rows)
