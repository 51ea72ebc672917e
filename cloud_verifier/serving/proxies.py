"""Who a client is that comes through a proxy, such as nginx: what the proxy says, if it is one of
ours. Anybody may send such a header.

The variable and its default are those of uvicorn, which serves OpenAI's API.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import cached_property
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

_VARIABLE = "FORWARDED_ALLOW_IPS"
_THIS_MACHINE = "127.0.0.1,::1"
_ANYBODY = "*"
_WITH_PORT = re.compile(r"(?:\[(?P<bracketed>[^\[\]]+)\]|(?P<plain>[^:]+)):(?P<port>[0-9]{1,5})")


class Proxies:
    """The proxies whose word on a client's address is taken."""

    def __init__(self, named: str | None = None) -> None:
        """`named` are addresses and networks with commas between them, or `*` for any; by default
        what the variable says, and without it this machine."""
        if named is None:
            named = os.environ.get(_VARIABLE, _THIS_MACHINE)
        self._named = [word for part in named.split(",") if (word := part.strip())]

    def client(self, peer: str, headers: Sequence[str]) -> str:
        """Returns the client's address, as far as it is known: the `peer` of the socket, or what it
        says in its X-Forwarded-For headers if it is one of these proxies. Of several addresses that
        is the last one that is none of them: those before it may be the client's own word. The port
        is 0 where the proxy has told none."""
        if not self._has(peer.rpartition(":")[0]):
            return peer
        client = peer
        words = [word for header in headers for part in header.split(",") if (word := part.strip())]
        for word in reversed(words):
            host, port = _host_and_port(word)
            if not _is_address(host):
                return peer
            client = f"{host}:{port}"
            if not self._has(host):
                return client
        return client

    def _has(self, host: str) -> bool:
        if _ANYBODY in self._named:
            return True
        try:
            address = ip_address(host)
        except ValueError:
            return host in self._named
        return any(address in network for network in self._networks)

    @cached_property
    def _networks(self) -> list[IPv4Network | IPv6Network]:
        """Those that are named by numbers."""
        found = []
        for word in self._named:
            try:
                found.append(ip_network(word, strict=False))
            except ValueError:
                continue  # a name, which is compared as it is
        return found


def _host_and_port(word: str) -> tuple[str, int]:
    """Returns a client's address, and its port where that is told as `192.0.2.7:4711` or
    `[2001:db8::7]:4711`, as uvicorn reads it, too; else 0."""
    found = _WITH_PORT.fullmatch(word)
    if found is None:
        return word, 0
    return found["bracketed"] or found["plain"], int(found["port"])


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
