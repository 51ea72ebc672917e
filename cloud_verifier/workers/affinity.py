"""Chooses a connection's worker: the same one for the same key, while it runs and is not overloaded. Pure."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from urllib.parse import parse_qs, urlsplit

from moa.wire.versions import SESSION_HEADER, SESSION_QUERY

_KEY = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HEAD_END = b"\r\n\r\n"
_SIGMAS = 3.0
"""A worker is overloaded with so many standard deviations more connections than the mean: too many clients share a
key. Luck alone must not reach it, nor connections whose end a busy worker has not noticed yet, or clients that return
lose their worker."""


def is_whole(head: bytes) -> bool:
    """Whether all of a request's head has arrived."""
    return _HEAD_END in head


def key_of(head: bytes) -> str:
    """The session key in a request's head: its header, else the query that a browser sends; empty without one."""
    request, *fields = head.partition(_HEAD_END)[0].decode("latin-1").split("\r\n")
    for field in fields:
        name, _, value = field.partition(":")
        if name.strip().lower() == SESSION_HEADER.lower():
            return _valid(value.strip())
    words = request.split(" ")
    query = parse_qs(urlsplit(words[1]).query) if len(words) == 3 else {}
    return _valid(query.get(SESSION_QUERY, [""])[0])


def choose_worker(key: str, loads: Mapping[int, int]) -> int | None:
    """The worker for `key`, given the connections that each has; None when there is no worker.

    Rendezvous hashing: each worker has its own rank for a key, so when a worker ends, only its keys move, spread over
    all others.
    """
    mean = (sum(loads.values()) + 1) / max(1, len(loads))
    most = math.ceil(mean + _SIGMAS * math.sqrt(mean))
    ranked = sorted(loads, key=lambda worker: _rank(key, worker))
    return next((worker for worker in ranked if loads[worker] < most), None)


def _rank(key: str, worker: int) -> bytes:
    return hashlib.blake2b(f"{worker}/{key}".encode(), digest_size=8).digest()


def _valid(key: str) -> str:
    return key if _KEY.fullmatch(key) else ""
