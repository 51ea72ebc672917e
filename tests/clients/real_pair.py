"""What the everyday hours beside a real pair share, on the page and in a terminal: our programs as
their user starts them, the link between them, questions.

`MOA_TARGET=/path/target.gguf MOA_BUNDLE=/path/bundle` name the pair, `MOA_CUTS=5,30,120` is how
many seconds the cuts last.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Self

from edge_client.tools.emulated_network import LinkProxy
from moa.process.listening import Port
from tests.clients.conftest import PATIENCE

TARGET = os.environ.get("MOA_TARGET", "")
BUNDLE = os.environ.get("MOA_BUNDLE", "")
CUTS = [float(seconds) for seconds in os.environ.get("MOA_CUTS", "5,30,120").split(",")]
MOST = float(os.environ.get("MOA_MOST", "900"))
"""Seconds that anything may take: a long prompt on a busy machine."""


class InThread:
    """Something that listens on this machine, in a thread with an event loop of its own."""

    def __init__(self, port: int) -> None:
        """`port` is where it passes on what comes."""
        self.target = port
        self.loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._up = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self.loop.run_until_complete, args=(self._run(),)).start()
        assert self._up.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._over.set)

    def listening(self) -> AbstractAsyncContextManager[object]:
        """A context in which it listens."""
        raise NotImplementedError

    async def _run(self) -> None:
        async with self.listening():
            self._up.set()
            await self._over.wait()


class Link(InThread):
    """An emulated link to an endpoint."""

    port = 0
    _link: LinkProxy

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        async with LinkProxy("127.0.0.1", self.target) as self._link:
            self.port = self._link.port
            yield

    def does(self, what: str) -> None:
        """`go_down`, `go_silent` or `restore`."""
        self.loop.call_soon_threadsafe(getattr(self._link, what))


class Program:
    """One of ours, as its user starts it."""

    def __init__(self, module: str, command: list[str], ready: str) -> None:
        """`ready` is in the line that it prints when it can be used."""
        self._module = module
        self._command = command
        self._ready = ready
        self._process: subprocess.Popen[str] | None = None
        self._up = threading.Event()
        self._reading: list[threading.Thread] = []

    def start(self) -> None:
        program = f"from {self._module} import main; main()"
        self._up.clear()
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *self._command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        reading = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        reading.start()
        self._reading.append(reading)

    def wait(self) -> None:
        assert self._up.wait(MOST)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
        for reading in self._reading:
            reading.join(60)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                print(f"  {self._module}: {line.rstrip()[:200]}", flush=True)
                if self._ready in line:
                    self._up.set()


@contextlib.contextmanager
def running(program: Program) -> Iterator[Program]:
    program.start()
    try:
        program.wait()
        yield program
    finally:
        program.end()


@contextlib.contextmanager
def target(*flags: str) -> Iterator[tuple[Program, Link]]:
    """The target's verifier, and the link to it."""
    with Port("127.0.0.1", 0) as free:
        port = free.number
    serve = ["serve", "--log-level", "warning", "--target", TARGET, "--port", str(port), *flags]
    with (
        running(Program("cloud_verifier.cli", serve, "listening on")) as verifier,
        Link(port) as link,
    ):
        yield verifier, link


def what_is(thing: str) -> str:
    """A question whose answer ends: asked for stories, a small coder says one sentence for ever."""
    return f"What is {thing}, and when is it used? Answer in three sentences."


class EverydayTurns(ABC):
    """The turns that an hour on the page and one in a terminal begin with."""

    @abstractmethod
    def turn(self, question: str, name: str, act: Callable[[], None] = lambda: None) -> None:
        """Ask, act while it is answered, and wait for the end."""

    @abstractmethod
    def cut(self, seconds: float, how: str, name: str) -> None:
        """Once the answer has begun, take the link away for so long."""

    def first(self) -> None:
        self.turn("Who are you, in one sentence?", "first")

    def code(self) -> None:
        question = "Write a Python function that reverses a string, with a comment in each line."
        self.turn(question, "cut", lambda: self.cut(CUTS[0], "go_down", "cut"))

    def silent(self) -> None:
        def act() -> None:
            self.cut(CUTS[1], "go_silent", "silent")

        self.turn(what_is("a hash table"), "silent", act)


def pasted() -> str:
    """About 4,000 tokens."""
    chosen = random.Random(4).choice
    ships = ["Vega", "Altair", "Deneb", "Rigel"]
    goods = ["apples", "lamps", "pens", "bricks"]
    ports = ["Oslo", "Riga", "Porto", "Genoa"]
    days = [
        f"Day {day}: the ship {chosen(ships)} carried {day * 7 % 90} crates of {chosen(goods)} "
        f"to {chosen(ports)}."
        for day in range(1, 186)
    ]
    return "\n".join(["Which ship sailed on day 17? Answer in one sentence.", *days])
