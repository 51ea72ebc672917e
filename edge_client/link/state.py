"""What the link is now, in one word, and why: for people, whether or not anything is asked."""

from __future__ import annotations

from dataclasses import dataclass

from edge_client.events import LinkState
from edge_client.link.dialling import is_refusal
from edge_client.link.websocket import VerifierLink
from moa.safe_text import safe_line

_GONE_SECONDS = 1.0
"""A link that is back so soon was no news."""
_CONNECTING = "connecting"


def state_of(link: VerifierLink, now: float) -> tuple[LinkState, str]:
    """Returns the state of the link, and why it is so; that is empty where all is well, and where
    nothing is known but that nothing comes."""
    dialling = link.dialling
    if dialling.cut:
        return "offline", "disconnected on purpose"
    if not link.up:
        why = dialling.refused or dialling.last_error
        if why is None:
            return "offline", _CONNECTING
        # Also while it is asked once more whether it still does.
        return "refused" if is_refusal(why) else "offline", why.line()
    if link.behind.away:
        return "offline", safe_line(link.behind.away)
    if link.unanswered:
        return "late", safe_line(link.unanswered)
    if now < link.limited_until:
        return "limited", link.limited
    if link.is_silent(now):
        return "late", ""  # as an answer that waits for the verifier calls it
    return "online", ""


@dataclass
class LinkWatch:
    """Tells of a link that is lost or back while nothing is asked. Pure."""

    link: VerifierLink
    who_verifies: str
    trouble: str = ""
    """What the user was last told of a link that is down; empty once it was up."""
    _away_since: float | None = None

    def look(self, now: float) -> str:
        """Returns the line for the user where the link is another than they know; empty else."""
        state, why = state_of(self.link, now)
        if state in ("online", "limited"):
            self._away_since = None
            if not self.trouble:
                return ""
            self.trouble = ""
            return "online"
        is_refused = state == "refused" and why != self.trouble
        if (self.trouble and not is_refused) or why == _CONNECTING:
            return ""  # it is known, or nothing is yet
        if is_refused:  # it does not come back by itself
            self.trouble = why
            return f"{state}: {why}; this device answers alone until somebody changes that"
        if self._away_since is None:
            self._away_since = now
        if now - self._away_since < _GONE_SECONDS:
            return ""
        self.trouble = why or f"no word from {self.who_verifies}"
        return f"{state}: {self.trouble}; this device answers alone until it is back"
