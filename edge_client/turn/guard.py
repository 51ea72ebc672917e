"""Limits of offline text, as calibrated for this drafter when its bundle was made.

After a lost link the drafter has the target's records of the text before; offline from the start it
has none, and its limits are lower. If not even its first tokens are likely to be right, nothing is
shown. Calibration covers the usual prompts. On others, such as an app's request for a title, a
drafter without an answer repeats itself up to the limit of tokens, be it a word or a paragraph. So
the device also stops where what it wrote last was all there before. The numbers of a list's items
count up, and would make each item a new one: they are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from moa.manifest import Calibration, Offline

_WARN_AGREEMENT = 0.6
"""Share of agreeing tokens below which the user is warned."""
_STOP_AGREEMENT = 0.3
"""Share of agreeing tokens below which the device stops."""
_FIRST_TOKENS = 4
"""If agreement is too low within so many tokens, the answer is not shown."""
_REPEATED_WITHIN = 64
"""Whether text repeats itself is judged by so many of its latest tokens."""
_REPEATED_TOKENS = 10
"""It does if these are so few different ones. A list of two-digit numbers has 15."""
_PHRASE = 8
"""Tokens of a phrase."""
_WARN_AT = 64
"""Tokens of unverified text at which a user is warned where nothing was measured."""
_REPEATED_PHRASES = 58
"""It also does if so many of the phrases that end with these tokens were there before. Code repeats
its lines, but for a name here and there."""
_REPEATED_WITHIN_LONG = 192
"""Items with a number each are the same paragraph but for it: that is judged by more tokens."""
_REPEATED_PHRASES_LONG = 144
"""So many of the phrases that end with those were there before. Of 444 answers of a real model none
had as many that had not 58 of 64 as well."""
_REPEATED_WITHIN_STRUCTURED = 512
"""Text of a grammar says its keys again in each object of a list: that it says nothing new is judged
by so many tokens, so that a list comes to its end."""
_REPEATED_PHRASES_STRUCTURED = 464
"""So many of the phrases that end with those were there before: the same share as of 64."""
_BEHIND_NUMBER = frozenset(".):")
"""What stands behind the number of an item."""
_LONGEST_NUMBER = 9
"""Digits of such a number."""


@dataclass(frozen=True, slots=True)
class OfflineLimits:
    """Lengths of unverified text at which to warn and to stop; 0 is never."""

    warn_at: int = _WARN_AT
    stop_at: int = 0
    worthless: bool = False
    """Whether not even the first token is shown."""

    @classmethod
    def of(cls, curve: Offline, stop_at: int) -> Self:
        """The calibrated limits; `stop_at` >= 0 overrides where it stops."""
        warn = _first_below(curve, _WARN_AGREEMENT)
        if stop_at >= 0:
            return cls(warn, stop_at)
        stop = _first_below(curve, _STOP_AGREEMENT)
        return cls(warn, stop, worthless=0 < stop <= _FIRST_TOKENS)


def _first_below(curve: Offline, agreement: float) -> int:
    """The shortest length at which fewer tokens agree than this share; 0 if there is none."""
    for length, share in zip(curve.lengths, curve.agreement, strict=True):
        if share < agreement:
            return length
    return 0


@dataclass(slots=True)
class Phrases:
    """Whether a growing text says again what it has said; each token is looked at once."""

    _text: list[int] = field(default_factory=list)
    """The text so far."""
    _seen: set[tuple[int, ...]] = field(default_factory=set)
    """All of its phrases."""
    _repeated: list[bool] = field(default_factory=list)
    """For each token, whether the phrase that it ends was there before."""

    def repeat(self, text: Sequence[int], *, structured: bool = False) -> bool:
        """Whether nearly all phrases of eight tokens at the text's end were there before, or most
        of them over a longer end; of a `structured` text the end is longer still. The text is that
        of the last call and what has been added since; another text is begun anew."""
        known = len(self._text)
        if list(text[:known]) != self._text:  # another text, or one whose beginning was verified
            self._text.clear()
            self._seen.clear()
            self._repeated.clear()
            known = 0
        for end in range(known + 1, len(text) + 1):
            phrase = tuple(text[max(0, end - _PHRASE) : end])
            is_whole = len(phrase) == _PHRASE
            self._repeated.append(is_whole and phrase in self._seen)
            if is_whole:
                self._seen.add(phrase)
        self._text += text[known:]
        if structured:
            repeated = sum(self._repeated[-_REPEATED_WITHIN_STRUCTURED:])
            return repeated >= _REPEATED_PHRASES_STRUCTURED
        if sum(self._repeated[-_REPEATED_WITHIN:]) >= _REPEATED_PHRASES:
            return True
        return sum(self._repeated[-_REPEATED_WITHIN_LONG:]) >= _REPEATED_PHRASES_LONG


@dataclass(slots=True)
class Unnumbered:
    """A growing text without the numbers of its items, as far as these count up; each token is
    looked at once. Any other number is what an item says, and stays."""

    decode: Callable[[Sequence[int]], str]
    _text: list[int] = field(default_factory=list)
    """The text so far."""
    _kept: list[int] = field(default_factory=list)
    """What of it is kept."""
    _digits: list[int] = field(default_factory=list)
    """The number at its end, until it is known whether it is an item's."""
    _numbers: set[int] = field(default_factory=set)
    """The numbers of items."""
    _said: dict[int, str] = field(default_factory=dict)
    """Text of each token that was met, without the space around it."""

    def of(self, text: Sequence[int]) -> list[int]:
        """The text without these numbers, and without a number at its end. The text is that of the
        last call and what has been added since; another text is begun anew."""
        known = len(self._text)
        if list(text[:known]) != self._text:
            self._text.clear()
            self._kept.clear()
            self._digits.clear()
            self._numbers.clear()
            known = 0
        for token in text[known:]:
            self._take(token)
        self._text += text[known:]
        return self._kept

    def _take(self, token: int) -> None:
        """Take in the text's next token."""
        if token not in self._said:
            self._said[token] = self.decode([token]).strip()
        said = self._said[token]
        if said.isascii() and said.isdecimal():
            self._digits.append(token)
            return
        if not self._counts_up(said):
            self._kept += self._digits
        self._digits.clear()
        self._kept.append(token)

    def _counts_up(self, behind: str) -> bool:
        """Whether the number with this behind it is an item's, and one more than another item's."""
        digits = "".join(self._said[token] for token in self._digits)
        if not 0 < len(digits) <= _LONGEST_NUMBER or not behind:
            return False
        if not _BEHIND_NUMBER.issuperset(behind):
            return False
        number = int(digits)
        self._numbers.add(number)
        return number - 1 in self._numbers


@dataclass(slots=True)
class OfflineGuard:
    """Decides when to warn and when to stop, for one turn."""

    limits: OfflineLimits = OfflineLimits()
    cold: OfflineLimits | None = None
    """Limits without records; None: the same as with records."""
    informed: Callable[[], bool] = lambda: True
    """Whether there are records of the target's."""
    may_repeat: bool = True
    """Whether text that repeats itself goes on."""
    measured: bool = True
    """Whether the limits are of this drafter."""
    structured: bool = False
    """Whether the text has a grammar."""
    unnumbered: Unnumbered | None = None
    """Leaves out the numbers of items; None where nothing says which tokens are numbers."""
    _warned: bool = False
    _phrases: Phrases = field(default_factory=Phrases)

    @classmethod
    def of(
        cls,
        calibration: Calibration | None,
        stop_at: int,
        informed: Callable[[], bool],
        *,
        structured: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> Self:
        """The guard for a drafter whose limits were calibrated when its bundle was made; `stop_at`
        of 0 or more overrides where it stops, and then text may repeat itself. `informed` says
        whether the drafter has the target's records, without which other limits hold. `structured`
        is text that has a grammar; of other text `decode` tells which tokens are numbers."""
        # A grammar's text is judged by its keys; numbers are values there.
        unnumbered = Unnumbered(decode) if decode is not None and not structured else None
        if calibration is None:
            return cls(
                OfflineLimits(stop_at=max(0, stop_at)),
                may_repeat=stop_at >= 0,
                measured=False,
                structured=structured,
                unnumbered=unnumbered,
            )
        cold = None
        if calibration.cold is not None:
            cold = OfflineLimits.of(calibration.cold, stop_at)
        return cls(
            OfflineLimits.of(calibration.offline, stop_at),
            cold,
            informed,
            may_repeat=stop_at >= 0,
            structured=structured,
            unnumbered=unnumbered,
        )

    def warning(self, offline: int) -> str:
        """The warning for so many tokens of unverified text, once for each time offline; empty
        before the length at which the user is to be warned."""
        warn_at = self._now.warn_at
        if not warn_at or offline < warn_at or self._warned:
            return ""
        self._warned = True
        if not self.measured:
            return (
                f"{offline} tokens that nobody has verified: how long this drafter can be trusted alone"
                " was not measured"
            )
        return f"{offline} tokens that nobody has verified: from here on expect mistakes"

    def stops(self, offline: Sequence[int]) -> bool:
        """Whether the device must stop writing after this unverified text: it is too long to be
        trusted, or only repeats itself."""
        limits = self._now
        if limits.worthless or 0 < limits.stop_at <= len(offline):  # 0: no limit
            return True
        if self.may_repeat or len(offline) < _REPEATED_WITHIN:
            return False
        has_few_tokens = len(set(offline[-_REPEATED_WITHIN:])) <= _REPEATED_TOKENS
        if has_few_tokens:
            return True
        text = offline if self.unnumbered is None else self.unnumbered.of(offline)
        return self._phrases.repeat(text, structured=self.structured)

    def reset(self) -> None:
        """Warn again next time, because all text is verified."""
        self._warned = False

    @property
    def _now(self) -> OfflineLimits:
        """The limits with the records that there are now, or without any."""
        if self.cold is None or self.informed():
            return self.limits
        return self.cold
