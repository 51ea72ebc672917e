"""Thinking apart from the answer: text in `<think>` at its beginning goes into `reasoning_content`. Pure."""

from __future__ import annotations

_OPEN, _CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """Splits a text that only grows, piece by piece."""

    def __init__(self) -> None:
        self._held = ""
        self._state = "start"

    def feed(self, piece: str, *, last: bool = False) -> tuple[str, str]:
        """The reasoning and the answer that this piece adds. What may be the beginning of a tag is held back, but not
        of the `last` piece."""
        text, self._held = self._held + piece, ""
        reasoning = ""
        if self._state == "start":
            begun = text.lstrip()
            if begun.startswith(_OPEN):
                self._state, text = "thinking", begun[len(_OPEN) :].lstrip("\n")
            elif _OPEN.startswith(begun) and not last:
                self._held = text
                return "", ""
            else:
                self._state = "answer"
        if self._state == "thinking":
            reasoning, found, rest = text.partition(_CLOSE)
            if found:
                self._state, text = "gap", rest
            else:
                keep = 0 if last else _tail(reasoning)
                self._held = reasoning[len(reasoning) - keep :]
                return reasoning[: len(reasoning) - keep], ""
        if self._state == "gap":  # line breaks between the two belong to neither
            text = text.lstrip("\n")
            self._state = "answer" if text else "gap"
        return reasoning, text


def _tail(text: str) -> int:
    """Characters at the end with which the closing tag may begin."""
    return next((size for size in range(len(_CLOSE) - 1, 0, -1) if text.endswith(_CLOSE[:size])), 0)


def split(text: str) -> tuple[str, str]:
    """The reasoning and the answer of a whole text."""
    return ReasoningSplitter().feed(text, last=True)
