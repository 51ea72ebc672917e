"""The parts of a text: thinking, answer, calls. Thinking is what is in `<think>` at its beginning,
or up to `</think>` where the prompt has opened it, as some templates do."""

from __future__ import annotations

from moa.api.present import Show
from moa.api.tools import ToolFormat, WrittenCall
from moa.text_stream import common_prefix

_OPEN = "<think>"
_CLOSE = "</think>"


def split(text: str, *, thinking: bool = False, last: bool = True) -> tuple[str, str]:
    """The reasoning and the answer. Of a text that still grows (not `last`), what may be the
    beginning of a tag is left out, so that both only grow with it."""
    if not thinking:
        begun = text.lstrip()
        if not begun.startswith(_OPEN):
            undecided = not last and _OPEN.startswith(begun)
            return "", "" if undecided else text
        text = begun[len(_OPEN) :].lstrip("\n")
    reasoning, closed, answer = text.partition(_CLOSE)
    if closed or last:
        return reasoning, answer.lstrip("\n")
    return reasoning[: len(reasoning) - _tail(reasoning)], ""


def within_thinking(prompt: str, begun: str) -> bool:
    """Whether the model begins by thinking: after this prompt, and this beginning of its answer."""
    opened = _OPEN if prompt.rstrip().endswith(_OPEN) else ""
    begun = (opened + begun).lstrip()
    return begun.startswith(_OPEN) and _CLOSE not in begun


def _tail(text: str) -> int:
    """Characters at the end with which the closing tag may begin."""
    return next((size for size in range(len(_CLOSE) - 1, 0, -1) if text.endswith(_CLOSE[:size])), 0)


class Separator:
    """One choice's text at its client, as reasoning, answer and calls."""

    def __init__(
        self, *, separate: bool = True, thinking: bool = False, form: ToolFormat | None = None
    ) -> None:
        """Without `separate` all of the text is the answer; `thinking`: the prompt has opened it;
        `form`: how the model writes calls, which are taken out of the answer."""
        self._separate = separate
        self._thinking = thinking
        self._form = form
        self.calls: list[WrittenCall] = []
        """The complete calls of the latest text."""
        self._text = ""
        self._verified = 0
        self.reasoning = self.answer = ""
        """What the client has of each."""

    def _split(self, text: str, *, last: bool) -> tuple[str, str]:
        reasoning, answer = (
            split(text, thinking=self._thinking, last=last) if self._separate else ("", text)
        )
        if self._form is not None:
            answer, self.calls, rest = self._form.split(answer, last=last)
            answer += rest if last else ""
        return reasoning, answer

    def take(self, show: Show | None, *, last: bool = False) -> tuple[Show, Show]:
        """The changes of reasoning and answer; the `last` one brings what was held back."""
        if show is not None:
            self._text = self._text[: show.cut] + show.text
            self._verified = show.verified
        sure = self._split(
            self._text[: self._verified], last=last and self._verified == len(self._text)
        )
        reasoning, answer = self._split(self._text, last=last)
        changes = _change(self.reasoning, reasoning, sure[0]), _change(self.answer, answer, sure[1])
        self.reasoning = reasoning
        self.answer = answer
        return changes


def _change(old: str, new: str, sure: str) -> Show:
    same = common_prefix(old, new)
    return Show(new[same:], len(sure), same if same < len(old) else None)
