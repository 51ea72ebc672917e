"""A TCP proxy on loopback that behaves like a worse link: delay, jitter, rate, loss-like stalls,
outages and cuts.

TCP turns loss into a delay, so that is emulated: with the profile's probability, a packet and all
after it are delayed by two round trips (a tail-loss probe). A new connection costs a round trip
before its first byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

Direction = Literal["up", "down"]
_PACKET_BYTES = 1448
"""Payload of a TCP packet in an Ethernet frame."""
_READ_BYTES = 16 * 1024
_OUTAGE_POLL_SECONDS = 0.02
_QUEUE_BYTES = 64 * 1024
"""Bytes that may queue in the link in one direction; more blocks the sender, like a full router
buffer."""
_BYTES_PER_MEGABIT = 125_000


@dataclass(frozen=True, slots=True)
class Condition:
    """A link's properties at one time. Rates are megabits a second (0 is unlimited), loss is a
    share of packets."""

    rtt_ms: float = 0.0
    down_mbps: float = 0.0
    up_mbps: float = 0.0
    loss: float = 0.0
    jitter: float = 0.1
    """Spread of the one-way delay, as a share of it."""
    out: bool = False
    """No bytes pass in either direction, and neither end gets an error."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Conditions with their durations in seconds, repeated. A duration of 0 is unlimited."""

    phases: tuple[tuple[float, Condition], ...]

    def at(self, seconds: float) -> Condition:
        """Returns the link's condition so many seconds after the start; the phases repeat."""
        total = sum(duration for duration, _ in self.phases)
        if total > 0:
            seconds %= total
        for duration, condition in self.phases:
            if duration == 0 or seconds < duration:
                return condition
            seconds -= duration
        return self.phases[-1][1]


_4G = Condition(rtt_ms=60, down_mbps=20, up_mbps=8, loss=0.005)

PROFILES = {
    "loopback": Profile(((0.0, Condition()),)),
    "wifi": Profile(((0.0, Condition(rtt_ms=10, down_mbps=100, up_mbps=50, loss=0.002)),)),
    "5g": Profile(((0.0, Condition(rtt_ms=20, down_mbps=100, up_mbps=20, loss=0.001)),)),
    "4g": Profile(((0.0, _4G),)),
    "4g-weak": Profile(((0.0, Condition(rtt_ms=150, down_mbps=2, up_mbps=1, loss=0.02)),)),
    "bursty": Profile(((8.0, Condition(40, 30, 15)), (2.0, Condition(250, 5, 2)))),
    "outage": Profile(((10.0, _4G), (5.0, replace(_4G, out=True)))),
}
"""This project's own choices, made from published measurements of such links; not figures of the
paper."""


class _Chunk(NamedTuple):
    """Bytes that are under way in one direction of a connection."""

    due: float
    """When they arrive, by the loop's clock."""
    data: bytes
    """Empty where the sender has ended."""


class _UnderWay:
    """The chunks that are under way in one direction of a connection, in order."""

    def __init__(self) -> None:
        self._chunks: asyncio.Queue[_Chunk] = asyncio.Queue()
        self._bytes = 0
        """Bytes that have not arrived."""
        self._room = asyncio.Event()
        """Set whenever bytes have arrived."""

    async def add(self, chunk: _Chunk) -> None:
        """Add a chunk, and wait while more bytes are under way than the link takes."""
        self._chunks.put_nowait(chunk)
        self._bytes += len(chunk.data)
        while self._bytes > _QUEUE_BYTES:
            self._room.clear()
            await self._room.wait()

    async def next(self) -> _Chunk:
        """Returns the next chunk as soon as there is one; its bytes are still under way."""
        return await self._chunks.get()

    def arrived(self, chunk: _Chunk) -> None:
        """Note that this chunk has arrived: others may be added in its place."""
        self._bytes -= len(chunk.data)
        self._room.set()


class LinkProxy:
    """`async with LinkProxy(host, port, profile) as link:` then connect to `link.port`."""

    def __init__(
        self, host: str, port: int, profile: Profile | None = None, *, seed: int = 0
    ) -> None:
        """Make a proxy to this server, with the link that `profile` describes; none is a link
        without delay."""
        self.host = host
        self.target_port = port
        self.profile = profile or PROFILES["loopback"]
        self.passed: dict[Direction, int] = {"up": 0, "down": 0}
        """Bytes delivered so far."""
        self.connections = 0
        """Connections accepted so far."""
        self._random = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._live: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        """The task of each connection, and the sockets that it resets at its end."""
        self._refusing = False
        """Whether new connections are refused."""
        self._silent = False
        """Whether all bytes are dropped."""
        self._cut_at: dict[Direction, float] = {"up": math.inf, "down": math.inf}
        """The value of `passed` at which all connections are reset."""
        self._started = 0.0
        """The loop's time at which the profile began."""

    # ---- life

    async def __aenter__(self) -> Self:
        self._started = asyncio.get_running_loop().time()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.go_down()
        await asyncio.gather(*self._live, return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports close their sockets in the loop's next turn

    @property
    def port(self) -> int:
        """The address to connect to."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def url(self) -> str:
        """The same as a websocket address."""
        return f"ws://127.0.0.1:{self.port}"

    # ---- faults

    def cut(self) -> None:
        """Reset every connection now; new ones are still accepted."""
        for connection in self._live:
            connection.cancel()

    def cut_after(self, count: int, direction: Direction) -> None:
        """Reset every connection once `count` more bytes have passed in this direction."""
        self._cut_at[direction] = self.passed[direction] + count

    def go_down(self) -> None:
        """Reset every connection and refuse new ones until `restore`."""
        self._refusing = True
        self.cut()

    def go_silent(self) -> None:
        """Drop all bytes from now on without an error, as when a phone is in a lift."""
        self._silent = True

    def restore(self) -> None:
        """End `go_down` and `go_silent`. Swallowed bytes stay lost, so connections that were
        silenced are reset."""
        if self._silent:
            self.cut()
        self._refusing = False
        self._silent = False

    def use(self, profile: Profile) -> None:
        """Change the link's profile, from now on."""
        self.profile = profile
        self._started = asyncio.get_running_loop().time()

    # ---- forwarding

    def _condition(self) -> Condition:
        """The link's condition now."""
        return self.profile.at(asyncio.get_running_loop().time() - self._started)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Connect a new client to the server behind the proxy, and carry bytes both ways until
        either end or the link ends that: then both sockets are reset."""
        if self._refusing:
            writer.transport.abort()
            return
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        ends = self._live[task] = [writer]
        try:
            await asyncio.sleep(self._condition().rtt_ms / 1000)  # TCP's own handshake
            far_reader, far_writer = await asyncio.open_connection(self.host, self.target_port)
            ends.append(far_writer)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(reader, far_writer, "up"))
                both.create_task(self._carry(far_reader, writer, "down"))
        except* (OSError, asyncio.CancelledError):  # an end was reset, or the link cut
            pass
        finally:
            del self._live[task]
            for end in ends:
                end.transport.abort()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        """Carry one direction of a connection until its sender ends: read chunks, delay each as the
        emulated link would, and deliver them in order."""
        under_way = _UnderWay()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read(reader, under_way, direction))
            while (chunk := await under_way.next()).data:
                await self._until(chunk.due)
                under_way.arrived(chunk)
                await self._deliver(writer, chunk.data, direction)
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()

    async def _read(
        self, reader: asyncio.StreamReader, under_way: _UnderWay, direction: Direction
    ) -> None:
        """Read chunks from their sender until it ends, and send each on its way with the time at
        which it arrives. An empty chunk says that there are no more."""
        now = asyncio.get_running_loop().time
        sent_at = 0.0  # when the link has sent all bytes so far, at its rate
        due = 0.0  # when the last of them arrives
        with contextlib.suppress(OSError):  # a reset is an end, too
            while data := await reader.read(_READ_BYTES):
                condition = self._condition()
                sending = self._sending_seconds(condition, len(data), direction)
                sent_at = max(sent_at, now()) + sending
                # Jitter must not make a chunk overtake the one before it.
                due = max(due, sent_at + self._delay(condition, len(data)))
                await under_way.add(_Chunk(due, data))
        await under_way.add(_Chunk(due, b""))

    @staticmethod
    def _sending_seconds(condition: Condition, size: int, direction: Direction) -> float:
        """How long the link takes to send `size` bytes at its rate."""
        megabits = condition.up_mbps if direction == "up" else condition.down_mbps
        if megabits == 0:  # unlimited
            return 0.0
        return size / (megabits * _BYTES_PER_MEGABIT)

    def _delay(self, condition: Condition, size: int) -> float:
        """Draw for how many seconds a chunk of `size` bytes is under way: half the round trip, with
        jitter, and with a retransmission if one of its packets is lost."""
        one_way = condition.rtt_ms / 2000
        delay = one_way * (1 + condition.jitter * self._random.random())
        packets = math.ceil(size / _PACKET_BYTES)
        any_lost = 1 - (1 - condition.loss) ** packets
        if condition.loss and self._random.random() < any_lost:
            delay += 4 * one_way  # two round trips until the sender's probe repairs it
        return delay

    async def _until(self, due: float) -> None:
        """Wait for the time of delivery, and then for the end of an outage."""
        remaining = due - asyncio.get_running_loop().time()
        if remaining > 0:
            await asyncio.sleep(remaining)
        while self._condition().out:
            await asyncio.sleep(_OUTAGE_POLL_SECONDS)

    async def _deliver(
        self, writer: asyncio.StreamWriter, data: bytes, direction: Direction
    ) -> None:
        """Write a chunk to its receiver. If the link is to be cut within it (`cut_after`), only the
        bytes before that are written, and all connections are reset."""
        if self._silent:
            return
        bytes_before_cut = self._cut_at[direction] - self.passed[direction]
        if len(data) < bytes_before_cut:  # always so where no cut is planned: that is infinite
            await self._write(writer, data, direction)
            return
        self._cut_at[direction] = math.inf  # one cut, not one of each connection
        await self._write(writer, data[: int(bytes_before_cut)], direction)
        # What was written must reach the socket before the reset: that comes in the loop's next
        # turn, and cancels this task while it waits.
        asyncio.get_running_loop().call_soon(self.cut)
        await asyncio.Event().wait()

    async def _write(self, writer: asyncio.StreamWriter, data: bytes, direction: Direction) -> None:
        """Write these bytes to their receiver, and count them."""
        writer.write(data)
        self.passed[direction] += len(data)
        await writer.drain()
