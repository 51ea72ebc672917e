"""Calls of tools of any style as ours. Pure.

A service writes a call as it has learned to: in a fence of Markdown, in `<tool_call>`, behind some
words, with `arguments` where the device's model has `parameters`. Our grammars know one style. What
is called, and with which values, stays as it was written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, Literal, NamedTuple

from cloud_verifier.upstream.json_style import JsonStyle
from moa.api.tools import OfferedCalls, begun_length

_HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:parameters|arguments)"\s*:\s*(?=\{)')
"""A call up to its arguments, if these are an object."""
_FIRST_KEY = re.compile(r'\{\s*(?:"([^"]*)("?))?')
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", "function", "tool_calls", *_ARGUMENTS)
"""What a call in JSON may have, or what it is wrapped in, as OpenAI's own."""
_FENCE = "```"
_FENCED = ("", "json", "tool_call", "tool_calls")
"""What a fence around a call is said to hold."""
_LONGEST_FIRST_LINE = 16
_MARKS = ("<tool_call>", "[TOOL_CALLS]")
"""What models write before a call."""
_MOST_KEPT = 2**14
"""Characters in which a call is looked for, beside the arguments of one: what is longer is none."""
_MOST_BRACES = 16
"""Places at which one may begin."""


class _Call(NamedTuple):
    """A call that a service has written."""

    name: str
    arguments: str


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
        may_be = len(self._kept) <= _MOST_KEPT and not last
        if self._offered.instead == "call":
            found = self._find()
        else:
            place = _opening(self._kept)
            found = self._call_at(place) if place is not None and place >= 0 else ""
            if place is None or (place >= 0 and not _may_be_call(self._kept[place:])):
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
        if self._offered.parallel and len(self._kept) <= _MOST_KEPT:
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
        head = _HEAD.match(self._kept, place)
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
        calls = _calls_in(value, names)
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


def _opening(text: str) -> int | None:
    """Returns where the brace of a call stands that an answer begins with, behind marks and the
    first line of a fence; -1 while that cannot be told, None where it begins with something else."""
    rest = text.lstrip()
    while not rest.startswith("{"):
        mark = next((mark for mark in _MARKS if rest.startswith(mark)), "")
        if mark:
            rest = rest[len(mark) :].lstrip()
        elif rest.startswith(_FENCE):
            line, ends, behind = rest[len(_FENCE) :].partition("\n")
            if not ends:
                return -1 if len(line) <= _LONGEST_FIRST_LINE else None
            if line.strip().lower() not in _FENCED:
                return None
            rest = behind.lstrip()
        elif rest.startswith("[") and not _MARKS[1].startswith(rest[:2]):
            rest = rest[1:].lstrip()  # a list of calls
        elif any(one.startswith(rest) for one in (*_MARKS, _FENCE)):
            return -1
        else:
            return None
        if not rest:
            return -1
    return len(text) - len(rest)


def _may_be_call(text: str) -> bool:
    """Whether the JSON object that begins here may be a call, by its first key."""
    first = _FIRST_KEY.match(text)
    if first is None or first[1] is None:
        return first is not None and not text[first.end() :]
    if first[2]:
        return first[1] in _KEYS
    return any(key.startswith(first[1]) for key in _KEYS)


def _calls_in(value: Any, names: Collection[str]) -> list[_Call]:
    """Returns the calls that a JSON value is, or holds as OpenAI's API writes them; none if it is
    something else, or calls what may not be called."""
    if not isinstance(value, dict) or not value.keys() <= set(_KEYS):
        return []
    if isinstance(value.get("tool_calls"), list):
        return [call for one in value["tool_calls"] for call in _calls_in(one, names)]
    if isinstance(value.get("function"), dict):
        return _calls_in(value["function"], names)
    arguments: Any = next((value[key] for key in _ARGUMENTS if key in value), {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return []
    name = value.get("name")
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return []
    return [_Call(name, json.dumps(arguments, ensure_ascii=False))]
