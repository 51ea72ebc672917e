"""Calls of tools of any style as ours. Pure.

A service writes a call as it has learned to: in a fence of Markdown, in `<tool_call>`, behind some
words, with `arguments` where the device's model has `parameters`. Our grammars know one style. What
is called, and with which values, stays as it was written.
"""

from __future__ import annotations

import json
import re
from typing import Literal

from cloud_verifier.upstream.json_style import JsonStyle
from moa.api.calls import CALL_HEAD, MOST_KEPT, begun_length, calls_in, may_be_call, opening
from moa.api.tools import OfferedCalls

_MOST_BRACES = 16
"""Places at which one may begin."""


class CallStyle:
    """Rewrites the calls of an answer that comes in pieces."""

    def __init__(self, offered: OfferedCalls) -> None:
        """`offered`: what may be called, and how the device's model would write it."""
        self._offered = offered
        self._form = offered.form
        self._mark = offered.form.before.strip()
        self._state: Literal["begins", "free", "arguments", "behind", "done"] = "begins"
        """Where the answer is: a call may begin here, it is text, it is within the arguments of a
        call, behind a call, or behind the last one."""
        self._kept = ""
        """The end of the answer that nothing was decided about yet."""
        self._written = 0
        """Calls so far."""
        self._json = JsonStyle()
        """The style of a JSON answer, or of a call's arguments."""
        self._end = _EndOfObject()

    def add(self, text: str) -> str:
        """Take in a piece of the answer, and return what is certain of it, in our style."""
        self._kept += text
        return self._steps(last=False)

    def rest(self) -> str:
        """Return what was kept back: the answer has ended."""
        rest = self._steps(last=True)
        return rest + self._form.closes if self._state == "behind" else rest

    def _steps(self, *, last: bool) -> str:
        """Go on for as long as something can be decided, and return what comes out."""
        out = ""
        before = None
        while self._kept and before != (self._state, self._kept):
            before = (self._state, self._kept)
            match self._state:
                case "begins":
                    out += self._begin(last=last)
                case "free":
                    out += self._free(last=last)
                case "arguments":
                    out += self._argue()
                case "behind":
                    out += self._go_on()
                case "done":
                    self._kept = ""
        return out

    def _begin(self, *, last: bool) -> str:
        """Decide whether a call begins here. Where nothing but calls is allowed, what stands before
        the first one is left out."""
        may_be = len(self._kept) <= MOST_KEPT and not last
        if self._offered.instead == "call":
            found = self._find()
        else:
            place, _ = opening(self._kept)
            found = self._call_at(place) if place is not None and place >= 0 else ""
            names = self._offered.names
            if place is None or (place >= 0 and not may_be_call(self._kept, place, names)):
                may_be = False
        if found or may_be:
            return found
        self._state = "free"
        if not self._mark or not self._kept.startswith(self._mark):
            return ""
        self._kept = self._kept[len(self._mark) :]  # what stands behind it is none
        return self._mark

    def _free(self, *, last: bool) -> str:
        """Return text as it is, up to a mark of the device's model, behind which a call may stand."""
        text = self._kept
        if self._offered.instead == "json":
            self._kept = ""
            return self._json.add(text)
        if self._mark and self._mark in text:
            text = text[: text.index(self._mark)]
            self._state = "begins"
        elif self._mark and not last:
            text = text[: len(text) - begun_length(self._mark, text)]
        self._kept = self._kept[len(text) :]
        return text

    def _argue(self) -> str:
        """Return the arguments as they come, and the end of the call behind them."""
        length, has_ended = self._end.find(self._kept)
        out = self._json.add(self._kept[:length])
        self._kept = self._kept[length:]
        return out + self._close() if has_ended else out

    def _go_on(self) -> str:
        """Look for another call behind one. What else stands there is left out."""
        if self._offered.parallel and len(self._kept) <= MOST_KEPT:
            return self._find()
        self._state = "done"
        return self._form.closes

    def _find(self) -> str:
        """Return the next call in the kept text, wherever it begins; an empty text where there is
        none yet."""
        for brace in list(re.finditer(r"\{", self._kept))[:_MOST_BRACES]:
            found = self._call_at(brace.start())
            if found:
                return found
        return ""

    def _call_at(self, place: int) -> str:
        """Return the call that begins at this place of the kept text, or its beginning up to the
        arguments; an empty text where none does, or not enough of it is there."""
        names = self._offered.names
        head = CALL_HEAD.match(self._kept, place)
        if head is not None and head[1] in names:
            self._kept = self._kept[head.end() :]
            begun = self._open(head[1])
            self._state = "arguments"
            self._json = JsonStyle(begun)
            self._end = _EndOfObject()
            return begun
        try:
            value, end = json.JSONDecoder().raw_decode(self._kept, place)
        except (ValueError, RecursionError):
            return ""
        calls = calls_in(value, names)
        if not calls:
            return ""
        self._kept = self._kept[end:]
        if not self._offered.parallel:
            calls = calls[:1]
        return "".join(self._open(call.name) + call.arguments + self._close() for call in calls)

    def _open(self, name: str) -> str:
        """Return the beginning of a call, up to its arguments."""
        form = self._form
        first = form.between if self._written else form.opens
        self._written += 1
        return f'{first}{form.before}{{"name": {json.dumps(name)}, "{form.key}": '

    def _close(self) -> str:
        """Return the end of a call, behind its arguments."""
        self._state = "behind"
        return f"}}{self._form.after}"


class _EndOfObject:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = False
        self._escaped = False

    def find(self, text: str) -> tuple[int, bool]:
        """Take in a piece, which begins with the object or within it. Returns how many characters
        of it belong to the object, and whether that ends there."""
        for place, character in enumerate(text):
            if self._in_text:
                self._in_text = self._escaped or character != '"'
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._in_text = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1, True
        return len(text), False
