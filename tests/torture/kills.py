"""Kills a verifier again and again and cuts its clients' connections; every text must be the
target's own."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from edge_client.tools.emulated_network import LinkProxy
from moa.errors import MoaError
from moa.wire.messages import Stream
from testing.client import PATIENCE
from testing.devices import Script, ScriptedDevice, scripts
from tests.torture.server import Mortal

_TOKENS = 48
_HALF_OPEN = 3
_PAUSE = 0.05
"""Longest time between two kills, in seconds: a few rounds of every client."""
_LEFT_ALONE_AFTER = PATIENCE / 4
"""Seconds for which a device was told nothing, after which nobody is killed or cut until it is. On
a busy machine a verifier would else live too short to tell it anything, and the pace of the machine
would decide whether the device gives up."""


@dataclass
class Toll:
    """The counts of a run, and whether it was right."""

    counts: Counter[str] = field(default_factory=Counter)
    """Kills; cuts, after each of which a client made another connection; answers; sessions that
    were opened again."""
    wrong: list[str] = field(default_factory=list)


@dataclass
class Asker(ScriptedDevice):
    """A device whose drafts or guesses are waited for, or for which the server drafts: from stream
    to stream, and from message to message, another way. It compares what it is told with the
    target's own text, each time."""

    rng: random.Random = field(default_factory=random.Random)

    def _stream(self) -> Stream:
        self.way = self.rng.choice(["device", "ahead", "server"])
        return super()._stream()

    def _guesses(self) -> list[int]:
        self.way = self.rng.choice(["device", "ahead"])
        return super()._guesses()


class Link(LinkProxy):
    """A link of one client, with more ways to lose a connection."""

    def __init__(self, port: int, rng: random.Random) -> None:
        super().__init__("127.0.0.1", port)
        self._rng = rng
        self._gone: list[asyncio.StreamWriter] = []
        """Connections that the verifier still takes for alive."""

    async def __aexit__(self, *how: object) -> None:
        await super().__aexit__(*how)
        for writer in self._gone:
            writer.transport.abort()

    def lose(self) -> bool:
        """Reset the connection, reset it in the middle of a frame, or at the client's end alone.
        Whether there was one to lose."""
        if not self._live or min(self._cut_at.values()) < math.inf:
            return False
        match self._rng.randrange(3):
            case 0:
                self.cut()
            case 1:
                self.cut_after(self._rng.randrange(1, 20), self._rng.choice(("up", "down")))
            case _:
                self._leave()
        return True

    def _leave(self) -> None:
        for connection, ends in self._live.items():
            self._gone += ends[1:]
            del ends[1:]
            connection.cancel()
        if len(self._gone) > _HALF_OPEN:
            oldest = self._gone.pop(0)  # named: a writer that nobody holds warns that it is open
            oldest.transport.abort()


async def answer(
    link: LinkProxy,
    script: Script,
    toll: Toll,
    rng: random.Random,
    token: str = "",
    asking: dict[LinkProxy, ScriptedDevice] | None = None,
) -> None:
    """One answer, through as many connections as it takes. `asking` has the device of each link."""
    device = Asker(link.url, script, records="int8", token=token, rng=rng)
    if asking is not None:
        asking[link] = device
    try:
        await device.run()
    except MoaError as error:
        toll.wrong.append(f"after {len(device.tokens)} tokens: {error}")
    else:
        toll.wrong += [] if device.exact else [f"at the end: {device.tokens}, not {script.truth}"]
    toll.counts["answers"] += 1
    toll.counts["reopened"] += device.reopened


def starved(devices: Iterable[ScriptedDevice]) -> bool:
    """Whether one of them waits so long that it is left alone until it is told something."""
    return any(device.lost_for > _LEFT_ALONE_AFTER for device in devices)


async def calm(url: str, count: int, token: str = "") -> list[Script]:
    """What is answered when nobody is killed, and drafts of which half of the tokens are right."""
    return await scripts(url, count, length=16, tokens=_TOKENS, rate=0.5, nodes=5, token=token)


async def run(place: Mortal, *, kills: int, cuts: int, clients: int = 4, seed: int = 0) -> Toll:
    """Answers by several clients, until there were so many kills and cuts."""
    toll = Toll()
    rng = random.Random(seed)
    ended = asyncio.Event()
    counts = toll.counts
    asking: dict[LinkProxy, ScriptedDevice] = {}

    async def ask(link: Link, script: Script) -> None:
        while not ended.is_set():
            await answer(link, script, toll, rng, asking=asking)

    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        links = []
        for script in await calm(place.url, clients):
            links.append(await stack.enter_async_context(Link(place.port, rng)))
            group.create_task(ask(links[-1], script))
        while counts["kills"] < kills or counts["cuts"] < cuts:
            await asyncio.sleep(rng.uniform(0.0, _PAUSE))
            if starved(asking.values()):
                continue
            if counts["cuts"] < cuts:
                counts["cuts"] += rng.choice(links).lose()
            if counts["kills"] < kills and (
                counts["cuts"] >= cuts or rng.random() < kills / max(1, cuts)
            ):
                place.kill()
                await place.start()
                counts["kills"] += 1
        ended.set()
    return toll
