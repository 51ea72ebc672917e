"""Errors in the API's format: a status, and a body that OpenAI clients can parse."""

from __future__ import annotations

import math
from typing import Any

from moa.errors import CapacityError, LinkError, MoaError, ProtocolError, RemoteError, UsageError
from moa.grammar.spec import GrammarError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
"""The `type` of an error by its status. Others below 500 are `invalid_request_error`."""


class ApiError(MoaError):
    """A refusal with its HTTP status. `param` names the field that is wrong, `code` is for
    programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        limit: str = "",
        retry_after: float = 0.0,
        why: str = "",
    ) -> None:
        """`limit`: the name of the limit that is reached, for the operator. `retry_after`: seconds
        after which the client may try again; 0: trying again is in vain. `why` there is no verified
        text, in words."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.limit = limit
        self.retry_after = retry_after
        self.why = why

    def body(self) -> dict[str, Any]:
        """The JSON of the response."""
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _TYPES.get(self.status, usual)
        error: dict[str, Any] = {
            "message": str(self),
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        if self.why:
            error["moa"] = {"why": self.why}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        """Headers that the status requires."""
        headers = {}
        if self.retry_after:
            headers["Retry-After"] = str(math.ceil(self.retry_after))
        elif self.status == 503:
            # OpenAI's clients ask again after a 503 whether it names a time or not.
            headers["X-Should-Retry"] = "false"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def stopping() -> ApiError:
    """The error of a request that this server answers no more, because it is about to end."""
    return ApiError(503, "this server stops: ask again", code="server_stopping", retry_after=5.0)


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The error of a request that is wrong."""
    return ApiError(400, message, param=param, code=code)


def from_error(error: MoaError) -> ApiError:
    """The error, with its HTTP status, that tells a client of an error of this project: 400 what it
    can correct, 429 what is full for now, 503 a verifier that cannot be reached, 500 the rest."""
    match error:
        case ApiError():
            return error
        case RemoteError(code="limit"):
            # The hint names the limit. One of stop texts or of the answer's length is not the
            # prompt's, which clients may shorten after this code.
            is_of_prompt = "stop" not in error.hint and "new_tokens" not in error.hint
            return bad(error.line(), code="context_length_exceeded" if is_of_prompt else None)
        case RemoteError(code="grammar") | GrammarError():
            return bad(error.line(), "response_format", "invalid_grammar")
        case RemoteError() if error.retryable:
            return ApiError(
                429,
                f"{error.line()}: ask again later",
                code=error.code,
                limit=error.limit,
                retry_after=max(1.0, error.retry_after or 0.0),
            )
        case RemoteError() | LinkError() | ProtocolError():
            return ApiError(503, error.line(), code="verifier_unavailable", retry_after=1.0)
        case CapacityError():
            return ApiError(429, error.line(), code="busy", retry_after=1.0)
        case UsageError():
            return bad(error.line())
        case _:
            return ApiError(500, error.line())
