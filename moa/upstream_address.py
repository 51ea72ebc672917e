"""The address of somebody else's engine, as users give it: read alike by the device, which refuses a
wrong one before anything is started, and by the process that asks there."""

from __future__ import annotations

from urllib.parse import urlsplit

from moa.errors import UsageError
from moa.safe_text import safe_line

_OF_ROUTES = ("/chat/completions", "/completions", "/responses", "/messages", "/models")
"""What stands behind an upstream's address in those of its routes."""


def upstream_address(url: str) -> str:
    """Returns an upstream's address as requests need it, from what a user gave: with a scheme,
    without a slash at the end, below /v1 by default. A `UsageError` for what is no address, or
    carries a key."""
    no_address = UsageError(
        f"{safe_line(url)!r} is no address of an upstream", hint="such as http://gpu:8000/v1"
    )
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
    except ValueError:  # of an IPv6 address, one of the brackets
        raise no_address from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise no_address
    try:
        is_a_port = parts.port != 0
    except ValueError:  # beyond 65535, or no number
        is_a_port = False
    if not is_a_port:
        raise UsageError(
            f"{safe_line(url)!r} has no port that can be: it is a number from 1 to 65535"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        raise UsageError(
            "an upstream's address has no user, query or fragment",
            hint="give the key in MOA_UPSTREAM_KEY or with --upstream-key-file",
        )
    path = parts.path.rstrip("/") or "/v1"
    route = next((one for one in _OF_ROUTES if path.endswith(one)), "")
    if route:
        meant = f"{parts.scheme}://{parts.netloc}{path.removesuffix(route)}"
        raise UsageError(
            f"{safe_line(url)} is the address of one route of an upstream",
            hint=f"did you mean {safe_line(meant)}?",
        )
    return f"{parts.scheme}://{parts.netloc}{path}"
