"""Acceptance against lag, precision, and share of the prompt's records.

The target answers once; then drafting is replayed on its text with late, coarse or sparse records.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from benchmarks.device.replay import Heard, accepted_per_round, hear, record_heads
from benchmarks.kit.figures import pivot, values_of
from benchmarks.kit.lab import Asking, open_lab
from benchmarks.kit.progress import steps
from edge_client.device import Device
from moa import records
from moa.graph.cache import RecordBuffer
from moa.tree import TreeShape

LAGS: tuple[int | None, ...] = (0, 1, 2, 4, 8, 16, 64, None)
PROMPT_ONLY = "prompt only"
PRECISIONS = ("fp16", "int8", "int4", "off")
SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
SHAPES = {"chain": TreeShape.chain(6), "tree": TreeShape(8, 6, 62)}

Fill = Callable[[Heard, RecordBuffer], None]
Options = Asking


def precision(name: Any, heard: Heard, buffer: RecordBuffer) -> None:
    """Records as after transmission."""
    if name != "off":
        payload = records.encode(heard.keys, heard.values, name)
        buffer.put(0, *records.decode(payload, name, len(heard.keys), *heard.keys.shape[1:]))


def prompt_share(share: float, heard: Heard, buffer: RecordBuffer) -> None:
    """Records of the answer, and of so much of the prompt, its newest rows first, as they are sent."""
    start = round(len(heard.prompt) * (1 - share))
    buffer.put(start, heard.keys[start:], heard.values[start:])


def scattered(share: float, heard: Heard, buffer: RecordBuffer) -> None:
    """Records of a random share of all positions: holes everywhere."""
    rng = random.Random(0)
    for row in range(len(heard.keys)):
        if rng.random() < share:
            buffer.put(row, heard.keys[row : row + 1], heard.values[row : row + 1])


def conditions() -> list[tuple[str, Any, int | None, Fill]]:
    """The varied setting, its value, the lag, and the records: one change at a time."""
    full = partial(precision, "fp16")
    return [
        *(("lag", PROMPT_ONLY if lag is None else lag, lag, full) for lag in LAGS),
        *(("precision", name, 0, partial(precision, name)) for name in PRECISIONS),
        *(("prompt rows held", share, 0, partial(prompt_share, share)) for share in SHARES),
        *(("rows held", share, 0, partial(scattered, share)) for share in SHARES),
    ]


def acceptance(device: Device, heard: Sequence[Heard], fill: Fill, lag: int | None, shape: TreeShape) -> float:
    """Tokens a round, the target's own included."""
    rounds: list[int] = []
    for one in heard:
        buffer = RecordBuffer(record_heads(device))
        fill(one, buffer)
        rounds += accepted_per_round(device, one, buffer, shape, lag=lag)
    return 1 + fmean(rounds)


async def measure(options: Options) -> dict[str, Any]:
    """Every condition for chains and trees."""
    with open_lab(options) as lab:
        heard = await hear(lab, options.tokens)
    plan = [(name, *condition) for name in SHAPES for condition in conditions()]
    runs = [
        {"what": what, "value": value, "shape": name, "tau": acceptance(lab.device, heard, fill, lag, SHAPES[name])}
        for name, what, value, lag, fill in steps(plan, "conditions")
    ]
    return {"prompts": len(heard), "runs": runs}


def tables(result: Mapping[str, Any]) -> str:
    """One table for each thing that was changed."""
    runs = result["runs"]
    of = {what: [run for run in runs if run["what"] == what] for what in values_of(runs, "what")}
    return "\n\n".join(pivot(found, "shape", "value", "{tau:.2f}", what) for what, found in of.items())
