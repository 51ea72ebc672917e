"""A link that loses its connections by itself, at places that depend on what they carry and not on
the time."""

from __future__ import annotations

import asyncio
import random

from edge_client.tools.emulated_network import LinkProxy


class CuttingLink(LinkProxy):
    """Cuts each connection once, somewhere in what it carries; lets some of them live."""

    def __init__(self, port: int, seed: int, *, share: float = 0.75, longest: int = 2500) -> None:
        """`share` of the connections are cut, after `longest` bytes in a direction at most."""
        super().__init__("127.0.0.1", port)
        self._rng = random.Random(seed)
        self._share = share
        self._longest = longest
        self.cuts = 0
        """Times that there was something to cut."""

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._rng.random() < self._share:
            place = self._rng.randrange(100, self._longest)
            self.cut_after(place, self._rng.choice(["up", "down"]))
        await super()._accept(reader, writer)

    def cut(self) -> None:
        self.cuts += bool(self._live)
        super().cut()
