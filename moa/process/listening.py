"""A port to listen on, taken before anything is loaded, so that a port in use is an error at once."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from moa.errors import UsageError

_TO_NOBODY = ("SSL connection is closed", "socket.send() raised exception.")
"""What asyncio says of each write to a connection that the other end has ended."""


class _ListeningSocket(socket.socket):
    """A listening socket that refuses connections while the process has no free file descriptor.

    Python's event loop would write a traceback into the log for each of them, up to the backlog's
    length at a time, and start as many tasks that try again. uvloop does what we do here.
    """

    exhausted: Callable[[str], None] = staticmethod(lambda peer: None)
    """Called with the address of each refused connection."""
    _spare = -1
    """A descriptor that is given up to accept a connection, so that it can be closed."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept the next connection. Where the process has no file descriptor left for it, it is
        refused, and `BlockingIOError` raised, as if there were none: the event loop waits then. One
        descriptor is kept spare (`_spare`), to accept such a connection with and close it."""
        if self._spare < 0:
            self._spare = _any_descriptor()
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        self._refuse_one()
        raise BlockingIOError

    def close(self) -> None:
        """Stop listening."""
        self._give_up_spare()
        super().close()

    def _refuse_one(self) -> None:
        """Refuse a connection: accept it with the descriptor that was kept spare, close it, and
        keep a descriptor spare again."""
        self._give_up_spare()
        try:
            connection, address = super().accept()
        except OSError:  # another thread was faster
            return
        connection.close()
        self._spare = _any_descriptor()
        self.exhausted(f"{address[0]}:{address[1]}")

    def _give_up_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of asyncio's may be written. A client that asks for much and goes away causes
    some that say nothing: they would fill a terminal, and use up a log's share for those that do."""
    return record.msg not in _TO_NOBODY


def _any_descriptor() -> int:
    """A descriptor of no use; -1 if the process has none left."""
    try:
        return os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return -1


class Port:
    """A port of this machine, for as long as the body runs. It refuses connections until `listen`."""

    def __init__(self, host: str, port: int, *, flag: str = "--port") -> None:
        """Take a port of this host; a `UsageError` if that cannot be, for example because it is in
        use. Port 0 is one that the system chooses. A name that has addresses of both kinds, as
        localhost has, stands for the IPv4 one, which all clients of the name try. `flag` is the
        option by which the user chooses another port, for the error."""
        self._host = host
        self.number = port
        self._flag = flag
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise self._refusal(error) from None
        families = [family for family, *_ in addresses]
        family = socket.AF_INET if socket.AF_INET in families else families[0]
        self.socket = _ListeningSocket(family, socket.SOCK_STREAM)
        try:
            self._bind(host, port)
        except OSError as error:
            self.socket.close()
            raise self._refusal(error) from None
        self.socket.setblocking(False)
        self.number = int(self.socket.getsockname()[1])

    def listen(
        self, backlog: int, exhausted: Callable[[str], None] = lambda peer: None
    ) -> socket.socket:
        """Accept connections from now on.

        `exhausted` is called with the address of a connection that was refused for lack of file
        descriptors."""
        self.socket.exhausted = exhausted
        logging.getLogger("asyncio").addFilter(_is_news)  # once, however many ports there are
        try:
            self._share()  # its connections inherit it: else those that rest keep the next start out
            self.socket.listen(backlog)
        except OSError as error:
            raise self._refusal(error) from None
        return self.socket

    def _bind(self, host: str, port: int) -> None:
        """Take the port for ourselves alone, so that nobody has it while a model is loaded. Where
        connections of a program that has just ended still rest there, the system gives it only to
        who shares it: of two such programs the first to listen gets it."""
        try:
            self.socket.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            self._share()
            self.socket.bind((host, port))

    def _share(self) -> None:
        """Let this port be taken beside connections that rest there, and by programs that do not
        listen."""
        if os.name == "posix":  # elsewhere it lets two programs listen on one port
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def url(self, scheme: str) -> str:
        """The address for clients."""
        is_ipv6 = ":" in self._host
        host = f"[{self._host}]" if is_ipv6 else self._host
        return f"{scheme}://{host}:{self.number}"

    def _refusal(self, error: OSError) -> UsageError:
        """The error for the user where this port cannot be had."""
        hint = ""
        if error.errno == errno.EADDRINUSE:
            hint = f"{self._flag} N takes another, {self._flag} 0 any free one"
        return UsageError(
            f"cannot listen on {self._host}:{self.number}: {error.strerror or error}", hint=hint
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.socket.close()
