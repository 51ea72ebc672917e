"""A target that is as slow as a larger one, with `--emulate`.

The embedded target answers in 3 ms, a real one on a CPU in 250 ms and reads a long prompt for a
minute: what a program does meanwhile is seen only at that speed. Only time is emulated. The real
forward runs, and then its thread sleeps until the stated time is over; the text stays the target's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

from cloud_verifier.forward_time import ForwardTime
from moa.target.contract import Step, Target
from moa.target.rows import Row

SomeTarget = TypeVar("SomeTarget", bound=Target)


def slowed_down(target: SomeTarget, forward_time: ForwardTime) -> SomeTarget:
    """Make each forward of the target take at least its `forward_time` from now on, and return the
    target."""
    forward = target.forward

    def slow_forward(rows: Sequence[Row]) -> Step:
        tokens = sum(len(row.tokens) for row in rows)
        until = time.perf_counter() + forward_time.seconds(tokens)
        step = forward(rows)
        step.wait()
        left = until - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return step

    target.forward = slow_forward  # type: ignore[method-assign]
    return target
