"""A target that is as slow as a larger one, with `--emulate`.

The embedded target answers in 3 ms, a real one on a CPU in 250 ms and reads a long prompt for a
minute: what a program does meanwhile is seen only at that speed. Only time is emulated. The real
forward runs, and then its thread sleeps until the stated time is over; the text stays the target's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from cloud_verifier.forward_time import ForwardTime
from moa.model.layout import Row
from moa.model.target import Step, Target


class EmulatedTarget(Target):
    """A target each of whose forwards takes at least its `forward_time`."""

    def __init__(self, *arguments: Any, forward_time: ForwardTime, **how: Any) -> None:
        super().__init__(*arguments, **how)
        self.forward_time = forward_time

    def forward(self, rows: Sequence[Row]) -> Step:
        """Run, and sleep for the rest of the time."""
        until = time.perf_counter() + self.forward_time.seconds(
            sum(len(row.tokens) for row in rows)
        )
        step = super().forward(rows)
        step.wait()
        left = until - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return step
