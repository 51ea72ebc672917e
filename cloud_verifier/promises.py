"""Who may take how much key/value memory: the pages promised to leases, against those that are free. No torch.

The event loop promises, the model's thread takes: a page is promised before it is needed, so a forward finds it free.
The thread may change its figures while they are read here; the order of reading makes that err towards caution.
"""

from __future__ import annotations

from collections.abc import Callable

from cloud_verifier.work import Lease


class PagePromises:
    """The pages that each lease may come to hold."""

    def __init__(self, page_tokens: int, free_pages: Callable[[], int]) -> None:
        """`free_pages` says how many pages no lease holds now."""
        self._page, self._free_pages = page_tokens, free_pages
        self._leases: dict[Lease, int] = {}
        self._leaving: list[Lease] = []

    def promise(self, lease: Lease, tokens: int) -> int:
        """Promise the lease pages for so many tokens, or what it has been promised before; returns that."""
        before = self._leases.get(lease, 0)
        self._leases[lease] = max(before, -(-tokens // self._page))
        return before

    def take_back(self, lease: Lease, before: int) -> None:
        """The last promise cannot be kept: the one before it holds."""
        self._leases[lease] = before

    def release(self, lease: Lease) -> None:
        """The lease is void; its pages come back once the model's thread has let go of them."""
        if self._leases.pop(lease, None) is not None:
            self._leaving.append(lease)

    @property
    def missing(self) -> int:
        """Pages promised beyond those there are; 0 when all promises can be kept."""
        promised = sum(max(0, pages - lease.held) for lease, pages in self._leases.items())
        free = self._free_pages()
        self._leaving = [lease for lease in self._leaving if lease.held]
        return max(0, promised - free - sum(lease.held for lease in self._leaving))
