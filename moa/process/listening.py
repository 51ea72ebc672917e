"""A port to listen on. It is taken before anything is loaded: that another program has it is said at once."""

from __future__ import annotations

import os
import socket
from types import TracebackType
from typing import Self

from moa.errors import UsageError


class Port:
    """A port of this machine, for as long as the body runs. It refuses connections until `listen`."""

    def __init__(self, host: str, port: int) -> None:
        """Port 0 is one that the system chooses. A name that has addresses of both kinds, as localhost has, stands for
        the IPv4 one, which all clients of the name try."""
        self._host, self.number = host, port
        try:
            families = [found[0] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except OSError as error:
            raise self._refusal(error) from None
        family = socket.AF_INET if socket.AF_INET in families else families[0]
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            if os.name == "posix":  # elsewhere it lets two programs listen on one port
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.socket.bind((host, port))
        except OSError as error:
            self.socket.close()
            raise self._refusal(error) from None
        self.socket.setblocking(False)
        self.number = int(self.socket.getsockname()[1])

    def listen(self, backlog: int) -> socket.socket:
        """Accept connections from now on. Of two programs that have taken a port the first to listen gets it."""
        try:
            self.socket.listen(backlog)
        except OSError as error:
            raise self._refusal(error) from None
        return self.socket

    def url(self, scheme: str) -> str:
        """The address for clients."""
        return f"{scheme}://{f'[{self._host}]' if ':' in self._host else self._host}:{self.number}"

    def _refusal(self, error: OSError) -> UsageError:
        return UsageError(f"cannot listen on {self._host}:{self.number}: {error.strerror or error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.socket.close()
