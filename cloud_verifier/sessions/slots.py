"""Slots and pages: fair shares of slots between principals, and reservations of KV cache. Pure: no
clock, no I/O, no torch.

A principal's share is the number of slots divided by the principals that hold or want one. It may
hold more if nobody else wants them. When slots run out, the least recently used one is evicted:
first of detached sessions, then of live ones that have paused. If none is unused, a principal below
its share takes one from a principal above its own: a session of that one loses its slot between two
rounds. A claim keeps the slot free until the claimant asks again.

Who is refused gets an appointment: however many wait, they ask again one after another, no more of
them in a pause than their principal's share of the slots. So refusals cost the same at twice the
capacity and at a hundred times.

The event loop reserves pages, the model's thread allocates them: a page is reserved before it is
needed, so that a forward finds it free. The thread may change its figures while they are read here;
they are read in an order that can only overestimate use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from cloud_verifier.engine.job import Lease
from cloud_verifier.sessions.session import ServerSession

_LONGEST_PAUSES = 20
"""An appointment is at most so many pauses away: by then slots may have become free faster than
expected."""


class SlotShares:
    """How many slots each principal holds, and who waits for one."""

    def __init__(
        self, total: int, idle_seconds: float, claim_seconds: float, pause_seconds: float
    ) -> None:
        """Share `total` slots. A live session may lose its slot when it has paused for
        `idle_seconds`; a claim on the next free slot holds for `claim_seconds`; who is refused asks
        again after `pause_seconds`."""
        self._total = total
        self._idle = idle_seconds
        self._claim_seconds = claim_seconds
        self._pause = pause_seconds
        self._held: Counter[str] = Counter()
        """Slots of each principal."""
        self._appointments: dict[str, float] = {}
        """When each principal's latest appointment is."""
        self._claims: dict[str, float] = {}
        """Until when a slot is kept free for a principal, the oldest claim first."""

    @property
    def free(self) -> int:
        """Slots that no principal holds."""
        return self._total - self._held.total()

    def take(self, principal: str) -> None:
        """Count a slot that this principal takes; its claim is settled."""
        self._held[principal] += 1
        self._claims.pop(principal, None)

    def give_back(self, principal: str) -> None:
        """Count a slot that this principal gives back."""
        self._held[principal] -= 1
        if not self._held[principal]:
            del self._held[principal]

    def may_take(self, principal: str, now: float) -> bool:
        """Whether a slot is free that is not reserved for an earlier claim."""
        earlier_claims = 0
        for name in self._waiting(now):
            if name == principal:
                break
            earlier_claims += 1
        return self.free > earlier_claims

    def victim(
        self, wanting: ServerSession, holders: Iterable[ServerSession], now: float
    ) -> ServerSession | None:
        """Returns the session that must give its slot, the place of its KV cache, to `wanting`;
        None if none must. A principal that holds less than its share has a claim on the next free
        slot from now on."""
        principal = wanting.principal
        below_share = self._held[principal] < self._share(principal)
        if below_share:
            self._claims[principal] = now + self._claim_seconds
        at_rest = [
            session
            for session in holders
            if session.lease is not None and session.at_rest and session is not wanting
        ]
        unused = self._least_used(at_rest, now)
        if unused is not None:
            return unused
        if not below_share:
            return None
        of_greedy = [session for session in at_rest if self._greedy(session.principal)]
        return min(of_greedy, key=lambda session: session.used, default=None)

    def _least_used(self, at_rest: Iterable[ServerSession], now: float) -> ServerSession | None:
        """Returns the session that needs its slot least, of those that nobody uses now: a detached
        one first, then one of a principal above its share, then the oldest. A live session that has
        paused counts too: its next round then costs a prefill. But one that is between two rounds
        must not lose its slot, or two sessions would evict each other in turn."""
        unused = [
            session
            for session in at_rest
            if session.outbox is None or now - session.used >= self._idle
        ]
        return min(
            unused,
            key=lambda session: (
                session.outbox is not None,
                not self._greedy(session.principal),
                session.used,
            ),
            default=None,
        )

    def appointment(self, principal: str, now: float) -> float:
        """Returns after how many seconds a refused session of this principal may ask again, so that
        they ask one after another. One with a claim may ask after a single pause, because its slot
        is kept free only for a few."""
        if principal in self._waiting(now):
            return self._pause
        self._appointments = {name: at for name, at in self._appointments.items() if at > now}
        latest = self._appointments.get(principal, now)
        # As many of them in a pause as the principal's share has slots.
        at = max(now + self._pause, latest + self._pause / self._share(principal))
        at = min(at, now + _LONGEST_PAUSES * self._pause)
        self._appointments[principal] = at
        return at - now

    def must_yield(self, principal: str, now: float) -> bool:
        """Whether a session of this principal must give its slot to a waiting principal."""
        others = [name for name in self._waiting(now) if name != principal]
        return len(others) > self.free and self._greedy(principal)

    def _greedy(self, principal: str) -> bool:
        """Whether a principal holds more than its share."""
        return self._held[principal] > self._share(principal)

    def _share(self, principal: str) -> int:
        """The slots that a principal may hold when all are wanted."""
        principals = {principal, *self._held, *self._claims}
        return max(1, self._total // len(principals))

    def _waiting(self, now: float) -> Iterable[str]:
        """The principals whose claims have not expired, the oldest claim first."""
        self._claims = {name: until for name, until in self._claims.items() if until > now}
        return self._claims


class PageReservations:
    """The pages that each lease may use."""

    def __init__(self, page_tokens: int, free_pages: Callable[[], int]) -> None:
        """`free_pages` returns the pages that no lease holds now."""
        self._page = page_tokens
        self._free_pages = free_pages
        self._leases: dict[Lease, int] = {}
        """Pages that are reserved for each lease, those that it holds included."""
        self._leaving: list[Lease] = []
        """Void leases whose pages the model's thread has not released yet."""

    def reserve(self, lease: Lease, tokens: int) -> int:
        """Reserve pages for so many tokens of the lease, never fewer than before; returns the
        earlier reservation."""
        before = self._leases.get(lease, 0)
        pages = -(-tokens // self._page)  # rounded up
        self._leases[lease] = max(before, pages)
        return before

    def undo(self, lease: Lease, before: int) -> None:
        """Undo the last reservation."""
        self._leases[lease] = before

    def release(self, lease: Lease) -> None:
        """Reserve nothing more for a lease, which is void; its pages are free after the model's
        thread has released them."""
        if self._leases.pop(lease, None) is not None:
            self._leaving.append(lease)

    @property
    def missing(self) -> int:
        """Pages of KV cache that are reserved beyond those there are; 0 if all reservations fit."""
        # In this order: the model's thread may change each figure meanwhile.
        to_come = sum(max(0, pages - lease.pages_held) for lease, pages in self._leases.items())
        free = self._free_pages()
        self._leaving = [lease for lease in self._leaving if lease.pages_held]
        soon_free = sum(lease.pages_held for lease in self._leaving)
        return max(0, to_come - free - soon_free)
