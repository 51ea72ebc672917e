"""The objects that all conversations of a client share: device, settings, measurements, connection,
budget."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge_client.device import Device
from edge_client.link.websocket import VerifierLink
from edge_client.settings import ClientSettings
from edge_client.turn.budget import Spending
from edge_client.turn.controller import Controller
from moa.wire.limits import Limits
from moa.wire.messages import Welcome

UPSTREAM_AWAY = "upstream_away:"
"""How a notice of a verifier in front of somebody else's engine begins, when that is away."""
_CHATS_ONLY = "chats_only:"
"""The same, where that engine continues no text that is no chat."""


@dataclass
class Shared:
    """The objects that all conversations of a client share."""

    device: Device
    settings: ClientSettings
    controller: Controller
    link: VerifierLink | None = None
    is_open: bool = True
    spending: Spending = field(default_factory=Spending)
    _told: list[str] = field(default_factory=list)

    @property
    def welcome(self) -> Welcome | None:
        """What the verifier has said of itself, once it was reached."""
        return self.link.welcome if self.link is not None else None

    @property
    def max_context(self) -> int:
        """Most tokens of prompt and answer together."""
        most = self.device.bundle.manifest.target.facts.max_positions
        return most if self.welcome is None else min(most, self.welcome.limits.max_context_tokens)

    @property
    def has_engine_behind(self) -> bool:
        """Whether what answers is known to be somebody else's engine: behind this device, or behind
        its verifier."""
        welcome = self.welcome
        return bool(self.settings.upstream or (welcome and "behind" in welcome.features))

    @property
    def takes_chats_alone(self) -> bool:
        """Whether the verifier has said that a text which is no chat would be this device's own."""
        notices = self.welcome.notices if self.welcome is not None else []
        return any(notice.startswith(_CHATS_ONLY) for notice in notices)

    @property
    def whose_context(self) -> str:
        """What to say where a prompt does not fit into the context, and that is not the one of the
        model that answers; empty where it is."""
        if self.settings.bundle or not self.has_engine_behind:
            return ""
        return (
            "these are the tokens and the context of the device's model, here the embedded toy, not"
            " the upstream's: --bundle with a model of your own has more room (docs/upstream.md)"
        )

    def longest_answer(self, asked: int) -> int:
        """Tokens of an answer at most, where so many are asked for, or 0: as many as there may be.
        Before the verifier has said what it allows, what verifiers usually do."""
        most = Limits.max_new_tokens
        if self.welcome is not None:
            most = max(1, self.welcome.limits.max_new_tokens)
        return min(asked or most, most)

    def news(self, in_trouble: bool) -> list[str]:
        """The notices in the verifier's welcome, once. That an upstream is away is told only where
        an answer waits for it (`in_trouble`), because one that refuses says why itself; and only by
        a verifier that sends no `Behind`, which the state of the link tells. That it takes chats only
        is told by its refusal of a text that is none."""
        welcome = self.welcome
        if welcome is None:
            return []
        news = []
        for notice in welcome.notices:
            tells_away = notice.startswith(UPSTREAM_AWAY)
            is_known = tells_away and ("behind" in welcome.features or not in_trouble)
            is_known = is_known or notice.startswith(_CHATS_ONLY)
            if not is_known and notice not in self._told:
                news.append(notice)
        self._told += news
        return news
