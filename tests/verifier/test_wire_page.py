"""A client that is written from docs/wire-protocol.md alone, as one in another language would be:
websocket frames and msgpack arrays. It uses nothing of `moa` or `edge_client`, and is never to."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from websockets.sync.client import connect

from moa.wire import chain_hash
from testing.verifier import verifier

_PAGE = Path(__file__).parents[2] / "docs" / "wire-protocol.md"
_PATIENCE = 100.0


def page_hash(ids: Sequence[int]) -> bytes:
    """The hash of a log, as the page defines it."""
    hashed = b"".join(struct.pack("<I", token) for token in ids)
    return hashlib.blake2b(hashed, digest_size=16).digest()


def all_fields(message: list[Any], *defaults: Any) -> list[Any]:
    """The fields of a message without its tag and session; of those at the end that are absent, of
    which these are the defaults, with their defaults."""
    fields = message[2:]
    absent = max(0, len(defaults) - len(fields))
    return [*fields, *defaults[len(defaults) - absent :]][: len(defaults)]


class PageClient:
    """One session of a client that loses its connection now and then. Its `log` has the prompt and
    all tokens that it was told."""

    def __init__(self, url: str, prompt: list[int], most: int, seed: int) -> None:
        self.url = url
        self.session = os.urandom(16)
        self.log = list(prompt)
        self.prompt = len(prompt)
        self.most = most
        self.sampling = [1.0, 0, 1.0, 0.0, 1.0, seed]
        self.round = 0  # the last one that was over
        self.finish = ""
        self.outcomes: list[str] = []
        self.connections = contextlib.ExitStack()
        self.connect()

    def connect(self) -> None:
        opening = connect(self.url, subprotocols=["moa.v3"], proxy=None)  # type: ignore[list-item]
        self.socket = self.connections.enter_context(opening)
        self.send("hello", [3], [])
        self.receive("welcome")

    def send(self, *message: Any) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def frame(self) -> bytes:
        frame = self.socket.recv(timeout=_PATIENCE)
        assert isinstance(frame, bytes), "a text frame"
        return frame

    def receive(self, *tags: str) -> list[Any]:
        """The next message of one of these tags; others, unknown ones too, are skipped."""
        while True:
            message: list[Any] = msgspec.msgpack.decode(self.frame())
            assert message[0] != "error", message
            if message[0] in tags:
                return message

    def open(self) -> None:
        """Open the session, or open it again with all that is known of it."""
        generated = len(self.log) - self.prompt
        stop: list[str] = []
        ignore_eos = False
        self.send(
            "open",
            self.session,
            self.log,
            self.most,
            self.sampling,
            stop,
            ignore_eos,
            generated,
            self.round,
        )
        self.receive("opened")

    def stream(self) -> None:
        """Ask for the next round, one token a forward."""
        self.send("stream", self.session, self.round + 1, len(self.log) - 1, False)

    def take(self) -> bool:
        """Take one answer of the running round; returns whether the round is over."""
        round, base, tokens, done, finish = all_fields(
            self.receive("stream_tokens"), 0, 0, [], False, ""
        )
        self.log += tokens[len(self.log) - 1 - base :]
        if done:
            self.round, self.finish = round, finish
        return bool(done)

    def lose(self) -> None:
        """Lose the connection without a word."""
        self.socket.socket.shutdown(socket.SHUT_RDWR)
        self.connections.close()

    def come_back(self, log: Sequence[int] | None = None) -> None:
        """Connect again and resume; `log` instead of our own makes another hash."""
        self.connect()
        chain = page_hash(self.log if log is None else log)
        self.send("resume", self.session, len(self.log), chain, self.round)
        outcome, length, round, tail, finish, running = all_fields(
            self.receive("resumed"), "", 0, 0, [], "", 0
        )
        self.outcomes.append(outcome)
        if outcome == "gone":
            self.open()
        else:
            self.log += tail
            assert len(self.log) == length
            self.round, self.finish = round, finish
        if not self.finish and not running:
            self.stream()

    def read_to_the_end(self) -> list[int]:
        """The whole answer."""
        while not self.finish:
            if self.take() and not self.finish:
                self.stream()  # the round has ended with its connection, and not the turn
        self.connections.close()
        return self.log[self.prompt :]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A verifier of the toy pair."""
    with verifier() as running:
        yield running.url


def _client(url: str, most: int = 24) -> PageClient:
    made = PageClient(url, [5, 6, 7, 8], most, seed=7)
    made.open()
    made.stream()
    return made


def test_a_client_from_the_page_streams_and_resumes(url: str) -> None:
    whole = _client(url).read_to_the_end()
    assert len(whole) > 8
    losing = _client(url)
    for _ in range(3):
        if losing.take() and not losing.finish:
            losing.stream()
        losing.lose()
        losing.come_back()
        if losing.finish:
            break
    assert losing.read_to_the_end() == whole
    assert set(losing.outcomes) <= {"resumed", "reprefilled"}


def test_a_client_from_the_page_opens_again_what_is_gone(url: str) -> None:
    whole = _client(url).read_to_the_end()
    losing = _client(url)
    losing.take()
    losing.lose()
    losing.come_back(log=[1])
    assert losing.outcomes == ["gone"], "the hash is of another log"
    assert losing.read_to_the_end() == whole


def test_the_hash_of_a_log_is_as_the_page_defines_it() -> None:
    rows = re.findall(r"^\| ([\d, ]+|none) \| `?(\w+)`? \| `(\w{32})` \|$", _PAGE.read_text(), re.M)
    assert len(rows) == 3
    for ids, hashed, digest in rows:
        log = [int(token) for token in re.findall(r"\d+", ids)]
        packed = b"" if hashed == "none" else bytes.fromhex(hashed)
        assert packed == b"".join(struct.pack("<I", token) for token in log)
        assert page_hash(log) == chain_hash(log) == bytes.fromhex(digest)
