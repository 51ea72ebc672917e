"""The paper's third experiment: the link is cut after m tokens, and the finished answer is checked.

MoA continues with the records of the verified text; `without records` is the same drafter without
any; an API client stops where the link does. Answers that were over before the cut count as they
are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.device.replay import TargetAnswer, fresh_drafter, target_answers
from benchmarks.kit.figures import right_by_cut
from benchmarks.kit.lab import Asking, open_lab
from benchmarks.kit.progress import steps
from edge_client.device import Device
from moa.graph.drafter import run
from moa.sampling import SamplingSettings

CUTS = (0, 4, 8, 16, 32, 64)
Finish = Callable[[TargetAnswer, int], list[int]]


@dataclass(frozen=True, kw_only=True)
class Options(Asking):
    """What is asked, and of whom."""

    per_skill: int = 2
    """Held-out prompts of every skill."""


def alone(device: Device, tokens: int, *, records: bool) -> Finish:
    """The device goes on from the first m tokens."""

    def finish(answered: TargetAnswer, cut: int) -> list[int]:
        drafter = fresh_drafter(device)
        if records and drafter.records is not None:
            rows = len(answered.prompt) + cut - 1
            drafter.records.put(0, answered.keys[:rows], answered.values[:rows])
        ids = [*answered.prompt, *answered.answer[:cut]]
        while len(ids) - len(answered.prompt) < tokens and ids[-1] not in device.codec.eos_ids:
            ids.append(run(drafter.guess(ids, SamplingSettings())))
        return ids[len(answered.prompt) :]

    return finish


async def measure(options: Options) -> dict[str, Any]:
    """Right answers by way and cut."""
    with open_lab(options) as lab:
        answered = await target_answers(lab, options.tokens)
    ways: dict[str, Finish] = {
        "target": lambda one, _: one.answer,
        "MoA": alone(lab.device, options.tokens, records=True),
        "MoA without records": alone(lab.device, options.tokens, records=False),
        "API client (stops)": lambda one, cut: one.answer[:cut],
    }
    runs = []
    for way, cut in steps([(way, cut) for way in ways for cut in CUTS], "ways and cuts"):
        answers = [
            one.answer if len(one.answer) <= cut else ways[way](one, cut) for one in answered
        ]
        right = sum(
            lab.right(number, lab.device.codec.decode(answer))
            for number, answer in enumerate(answers)
        )
        same = sum(answer == one.answer for answer, one in zip(answers, answered, strict=True))
        runs.append({"way": way, "cut": cut, "right": right, "same": same, "asked": len(answered)})
    return {"tokens": options.tokens, "runs": runs}


def tables(result: Mapping[str, Any]) -> str:
    """Shares of right answers by way and cut."""
    return right_by_cut(result["runs"])
