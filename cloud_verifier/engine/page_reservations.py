"""Reservations of KV cache: the pages reserved for leases, against the free ones. No torch.

The event loop reserves, the model's thread allocates: a page is reserved before it is needed, so that a forward finds
it free. The thread may change its figures while they are read here; they are read in an order that can only
overestimate use.
"""

from __future__ import annotations

from collections.abc import Callable

from cloud_verifier.engine.work import Lease


class PageReservations:
    """The pages that each lease may use."""

    def __init__(self, page_tokens: int, free_pages: Callable[[], int]) -> None:
        """`free_pages` returns the pages that no lease holds now."""
        self._page, self._free_pages = page_tokens, free_pages
        self._leases: dict[Lease, int] = {}
        self._leaving: list[Lease] = []

    def reserve(self, lease: Lease, tokens: int) -> int:
        """Reserve pages for so many tokens of the lease, never fewer than before; returns the earlier reservation."""
        before = self._leases.get(lease, 0)
        self._leases[lease] = max(before, -(-tokens // self._page))
        return before

    def undo(self, lease: Lease, before: int) -> None:
        """Undo the last reservation."""
        self._leases[lease] = before

    def release(self, lease: Lease) -> None:
        """The lease is void; its pages are free after the model's thread has released them."""
        if self._leases.pop(lease, None) is not None:
            self._leaving.append(lease)

    @property
    def missing(self) -> int:
        """Pages reserved beyond the existing ones; 0 if all reservations fit."""
        reserved = sum(max(0, pages - lease.held) for lease, pages in self._leases.items())
        free = self._free_pages()
        self._leaving = [lease for lease in self._leaving if lease.held]
        return max(0, reserved - free - sum(lease.held for lease in self._leaving))
