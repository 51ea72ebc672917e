"""Plain HTTP to the process at the link's address: what it counts, and whether text would be
verified there now."""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus
from urllib.parse import urlsplit

from websockets.proxy import get_proxy
from websockets.uri import parse_uri

from edge_client.link.websocket import Endpoint, VerifierLink
from moa.api.access import is_loopback
from moa.safe_text import safe_line
from moa.wire.versions import SESSION_HEADER

_READY_SECONDS = 2.0
"""For so long a health check waits: more than the verifier itself does for the engine behind it."""
_LONGEST_REASON = 200
"""Characters of a verifier's reason: what stands before it may answer with a page."""
_MOST_BYTES = 2**20


async def plain_get(
    endpoint: Endpoint, path: str, seconds: float, key: str = ""
) -> tuple[int, bytes]:
    """Returns status and body of the answer to a GET; status 0 where none came in time. `key`
    leads load balancers to the verifier of this client's sessions."""
    address = urlsplit(endpoint.url)
    port = address.port or (443 if address.scheme == "wss" else 80)
    asked = f"GET {path} HTTP/1.1\r\nHost: {address.netloc}\r\n"
    if key:
        asked += f"{SESSION_HEADER}: {key}\r\n"
    answer = b""
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(address.hostname, port, ssl=endpoint.tls)
            with contextlib.closing(writer):
                writer.write(f"{asked}Connection: close\r\n\r\n".encode())
                while len(answer) < _MOST_BYTES and (part := await reader.read(2**16)):
                    answer += part  # it closes the connection after its answer
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"chunked" in head.lower():
        body = b""  # a proxy's: our own process never answers so
    words = head.split(maxsplit=2)
    if len(words) < 2 or not words[1].isdigit():
        return 0, b""
    return int(words[1]), body


async def why_unready(link: VerifierLink) -> str:
    """Returns why no text would be verified now, where an engine stands behind the verifier: that
    looks at it first if it was not heard lately. Empty where it answers, or where the verifier's
    address does not tell."""
    if link.welcome is None or "behind" not in link.welcome.features:
        return ""
    url = link.endpoint.url
    address = urlsplit(url)
    if address.path.strip("/"):
        return ""  # a proxy stands before it, which has routes of its own
    if not is_loopback(address.hostname or "") and get_proxy(parse_uri(url)) is not None:
        return ""  # the link goes over a proxy of this network: a direct way may be closed
    status, body = await plain_get(link.endpoint, "/health/ready", _READY_SECONDS, link.key)
    if status != HTTPStatus.SERVICE_UNAVAILABLE:
        return link.away
    line = body.decode(errors="replace").strip().partition("\n")[0]
    return link.away or safe_line(line)[:_LONGEST_REASON] or "the verifier is not ready"
