"""`--emulate`: the speed of a larger target, and the text of this one."""

from __future__ import annotations

import time

import pytest

from cloud_verifier.emulated import slowed_down
from cloud_verifier.forward_time import ForwardTime
from cloud_verifier.settings import Settings
from moa.errors import ConfigError
from moa.target.torch_target import Row, Target
from tests.verifier import kit


def test_a_time_for_the_forward_and_one_for_each_further_token() -> None:
    assert ForwardTime.of("250ms") == ForwardTime(0.25)
    assert ForwardTime.of("1.5s+20ms") == ForwardTime(1.5, 0.02)
    assert ForwardTime.of("250ms+20ms").seconds(1) == pytest.approx(0.25)
    assert ForwardTime.of("250ms+20ms").seconds(101) == pytest.approx(2.25)


@pytest.mark.parametrize(
    "wrong", ["250", "fast", "-1s", "1s+2s+3s", "1s+", "nan s", "61s", "9" * 9 + "s"]
)
def test_what_is_no_time_is_refused_before_anything_is_loaded(wrong: str) -> None:
    with pytest.raises(ConfigError, match="--emulate takes"):
        Settings(emulate=wrong)


def test_only_time_is_emulated() -> None:
    quick = Target.from_model(kit.model(), slots=2, capacity=64)
    slow = slowed_down(
        Target.from_model(kit.model(), slots=1, capacity=64),
        ForwardTime(forward=0.05, token=0.01),
    )
    slot = quick.cache.acquire()
    assert slow.cache.acquire() == slot
    row = Row.chain(slot, [5, 6, 7], judged="all")
    expected = quick.forward([row]).argmax(0).tolist()
    began = time.perf_counter()
    step = slow.forward([row])
    assert time.perf_counter() - began >= 0.07
    assert step.argmax(0).tolist() == expected
