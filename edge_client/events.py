"""The events of a generation, in order. Positions are indices into the whole token log, prompt included."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from moa.logprobs import TokenLogprobs

Status = Literal["verified", "provisional"]
LinkState = Literal["none", "connecting", "online", "late", "offline", "refused"]
"""none: offline on purpose. late: connected, but the answer is overdue. refused: the verifier refused the client."""
Reason = Literal["eos", "stop", "length", "context", "cancelled", "guard", "link"]
"""Why a turn ended. guard: too many offline tokens for good quality. link: lost, and the device could not continue."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=str.lower):
    """Base of all events; `msgspec.to_builtins(event)` is its JSON."""


class Prompt(Event, frozen=True, kw_only=True):
    """The turn's context is known: every id before the first output token."""

    ids: list[int]


class Token(Event, frozen=True, kw_only=True, omit_defaults=True):
    """One output token. `text` is what it adds; it may be empty while a character is incomplete. A verified token has
    the target's log-probabilities when they were asked for."""

    position: int
    id: int
    text: str
    status: Status
    logprobs: TokenLogprobs | None = None


class Confirm(Event, frozen=True, kw_only=True, omit_defaults=True):
    """Provisional tokens at start..stop (exclusive) are the target's own. `logprobs`: of each of them, or empty."""

    start: int
    stop: int
    logprobs: tuple[TokenLogprobs, ...] = ()


class Retract(Event, frozen=True, kw_only=True):
    """Provisional tokens at start..stop (exclusive) are withdrawn; `characters` of the turn's text remain."""

    start: int
    stop: int
    characters: int


class Adopt(Event, frozen=True, kw_only=True):
    """Provisional tokens at start..stop (exclusive) stay although the target would have continued differently."""

    start: int
    stop: int


class Link(Event, frozen=True, kw_only=True):
    """The state of the link changed."""

    state: LinkState
    detail: str = ""


class Notice(Event, frozen=True, kw_only=True):
    """A message for the user: quality, a degraded service."""

    message: str


class Done(Event, frozen=True, kw_only=True):
    """The turn is over. If not `verified`, some of its tokens were never verified."""

    reason: Reason
    verified: bool
    text: str
    stats: dict[str, Any]
