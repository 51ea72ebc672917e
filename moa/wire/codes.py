"""Error codes, close codes, and which of them are retryable. This is the only place that decides
it."""

from __future__ import annotations

from enum import StrEnum

from moa.errors import ProtocolError, RemoteError
from moa.wire.messages import Error


class Code(StrEnum):
    """Codes of `Error`. An unknown code is fatal for the session, or for the connection if the
    error names no session."""

    BAD_MESSAGE = "bad_message"
    """The frame is no message of the protocol, or a field is out of range."""
    VERSION = "version"
    """No protocol version in common."""
    TOKENIZER = "tokenizer_mismatch"
    """Client and target do not share the tokenizer: tokens would mean different text."""
    TARGET = "target_mismatch"
    """The client asked for another target."""
    LIMIT = "limit"
    """A limit was exceeded; `limit` names it."""
    BUSY = "busy"
    """No room now; try again after `retry_after_ms`."""
    DEADLINE = "deadline"
    """The request waited longer than its deadline; nothing was run."""
    UNKNOWN_SESSION = "unknown_session"
    """No such session here (of this principal): resume or open it."""
    CONFLICT = "conflict"
    """The request does not fit the session's log or rounds."""
    UNSUPPORTED = "unsupported"
    """A feature that was not agreed."""
    GRAMMAR = "grammar"
    """The grammar of an answer cannot be compiled, or needs too much work."""
    DRAINING = "draining"
    """The server is stopping: go elsewhere."""
    QUARANTINED = "quarantined"
    """This session's work failed in the engine, and the session was dropped. Open it again."""
    INTERNAL = "internal"
    """The server failed; its log has the details."""


RETRYABLE = frozenset({Code.BUSY, Code.DEADLINE, Code.DRAINING, Code.INTERNAL})
"""The same request may succeed later, here or elsewhere."""


class CloseCode:
    """Websocket close codes in use."""

    NORMAL = 1000
    """The edge has nothing more to ask."""
    PROTOCOL_ERROR = 1002
    """Hello missing, not first, or refused; too many bad messages."""
    BAD_DATA = 1003
    """A text frame."""
    POLICY = 1008
    """Too slow a reader, a revoked token, or another rule broken."""
    TOO_BIG = 1009
    """A frame beyond `max_frame_bytes`."""
    INTERNAL = 1011
    """The verifier failed; its log has the details."""
    RESTART = 1012
    """The server drained; connect again, here or elsewhere."""
    TRY_LATER = 1013
    """No room for another connection."""


class Refusal(ProtocolError):
    """A request is refused with a typed error. Raised by pure code, sent by the transport."""

    def __init__(
        self, code: Code, message: str, *, limit: str = "", retry_after_ms: int = 0
    ) -> None:
        super().__init__(message)
        self.code = code
        self.limit = limit
        self.retry_after_ms = retry_after_ms

    @property
    def retryable(self) -> bool:  # type: ignore[override]
        """Whether the same request may succeed later."""
        return self.code in RETRYABLE

    def error(self, *, session: bytes = b"", round: int = 0) -> Error:
        """This refusal as an `Error` message for the other end. It names the session and the round
        that are refused; without a session it concerns the connection."""
        return Error(
            code=self.code.value,
            message=str(self),
            session=session,
            round=round,
            retry_after_ms=self.retry_after_ms,
            limit=self.limit,
        )


def remote_error(message: Error) -> RemoteError:
    """The exception for an `Error` that arrived; it carries `retry_after` (seconds) when trying
    again makes sense."""
    retry_after = None
    if message.code in RETRYABLE:
        retry_after = message.retry_after_ms / 1000
    hint = f"limit {message.limit}" if message.limit else ""
    return RemoteError(
        message.code, message.message, retry_after=retry_after, hint=hint, limit=message.limit
    )
