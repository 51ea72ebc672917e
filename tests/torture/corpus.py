"""What has once done harm to a verifier, as messages. What a message can carry goes here when
found.

Those that need a flood are in `tests/verifier/test_floods.py`; what harmed a device is in
`fake_verifier.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.msgpack import encode as pack

from moa.wire import encode
from moa.wire import messages as m

HUGE = 2**31 - 1
_NAN = float("nan")
_INFINITY = float("inf")


def _sampled(**fields: float) -> Callable[[bytes, list[int]], m.Message]:
    return lambda session, ids: m.Open(bytes(15) + b"\1", ids, sampling=m.Sampling(**fields))  # type: ignore[arg-type]


def _guesses(session: bytes, ids: list[int], tokens: list[int], parents: list[int]) -> m.Foresee:
    """Of a stream that may not run."""
    tree = [ids[-1], *tokens]
    return m.Foresee(session, 1, len(ids) - 1, tree, parents, [0] * len(tree))


TO_A_VERIFIER: dict[str, Callable[[bytes, list[int]], m.Message | bytes]] = {
    "a temperature of 1e-308 with top_p": _sampled(temperature=1e-308, top_p=0.9),
    "the smallest temperature there is": _sampled(temperature=5e-324),
    "a temperature that is no number": _sampled(temperature=_NAN),
    "an infinite temperature": _sampled(temperature=_INFINITY),
    "a top_p that is no number": _sampled(temperature=0.5, top_p=_NAN),
    "an infinite penalty": _sampled(repetition_penalty=_INFINITY),
    "a min_p below nothing": _sampled(temperature=0.5, min_p=-1.0),
    "a token beyond the vocabulary": lambda s, ids: _guesses(s, ids, [HUGE], [-1, 0]),
    "guesses of nothing": lambda s, ids: pack(["foresee", s, 1, len(ids) - 1, [], [], []]),
    "a parent that comes later": lambda s, ids: _guesses(s, ids, [4, 5], [-1, 2, 0]),
    "a parent that is itself": lambda s, ids: _guesses(s, ids, [4], [-1, 1]),
    "two roots": lambda s, ids: _guesses(s, ids, [4], [-1, -1]),
    "fewer parents than tokens": lambda s, ids: _guesses(s, ids, [4, 5], [-1, 0]),
    "a round that is far ahead": lambda s, ids: m.Stream(s, HUGE, len(ids) - 1),
    "a base beyond the log": lambda s, ids: m.Stream(s, 1, HUGE),
    "4,096 guesses": lambda s, ids: _guesses(s, ids, [4] * 4095, [*range(-1, 4095)]),
    "guesses without a stream": lambda s, ids: m.Foresee(
        s, 1, len(ids) - 1, [ids[-1], 4], [-1, 0], [0, 0]
    ),
    "guesses that are their own parents": lambda s, ids: m.Foresee(
        s, 1, len(ids) - 1, [ids[-1], 4], [1, 0], [0, 0]
    ),
    "held rows in reverse": lambda s, ids: m.Sync(s, held=[(9, 3), (2, 2), (0, HUGE)]),
    "4,096 held rows with holes": lambda s, ids: m.Sync(
        s, held=[(2 * n, 2 * n + 1) for n in range(4096)]
    ),
    "an append into the middle": lambda s, ids: m.Append(s, 1, [4, 5]),
    "an append of nothing": lambda s, ids: m.Append(s, len(ids), []),
    "a resume of another's log": lambda s, ids: m.Resume(bytes(16), HUGE, bytes(16), HUGE),
    "a stream of an unknown session": lambda s, ids: m.Stream(bytes(16), 1, 0),
    "a cancel of an unknown session": lambda s, ids: m.Cancel(bytes(16), 1),
    "an acknowledgement of what was never sent": lambda s, ids: m.Ack(2**62),
    "an opening of nothing": lambda s, ids: pack(["open", bytes(16), []]),
    "an opening with more output than log": lambda s, ids: m.Open(bytes(16), ids, generated=HUGE),
    "stop strings of nothing": lambda s, ids: m.Open(bytes(16), ids, stop=["", "\x00", "\u202e"]),
    "a session name of 15 bytes": lambda s, ids: pack(["close", bytes(15)]),
    "a number of 64 bits": lambda s, ids: pack(["stream", s, 2**64 - 1, 2**63]),
    "a message inside a message": lambda s, ids: b"\x91" * 10_000,
    "half a message": lambda s, ids: encode(m.Stream(s, 1, len(ids) - 1))[:9],
    "an empty frame": lambda s, ids: b"",
    "a byte that is nothing": lambda s, ids: b"\xc1",
    "a map": lambda s, ids: pack({"open": s}),
    "text that is none": lambda s, ids: b"\x92\xa5close\xa2\xff\xfe",
}
"""What is sent to a verifier, of a session with a log of these ids."""
