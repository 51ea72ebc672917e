"""`cloud-verifier token`: make, list and revoke bearer tokens. A running verifier notices within
two seconds."""

from __future__ import annotations

import argparse
import contextlib
import errno
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from cloud_verifier.serving.auth import new_token, read_entries, token_line
from moa.errors import UsageError
from moa.process.files import Changed, appended, digest_of, replace_known
from moa.safe_text import safe_line

_NAMED = 5
"""Names that a line lists at most."""
_SHOWN = 12
"""Hexadecimal digits of a hash that identify a token in a list."""
_IN_ITS_PLACE = "nothing was changed: do it where the mounted folder comes from"
_NO_ROOM = "nothing was changed: make room on that disk first"
_WHAT_TO_DO = {
    errno.EROFS: _IN_ITS_PLACE,
    errno.EBUSY: "nothing was changed: a file that is mounted by itself cannot be replaced; do it"
    " outside of the container, and mount the file's folder",
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
}
_ASK_ANOTHER = (
    "nothing was changed: do it as root, or as the file's owner where that one may write"
    " into its folder"
)


def add(token: argparse.ArgumentParser) -> None:
    """Add the subcommands that make, list and revoke tokens, with their flags."""
    commands = token.add_subparsers(required=True, metavar="COMMAND")
    new = commands.add_parser("new", help="make tokens", description=_new.__doc__)
    new.add_argument(
        "--name",
        action="append",
        help="its principal (default: edge); given again: one more token",
    )
    new.add_argument(
        "--names-from",
        type=Path,
        metavar="FILE",
        help="a token for each line of this file, a name; one that the file of --append has, or"
        " that an earlier line names, gets no other",
    )
    new.add_argument("--append", type=Path, metavar="FILE", help="add the lines to this token file")
    new.set_defaults(run=_new)
    shown = commands.add_parser("list", help="list the tokens of a file", description=_list.__doc__)
    shown.add_argument("file", type=Path, metavar="FILE", help="the token file")
    shown.set_defaults(run=_list)
    revoke = commands.add_parser(
        "revoke", help="revoke tokens in a file", description=_revoke.__doc__
    )
    revoke.add_argument("file", type=Path, metavar="FILE", help="the token file")
    revoke.add_argument(
        "which",
        nargs="+",
        metavar="NAME_OR_HASH",
        help="a principal, or a token as `token list` shows it",
    )
    revoke.set_defaults(run=_revoke)


def _new(arguments: argparse.Namespace) -> int:
    """Make a bearer token, or one for each name. They are shown once; the token file keeps only
    their hashes."""
    names = _names(arguments)
    if not names:
        return 0
    tokens = [(name, new_token()) for name in names]
    lines = [token_line(name, token) for name, token in tokens]
    if arguments.append is None:
        for (_, token), line in zip(tokens, lines, strict=True):
            print(f"token: {token}\nline for the token file: {line}")
        return 0
    if len(tokens) == 1 and arguments.names_from is None:
        shown = tokens[0][1]
    else:
        shown = "\n".join(f"{name}  {token}" for name, token in tokens)
    try:
        # Printed last: one that the file could not take would open nothing.
        with _refusing(arguments.append), appended(arguments.append, "\n".join(lines)):
            _print_tokens(shown)
    except IsADirectoryError:
        raise UsageError(f"{arguments.append} is a folder, not a token file") from None
    except FileNotFoundError:
        raise UsageError(
            f"cannot make the token file {arguments.append}: there is no such folder"
        ) from None
    return 0


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """A token file that this user may not change, or not so that its readers can read it still, is
    one line that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, *_WHAT_TO_DO):
            raise
        raise UsageError(
            f"cannot change the token file {path}: {error.strerror}",
            hint=_WHAT_TO_DO.get(error.errno, _ASK_ANOTHER),
        ) from None


def _names(arguments: argparse.Namespace) -> list[str]:
    """Whose tokens are to be made. A name from a file that has a token already gets no other: the file
    of a team is given again when somebody has joined. Nor does one that it names twice."""
    names = list(arguments.name or ())
    known = set()
    append = arguments.append
    if append is not None and append.is_file() and append.stat().st_size:
        # A verifier takes nothing of an invalid file
        known = {name for name, _ in read_entries(append)}
    if arguments.names_from is not None:
        try:
            text = arguments.names_from.read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", None) or "it is no text"
            raise UsageError(f"cannot read {arguments.names_from}: {why}") from None
        listed = [line.strip() for line in text.splitlines() if line.strip()]
        if not listed and not names:
            raise UsageError(f"there is no name in {arguments.names_from}")
        people = Counter(listed)
        if left_out := [name for name in people if name in known]:
            have = "has a token" if len(left_out) == 1 else "have tokens"
            _tell_left_out(left_out, f"{have} in {append} already")
        if repeated := [name for name in people if people[name] > 1 and name not in known]:
            stand = "stands" if len(repeated) == 1 else "stand"
            _tell_left_out(repeated, f"{stand} in {arguments.names_from} more than once")
        names += [name for name in people if name not in known]
        return names
    return names or ["edge"]


def _tell_left_out(names: list[str], why: str) -> None:
    """Say which names get no token, or no second one, and how one gets another."""
    some = ", ".join(safe_line(name) for name in names[:_NAMED])
    if len(names) > _NAMED:
        some += f" and {len(names) - _NAMED} more"
    print(f"{some} {why}: left out (`--name NAME` makes one more)", file=sys.stderr)


def _print_tokens(shown: str) -> None:
    """Print tokens, now: where that fails nobody has seen them, and they must not open anything."""
    try:
        print(shown, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(
            f"standard output cannot be written: {error.strerror}", hint="no token was added"
        ) from None


def _list(arguments: argparse.Namespace) -> int:
    """Print the principal and the beginning of the hash of each token."""
    entries = read_entries(arguments.file)
    if sys.stdout.isatty():  # a script reads lines of tokens alone
        width = max(len(name) for name in ("NAME", *(name for name, _ in entries)))
        print(f"{'NAME':{width}}  HASH, ITS BEGINNING")
    else:
        width = 0
    for name, digest in entries:
        print(f"{name:{width}}  {digest.hex()[:_SHOWN]}")
    return 0


def _revoke(arguments: argparse.Namespace) -> int:
    """Revoke all tokens of a principal, or one token by the beginning of its hash; several at once
    or, where there is no such token of one of them, none.

    Verifiers that run end what was opened with it within about two seconds, and refuse it from then
    on; devices keep their text and go on alone.
    """
    with _refusing(arguments.file):
        while True:  # until nobody has changed the file between reading and replacing it
            read_entries(arguments.file)  # an invalid file is not rewritten
            content = arguments.file.read_bytes()
            kept, revoked = content.decode(), 0
            for which in dict.fromkeys(arguments.which):
                kept, of_this = _without(kept, which)
                # It may have gone with another: a name and the hash of its token.
                if of_this == 0 and _without(content.decode(), which)[1] == 0:
                    raise UsageError(
                        f"no token of {which!r} in {arguments.file}",
                        hint="nothing was changed: see `cloud-verifier token list`",
                    )
                revoked += of_this
            with contextlib.suppress(Changed):
                replace_known(arguments.file, kept.encode(), digest_of(content))
                break
    unit = "token" if revoked == 1 else "tokens"
    print(f"{revoked} {unit} revoked", file=sys.stderr)
    return 0


def _without(text: str, which: str) -> tuple[str, int]:
    """The text of a token file without the tokens of a principal, or without one token; and how many
    these are."""
    kept = []
    revoked = 0
    for line in text.splitlines(keepends=True):
        words = line.split("#")[0].split()
        if words and (words[0] == which or _begins_with(words[1], which)):
            revoked += 1
        else:
            kept.append(line)
    return "".join(kept), revoked


def _begins_with(entry: str, beginning: str) -> bool:
    """Whether a hash of the token file begins with these digits; too few digits match none."""
    digits = beginning.removeprefix("sha256:")
    return len(beginning) >= _SHOWN and entry.removeprefix("sha256:").startswith(digits)
