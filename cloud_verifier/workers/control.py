"""The connection between the front and one worker: typed messages, and accepted sockets passed along."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import msgspec

_LONGEST = 1 << 20


class Serve(msgspec.Struct, tag="take", frozen=True):
    """Front: serve this connection (its socket is passed along), whose first bytes were already read."""

    head: bytes


class SendMetrics(msgspec.Struct, tag="tell", frozen=True):
    """Front: send your metrics."""


class AllMetrics(msgspec.Struct, tag="pages", frozen=True):
    """Front: the answer to `MetricsRequest`: all processes' metrics by name, compressed."""

    pages: dict[str, bytes]


class Heartbeat(msgspec.Struct, tag="beat", frozen=True):
    """Worker: heartbeat; `wrong` is the problem that keeps it from serving. The first one means that the model is
    loaded."""

    open: int
    """Connections it has."""
    taken: int
    """Connections it was given so far."""
    wrong: str = ""


class WorkerMetrics(msgspec.Struct, tag="told", frozen=True):
    """Worker: its metrics, compressed."""

    page: bytes


class MetricsRequest(msgspec.Struct, tag="ask", frozen=True):
    """Worker: a client asked for the metrics of all processes."""


class StartFailed(msgspec.Struct, tag="failed", frozen=True):
    """Worker: cannot start; the line for the user, and the exit code."""

    line: str
    code: int


Control = Serve | SendMetrics | AllMetrics | Heartbeat | WorkerMetrics | MetricsRequest | StartFailed
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Control] = msgspec.msgpack.Decoder(Control)


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a new line."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(sock: socket.socket, message: Control, carried: socket.socket | None = None) -> bool:
    """Send without waiting, if the line is open; False when the other end is gone or does not read."""
    try:
        socket.send_fds(sock, [_encoder.encode(message)], [] if carried is None else [carried.fileno()])
    except OSError:
        return False
    return True


class Line:
    """One end. `heard` gets each message, with the socket that came along; `lost` is called once, at the end."""

    def __init__(
        self,
        sock: socket.socket,
        heard: Callable[[Control, socket.socket | None], None],
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._sock, self._heard, self._lost = sock, heard, lost
        sock.setblocking(False)
        asyncio.get_running_loop().add_reader(sock.fileno(), self._readable)

    def send(self, message: Control, carried: socket.socket | None = None) -> bool:
        """Send without waiting; False when the other end is gone or does not read."""
        return send(self._sock, message, carried)

    def close(self) -> None:
        """Hang up."""
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()

    def _readable(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                data, descriptors, _, _ = socket.recv_fds(self._sock, _LONGEST, 1)
            except ConnectionError:
                data, descriptors = b"", []
            if not data:
                self.close()
                self._lost()
                return
            self._heard(_decoder.decode(data), socket.socket(fileno=descriptors[0]) if descriptors else None)
