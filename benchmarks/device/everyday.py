"""What people ask a demo first: one-digit sums and three lists of sixty everyday questions, online
and offline.

Online is the target's own text; offline is the device alone, from the first token on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.device.offline import alone
from benchmarks.device.replay import TargetAnswer
from benchmarks.kit.figures import table
from benchmarks.kit.lab import Asking, open_lab
from benchmarks.kit.progress import steps
from demo.everyday import EVERYDAY, SUM_WORDINGS, right_sum, sums
from demo.newcomers import NEWCOMERS
from demo.questions import Question
from demo.strangers import STRANGERS
from edge_client.tools.compare import ask

LISTS: dict[str, Sequence[Question]] = {
    "own": EVERYDAY,
    "strangers": STRANGERS,
    "newcomers": NEWCOMERS,
}
"""Questions by who then wrote the training's wordings, and by two others who trained nothing."""


@dataclass(frozen=True, kw_only=True)
class Options(Asking):
    """What is asked, and of whom."""

    tokens: int = 130
    """Tokens of an answer at most."""
    every: int = 1
    """Ask every n-th question and sum."""


async def measure(options: Options) -> dict[str, Any]:
    """Acceptable answers and right sums by way."""
    lists = {name: questions[:: options.every] for name, questions in LISTS.items()}
    asked = {wording: sums(wording)[:: options.every] for wording in SUM_WORDINGS}
    prompts = [question.prompt for questions in lists.values() for question in questions]
    prompts += [prompt for some in asked.values() for prompt, _ in some]
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
        runs.append(
            {
                "way": way,
                "acceptable": {
                    name: sum(q.acceptable(replies[q.prompt]) for q in some)
                    for name, some in lists.items()
                },
                "refused": {
                    name: sum(q.refused(replies[q.prompt]) for q in some)
                    for name, some in lists.items()
                },
                "sums": {
                    w: sum(right_sum(total, replies[p]) for p, total in some)
                    for w, some in asked.items()
                },
                "replies": {q.prompt: replies[q.prompt] for some in lists.values() for q in some},
            }
        )
    questions = {name: len(some) for name, some in lists.items()}
    return {"questions": questions, "sums": len(asked[SUM_WORDINGS[0]]), "runs": runs}


def tables(result: Mapping[str, Any]) -> str:
    """Counts by way."""
    heads = ["way"]
    for name, count in result["questions"].items():
        heads += [f"{name}: acceptable of {count}", "listed skills refused"]
    heads += [f"`{wording}` of {result['sums']}" for wording in SUM_WORDINGS]
    rows = [
        [run["way"]]
        + [
            str(run[what][name])
            for name in result["questions"]
            for what in ("acceptable", "refused")
        ]
        + [str(right) for right in run["sums"].values()]
        for run in result["runs"]
    ]
    return table(heads, rows)
