"""What has once done harm, as messages: to a verifier, and to a device. What a message can carry goes here when found.

Those that need a flood are in `tests/verifier/test_floods.py`; ways of answering are in `fake_verifier.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from moa.wire import encode
from moa.wire.messages import (
    Ack,
    Activations,
    Append,
    Cancel,
    Error,
    Foresee,
    Message,
    Open,
    Opened,
    Resume,
    Resumed,
    Sampling,
    ServerMessage,
    Stream,
    StreamTokens,
    Sync,
    Verdict,
    Verify,
)

HUGE = 2**31 - 1
_NAN, _INFINITY = float("nan"), float("inf")


def _packed(*fields: Any) -> bytes:
    return msgspec.msgpack.encode(list(fields))


def _sampled(**fields: float) -> Callable[[bytes, list[int]], bytes]:
    return lambda session, ids: encode(Open(bytes(15) + b"\1", ids, sampling=Sampling(**fields)))  # type: ignore[arg-type]


def _message(make: Callable[[bytes, list[int]], Message]) -> Callable[[bytes, list[int]], bytes]:
    return lambda session, ids: encode(make(session, ids))


TO_A_VERIFIER: dict[str, Callable[[bytes, list[int]], bytes]] = {
    "a temperature of 1e-308 with top_p": _sampled(temperature=1e-308, top_p=0.9),
    "the smallest temperature there is": _sampled(temperature=5e-324),
    "a temperature that is no number": _sampled(temperature=_NAN),
    "an infinite temperature": _sampled(temperature=_INFINITY),
    "a top_p that is no number": _sampled(temperature=0.5, top_p=_NAN),
    "an infinite penalty": _sampled(repetition_penalty=_INFINITY),
    "a min_p below nothing": _sampled(temperature=0.5, min_p=-1.0),
    "a token beyond the vocabulary": _message(lambda s, ids: Verify(s, 1, len(ids) - 1, [ids[-1], HUGE])),
    "a draft of nothing": lambda s, ids: _packed("verify", s, 1, len(ids) - 1, [], []),
    "a parent that comes later": _message(lambda s, ids: Verify(s, 1, len(ids) - 1, [ids[-1], 4, 5], [-1, 2, 0])),
    "a parent that is itself": _message(lambda s, ids: Verify(s, 1, len(ids) - 1, [ids[-1], 4], [-1, 1])),
    "two roots": _message(lambda s, ids: Verify(s, 1, len(ids) - 1, [ids[-1], 4], [-1, -1])),
    "fewer parents than tokens": _message(lambda s, ids: Verify(s, 1, len(ids) - 1, [ids[-1], 4, 5], [-1, 0])),
    "a round that is far ahead": _message(lambda s, ids: Verify(s, HUGE, len(ids) - 1, [ids[-1]])),
    "a base beyond the log": _message(lambda s, ids: Verify(s, 1, HUGE, [ids[-1]])),
    "a draft of 4,096 tokens": _message(lambda s, ids: Verify(s, 1, len(ids) - 1, [ids[-1]] * 4096)),
    "guesses without a stream": _message(lambda s, ids: Foresee(s, 1, len(ids) - 1, [ids[-1], 4], [-1, 0], [0, 0])),
    "guesses that are their own parents": _message(
        lambda s, ids: Foresee(s, 1, len(ids) - 1, [ids[-1], 4], [1, 0], [0, 0])
    ),
    "held rows in reverse": _message(lambda s, ids: Sync(s, held=[(9, 3), (2, 2), (0, HUGE)])),
    "4,096 held rows with holes": _message(lambda s, ids: Sync(s, held=[(2 * n, 2 * n + 1) for n in range(4096)])),
    "an append into the middle": _message(lambda s, ids: Append(s, 1, [4, 5])),
    "an append of nothing": _message(lambda s, ids: Append(s, len(ids), [])),
    "a resume of another's log": _message(lambda s, ids: Resume(bytes(16), HUGE, bytes(16), HUGE)),
    "a stream of an unknown session": _message(lambda s, ids: Stream(bytes(16), 1, 0)),
    "a cancel of an unknown session": _message(lambda s, ids: Cancel(bytes(16), 1)),
    "an acknowledgement of what was never sent": _message(lambda s, ids: Ack(2**62)),
    "an opening of nothing": lambda s, ids: _packed("open", bytes(16), []),
    "an opening with more output than log": _message(lambda s, ids: Open(bytes(16), ids, generated=HUGE)),
    "stop strings of nothing": _message(lambda s, ids: Open(bytes(16), ids, stop=["", "\x00", "\u202e"])),
    "a session name of 15 bytes": lambda s, ids: _packed("close", bytes(15)),
    "a number of 64 bits": lambda s, ids: _packed("verify", s, 2**64 - 1, 2**63, [2**64 - 1], []),
    "a message inside a message": lambda s, ids: b"\x91" * 10_000,
    "half a message": lambda s, ids: encode(Verify(s, 1, len(ids) - 1, [ids[-1]]))[:9],
    "an empty frame": lambda s, ids: b"",
    "a byte that is nothing": lambda s, ids: b"\xc1",
    "a map": lambda s, ids: msgspec.msgpack.encode({"open": s}),
    "text that is none": lambda s, ids: b"\x92\xa5close\xa2\xff\xfe",
}
"""What is sent to a verifier, of a session with a log of these ids."""


def _verdict(**fields: Any) -> Callable[[bytes, int, int], ServerMessage]:
    return lambda session, round, base: msgspec.structs.replace(Verdict(session, round, base, [0], 40), **fields)


def _rows(**fields: Any) -> Callable[[bytes, int, int], ServerMessage]:
    honest = Activations(b"", 0, 0, 1, "int8", 2, 32, bytes(136))
    return lambda session, round, base: msgspec.structs.replace(honest, session=session, **fields)


TO_A_DEVICE: dict[str, Callable[[bytes, int, int], ServerMessage]] = {
    "a forward that took no time": _verdict(forward_ms=0.0),
    "a forward that took for ever": _verdict(forward_ms=_INFINITY),
    "a forward of 1e300 ms": _verdict(forward_ms=1e300),
    "a forward before it was asked for": _verdict(forward_ms=-1.0),
    "a time that is no number": _verdict(queue_ms=_NAN),
    "a token beyond the vocabulary": _verdict(next_token=HUGE),
    "a path of a million": _verdict(path=[0] * 1_000_000),
    "a path through nowhere": _verdict(path=[0, 4000]),
    "a path of nothing": _verdict(path=[]),
    "another base": _verdict(base=HUGE),
    "log-probabilities of nobody": _verdict(logprobs=b"\xff" * 999),
    "100,000 tokens at once": lambda s, round, base: StreamTokens(s, round, base, [40] * 100_000),
    "a stream of nothing": lambda s, round, base: StreamTokens(s, round, base, []),
    "rows at 2^31": _rows(start=HUGE),
    "2^31 rows": _rows(rows=HUGE),
    "rows of other heads": _rows(heads=HUGE, head_dim=HUGE),
    "rows that are no numbers": _rows(dtype="fp16", payload=b"\xff" * 256),
    "rows of another time": _rows(epoch=HUGE),
    "a log that is longer than ours": lambda s, round, base: Opened(s, HUGE),
    "a tail that nobody asked for": lambda s, round, base: Resumed(s, "resumed", HUGE, HUGE, [1] * 9),
    "an error in escapes": lambda s, round, base: Error(
        "\x1b[2J", "\x1b]0;owned\x07\u202e", s, round, HUGE, "\x1b[31m"
    ),
}
"""What is sent to a device, of the session, round and base that it has asked about."""
