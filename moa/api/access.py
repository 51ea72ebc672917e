"""Who may use the endpoint: API keys, and checks against requests from other websites. No I/O.

A page of another website can make a browser send requests here. It cannot fake two headers:
`Origin`, and `Host`, which names the website when its DNS name was re-bound to this address. So a
foreign `Origin` is refused, and a `Host` must be an address, `localhost`, or a name that was
allowed.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from urllib.parse import SplitResult, urlsplit

from moa.api.errors import ApiError
from moa.errors import ConfigError

Principals = Callable[[Sequence[str]], str | None]
"""From the Authorization headers to the caller's name; None refuses the request."""
Watching = Callable[[Sequence[str], Callable[[], None]], AbstractContextManager[None]]
"""From the Authorization headers to a context that calls a function if their key is revoked while
it runs."""
ANONYMOUS = "anonymous"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
"""A name of DNS, as a browser sends it: one in other letters in its form of ASCII, `xn--`."""


class ApiKeys:
    """The accepted keys, as hashes. Without any key, all callers are one anonymous principal."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __call__(self, authorization: Sequence[str]) -> str | None:
        """The caller's name, a hash of the key that its Authorization headers bring; None for a
        caller without a valid key, which is to be refused. Only one such header may be sent."""
        if not self._digests:
            return ANONYMOUS
        header = authorization[0] if len(authorization) == 1 else ""
        scheme, _, key = header.partition(" ")
        presented = _digest(key.strip())
        # Compare with every key in constant time, so that timing does not reveal which key matches.
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        if not any(matches) or scheme.lower() != "bearer":
            return None
        return presented.hex()[:16]


class Hosts:
    """The names under which a port is served. Another one is of a website whose DNS name was
    re-bound to this address, so that the pages of the website may read the answer."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names` besides addresses and `localhost`."""
        self._names = {"localhost", *(name.lower() for name in names)}

    def serve(self, host: str) -> bool:
        """Whether a request's `Host` may be answered."""
        if not _is_plain(host):
            return False
        name = _split(f"//{host}").hostname
        return name is not None and (name in self._names or is_address(name))


class Access:
    """The checks that every request passes before it costs anything."""

    def __init__(
        self,
        principals: Principals,
        *,
        host: str = "127.0.0.1",
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
        watching: Watching = lambda authorization, end: nullcontext(),
        refused: Callable[[Sequence[str], str], None] = lambda authorization, peer: None,
        names_flag: str = "--allowed-host",
    ) -> None:
        """`principals` tells a caller's name from its key, and `watching` whether the key is revoked
        later: without it none is. `refused` is told the Authorization headers and the address of a
        caller without a valid key. The endpoint is served at `host` and under the names `hosts`,
        which the program is given by `names_flag`; `origins` are the websites whose pages may use
        it."""
        self._principals = principals
        self.watching = watching
        self._refused = refused
        self._hosts = Hosts((host, *hosts))
        self._names_flag = names_flag
        self._origins = {origin.lower().rstrip("/") for origin in origins}

    def check_source(self, headers: Mapping[str, str]) -> None:
        """Refuse a request, with or without a key, that the page of another website has made a
        browser send."""
        host = headers.get("host", "")
        if not self._hosts.serve(host):
            raise ApiError(
                403,
                f"the name {host[:100]!r} is not served here: allow it with {self._names_flag}",
                code="host_refused",
            )
        if self._comes_from_another_website(headers, host):
            raise ApiError(403, "another website may not use this endpoint", code="origin_refused")

    def _comes_from_another_website(self, headers: Mapping[str, str], host: str) -> bool:
        """Whether a browser's headers say that a page of another website has sent the request. A
        website that is let in does not count, nor a request that no page has sent."""
        origin = headers.get("origin", "").lower()
        if origin in self._origins:
            return False
        if origin:
            parts = _split(origin)
            return parts.scheme not in ("http", "https") or parts.netloc != host.lower()
        # Requests that only read have no Origin; a link that somebody follows is none of a script.
        is_cross_site = headers.get("sec-fetch-site") == "cross-site"
        is_followed_link = headers.get("sec-fetch-mode") == "navigate"
        return is_cross_site and not is_followed_link

    def principal(self, authorization: Sequence[str], peer: str) -> str:
        """The caller's name, from the Authorization headers; `peer` is its address."""
        name = self._principals(authorization)
        if name is None:
            self._refused(authorization, peer)
            raise ApiError(
                401, "a valid api key is needed: Authorization: Bearer KEY", code="invalid_api_key"
            )
        return name


def check_names(flag: str, names: Sequence[str]) -> None:
    """Refuse what can be no name in a request's `Host`, such as a URL; `flag` gave these names."""
    for name in names:
        if not _NAME.fullmatch(name) and not is_address(name):
            raise ConfigError(
                f"{flag} takes a name such as verifier.lan, not {name[:100]!r}",
                hint="without scheme, port and path",
            )


def check_origins(origins: Sequence[str]) -> None:
    """Refuse what no browser calls a website, such as a name alone. A page from a file is `null`."""
    for origin in origins:
        if origin == "null":
            continue
        parts = _split(origin)
        has_more = parts.path.strip("/") or parts.query or parts.fragment
        if not (parts.scheme and parts.netloc) or has_more:
            raise ConfigError(
                f"--origin takes a website such as https://chat.example, not {origin[:100]!r}",
                hint="with its scheme, without a path",
            )


def is_address(name: str) -> bool:
    """Whether this is a literal address: no DNS, so nothing to re-bind."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def _split(url: str) -> SplitResult:
    """The parts of a URL; all empty if it is none."""
    try:
        return urlsplit(url)
    except ValueError:  # a bracket that is not closed, or an address within brackets that is none
        return SplitResult("", "", "", "", "")


def _is_plain(host: str) -> bool:
    """Whether a `Host` is short, and has nothing but a name and a port in it."""
    return 0 < len(host) <= 255 and not set(host) & set("/?#@\\ \t")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
