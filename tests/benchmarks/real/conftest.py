"""What all of these tests do without."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial

import pytest

from export.build import step_times


@pytest.fixture(scope="module", autouse=True)
def short_timing() -> Iterator[None]:
    """How long a step of a bundle takes is told by nobody here."""
    with pytest.MonkeyPatch.context() as patch:
        quick = partial(step_times, threads=(1,), seconds=0.001)
        patch.setattr("export.build.step_times", quick)
        yield


@pytest.fixture(autouse=True)
def threads_take_turns_as_before() -> Iterator[None]:
    """Lanes of a benchmark change how often they do: that would be every later test's."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)
