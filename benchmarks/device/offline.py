"""The paper's third experiment: the link is cut after m tokens, and the finished answer is checked.

MoA continues with the records of the verified text; `without records` is the same drafter without any; an API client
stops where the link does. Answers that were over before the cut count as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.device.replay import Heard, fresh_drafter, hear
from benchmarks.kit.figures import right_by_cut
from benchmarks.kit.lab import Asking, open_lab
from benchmarks.kit.progress import steps
from edge_client.device import Device
from moa.graph.drafter import run
from moa.sampling import SamplingSettings

CUTS = (0, 4, 8, 16, 32, 64)
Finish = Callable[[Heard, int], list[int]]


@dataclass(frozen=True, kw_only=True)
class Options(Asking):
    """What is asked, and of whom."""

    per_skill: int = 2
    """Held-out prompts of every skill."""


def alone(device: Device, tokens: int, *, records: bool) -> Finish:
    """The device goes on from the first m tokens."""

    def finish(heard: Heard, cut: int) -> list[int]:
        drafter = fresh_drafter(device)
        if records and drafter.records is not None:
            rows = len(heard.prompt) + cut - 1
            drafter.records.put(0, heard.keys[:rows], heard.values[:rows])
        ids = [*heard.prompt, *heard.answer[:cut]]
        while len(ids) - len(heard.prompt) < tokens and ids[-1] not in device.codec.eos_ids:
            ids.append(run(drafter.guess(ids, SamplingSettings())))
        return ids[len(heard.prompt) :]

    return finish


async def measure(options: Options) -> dict[str, Any]:
    """Right answers by way and cut."""
    with open_lab(options) as lab:
        heard = await hear(lab, options.tokens)
    ways: dict[str, Finish] = {
        "target": lambda one, _: one.answer,
        "MoA": alone(lab.device, options.tokens, records=True),
        "MoA without records": alone(lab.device, options.tokens, records=False),
        "API client (stops)": lambda one, cut: one.answer[:cut],
    }
    runs = []
    for way, cut in steps([(way, cut) for way in ways for cut in CUTS], "ways and cuts"):
        answers = [one.answer if len(one.answer) <= cut else ways[way](one, cut) for one in heard]
        right = sum(lab.right(number, lab.device.codec.decode(answer)) for number, answer in enumerate(answers))
        same = sum(answer == one.answer for answer, one in zip(answers, heard, strict=True))
        runs.append({"way": way, "cut": cut, "right": right, "same": same, "asked": len(heard)})
    return {"tokens": options.tokens, "runs": runs}


def tables(result: Mapping[str, Any]) -> str:
    """Shares of right answers by way and cut."""
    return right_by_cut(result["runs"])
