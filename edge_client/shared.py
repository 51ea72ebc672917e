"""The objects that all conversations of a client share: device, settings, measurements, connection, budget."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge_client.device import Device
from edge_client.link.websocket import VerifierLink
from edge_client.settings import ClientSettings
from edge_client.turn.budget import Budget, Spending
from edge_client.turn.controller import Controller


@dataclass
class Shared:
    """The objects that all conversations of a client share."""

    device: Device
    settings: ClientSettings
    controller: Controller
    link: VerifierLink | None = None
    is_open: bool = True
    _spending: Spending = field(default_factory=lambda: Spending(Budget()))
    _told: list[str] = field(default_factory=list)

    @property
    def spending(self) -> Spending:
        """The rest of the budget."""
        self._spending.budget = self.settings.budget
        return self._spending

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together."""
        most = self.device.bundle.manifest.target.facts.max_positions
        if self.link is not None and self.link.welcome is not None:
            most = min(most, self.link.welcome.limits.max_context_tokens)
        return most

    def news(self) -> list[str]:
        """The notices in the verifier's welcome, once."""
        welcome = self.link.welcome if self.link is not None else None
        news = [notice for notice in welcome.notices if notice not in self._told] if welcome is not None else []
        self._told += news
        return news
