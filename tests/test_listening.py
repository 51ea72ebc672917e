"""Ports to listen on."""

from __future__ import annotations

import socket

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


def test_a_port_where_another_program_listens_is_one_clear_line() -> None:
    with Port("127.0.0.1", 0) as theirs:
        theirs.listen(1)
        with pytest.raises(UsageError, match=rf"cannot listen on 127.0.0.1:{theirs.number}: Address already in use"):
            Port("127.0.0.1", theirs.number)


def test_of_two_that_have_taken_a_port_the_first_to_listen_gets_it() -> None:
    with Port("127.0.0.1", 0) as first, Port("127.0.0.1", first.number) as second:
        second.listen(1)
        with pytest.raises(UsageError, match=f"cannot listen on 127.0.0.1:{first.number}"):
            first.listen(1)


def test_a_host_that_is_not_this_machine_is_one_clear_line() -> None:
    for host in ("192.0.2.1", "no such host"):
        with pytest.raises(UsageError, match=f"cannot listen on {host}:80"):
            Port(host, 80)


def test_localhost_is_reached_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [(family, socket.SOCK_STREAM, 6, "", ()) for family in (socket.AF_INET6, socket.AF_INET)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    with Port("localhost", 0) as port:
        assert port.socket.family == socket.AF_INET
        assert port.url("ws") == f"ws://localhost:{port.number}"


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_an_ipv6_address_is_in_brackets() -> None:
    with Port("::1", 0) as port:
        assert port.url("http") == f"http://[::1]:{port.number}"
