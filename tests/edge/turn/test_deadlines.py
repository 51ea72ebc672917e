"""The next instant at which the machine must act."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.turn.controller import Controller
from edge_client.turn.deadlines import Deadlines, Moment, Patience

times = st.floats(-1e9, 1e9) | st.just(float("inf")) | st.just(float("nan"))


@given(now=st.floats(0, 1e9), deadlines=st.lists(times))
def test_a_deadline_has_passed_or_ends_the_wait(now: float, deadlines: list[float]) -> None:
    moment = Moment(now)
    waiting = [at for at in deadlines if not moment.reached(at)]
    assert moment.next is None or moment.next > now
    assert all(moment.next is not None and moment.next <= at for at in waiting)


def test_the_prompt_and_the_link_are_part_of_the_usual_wait() -> None:
    controller = Controller()
    controller.rtt.add(0.1)
    controller.prefilled(100, 2.0)
    new, running = (Deadlines(Patience(), controller, waiting_since=0.0, unread=unread) for unread in (50, 0))
    for deadlines in (new, running):
        deadlines.asked(10.0)
    assert new.write_at() - running.write_at() == pytest.approx(1.0)
    running.lost(5.0)
    assert running.write_at() == 6.0, "a link that is known to be down is not waited for again"
