"""Invalid frames: valid messages with changed bytes, messages with invalid fields, broken
websockets.

Everything is derived from a seed. The verifier runs with raised budgets, or it would close the
connection at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, get_args

import msgspec
from msgspec import inspect

from moa.wire import PROTOCOL_VERSIONS, encode
from moa.wire import messages as m
from tests.torture.raw import BINARY, PATIENCE, Raw, binary, frame, request

UNBOUNDED = (
    "--max-empty-frames-per-second",
    "1000000",
    "--max-bytes-per-second",
    "1000000000",
    "--max-refusals-per-second",
    "1000000",
    "--max-bad-messages",
    "1000000",
    "--max-log-lines-per-second",
    "1",
)
"""Flags of a verifier for fuzzing."""

_AT_A_TIME = 25
_FEATURES = ["append", "foresee", "records"]
_NUMBERS = [
    0,
    1,
    2,
    7,
    15,
    16,
    127,
    128,
    255,
    4095,
    4096,
    2**31 - 1,
    2**31,
    2**32,
    2**63 - 1,
    2**64 - 1,
    -1,
    -(2**63),
]
_FLOATS = [
    0.0,
    -0.0,
    1.0,
    5e-324,
    1e-308,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    0.5,
    100.0,
]
_STRINGS = [
    "",
    "a",
    "int8",
    "fp16",
    "\x1b[2J",
    "\x00",
    "\u202e",
    "é" * 50,
    "x" * 1025,
    "records",
    "stop",
]


class Fuzzer:
    """Makes what is sent, from a seed."""

    def __init__(
        self,
        seed: int,
        sessions: Sequence[bytes] = (),
        ids: Sequence[int] = (40,),
        kinds: Any = m.ClientMessage,
    ) -> None:
        self._rng = random.Random(seed)
        self._sessions = list(sessions) or [bytes(16)]
        self._ids = list(ids)
        self._kinds = {kind: inspect.type_info(kind) for kind in get_args(kinds)}
        self._likely: dict[str, int] = {}
        self.kinds: Counter[str] = Counter()
        """What was made, by kind."""

    def about(self, session: bytes, **likely: int) -> None:
        """Speak of this session from now on, and name these numbers half of the time."""
        self._sessions = [session]
        self._likely = likely

    def frame(self) -> bytes:
        """The next websocket frame. What it holds may be anything."""
        name = self._rng.choices(["fields", "bytes", "sequence"], weights=[40, 30, 30])[0]
        self.kinds[name] += 1
        if name == "fields":
            return frame(BINARY, self.message())
        valid = encode(self._valid())  # in an order that makes no sense
        return frame(BINARY, self.mutated(valid) if name == "bytes" else valid)

    def broken(self) -> bytes:
        """What mostly is no websocket frame: the other end may hang up."""
        self.kinds["websocket"] += 1
        rng = self._rng
        valid = encode(self._valid())
        made: Callable[[], bytes] = rng.choice(
            [
                lambda: frame(
                    rng.randrange(16), rng.randbytes(rng.randrange(130)), final=rng.random() < 0.5
                ),
                lambda: self.mutated(frame(BINARY, valid)),
                lambda: (
                    bytes([0x80 | rng.randrange(128), rng.randrange(128)]) + rng.randbytes(10)
                ),  # not masked
                lambda: frame(8, rng.randbytes(rng.randrange(10))),
                lambda: b"\x82\xff" + rng.randbytes(8) + bytes(4),  # a length of up to 2^64
                lambda: (
                    frame(BINARY, valid, final=False) + frame(0, b"", final=False) * 3 + frame(0)
                ),
                lambda: rng.randbytes(rng.randrange(1, 200)),
            ]
        )
        return made()

    def message(self) -> bytes:
        """A message whose fields are of the right kind now and then."""
        rng = self._rng
        kind, info = rng.choice(list(self._kinds.items()))
        fields: list[Any] = [
            kind.__struct_config__.tag,
            *(self._value(f.type, f.name) for f in info.fields),
        ]
        if rng.random() < 0.1:
            fields = fields[: rng.randrange(len(fields) + 1)]
        elif rng.random() < 0.05:
            fields.append(self._junk())
        return msgspec.msgpack.encode(fields)

    def mutated(self, data: bytes) -> bytes:
        """The same with some bytes changed, cut out, doubled or put in."""
        rng = self._rng
        out = bytearray(data)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(out) + 1)
            match rng.randrange(4):
                case 0 if out:
                    out[at % len(out)] = rng.randrange(256)
                case 1:
                    del out[at : at + rng.randrange(1, 8)]
                case 2:
                    out[at:at] = out[at : at + rng.randrange(1, 16)]
                case _:
                    out[at:at] = rng.randbytes(rng.randrange(1, 4))
        return bytes(out)

    # ---- valid messages

    def _valid(self) -> m.Message:
        rng = self._rng
        session = self._rng.choice(self._sessions)
        base = rng.choice([*[len(self._ids) - 1] * 4, 0, 5])
        round = rng.choice([0, 1, 1, 1, 1, 1, 2, 3])
        parents = [-1, *(rng.randrange(n) for n in range(1, rng.randrange(2, 12)))]
        tokens = [self._ids[-1], *(rng.randrange(200) for _ in parents[1:])]
        made: Callable[[], m.Message] = rng.choice(
            [
                lambda: m.Open(session, self._ids, rng.choice([1, 8, 64])),
                lambda: m.Open(
                    self._fresh(), self._ids, sampling=self._sampling(), ignore_eos=True
                ),
                lambda: m.Stream(session, round, base, rng.random() < 0.5, rng.random() < 0.3),
                *[
                    lambda: m.Foresee(
                        session, round, base, tokens, parents, [rng.randrange(256) for _ in parents]
                    )
                ]
                * 3,
                lambda: m.Cancel(session, round),
                lambda: m.Resume(session, rng.randrange(40), rng.randbytes(16), round),
                lambda: m.Sync(
                    session, rng.choice(["off", "int8", "int4", "fp16"]), held=[(0, 9), (7, 3)]
                ),
                lambda: m.Append(session, rng.randrange(40), [40, 41]),
                lambda: rng.choice(
                    [m.Close(session), m.Hello(list(PROTOCOL_VERSIONS), ["foresee"])]
                ),
            ]
        )
        return made()

    def _fresh(self) -> bytes:
        """A new session in the place of one that may be closed or far on."""
        self._sessions[self._rng.randrange(len(self._sessions))] = fresh = self._rng.randbytes(16)
        return fresh

    def _sampling(self) -> m.Sampling:
        if self._rng.random() < 0.5:
            return m.Sampling(self._rng.choice([0.0, 0.7]), seed=self._rng.getrandbits(62))
        numbers = [self._rng.choice([0.0, 0.5, 1.0, *_FLOATS]) for _ in range(4)]
        return m.Sampling(
            numbers[0], self._rng.choice([0, 1, 5]), *numbers[1:], self._rng.getrandbits(62)
        )

    # ---- values

    def _value(self, kind: Any, name: str = "") -> Any:
        rng = self._rng
        if rng.random() < 0.03:
            return self._junk()
        match kind:
            case inspect.BytesType() if name == "session":
                return rng.choice(self._sessions)
            case inspect.BytesType():
                return rng.randbytes(rng.choice([16, 16, 0, 15, 17]))
            case inspect.IntType() if name in self._likely and rng.random() < 0.5:
                return self._likely[name]
            case inspect.IntType():
                return rng.choice(_NUMBERS) if rng.random() < 0.4 else rng.randrange(64)
            case inspect.FloatType():
                return rng.choice(_FLOATS)
            case inspect.BoolType():
                return rng.random() < 0.5
            case inspect.StrType():
                return rng.choice(_STRINGS)
            case inspect.LiteralType():
                return rng.choice([*kind.values, "other"])
            case inspect.ListType():
                size = (
                    rng.choice([0, 1, 2, 3, 8, 40])
                    if rng.random() < 0.97
                    else rng.choice([300, 5000])
                )
                return (
                    [self._value(kind.item_type) for _ in range(min(size, 8))] * max(1, size // 8)
                    if size
                    else []
                )
            case inspect.TupleType():
                return [self._value(item) for item in kind.item_types]
            case inspect.UnionType():
                return self._value(rng.choice(kind.types), name)
            case inspect.StructType():
                return [self._value(field.type, field.name) for field in kind.fields]
            case _:
                return self._junk()

    def _junk(self) -> Any:
        rng = self._rng
        deep: Any = []
        for _ in range(rng.randrange(40)):
            deep = [deep]
        return rng.choice(
            [None, True, -1, 2**63, 1.5, "x", b"y", [], {}, {"a": 1}, deep, rng.randbytes(3)]
        )


async def fuzz(
    port: int,
    token: str,
    frames: int,
    seed: int,
    *,
    a_connection: int = 250,
    lanes: int = 1,
    until: float = math.inf,
) -> Counter[str]:
    """Send this many on each lane; how many were looked at, of which kind, and how many connections
    it took.

    A frame counts when a request behind it was answered: what is sent into a connection that has
    ended proves nothing. A verifier with limits ends most of them, so `until` ends a lane that gets
    nowhere.
    """
    seeds = random.Random(seed)
    parts = (
        _lane(port, token, frames, seeds.getrandbits(60), a_connection, until) for _ in range(lanes)
    )
    return sum(await asyncio.gather(*parts), Counter[str]())


async def _lane(
    port: int, token: str, frames: int, seed: int, a_connection: int, until: float
) -> Counter[str]:
    rng = random.Random(seed)
    counts = Counter[str]()
    while (
        counts["frames"] + counts["handshakes"] + counts["endings"] < frames
        and time.monotonic() < until
    ):
        sessions = [rng.randbytes(16) for _ in range(2)]
        ids = [rng.randrange(40, 90) for _ in range(12)]
        fuzzer = Fuzzer(rng.getrandbits(60), sessions, ids)
        counts["connections"] += 1
        with contextlib.suppress(
            ConnectionError, OSError, TimeoutError, asyncio.IncompleteReadError
        ):
            raw = await Raw.connect(port)
            try:
                if rng.random() < 0.03:
                    counts["handshakes"] += 1
                    await raw.pour(fuzzer.mutated(request(token)))
                    await asyncio.wait_for(raw.reader.read(1000), 0.2)
                    continue
                await raw.shake(token)
                if rng.random() < 0.03:
                    counts["handshakes"] += 1
                    await raw.pour(fuzzer.frame())  # where a hello should be
                    await raw.listen()
                    continue
                raw.write(
                    binary(
                        m.Hello(
                            list(PROTOCOL_VERSIONS),
                            sorted(rng.sample(_FEATURES, len(_FEATURES) - 1)),
                        )
                    )
                )
                for session in sessions:
                    raw.write(
                        binary(m.Open(session=session, ids=ids, max_new_tokens=16, ignore_eos=True))
                    )
                for _ in range(0, a_connection, _AT_A_TIME):
                    marker = rng.randbytes(16)
                    pieces = [fuzzer.frame() for _ in range(_AT_A_TIME)]
                    raw.write(
                        b"".join(
                            [
                                *pieces,
                                binary(m.Resume(session=marker, length=1, chain=marker, round=0)),
                            ]
                        )
                    )
                    async with asyncio.timeout(PATIENCE):
                        while marker not in (await raw.receive())[1]:
                            pass
                    counts["frames"] += _AT_A_TIME
                if rng.random() < 0.9:
                    counts["endings"] += 1
                    await raw.pour(fuzzer.broken())
                raw.writer.close()
                await asyncio.wait_for(raw.listen(), 1.0)
            finally:
                counts.update(fuzzer.kinds)
                raw.abort()
    return counts


def seed_from_clock() -> int:
    """A random seed; it is printed, so that the run can be repeated."""
    return int.from_bytes(os.urandom(4), "big")
