"""Authentication: bearer tokens in a file of `NAME HASH` lines. The file contains only hashes, no
secrets."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloud_verifier.logs import log
from moa.api.access import ANONYMOUS
from moa.errors import ConfigError, UsageError
from moa.wire.versions import TOKEN_SUBPROTOCOL

OPERATOR = "operator"
"""The principal that may read `/metrics` where there is a token file: they say how much others
work."""
WRONG_TOKENS = {
    "missing": "no token",
    "unknown": "a token that is not in the token file",
    "malformed": "not one header of the form Bearer TOKEN",
}
"""What can be wrong with a caller's token: as the metric calls it, and in words."""
_NAMED = 5
"""Principals that a line of the log names at most."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


_Entries = tuple[tuple[str, bytes], ...]
"""What a token file holds: principals, each with the hash of a token."""


def new_token() -> str:
    """A fresh secret of 256 bits."""
    return "moa_" + secrets.token_urlsafe(32)


def token_line(name: str, token: str) -> str:
    """The line of the token file for `token` of principal `name`."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"a principal's name is 1 to 64 of A-Z a-z 0-9 . _ -, not {name!r}")
    return f"{name} sha256:{_digest(token).hex()}"


def read_entries(path: Path) -> _Entries:
    """Returns the principals and the hashes of their tokens in a token file; empty lines and `#`
    comments are skipped."""
    entries = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the token file {path}: {getattr(error, 'strerror', None) or error}"
        ) from None
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or not _NAME.fullmatch(words[0]) or not _HASH.fullmatch(words[1]):
            # The line is not quoted: somebody may have pasted a secret.
            raise ConfigError(
                f"{path}, line {number}: expected NAME sha256:HASH",
                hint="see `cloud-verifier token new --help`",
            )
        entries.append((words[0], bytes.fromhex(words[1].removeprefix("sha256:"))))
    return tuple(entries)


def may_measure(principal: str) -> bool:
    """Whether this principal may see what all together do."""
    return principal in (ANONYMOUS, OPERATOR)


@dataclass(frozen=True)
class Caller:
    """Who has sent a request, and with which token."""

    principal: str
    token: bytes = b""
    """The hash of the token; empty where none is needed."""


@dataclass(frozen=True, eq=False)
class _Watched:
    """A connection or an answer that ends when its token is revoked."""

    caller: Caller
    end: Callable[[], None]


class Authenticator:
    """Maps Authorization headers to a principal, by a token file that is read again when it
    changes, without a restart. Without a file everybody is the same anonymous principal.

    A changed file that cannot be read or parsed is ignored, and logged as an error: half a file of a
    full disk would lock out whoever is in the other half, and `token revoke` never leaves one. It is
    looked at again until it can be read, and `unread` says so meanwhile. One without entries refuses
    everybody, because all of them may have been revoked.
    What was opened with a token that is no longer in the file is ended, by `end_revoked`.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Read the token file; it must have at least one entry. None: everybody may connect."""
        self._path = path
        self._stamp = _stamp(path)
        self._entries = read_entries(path) if path is not None else ()
        self._watched: set[_Watched] = set()
        self._looked_at = self._stamp
        """The file's stamp when `end_revoked` looked last."""
        self._all_valid = True
        """Whether every watched token is in the file, as it was read last."""
        self.unread = ""
        """Why the token file cannot be read or parsed as it is now, so that nothing that was revoked
        in it is; empty if it can."""
        if path is not None and not self._entries:
            raise ConfigError(
                f"the token file {path} has no entries",
                hint="add one with `cloud-verifier token new`",
            )

    def principal(self, authorization: Sequence[str]) -> str | None:
        """Returns the name of the caller by its Authorization headers, or None to refuse it."""
        caller = self.caller(authorization)
        return None if caller is None else caller.principal

    def caller(self, authorization: Sequence[str]) -> Caller | None:
        """Returns the caller by its Authorization headers, or None to refuse it: without a valid
        one, or with several, because a proxy may have checked a different one."""
        if self._path is None:
            return Caller(ANONYMOUS)
        self._read_again_if_changed(self._path)
        header = authorization[0] if len(authorization) == 1 else ""
        scheme, _, token = header.partition(" ")
        presented = _digest(token.strip())
        # Every entry is compared, each in constant time, so that timing does not reveal which one
        # matches.
        matching = []
        for name, digest in self._entries:
            if hmac.compare_digest(presented, digest):
                matching.append(name)
        if not matching or scheme.lower() != "bearer":
            return None
        return Caller(matching[0], presented)

    def refused(self, authorization: Sequence[str], peer: str, port: str) -> str:
        """Log that a caller at this address had no valid token in its Authorization headers, and at
        which port. Returns what was wrong with it, one of `WRONG_TOKENS`."""
        kind = "unknown"
        if not authorization:
            kind = "missing"
        elif len(authorization) > 1 or not authorization[0].lower().startswith("bearer "):
            kind = "malformed"
        where = {"peer": peer, "port": port}
        log.warning("unauthorized: %s", WRONG_TOKENS[kind], extra=where | {"event": "unauthorized"})
        return kind

    @contextlib.contextmanager
    def watching(self, caller: Caller, end: Callable[[], None]) -> Iterator[None]:
        """Call `end`, once, if the token of this caller is revoked while the body runs."""
        if self._path is None:
            yield
            return
        watched = _Watched(caller, end)
        self._watched.add(watched)
        # It may have been revoked between the handshake and now.
        self._all_valid = self._all_valid and self._knows(caller)
        try:
            yield
        finally:
            self._watched.discard(watched)

    @contextlib.contextmanager
    def watching_key(self, authorization: Sequence[str], end: Callable[[], None]) -> Iterator[None]:
        """The same for a request with these Authorization headers. One without a valid token is
        not watched: it is refused."""
        caller = self.caller(authorization)
        if caller is None:
            yield
            return
        with self.watching(caller, end):
            yield

    def has_token(self, principal: str) -> bool:
        """Whether any token of this principal is in the file."""
        return any(name == principal for name, _ in self._entries)

    def end_revoked(self) -> bool:
        """Read the token file if it has changed, and end what was opened with a token that is no
        longer in it. Returns whether the file was looked through for that. To be called about once a
        second.

        The file must have stayed as it is since the last call: an editor may empty a file before it
        writes it.
        """
        if self._path is None:
            return False
        self._read_again_if_changed(self._path)
        if self.unread:  # who may read it may have been changed, and nothing in it
            self._read_again(self._path)
        is_settled = self._stamp == self._looked_at
        self._looked_at = self._stamp
        if self._all_valid or not is_settled:
            return False
        for watched in tuple(self._watched):
            if not self._knows(watched.caller):
                self._watched.discard(watched)
                watched.end()
        self._all_valid = True
        return True

    def _knows(self, caller: Caller) -> bool:
        """Whether the token that a caller came with is in the file, under the same name."""
        return (caller.principal, caller.token) in self._entries

    def _read_again_if_changed(self, path: Path) -> None:
        """Read the token file again if it has changed since."""
        stamp = _stamp(path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        self.unread = ""  # what is wrong now is said, even if it is what was wrong before
        self._read_again(path)

    def _read_again(self, path: Path) -> None:
        """Read the token file again. If it cannot be read, that is logged once and the tokens stay as
        they are."""
        before = self._entries
        try:
            self._entries = read_entries(path)
        except UsageError as error:
            if self.unread != str(error):
                self.unread = str(error)
                log.error(
                    "the token file has changed, but: %s (the %s of before stay valid)",
                    error,
                    _tokens(len(before)),
                    extra={"event": "tokens"},
                )
            return
        self.unread = ""
        self._all_valid = False
        _log_change(before, self._entries)


def _log_change(before: _Entries, now: _Entries) -> None:
    """Log that the token file was read again, how many tokens it had and has, and whose have come
    and gone: whoever lost one of two is named, too. Fewer are a warning: they may have been revoked,
    or a full disk has cut the file."""
    words = f"the token file was read again: {_tokens(len(now))}, {len(before)} before"
    if not now:
        words += ": everybody is refused"
    figures: dict[str, int | list[str]] = {"tokens": len(now), "tokens_before": len(before)}
    for what, entries in (("gone", set(before) - set(now)), ("new", set(now) - set(before))):
        if not entries:
            continue
        names = sorted({name for name, _ in entries})
        named = figures[what] = names[:_NAMED]
        words += f"; {what}: {', '.join(named)}"
        if len(names) > _NAMED:
            words += f" and {len(names) - _NAMED} more"
    log.log(
        logging.WARNING if len(now) < len(before) else logging.INFO,
        "%s",
        words,
        extra={"event": "tokens", "figures": figures},
    )


def _tokens(count: int) -> str:
    """A number of tokens in words."""
    return "1 token" if count == 1 else f"{count} tokens"


def authorizations(headers: Sequence[str], subprotocols: Iterable[str]) -> list[str]:
    """A handshake's Authorization headers, and those that a web page offers as subprotocols
    instead."""
    found = list(headers)
    for name in subprotocols:
        if name.startswith(TOKEN_SUBPROTOCOL):
            found.append(f"Bearer {name.removeprefix(TOKEN_SUBPROTOCOL)}")
    return found


def _stamp(path: Path | None) -> tuple[int, int, int]:
    """Returns inode, time and size of a file, one of which changes when the file does; zeros if
    there is no file."""
    if path is None:
        return (0, 0, 0)
    try:
        stat = path.stat()
    except OSError:
        return (0, 0, 0)
    return (stat.st_ino, stat.st_mtime_ns, stat.st_size)


def _digest(token: str) -> bytes:
    """The sha256 of a token, whatever characters a header brings."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
