"""Calls of tools in what a model has written, in whichever style: behind a mark, in a fence of
Markdown, or bare. Pure.

A grammar makes a model write calls as its chat template does (`tools.py`), but only where it must
call, or has begun to. Left free, many models write the same object in a fence instead. Only a call
of a function that was offered counts, with arguments as a `strict` one promises them: any other
JSON, and any other fence, is text.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from moa.grammar.fitting import fits

MARKS = ("<tool_call>", "[TOOL_CALLS]")
"""What models write before a call."""
CALL_HEAD = re.compile(
    r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:parameters|arguments)"\s*:\s*(?=\{)'
)
"""A call up to its arguments, if these are an object."""
MOST_KEPT = 2**14
"""Characters in which a call is looked for, beside the arguments of one: what is longer is none."""
_ARGUMENTS = ("arguments", "parameters")
_HOLDERS = ("function", "tool_calls")
_KEYS = ("name", "type", "id", *_HOLDERS, *_ARGUMENTS)
"""What a call in JSON may have, or what it is wrapped in, as OpenAI's own."""
_FENCE = "```"
_FENCED = ("", "json", "tool_call", "tool_calls")
"""What a fence around a call is said to hold."""
_CLOSING = "</tool_call>"
_BETWEEN = " \t\r\n,;]"
"""What stands between calls, and behind the last one."""
_LONGEST_CUT = 16
"""Characters of a JSON literal, number or escape, of which the end may be missing."""
_KEY = re.compile(r'\s*"([^"\\]*)("?)')
_COLON = re.compile(r"\s*:\s*")
_TEXT = re.compile(r'"([^"\\]*)("?)')
_NEXT = re.compile(r"\s*,")
_WAITS = -1
"""It cannot be told yet."""
_TEXTS = 2
"""An answer is split twice each time: as far as it is verified, and all of it."""


class WrittenCall(NamedTuple):
    """A call that the model has written."""

    name: str
    arguments: str


class _State(NamedTuple):
    """How far a text is taken apart."""

    place: int = 0
    """Where it goes on."""
    said: str = ""
    """The text without the calls, up to there."""
    calls: tuple[WrittenCall, ...] = ()
    may_begin: bool = True
    """Whether a call may begin here without a mark: at the beginning, and behind another."""
    in_fence: bool = False

    def saying(self, words: str, *, in_fence: bool) -> _State:
        """Returns the state behind these words, which are no call."""
        return self._replace(
            place=self.place + len(words),
            said=self.said + words,
            may_begin=False,
            in_fence=in_fence,
        )


class CallReader:
    """Finds the calls in what a model writes. It remembers how far it has come in a text, for what
    is text or a call once stays so, whatever follows."""

    def __init__(
        self,
        names: Iterable[str],
        *,
        parallel: bool = True,
        strict: Mapping[str, Any] | None = None,
    ) -> None:
        """`names` are those of the functions that may be called. Without `parallel` only the
        first call counts: others behind it are left out, for the model can ask for them again.
        `strict` has the schemas, by name, without which the arguments of a function are no call."""
        self._names = frozenset(names)
        self._strict = {} if strict is None else strict
        self._parallel = parallel
        self._known: deque[tuple[str, _State]] = deque(maxlen=_TEXTS)
        """The latest texts, and how far each is taken apart."""

    def split(self, text: str, *, last: bool = True) -> tuple[str, list[WrittenCall]]:
        """Split a text into what is said and the complete calls. One may stand at the beginning,
        behind another, or in a mark or a fence anywhere. Of a text that still grows (not `last`),
        an end that may become a call is left out: it is not said yet, and no call yet."""
        states = [state for begun, state in self._known if text.startswith(begun)]
        following: _State | None = max(states, default=_State())
        while following is not None:
            state = following
            following = self._next(text, state, last=last)
        if not last:
            self._known.append((text, state))
        return state.said, list(state.calls)

    def _next(self, text: str, state: _State, *, last: bool) -> _State | None:
        """Returns the state behind the next thing that can be decided; None if nothing can be."""
        if state.place == len(text):
            return None
        if not state.may_begin:
            return self._next_in_words(text, state, last=last)
        if state.calls:
            return self._next_behind_call(text, state, last=last)
        return self._decided(text, state, last=last)

    def _next_in_words(self, text: str, state: _State, *, last: bool) -> _State | None:
        """The same where a call needs a mark, or a fence that is opened in a line of its own: first
        what is said up to there, then what stands there."""
        mark, start = _next_mark(text, state.place)
        if not mark and not last:
            start -= max(begun_length(one, text) for one in (*MARKS, _FENCE))
        if start > state.place:
            return state.saying(text[state.place : start], in_fence=state.in_fence)
        if not mark:
            return None
        begins_line = _begins_line(text, state.place)
        if mark == _FENCE and (state.in_fence or not begins_line):
            return state.saying(mark, in_fence=state.in_fence and not begins_line)
        return self._decided(text, state, mark, last=last)

    def _next_behind_call(self, text: str, state: _State, *, last: bool) -> _State | None:
        """The same behind a call and what closes it, where another one may begin."""
        place, in_fence = _behind(text, state.place, in_fence=state.in_fence)
        if not last and _may_close(text[place:], in_fence=in_fence):
            return None
        return self._decided(text, state._replace(place=place, in_fence=in_fence), last=last)

    def _decided(self, text: str, state: _State, mark: str = "", *, last: bool) -> _State | None:
        """Returns the state behind the calls that stand here, or behind this `mark` as something
        said, if there are none; None while that cannot be told."""
        behind_in_fence = state.may_begin and state.in_fence
        found = self._call_at(text, state.place, behind_in_fence=behind_in_fence, last=last)
        if found is None:
            return state.saying(mark, in_fence=state.in_fence or mark == _FENCE)
        if found.end == _WAITS:
            return None
        calls = state.calls + found.calls
        if not self._parallel:
            calls = calls[:1]
        return _State(found.end, state.said, calls, True, found.in_fence)

    def _call_at(
        self, text: str, place: int, *, behind_in_fence: bool, last: bool
    ) -> _Found | None:
        """Returns the calls of the object that stands here, behind marks and the first line of a
        fence, or in the fence of the call before; None if it is none."""
        brace, in_fence = opening(text, place)
        in_fence = in_fence or behind_in_fence
        undecided = None if last else _Found((), _WAITS, in_fence)
        if brace is None:
            return None
        if brace == _WAITS:
            return undecided
        if not may_be_call(text, brace, self._names):
            return None
        head = CALL_HEAD.match(text, brace)
        most = len(text) if head is not None else MOST_KEPT
        try:
            value, end = _DECODER.raw_decode(text, brace)
        except json.JSONDecodeError as error:
            is_open = error.msg.startswith("Unterminated string")
            is_cut = is_open or len(text) - error.pos <= _LONGEST_CUT
            return undecided if is_cut and len(text) - brace <= most else None
        except (ValueError, RecursionError):
            return None
        calls = calls_in(value, self._names, demands_arguments=True)
        if not calls or end - brace > most:
            return None
        if not all(self._keeps_promise(call, in_fence=in_fence) for call in calls):
            return None
        return _Found(tuple(calls), end, in_fence)

    def _keeps_promise(self, call: WrittenCall, *, in_fence: bool) -> bool:
        """Whether the arguments fit the schema of a function that is `strict`. In a fence no
        grammar has held them to it: there a schema that is not understood is not kept, either."""
        if call.name not in self._strict:
            return True
        does_fit = fits(json.loads(call.arguments), self._strict[call.name])
        return does_fit is True or (does_fit is None and not in_fence)


class _Found(NamedTuple):
    """Calls in a text."""

    calls: tuple[WrittenCall, ...]
    end: int
    """Where the object ends that holds them; `_WAITS` while that cannot be told."""
    in_fence: bool
    """Whether it stands in a fence."""


_DECODER = json.JSONDecoder(strict=False)  # a line break in a text is a model's usual mistake


def opening(text: str, place: int = 0) -> tuple[int | None, bool]:
    """Returns where the brace of a call stands that begins here, behind marks and the first line of
    a fence; -1 while that cannot be told, None where something else begins. And whether it stands
    in a fence."""
    in_fence = False
    place = _skip_space(text, place)
    while not text.startswith("{", place):
        mark = next((mark for mark in MARKS if text.startswith(mark, place)), "")
        if mark:
            place += len(mark)
        elif text.startswith(_FENCE, place):
            line, ends, _ = text[place + len(_FENCE) :].partition("\n")
            kind = line.strip().lower()
            if not ends:
                may_become_one = any(one.startswith(kind) for one in _FENCED)
                return _WAITS if may_become_one else None, True
            if kind not in _FENCED:
                return None, True
            in_fence = True
            place += len(_FENCE) + len(line) + 1
        elif text.startswith("[", place) and not text.startswith(MARKS[1][:2], place):
            place += 1  # a list of calls
        elif any(one.startswith(text[place:]) for one in (*MARKS, _FENCE)):
            return _WAITS, in_fence
        else:
            return None, in_fence
        place = _skip_space(text, place)
    return place, in_fence


def may_be_call(text: str, brace: int, names: Collection[str]) -> bool:
    """Whether the JSON object that begins at this brace may be a call of one of these functions, by
    its keys up to the first value that is more than a text. What is none never becomes one."""
    place = brace + 1
    while True:
        key = _KEY.match(text, place)
        if key is None:
            return not text[place:].strip()
        if not key[2]:
            return key.end() == len(text) and any(one.startswith(key[1]) for one in _KEYS)
        if key[1] not in _KEYS:
            return False
        colon = _COLON.match(text, key.end())
        if colon is None:
            return not text[key.end() :].strip()
        if colon.end() == len(text):
            return True
        if text[colon.end()] in "{[":
            return key[1] in (*_ARGUMENTS, *_HOLDERS)
        value = _TEXT.match(text, colon.end())
        if value is None or key[1] in _HOLDERS:
            return False
        if key[1] == "name":
            if not value[2]:
                is_cut = value.end() == len(text)
                return is_cut and any(name.startswith(value[1]) for name in names)
            if value[1] not in names:
                return False
        elif not value[2]:
            return True  # a text with quotes in it, or one that goes on
        comma = _NEXT.match(text, value.end())
        if comma is None:
            return text[value.end() :].strip()[:1] in ("", "}")
        place = comma.end()


def calls_in(
    value: Any, names: Collection[str], *, demands_arguments: bool = False
) -> list[WrittenCall]:
    """Returns the calls that a JSON value is, or holds as OpenAI's API writes them; none if it is
    something else, or calls what may not be called. A call without arguments counts as one with
    none, unless they are demanded."""
    if not isinstance(value, dict) or not value.keys() <= set(_KEYS):
        return []
    held: Any = None
    if isinstance(value.get("tool_calls"), list):
        held = value["tool_calls"]
    elif isinstance(value.get("function"), dict):
        held = [value["function"]]
    if held is not None:
        return [
            call
            for one in held
            for call in calls_in(one, names, demands_arguments=demands_arguments)
        ]
    keys = [key for key in _ARGUMENTS if key in value]
    if demands_arguments and not keys:
        return []
    arguments: Any = value[keys[0]] if keys else {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return []
    name = value.get("name")
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        return []
    return [WrittenCall(name, json.dumps(arguments, ensure_ascii=False))]


def begun_length(mark: str, text: str) -> int:
    """Length of the end of `text` that may be the beginning of a `mark` which is to come."""
    for length in range(len(mark) - 1, 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


# ---- parts


def _next_mark(text: str, place: int) -> tuple[str, int]:
    """Returns the next mark or fence in a text, and where it stands; an empty one if there is none
    any more."""
    found = [(text.find(mark, place), mark) for mark in (*MARKS, _FENCE)]
    start, mark = min(((at, mark) for at, mark in found if at >= 0), default=(len(text), ""))
    return mark, start


def _begins_line(text: str, place: int) -> bool:
    """Whether nothing but space stands before this place in its line."""
    return not text[text.rfind("\n", 0, place) + 1 : place].strip()


def _skip_space(text: str, place: int) -> int:
    """Returns where the next character stands that is no space."""
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _behind(text: str, place: int, *, in_fence: bool) -> tuple[int, bool]:
    """Returns where it goes on behind a call and what closes it, and whether its fence is still
    open there."""
    while True:
        while place < len(text) and text[place] in _BETWEEN:
            place += 1
        if text.startswith(_CLOSING, place):
            place += len(_CLOSING)
        elif in_fence and text.startswith(_FENCE, place):
            in_fence = False
            place += len(_FENCE)
        else:
            return place, in_fence


def _may_close(text: str, *, in_fence: bool) -> bool:
    """Whether what stands behind a call may become what closes it."""
    closes = (_CLOSING, _FENCE) if in_fence else (_CLOSING,)
    return bool(text) and any(one.startswith(text) for one in closes)
