"""Views of an answer in a pipe, or without output, and what they share with that on a terminal
(`live.py`).

A pipe cannot be corrected, so verified text is written at once and the provisional rest at the end.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn, Self

from edge_client.events import OVERDUE, AnswerSoFar, Done, Event, Link, Notice
from edge_client.screen.words import first_words
from moa.errors import MoaError
from moa.safe_text import safe_line, safe_text

ENDS = {
    "length": "cut here: it may be no longer (--max-new-tokens)",
    "context": "the context is full: the answer ends here",
    "guard": "the device stops here: more offline text would be unreliable (--max-offline-tokens)",
    "link": "the answer ends here: nobody could verify it in time (--settle-seconds)",
}
"""Reasons to stop that a reader could mistake for the answer's end."""
_QUOTED = 40
"""Characters by which a place in the answer is named."""


class View:
    """Shows the events of a turn, which runs while the view is entered as a context manager. This
    one shows nothing."""

    def take(self, event: Event) -> None:
        """Show an event."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class PipeView(View):
    """For files and pipes: each final text once. `remarks` go to standard error; without
    `says_unverified` none of them says of an answer that it was not verified, or refused: whoever
    shows it says so at its end. `trouble` is what the reader was told of the link before."""

    def __init__(
        self,
        *,
        remarks: bool = True,
        says_unverified: bool = True,
        who_verifies: str = "the verifier",
        trouble: str = "",
    ) -> None:
        self._says_unverified = says_unverified
        self._who_verifies = who_verifies
        self._trouble = trouble
        self._link: Link | None = None
        """What was said last of the link."""
        self._was_down = False
        """Whether the reader was told in this answer that the link is down."""
        self._is_limited = False
        """Whether the reader was told in this answer that his rate is used up."""
        self._remarks: list[str] | None = [] if remarks else None
        """Remarks that wait for the end of a line, because standard error may be the same terminal
        or file; None if there shall be none."""
        self._midline = False
        """Whether standard output has text without the end of its line."""
        self._answer = AnswerSoFar()
        self._written = 0
        """Tokens that were written."""
        self._broken: OSError | None = None
        """Why standard output takes no more text, if it does not."""

    def take(self, event: Event) -> None:
        """Write the text that the event has made final, or tell what it says of the answer."""
        self._answer.take(event)
        if isinstance(event, Link):
            self._link = event
        match event:
            case Notice():
                self._tell(event.message)
            case Link(state="refused") if not self._says_unverified:
                pass
            case Link(state="limited", detail=detail):
                self._tell_of_rate(detail)
            case Link(state="offline" | "refused"):
                self._was_down = True
                self._tell(trouble_in_words(event, self._trouble))
            case Done():
                self._finish(event)
            case _:
                self._write(self._answer.final)

    def _tell_of_rate(self, words: str) -> None:
        """Tell once in an answer that the reader's rate is used up."""
        if not self._is_limited:
            self._is_limited = True
            self._tell(words)

    def _finish(self, done: Done) -> None:
        """Write the rest of the answer, and say what a reader could not see from the text: what is
        not verified, and why it ended."""
        rest = done.text[len(self._answer.text_of()) :]  # known only at the end
        self._write(len(self._answer.texts), rest + "\n")
        if self._says_unverified and not done.verified and self._answer.texts:
            line = f"{how_much_verified(self._answer)} was verified by the target"
            link = self._answer.trouble
            if link is not None and link.state in ("connecting", *OVERDUE):
                line += f": {link.detail or f'{self._who_verifies} did not answer in time'}"
            self._tell(line)
        is_online = self._link is not None and self._link.state == "online"
        if self._was_down and is_online and done.verified:
            self._tell("online again: the target has verified all of this")
        if done.reason in ENDS:
            self._tell(ENDS[done.reason])
        if self._broken is not None:
            rescue(done.text, self._broken)

    def _write(self, stop: int, more: str = "") -> None:
        """Write the answer's tokens up to number `stop` that are not written yet, and the text
        `more` behind them."""
        if self._broken is not None:
            return
        try:
            text = self._answer.text_of(self._written, stop) + more
            # A file gets the text as it is; for a terminal, even a dumb one, control characters are
            # escaped.
            sys.stdout.write(safe_text(text) if sys.stdout.isatty() else text)
            sys.stdout.flush()
            if text:
                self._midline = not text.endswith("\n")
        except BrokenPipeError:
            raise  # the reader has closed the pipe: stop
        except OSError as error:
            # A full disk: the answer continues, and is printed on standard error at its end.
            self._broken = error
            self._midline = False
        self._written = max(self._written, stop)
        self._tell()

    def _tell(self, *remarks: str) -> None:
        """Print these remarks on standard error, and those that wait; they wait until the answer's
        line has ended."""
        if self._remarks is None:
            return
        self._remarks += remarks
        while self._remarks and not self._midline:
            print(f"edge-client: {safe_line(self._remarks.pop(0))}", file=sys.stderr)

    def __exit__(self, *_: Any) -> None:
        self._midline = False  # also where the answer was not finished
        self._tell()


def trouble_in_words(link: Link, told: str) -> str:
    """What to say of a link that is down; in two words if the reason is the one that was `told`
    before."""
    if link.state == "limited":
        return safe_line(link.detail)  # that is no state of the connection
    if not link.detail:
        return link.state
    if link.detail == told:
        # It may never have been online: "still offline" would be news.
        return "still not online" if link.state == "offline" else f"still {link.state}"
    return safe_line(f"{link.state}: {link.detail}")


def how_much_verified(answer: AnswerSoFar) -> str:
    """The beginning of a sentence about an answer that is not verified to its end: up to which place
    it is, where the rest is not."""
    verified = answer.verified_beginning
    if not verified:
        return "not all of this" if "verified" in answer.statuses else "nothing of this"
    rest = " ".join(answer.text_of(verified).split())
    if not rest or "verified" in answer.statuses[verified:]:
        return "not all of this"
    return f'only what stands before "{first_words(rest, _QUOTED)}"'


def rescue(text: str, trouble: OSError) -> NoReturn:
    """Print the answer on standard error, so that it is not lost although standard output failed,
    and raise an error that says so."""
    sys.stderr.write(f"{safe_text(text)}\n")
    # Closing standard output would only report the same error again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise MoaError(
        f"the answer could not be written: {trouble.strerror}",
        hint="it is above, on standard error",
    )


def refused(why: str, who_verifies: str) -> MoaError:
    """The error at the end of a command whose answer the verifier, or the upstream in its place,
    refused: a script must not take it for verified."""
    if not why.startswith(who_verifies):  # it may begin so: "the upstream has no model ..."
        why = f"{who_verifies} refuses: {why}"
    return MoaError(why, hint="this device alone: --offline")
