"""Ctrl-C, at every moment of a conversation with the user."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from edge_client.screen.ctrl_c import CtrlC, Interrupted

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs signals")


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


async def test_it_stops_what_is_being_done() -> None:
    ended = []

    async def long() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(True)

    ctrl_c = CtrlC()
    with ctrl_c.heard():
        asyncio.get_running_loop().call_soon(press)
        with pytest.raises(Interrupted):
            await ctrl_c.stoppable(long())
        assert ended
        assert await ctrl_c.stoppable(asyncio.sleep(0, "next")) == "next"


@pytest.mark.parametrize("between", [False, True])
async def test_just_after_the_end_of_one_thing_or_between_two_it_stops_the_next(
    between: bool,
) -> None:
    async def short() -> str:
        if not between:
            press()
        return "done"

    ctrl_c = CtrlC()
    with ctrl_c.heard():
        assert await ctrl_c.stoppable(short()) == "done"
        if between:
            press()
            await asyncio.sleep(0.01)
        with pytest.raises(Interrupted):
            await ctrl_c.stoppable(asyncio.sleep(3600))
        assert await ctrl_c.stoppable(asyncio.sleep(0, "next")) == "next"


async def test_a_library_that_takes_the_handler_away_does_not_keep_it() -> None:
    async def prompt() -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    ctrl_c = CtrlC()
    with ctrl_c.heard():
        await ctrl_c.stoppable(prompt())
        asyncio.get_running_loop().call_soon(press)
        with pytest.raises(Interrupted):
            await ctrl_c.stoppable(asyncio.sleep(3600))


async def test_to_be_cancelled_by_somebody_else_is_no_ctrl_c() -> None:
    ctrl_c = CtrlC()
    task = asyncio.create_task(ctrl_c.stoppable(asyncio.sleep(3600)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
