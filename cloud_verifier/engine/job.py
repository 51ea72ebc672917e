"""What both threads hold of a session: its claim on a slot, its activation records, the device's
guesses, and the round to run. No torch.

Only the event loop changes sessions and their histories; only the model's thread touches slots. A
`Lease` is a session's claim on a slot: the loop makes and revokes it, the thread fills it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moa.grammar.matcher import Matcher, TextMask
from moa.grammar.spec import Grammar
from moa.sampling import SamplingSettings
from moa.speculation.guess_tree import GuessTree, Picked
from moa.wire.finish import TurnRules
from moa.wire.messages import ChatMessage, Foresee, Stream
from moa.wire.ranges import Ranges

if TYPE_CHECKING:
    from torch import Tensor

    from moa.target.torch_target import Committed


_FLOAT16_MAX = 65504
"""The largest number that float16 has."""


def finite(rows: NDArray[Any]) -> NDArray[np.float16]:
    """Record rows as they are kept. NaN would break the edge's attention; a record is only a hint,
    so zero is fine."""
    numbers = np.nan_to_num(rows.astype(np.float32), nan=0.0)
    return np.clip(numbers, -_FLOAT16_MAX, _FLOAT16_MAX).astype(np.float16)


class RecordRows:
    """Activation records of one session, by position. The thread writes rows, then the loop learns
    of them."""

    def __init__(self, heads: int, head_dim: int) -> None:
        # Keys and values by position: (2, positions, heads, head_dim). It grows as it is written.
        self._rows: NDArray[np.float16] = np.zeros((2, 0, heads, head_dim), dtype=np.float16)

    def write(self, start: int, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Store keys and values, `(positions, heads, head_dim)`, for the positions from `start` on;
        they come from `finite`, so each of them is a number."""
        stop = start + len(keys)
        written = self._rows.shape[1]
        if stop > written:
            # Half as much again as is needed, so that a long text is copied only now and then.
            positions = max(64, stop + stop // 2)
            grown = np.zeros((2, positions, *self._rows.shape[2:]), dtype=np.float16)
            grown[:, :written] = self._rows
            self._rows = grown
        self._rows[0, start:stop] = keys
        self._rows[1, start:stop] = values

    def read(self, start: int, stop: int) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
        """Keys and values of positions start..stop, which must have been written."""
        return self._rows[0, start:stop], self._rows[1, start:stop]


@dataclass(eq=False, slots=True)
class Lease:
    """A session's claim on a slot, and what the model's thread keeps there."""

    session: bytes
    principal: str
    records: RecordRows | None = None
    """Where to put activation records; None if they are not wanted."""
    eager_records: bool = True
    """Whether records are made at the next idle moment. Those that the server's own drafter alone
    may want wait until it drafts for this session, or there are very many: made anyway they would
    cost a plain stream 5 %."""
    share: Lease | None = None
    """Another lease of the same principal with a common prefix, which can be shared instead of
    computed."""
    share_tokens: int = 0
    revoked: bool = False
    """Set by the loop: whatever is still queued for this lease is void."""

    slot: int | None = None
    length: int = 0
    """Tokens whose keys and values are in the slot."""
    pages_held: int = 0
    """Pages of the KV cache that the slot holds."""
    backlog: list[Committed] = field(default_factory=list)
    """Committed tokens whose records have not been made yet."""
    uncopied: int = 0
    """How many of them, the latest, are views of the states of their whole forward, and keep those
    in memory."""
    newest_stop: int = 0
    """The position behind the latest committed token, where records are made from states."""
    newest_states: Tensor | None = None
    """The states of that token."""
    made: Ranges = field(default_factory=Ranges)
    """Positions whose records have been made."""
    draft_slot: int | None = None
    """Slot of the server's own drafter."""

    @property
    def usable(self) -> bool:
        """Whether it has a slot, and is not void."""
        return self.slot is not None and not self.revoked

    @property
    def start(self) -> int:
        """Tokens that need not be run: those in the slot or, before there is one, those that it
        will share."""
        source = self.share
        if self.slot is not None or source is None or source.slot is None:
            return self.length
        return min(self.share_tokens, source.length)


_MOST_WAITING = 64
"""Most messages with guesses that may wait to be read; beyond, the oldest are dropped."""
_USEFUL = 32
"""Messages that count as work between two advances of a stream. More of them spend the connection's
budget."""


class Guesses:
    """The edge's guesses for one stream round: the event loop adds them, the model's thread takes
    them. Appending to a deque needs no lock."""

    def __init__(self, waits: bool, most: float = math.inf) -> None:
        self._asked_to_wait = waits
        """Whether the device has asked the stream to wait for guesses. The event loop writes it, the
        model's thread reads it."""
        self.most = most
        """How many guesses a forward may run now, by the rate of their principal. Written and read
        as the one above."""
        self._arrived: deque[Foresee] = deque(maxlen=_MOST_WAITING)
        self._tree = GuessTree()
        self._since_advance = 0

    @property
    def waits(self) -> bool:
        """Whether the stream waits where no guess fits. It does not wait for what may not be run."""
        return self._asked_to_wait and self.most >= 1

    @property
    def waiting(self) -> bool:
        """Whether there are guesses that the model's thread has not read."""
        return bool(self._arrived)

    @property
    def nodes(self) -> int:
        """How many guesses have come since they were last read. Not to be asked while the stream
        runs: then the other thread reads them."""
        return sum(len(message.tokens) - 1 for message in self._arrived)

    def add(self, message: Foresee) -> bool:
        """Add a message's guesses, tokens that the device expects; called by the event loop.
        Returns False if more messages come than a stream can use, which spends the connection's
        budget."""
        if message.waits is not None:
            # Before the guesses: whoever reads these must know already what to do without them.
            self._asked_to_wait = message.waits
        self._arrived.append(message)
        self._since_advance += 1
        return self._since_advance <= _USEFUL

    def advanced(self) -> None:
        """Note that the stream has brought tokens; called by the event loop."""
        self._since_advance = 0

    def pick(self, ids: Sequence[int], most: int, least: float, *, branches: bool) -> Picked:
        """Returns the likeliest of the device's guesses after these ids as a draft: at most `most`
        tokens, and no more than may be run, none less likely than `least`, in a chain unless
        `branches` are allowed. Called by the model's thread."""
        while self._arrived:
            new = self._arrived.popleft()
            self._tree.add(ids, new.base, new.tokens, new.parents, new.neg_log_probs)
        self._tree.follow(ids)
        return self._tree.pick(int(min(most, self.most)), least, branches=branches)


USUAL_COST = 8
"""Tokens of a forward of a stream that the server drafts, before the first."""
READING_SPEED = 10.0
"""Tokens a second that a person reads."""


@dataclass(eq=False, slots=True)
class Job:
    """A round to run once the slot holds all tokens before `request.base`."""

    lease: Lease
    request: Stream
    ids: list[int]
    """The session's log: a copy, which the model's thread writes on."""
    rules: TurnRules
    sampling: SamplingSettings
    guesses: Guesses
    """The device's guesses for this round."""
    enqueued: float
    """When its next forward was asked for: its request or its first guesses arrived, or the
    forward before ended."""
    deadline: float
    logprobs: int = -1
    """Likeliest tokens whose log-probabilities are wanted, with each chosen one's; -1 wants none."""
    messages: Sequence[ChatMessage] = ()
    """The conversation, where the device has told it."""
    grammar: Grammar | None = None
    """What the turn's answer must match, as the device has written it."""
    matcher: Matcher | None = None
    """Follows the answer's grammar; only the model's thread and its helper use it."""
    cancelled: bool = False
    cost: int = USUAL_COST
    """Tokens that its next forward runs, about, for fairness: as many as the latest one did."""
    needed: float = 0.0
    """When its reader has read what a stream has sent so far, by the clock; before that nobody
    waits. 0: at once."""

    @property
    def base(self) -> int:
        """Position of the pending token."""
        return len(self.ids) - 1

    @property
    def mask(self) -> TextMask | None:
        """What its grammar allows after the log; None without one."""
        if self.matcher is None:
            return None
        return self.matcher.after(self.ids)

    @property
    def takes_extra_work(self) -> bool:
        """Whether it takes more of the engine than its forward: a draft of ours, or masks."""
        drafts = self.request.speculate and not self.guesses.waits
        return self.matcher is not None or drafts

    @property
    def due(self) -> float:
        """When somebody begins to wait for it: the rounds of a principal go by this."""
        return max(self.enqueued, self.needed)

    def sent(self, tokens: int, now: float) -> None:
        """Note that the stream has sent so many more tokens, to somebody who reads them one after
        another: until these are read, nobody waits for the next ones."""
        self.needed = max(self.needed, now) + tokens / READING_SPEED
