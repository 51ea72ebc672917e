"""`cloud-verifier token`: make, list and revoke bearer tokens. A running verifier notices within
two seconds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cloud_verifier.serving.auth import new_token, read_entries, token_line
from moa.errors import UsageError
from moa.process.files import appended, write_whole

_SHOWN = 12
"""Hexadecimal digits of a hash that identify a token in a list."""


def add(token: argparse.ArgumentParser) -> None:
    """Add the subcommands that make, list and revoke tokens, with their flags."""
    commands = token.add_subparsers(required=True, metavar="COMMAND")
    new = commands.add_parser("new", help="make a token", description=_new.__doc__)
    new.add_argument("--name", default="edge", help="its principal (default: %(default)s)")
    new.add_argument("--append", type=Path, metavar="FILE", help="add the line to this token file")
    new.set_defaults(run=_new)
    shown = commands.add_parser("list", help="list the tokens of a file", description=_list.__doc__)
    shown.add_argument("file", type=Path, metavar="FILE", help="the token file")
    shown.set_defaults(run=_list)
    revoke = commands.add_parser(
        "revoke", help="revoke tokens in a file", description=_revoke.__doc__
    )
    revoke.add_argument("file", type=Path, metavar="FILE", help="the token file")
    revoke.add_argument(
        "which", metavar="NAME_OR_HASH", help="a principal, or a token as `token list` shows it"
    )
    revoke.set_defaults(run=_revoke)


def _new(arguments: argparse.Namespace) -> int:
    """Make a bearer token. It is shown once; the token file keeps only its hash."""
    token = new_token()
    line = token_line(arguments.name, token)
    if arguments.append is None:
        print(f"token: {token}\nline for the token file: {line}")
        return 0
    if arguments.append.is_file() and arguments.append.stat().st_size:
        read_entries(arguments.append)  # a verifier takes nothing of an invalid file
    try:
        # Printed last: one that the file could not take would open nothing.
        with appended(arguments.append, line):
            _print_token(token)
    except IsADirectoryError:
        raise UsageError(f"{arguments.append} is a folder, not a token file") from None
    except FileNotFoundError:
        raise UsageError(
            f"cannot make the token file {arguments.append}: there is no such folder"
        ) from None
    return 0


def _print_token(token: str) -> None:
    """Print a token, now: where that fails nobody has seen it, and it must not open anything."""
    try:
        print(token, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(
            f"standard output cannot be written: {error.strerror}", hint="no token was added"
        ) from None


def _list(arguments: argparse.Namespace) -> int:
    """Print the principal and the beginning of the hash of each token."""
    for name, digest in read_entries(arguments.file):
        print(f"{name}  {digest.hex()[:_SHOWN]}")
    return 0


def _revoke(arguments: argparse.Namespace) -> int:
    """Revoke all tokens of a principal, or one token by the beginning of its hash.

    Verifiers that run end what was opened with it within about two seconds, and refuse it from then
    on; devices keep their text and go on alone.
    """
    read_entries(arguments.file)  # an invalid file is not rewritten
    kept = []
    revoked = 0
    for line in arguments.file.read_text(encoding="utf-8").splitlines(keepends=True):
        words = line.split("#")[0].split()
        if words and (words[0] == arguments.which or _begins_with(words[1], arguments.which)):
            revoked += 1
        else:
            kept.append(line)
    if revoked == 0:
        raise UsageError(
            f"no token of {arguments.which!r} in {arguments.file}",
            hint="see `cloud-verifier token list`",
        )
    write_whole(arguments.file, "".join(kept).encode())
    unit = "token" if revoked == 1 else "tokens"
    print(f"{revoked} {unit} revoked", file=sys.stderr)
    return 0


def _begins_with(entry: str, beginning: str) -> bool:
    """Whether a hash of the token file begins with these digits; too few digits match none."""
    digits = beginning.removeprefix("sha256:")
    return len(beginning) >= _SHOWN and entry.removeprefix("sha256:").startswith(digits)
