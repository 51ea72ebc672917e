"""The front with workers that have no model: they answer with their index, and end when told."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
import signal
import socket
import zlib
from collections.abc import AsyncIterator, Callable
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from cloud_verifier.settings import Settings
from cloud_verifier.workers import front as front_module
from cloud_verifier.workers.control import (
    AllMetrics,
    Control,
    Heartbeat,
    Line,
    MetricsRequest,
    SendMetrics,
    Serve,
    StartFailed,
    WorkerMetrics,
    send,
)
from cloud_verifier.workers.front import Front
from moa.errors import MoaError, UsageError
from moa.wire.limits import Limits

PATIENCE = 110.0  # processes start slowly on a busy machine
SETTINGS = Settings(port=0, limits=Limits(handshake_timeout=5.0, drain_seconds=5.0))
_FRESH = multiprocessing.get_context("spawn")


def _start(index: int, line: socket.socket) -> BaseProcess:
    process = _FRESH.Process(target=_worker, args=(index, line))
    process.start()
    return process


def _start_failing(index: int, line: socket.socket) -> BaseProcess:
    process = _FRESH.Process(target=_failing, args=(line,))
    process.start()
    return process


def _failing(line: socket.socket) -> None:
    send(line, StartFailed("no such target", 2))


def _worker(index: int, control: socket.socket) -> None:
    asyncio.run(_serve(index, control))


async def _serve(index: int, control: socket.socket) -> None:
    """Answers a connection with its index, process and the first line that it was handed; `metrics` asks for all."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    taken = 0
    asking: list[socket.socket] = []

    def heard(message: Control, carried: socket.socket | None) -> None:
        nonlocal taken
        match message:
            case Serve() if carried is not None:
                taken += 1
                request = message.head.split(b"\r\n")[0]
                if b"/metrics" in request:
                    asking.append(carried)
                    line.send(MetricsRequest())
                else:
                    carried.sendall(f"{index} {os.getpid()} {request.decode()}".encode())
                    carried.close()
                line.send(Heartbeat(0, taken))
            case SendMetrics():
                line.send(WorkerMetrics(zlib.compress(f"# HELP x X\n# TYPE x gauge\nx {index}\n".encode())))
            case AllMetrics():
                asking[0].sendall(repr(sorted(message.pages)).encode())
                asking.pop().close()

    line = Line(control, heard, lost=stop.set)
    line.send(Heartbeat(0, 0))
    await stop.wait()


@contextlib.asynccontextmanager
async def _front(count: int = 2, start: Any = _start, settings: Settings = SETTINGS) -> AsyncIterator[Front]:
    async with asyncio.timeout(PATIENCE), Front(settings, count, start).open() as front:
        yield front


async def _say(front: Front, head: bytes) -> str:
    host, port = front.url.removeprefix("ws://").split(":")
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head)
        answer = (await reader.read()).decode()
        writer.close()
        await writer.wait_closed()
    return answer


async def _ask(front: Front, key: str) -> tuple[int, int]:
    """The index and the process of the worker that answers for `key`."""
    index, process, *request = (await _say(front, _head(f"/?session={key}"))).split()
    assert request == ["GET", f"/?session={key}", "HTTP/1.1"]
    return int(index), int(process)


def _head(target: str) -> bytes:
    return f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


async def _until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not what():
            await asyncio.sleep(0.01)


async def test_equal_keys_reach_the_same_worker_and_both_work() -> None:
    async with _front() as front:
        homes = {key: await _ask(front, key) for key in "abcdefgh"}
        assert {index for index, _ in homes.values()} == {0, 1}
        assert homes == {key: await _ask(front, key) for key in "hgfedcba"}


async def test_a_killed_worker_is_replaced_and_its_keys_are_served_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_module, "_BACKOFF", (0.2, 0.2))
    async with _front() as front:
        homes = {key: await _ask(front, key) for key in "abcdefgh"}
        index, process = homes["a"]
        os.kill(process, signal.SIGKILL)
        await _until(lambda: not front.workers[index].well)
        assert (await _ask(front, "a"))[0] == 1 - index, "the other one takes it"
        await _until(lambda: front.workers[index].well)
        after = {key: await _ask(front, key) for key in homes}
        assert {key: home[0] for key, home in after.items()} == {key: home[0] for key, home in homes.items()}
        assert after["a"][1] != process


async def test_a_worker_that_is_stuck_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(front_module, "_BACKOFF", (0.1, 0.1))
    async with asyncio.timeout(PATIENCE), Front(SETTINGS, 1, _start, clock=lambda: now).open() as front:
        _, process = await _ask(front, "a")
        await _until(lambda: front.workers[0].load == 0)  # a report that came after the jump in time would say "well"
        now = front_module._STUCK_SECONDS + 1.0
        await _until(lambda: not front.workers[0].well)
        now = 0.0
        await _until(lambda: front.workers[0].well)
        assert (await _ask(front, "a"))[1] != process


async def test_metrics_of_all_are_gathered() -> None:
    async with _front() as front:
        assert await _say(front, _head("/metrics")) == "['0', '1', 'front']"


async def test_a_drain_ends_every_worker_and_takes_nobody_more() -> None:
    async with _front() as front:
        port = int(front.url.rpartition(":")[2])
        await front.drain()
        assert all(worker.ended.is_set() for worker in front.workers)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_who_sends_no_head_is_hung_up_on() -> None:
    limits = dataclasses.replace(SETTINGS.limits, handshake_timeout=0.2)
    async with _front(1, settings=dataclasses.replace(SETTINGS, limits=limits)) as front:
        assert await _say(front, b"GET / HTTP/1.1\r\n") == ""


async def test_a_head_without_an_end_goes_to_a_worker_which_refuses_it() -> None:
    async with _front(1) as front:
        head = b"GET /long HTTP/1.1\r\n"
        assert (await _say(front, head + b"a" * (front_module._LONGEST_HEAD - len(head)))).startswith("0 ")


async def test_why_a_worker_cannot_start_is_said_once() -> None:
    with pytest.raises(MoaError, match="no such target") as caught:
        async with _front(2, _start_failing):
            pass
    assert caught.value.exit_code == 2


async def test_a_taken_port_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port}"):
            async with _front(settings=dataclasses.replace(SETTINGS, port=port)):
                pass
