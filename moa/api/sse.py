"""Server-sent events: how one frame is written."""

from __future__ import annotations

from typing import Any

import msgspec

CONTENT_TYPE = "text/event-stream"
DONE = "[DONE]"
NOTHING = b": continued\n\n"
"""A comment in the place of an end that was not the last."""
KEEPALIVE = b": still here\n\n"
"""A comment: clients skip it, and it keeps the connection alive through proxies."""


def frame(data: Any, *, id: str = "", event: str = "") -> bytes:
    """One event: JSON, or a text that is sent as it is."""
    text = data.encode() if isinstance(data, str) else msgspec.json.encode(data)  # neither contains line breaks
    head = (f"id: {id}\n" if id else "") + (f"event: {event}\n" if event else "")
    return head.encode() + b"data: " + text + b"\n\n"
