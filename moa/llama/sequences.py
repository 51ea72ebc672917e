"""The KV cache of a target in llama.cpp: each sequence there has cells of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from moa.errors import FullError
from moa.llama.runtime import Runtime
from moa.target.slots import Slots


class Checkpoint(NamedTuple):
    """A recurrent state, and how many tokens it stands for."""

    length: int
    state: bytes


@dataclass
class _Content:
    """What is in a slot."""

    tokens: list[int] = field(default_factory=list)
    """The committed ones."""
    sequence: int = -1
    """llama.cpp's number for it; -1 before its first forward."""
    held: int = 0
    """Tokens in llama.cpp's memory: committed ones, and a draft behind them."""
    checkpoint: Checkpoint | None = None


class Sequences(Slots):
    """Slots, and the sequences of llama.cpp behind those that hold tokens. All of a sequence's cells
    are its own from the start, so that a page is a whole sequence. Memory of sequences is taken in
    blocks when they are needed, and given back."""

    page_tokens: int
    pages: int

    def __init__(self, runtime: Runtime, *, slots: int, capacity: int) -> None:
        """Begin with `slots` empty slots of up to `capacity` tokens. As many of them can hold
        tokens at once as llama.cpp has sequences."""
        super().__init__(slots, capacity)
        self.page_tokens = capacity
        self.pages = runtime.shape.sequences
        self.versions = [0] * slots
        """Counts the changes of a slot, so that a result of an older forward cannot be committed."""
        self._runtime = runtime
        self._contents = [_Content() for _ in range(slots)]
        self._unused = list(range(self.pages - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        """Sequences that no slot holds."""
        return len(self._unused)

    @property
    def pages_held(self) -> list[int]:
        """Of each slot: one, from its first forward on."""
        return [int(content.sequence >= 0) for content in self._contents]

    def share(self, source: int, tokens: int) -> int:
        """Take an empty slot, and let it begin with the first `tokens` of the slot `source`.
        llama.cpp copies all that it holds of the source; what is behind the shared tokens is taken
        back at the next forward."""
        self.check_taken(source)
        self.check_shareable(source, tokens)
        slot = self.acquire()
        try:
            self.begin([slot])
        except FullError:
            self.release(slot)
            raise
        content = self._contents[source]
        copy = self._contents[slot]
        copied = self._runtime.copy(content.sequence, copy.sequence)
        copy.tokens = content.tokens[:tokens]
        copy.held = content.held if copied else 0  # what is not held is run again
        self.lengths[slot] = tokens
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back, and forget its tokens."""
        self.check_taken(slot)
        sequence = self._contents[slot].sequence
        if sequence >= 0:
            self._runtime.clear(sequence)
            # The lowest is given first: llama.cpp runs sequences at once whose numbers follow each
            # other.
            self._unused = sorted([*self._unused, sequence], reverse=True)
        self._contents[slot] = _Content()
        if sequence >= 0:
            others = (content.sequence for content in self._contents)
            self._runtime.give_back([other for other in others if other >= 0])
        self.versions[slot] += 1
        self._give_back(slot)

    # ---- what a forward does

    def begin(self, slots: Sequence[int]) -> list[int]:
        """Give each of these slots a sequence of llama.cpp, the memory of one text, if it has none;
        or raise a `FullError` where there are too few. Returns the slots' new versions, which count
        their changes: a forward can be committed only while they are the same."""
        without = [slot for slot in slots if self._contents[slot].sequence < 0]
        if len(without) > len(self._unused):
            raise FullError(
                f"the target's key/value memory is full: {len(without)} more sequences of "
                f"{self.capacity} tokens are needed, {len(self._unused)} of {self.pages} are free"
            )
        for slot in without:
            # First: where the machine has no memory left, the sequence stays unused.
            self._runtime.reserve(self._unused[-1])
            self._contents[slot].sequence = self._unused.pop()
        for slot in slots:
            self.versions[slot] += 1
        return [self.versions[slot] for slot in slots]

    def sequence(self, slot: int) -> int:
        """llama.cpp's number for a slot that has begun."""
        return self._contents[slot].sequence

    def held(self, slot: int) -> int:
        """How many of a slot's tokens llama.cpp's memory holds, a draft's among them."""
        return self._contents[slot].held

    def rewind(self, slot: int) -> list[int]:
        """Have llama.cpp forget what it holds of a slot beyond its committed tokens: a rejected
        draft. Returns the committed tokens that it had to forget with it, and that must be run
        again: a recurrent state can only go back to where it was kept."""
        content = self._contents[slot]
        length = self.lengths[slot]
        if content.held > length:
            content.held = self._cut_to(content, length)
        return content.tokens[content.held : length]

    def _cut_to(self, content: _Content, length: int) -> int:
        """Have llama.cpp forget a slot's tokens from position `length` on. Returns how many it
        holds then: `length`; or fewer for a model with a recurrent state, which cannot be cut, but
        can only go back to a copy that was kept, or to nothing."""
        runtime = self._runtime
        if runtime.cut(content.sequence, length):
            return length
        checkpoint = content.checkpoint
        if checkpoint is not None and checkpoint.length <= length:
            restored = runtime.restore(content.sequence, checkpoint.state)
            if restored and runtime.cut(content.sequence, checkpoint.length):
                return checkpoint.length
        runtime.clear(content.sequence)
        content.checkpoint = None
        return 0

    def keep_state(self, slot: int) -> None:
        """Keep a copy of a slot's recurrent state as it is now, before a draft, so that `rewind`
        can go back to it."""
        content = self._contents[slot]
        if content.held == 0:
            return  # before the first token there is no state
        kept = content.checkpoint
        if kept is None or kept.length != content.held:
            state = self._runtime.save(content.sequence)
            content.checkpoint = Checkpoint(content.held, state)

    def ran(self, slot: int, end: int) -> None:
        """Note that llama.cpp holds a slot's tokens up to position `end` now."""
        self._contents[slot].held = end

    def commit(self, slot: int, tokens: list[int]) -> None:
        """Append tokens, which the latest forward ran, to a slot."""
        self._contents[slot].tokens += tokens
        self.lengths[slot] += len(tokens)
        self.versions[slot] += 1
