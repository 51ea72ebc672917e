"""The parts of a text: thinking, answer, calls. Thinking is what is in `<think>` at its beginning,
or up to `</think>` where the prompt has opened it, as some templates do."""

from __future__ import annotations

from moa.api.calls import CallReader, WrittenCall, begun_length
from moa.api.present import Show
from moa.text_stream import common_prefix

_OPEN = "<think>"
_CLOSE = "</think>"


def split(text: str, *, thinking: bool = False, last: bool = True) -> tuple[str, str]:
    """Split a model's text into its reasoning, what is in `<think>` at the beginning, and its
    answer. With `thinking` the prompt has opened `<think>` already. Of a text that still grows (not
    `last`), what may be the beginning of a tag is left out, so that both parts only grow with
    it."""
    if not thinking:
        begun = text.lstrip()
        if not begun.startswith(_OPEN):
            may_still_open = not last and _OPEN.startswith(begun)
            if may_still_open:
                return "", ""
            return "", text
        text = begun[len(_OPEN) :].lstrip("\n")
    reasoning, closed, answer = text.partition(_CLOSE)
    if closed or last:
        return reasoning, answer.lstrip("\n")
    may_close = begun_length(_CLOSE, reasoning)
    return reasoning[: len(reasoning) - may_close], ""


def within_thinking(prompt: str, begun: str) -> bool:
    """Whether the model begins by thinking: after this prompt, and this beginning of its answer."""
    opened = _OPEN if prompt.rstrip().endswith(_OPEN) else ""
    begun = (opened + begun).lstrip()
    return begun.startswith(_OPEN) and _CLOSE not in begun


class Separator:
    """One choice's text at its client, as reasoning, answer and calls."""

    def __init__(
        self, *, separate: bool = True, thinking: bool = False, reader: CallReader | None = None
    ) -> None:
        """Begin with an empty text. Without `separate` all of the text is the answer; with
        `thinking` it begins within the reasoning, which the prompt has opened. The `reader` finds
        calls of tools, which are taken out of the answer; None: it may have none."""
        self._separate = separate
        self._thinking = thinking
        self._reader = reader
        self.calls: list[WrittenCall] = []
        """The complete calls of the latest text."""
        self._text = ""
        """All of the text."""
        self._verified = 0
        """How many characters of it will not be withdrawn."""
        self.reasoning = ""
        """What the client has of the reasoning."""
        self.answer = ""
        """What the client has of the answer."""

    def _split(self, text: str, *, last: bool) -> tuple[str, str]:
        """The reasoning and the answer of a text; the calls in it are left in `calls`. Of a text
        that still grows (not `last`), what may become a tag or a call is held back."""
        reasoning = ""
        answer = text
        if self._separate:
            reasoning, answer = split(text, thinking=self._thinking, last=last)
        if self._reader is not None:
            answer, self.calls = self._reader.split(answer, last=last)
        return reasoning, answer

    def take(self, show: Show | None, *, last: bool = False) -> tuple[Show, Show]:
        """Take a change of the whole text, and return the changes that it makes to the client's
        reasoning and to its answer. The `last` one brings what was held back because it could have
        become a tag or a call."""
        if show is not None:
            self._text = self._text[: show.cut] + show.text
            self._verified = show.verified
        all_verified = self._verified == len(self._text)
        verified = ("", "")
        if not all_verified:
            verified = self._split(self._text[: self._verified], last=False)
        whole = self._split(self._text, last=last)  # last, for it leaves its `calls`
        if all_verified:
            verified = whole
        reasoning, answer = whole
        reasoning_change = _change(self.reasoning, reasoning, len(verified[0]))
        answer_change = _change(self.answer, answer, len(verified[1]))
        self.reasoning = reasoning
        self.answer = answer
        return reasoning_change, answer_change


def _change(old: str, new: str, verified: int) -> Show:
    """The change that makes `new` of `old`."""
    common = common_prefix(old, new)
    cut = common if common < len(old) else None
    return Show(new[common:], verified, cut)
