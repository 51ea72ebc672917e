"""Ports to listen on."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from moa.errors import UsageError
from moa.process.listening import Port


def test_a_port_refuses_connections_until_a_server_listens() -> None:
    with Port("127.0.0.1", 0) as port:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port.number))
        port.listen(1)
        socket.create_connection(("127.0.0.1", port.number)).close()
        assert port.url("ws") == f"ws://127.0.0.1:{port.number}"
    with Port("127.0.0.1", port.number):
        """Free again at once."""


def test_a_port_or_host_that_cannot_be_had_is_one_clear_line() -> None:
    with Port("127.0.0.1", 0) as theirs:
        theirs.listen(1)
        with pytest.raises(
            UsageError, match=rf"cannot listen on 127.0.0.1:{theirs.number}: Address already in use"
        ):
            Port("127.0.0.1", theirs.number)
    for host in ("192.0.2.1", "no such host"):
        with pytest.raises(UsageError, match=f"cannot listen on {host}:80"):
            Port(host, 80)


def test_a_port_is_held_from_the_start_and_not_only_once_it_is_listened_on() -> None:
    """Another program took it while a model was loaded, and the verifier ended afterwards."""
    with Port("127.0.0.1", 0) as port, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as most servers do
        with pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", port.number))
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{port.number}"):
            Port("127.0.0.1", port.number)
        port.listen(1)
        socket.create_connection(("127.0.0.1", port.number)).close()


def test_a_server_starts_again_while_connections_of_the_one_before_rest() -> None:
    """Those that a server closes first rest for a minute."""
    number = 0
    for _ in range(3):
        with Port("127.0.0.1", number) as port:
            number = port.number
            listening = port.listen(1)
            with socket.create_connection(("127.0.0.1", number)) as client:
                accepted, _ = listening.accept()
                accepted.close()
                assert client.recv(1) == b""


def test_localhost_is_reached_by_its_number_and_an_ipv6_address_in_brackets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = [(family, socket.SOCK_STREAM, 6, "", ()) for family in (socket.AF_INET6, socket.AF_INET)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    with Port("localhost", 0) as port:
        assert port.socket.family == socket.AF_INET
        assert port.url("ws") == f"ws://localhost:{port.number}"
    monkeypatch.undo()
    if socket.has_ipv6:
        with Port("::1", 0) as port:
            assert port.url("http") == f"http://[::1]:{port.number}"


@contextlib.contextmanager
def no_free_descriptor() -> Iterator[None]:
    """This process has as many files open as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, len(os.listdir("/dev/fd")) + 20), hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_connection_for_which_there_is_no_descriptor_is_refused_and_reported_and_the_next_is_served() -> (
    None
):
    refused: list[str] = []
    with (
        Port("127.0.0.1", 0) as port,
        socket.socket() as first,
        socket.socket() as second,
        socket.socket() as third,
    ):
        listening = port.listen(8, refused.append)
        first.connect(("127.0.0.1", port.number))
        accepted, _ = listening.accept()
        accepted.close()
        with no_free_descriptor():
            second.connect(("127.0.0.1", port.number))
            for _ in range(3):  # the loop that asks sees no connection, then and later
                with pytest.raises(BlockingIOError):
                    listening.accept()
            assert refused == [f"127.0.0.1:{second.getsockname()[1]}"]
            assert second.recv(1) == b""
        third.connect(("127.0.0.1", port.number))
        accepted, address = listening.accept()
        assert address == third.getsockname()
        accepted.close()


def test_a_program_that_listens_writes_no_line_for_each_write_to_nobody() -> None:
    with Port("127.0.0.1", 0) as port, Port("127.0.0.1", 0) as other:
        port.listen(1)
        other.listen(1)
    told = logging.getLogger("asyncio")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    told.addHandler(handler)
    try:
        for line in ("socket.send() raised exception.", "SSL connection is closed", "news"):
            told.warning(line)
    finally:
        told.removeHandler(handler)
    assert said == ["news"]
