"""A consistency checker for recorded runs, in the style of Jepsen. Pure.

A run is a list of entries in the order in which a client learned of things. The rules:
* A session has one linear token log: what was verified at a position stays, and nothing is verified beyond a gap.
* Text shown provisionally is later confirmed, retracted or adopted, each token once.
* Acknowledged text is never lost: the final text is everything that was verified, confirmed or adopted, in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Opened:
    """A session's log begins with this prompt (again, with as much as the client knows, after a loss)."""

    session: str
    log: Sequence[int]


@dataclass(frozen=True, slots=True)
class Verified:
    """The verifier has said what stands at these positions."""

    session: str
    position: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Provisional:
    """The client shows text of its own from this position on."""

    session: str
    position: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Resolved:
    """What has become of provisional text, from its oldest unresolved token on."""

    session: str
    how: Literal["confirmed", "retracted", "adopted"]
    count: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The client says that this is the whole log."""

    session: str
    log: Sequence[int]


Entry = Opened | Verified | Provisional | Resolved | Finished


@dataclass
class _Session:
    log: list[int]
    shown: list[int] = field(default_factory=list)
    """Provisional tokens behind the log."""


def violations(entries: Iterable[Entry], truth: dict[str, Sequence[int]] | None = None) -> list[str]:
    """What is wrong with a run; `truth` are the logs as the target alone would have written them, where known."""
    found: list[str] = []
    sessions: dict[str, _Session] = {}
    finished: set[str] = set()
    for number, entry in enumerate(entries):
        where = f"entry {number}, session {entry.session}: "
        known = sessions.get(entry.session)
        if isinstance(entry, Opened):
            if known is None:
                sessions[entry.session] = _Session(list(entry.log))
            elif list(entry.log) != known.log[: len(entry.log)]:
                found.append(f"{where}opened again with another log")
            continue
        if known is None:
            found.append(f"{where}not opened")
            continue
        found += [where + problem for problem in _apply(known, entry)]
        if isinstance(entry, Finished):
            finished.add(entry.session)
    for name, session in sessions.items():
        expected = (truth or {}).get(name)
        if expected is not None and session.log != list(expected[: len(session.log)]):
            found.append(f"session {name}: not the target's text")
        if session.shown and name in finished:
            found.append(f"session {name}: {len(session.shown)} provisional tokens never resolved")
    return found


def _apply(session: _Session, entry: Verified | Provisional | Resolved | Finished) -> list[str]:
    match entry:
        case Verified(_, position, tokens):
            if position > len(session.log):
                return [f"a gap: verified at {position}, the log has {len(session.log)}"]
            known = session.log[position : position + len(tokens)]
            if known != list(tokens[: len(known)]):
                return [f"verified tokens changed at {position}"]
            session.log += tokens[len(known) :]
        case Provisional(_, position, tokens):
            if position != len(session.log) + len(session.shown):
                return [f"provisional at {position}, the text has {len(session.log) + len(session.shown)} tokens"]
            session.shown += tokens
        case Resolved(_, how, count):
            if count > len(session.shown):
                return [f"{how} {count} tokens, but only {len(session.shown)} are provisional"]
            settled, session.shown = session.shown[:count], session.shown[count:]
            if how != "retracted":
                session.log += settled
            elif session.shown:
                return ["retracted in the middle: what follows would stand behind a gap"]
        case Finished(_, log):
            if list(log) != session.log:
                return [f"the text at the end is not what was acknowledged ({len(log)} and {len(session.log)} tokens)"]
    return []
