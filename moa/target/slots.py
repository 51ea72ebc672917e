"""Which slots of a target or a drafter are taken, and how many tokens each holds. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from moa.errors import CapacityError, FullError, UsageError


class Slots:
    """Which slots are taken, and how many tokens each holds."""

    slots: int
    capacity: int
    """Most tokens of a slot."""
    lengths: list[int]
    """Committed tokens of each slot."""

    def __init__(self, slots: int, capacity: int) -> None:
        """Begin with all slots free; a slot is the place of one sequence of up to `capacity`
        tokens."""
        if slots < 1 or capacity < 1:
            raise UsageError(
                f"a KV cache needs at least one slot of one token, not {slots} of {capacity}"
            )
        self.slots = slots
        self.capacity = capacity
        self.lengths = [0] * slots
        self._free = list(range(slots - 1, -1, -1))  # taken from the end: the first slot first
        self._taken = [False] * slots

    @property
    def free(self) -> int:
        """Slots that `acquire` can still give."""
        return len(self._free)

    def acquire(self) -> int:
        """Take an empty slot."""
        if not self._free:
            raise FullError(f"all {self.slots} slots are in use")
        slot = self._free.pop()
        self._taken[slot] = True
        return slot

    def check_taken(self, slot: int) -> None:
        """Raise unless `slot` was acquired and not released."""
        if not 0 <= slot < self.slots or not self._taken[slot]:
            raise UsageError(f"slot {slot} is not in use")

    def check_room(self, slots: Sequence[int], sizes: Sequence[int]) -> None:
        """Raise unless each of `slots` is taken, and has room for as many more tokens as `sizes`
        says: a `CapacityError` names the first that has not."""
        for slot, size in zip(slots, sizes, strict=True):
            self.check_taken(slot)
            if self.lengths[slot] + size > self.capacity:
                raise CapacityError(
                    f"slot {slot} holds {self.lengths[slot]} tokens and cannot take {size} more: "
                    f"its capacity is {self.capacity}"
                )

    def check_shareable(self, source: int, tokens: int) -> None:
        """A `UsageError` unless another slot can begin with the first `tokens` of `source`: one at
        least, and no more than it holds."""
        if not 0 < tokens <= self.lengths[source]:
            raise UsageError(
                f"slot {source} holds {self.lengths[source]} tokens and cannot share {tokens}"
            )

    def _give_back(self, slot: int) -> None:
        """Make a slot that `acquire` took free again, and empty."""
        self.lengths[slot] = 0
        self._taken[slot] = False
        self._free.append(slot)
