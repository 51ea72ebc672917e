"""What has once done harm to a verifier, as messages. What a message can carry goes here when found.

Those that need a flood are in `tests/verifier/test_floods.py`; what harmed a device is in `fake_verifier.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from moa.wire import encode
from moa.wire.messages import (
    Ack,
    Append,
    Cancel,
    Foresee,
    Message,
    Open,
    Resume,
    Sampling,
    Stream,
    Sync,
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
