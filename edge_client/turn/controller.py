"""What a turn has measured, and what pays by it: whether the verifier is to wait for the device's
guesses, or to draft for itself, and how deep the first guesses are.

All inputs are measured while it runs; until then the priors below count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from edge_client.link.estimates import Pace, RoundTrip, Smoothed, Streak
from moa.speculation.cost import Cost
from moa.speculation.policy import LevelRates
from moa.wire.messages import MOST_IN_A_DRAFT, Welcome

WhoDrafts = Literal["auto", "device", "server", "none"]
"""auto      what pays: the server drafts, and takes the device's guesses, or it waits for them
device    the server waits for the device's guesses
server    the server drafts for itself
none      the server decodes plainly, as an ordinary API does: a baseline, never chosen by `auto`,
          because a server that may draft stops by itself where that loses
"""

DEPTHS = 16
"""Levels of the first guesses at most."""
_LEAST_PROBABILITY = 1e-5
"""No path of first guesses is followed below this probability, however cheap it is."""
_PRIOR_ACCEPTANCE = 0.75
"""Prior acceptance of a level of guesses, given the level before."""
_PRIOR_SERVER_ACCEPTANCE = 0.65
"""Prior acceptance of a level of the server's drafts, given the level before."""
_SERVER_DEPTH = 4
"""Levels that the server is taken to draft before its pace was measured."""
_SERVER_ROUND = 1.3
"""What a round of the server takes, as a multiple of its forward: drafting is a small part of it."""
_PRIOR_GUESSES = 4.0
"""Guesses that the prior of the streak counts as."""
_PRIOR_FORWARDS = 4.0
"""Forwards that the prior of the pace of a stream counts as."""
_PRIOR_FORWARD = 0.03
"""Seconds of a forward of the target, before the first measurement."""
_PRIOR_STEP = 0.003
"""Seconds of a step of the drafter, before the first measurement."""
GUESSED = 4
"""Guesses that a step of the drafter makes."""
_SHORTEST = 1e-6
"""Seconds: the least time of an answer, whatever was measured."""
_NODES_A_LEVEL = 2
"""Approximate nodes that a level of guesses adds to a forward: the others are too unlikely."""
_PER_FORWARD = 8
"""Approximate nodes of a forward over guesses; most of them are accepted."""
_STEPS_OF_A_FORWARD = 6
"""Steps of the drafter in the time of a forward, from which on it is better to guess further before
the first message than to leave the rest to another forward."""
_WAITING_MARGIN = 1.15
"""Expected gain above which the verifier waits for the device's guesses, without drafts of its own."""
_EVIDENCE = 16
"""Guesses of a turn after which it is known how well they do, and what they win beside the server's
own drafts."""
_EARLY_MARGIN = 2.0
"""Expected gain above which the verifier waits before that is known."""
_EARLIER = 8.0
"""Guesses that all earlier turns count as, at most."""
_UNUSED = 16
"""Forwards without a guess in time before the device stops guessing."""
_FIRST_REST = 32
"""For how many forwards it stops at first."""
_LONGEST_REST = 512
"""For how many it stops at most."""
_FIRST_KEPT = 0.5
"""Share that is left of the longest wait for a first text after another answer that came sooner."""
_LONGEST_IN_VAIN = 30.0
"""Seconds in vain that are remembered at most: an engine that hangs may say for ever that it lives."""
_TRIES = 5
"""Forwards at the beginning of a turn over which it guesses in any case."""


def _streak(rate: float) -> Streak:
    """A streak of guesses of which this share is right, before any was judged."""
    return Streak(_PRIOR_GUESSES * rate, _PRIOR_GUESSES * (1 - rate))


class FirstGuesses(NamedTuple):
    """How far to guess before anything is sent to a verifier that has no guess."""

    depth: int
    """Levels of the deepest path."""
    least: float
    """Log-probability below which a path is followed no further."""


@dataclass(slots=True)
class Usefulness:
    """Whether a server that drafts too uses the guesses. After 16 forwards without one the device
    rests for 32, then for 64, up to 512."""

    _pause: int = _FIRST_REST
    """Forwards of the next rest."""
    _unused: int = 0
    """Forwards in a row without a guess in time. Below 0 the device rests for so many more."""
    _tries: int = 0
    """Forwards of a new text over which it still does not rest."""

    @property
    def rests(self) -> bool:
        """Whether to make no guesses for now."""
        return self._unused < 0 and not self._tries

    def begin(self) -> None:
        """Another text, which may be easier to guess: try before resting on."""
        self._tries = _TRIES

    def forward(self, used: bool) -> None:
        """Count a forward of a stream for which the server drafts; `used` says whether it ran over
        guesses of the device. After 16 in a row that did not, the device rests, each time twice as
        long."""
        self._tries = max(0, self._tries - 1)
        self._unused += 1
        if used:
            self._pause = _FIRST_REST
            self._unused = 0
        elif self._unused >= _UNUSED:
            self._unused = -self._pause  # counts up to 0 again, one a forward
            self._pause = min(2 * self._pause, _LONGEST_REST)


@dataclass
class Controller:
    """Keeps what was measured of link, verifier and drafter, and decides by it."""

    rtt: RoundTrip = field(default_factory=RoundTrip)
    """Of the link."""
    most_guesses: int = 255
    """Guesses that this verifier takes in a message."""

    forward: Cost = field(default_factory=lambda: Cost(_PRIOR_FORWARD, mean=True))
    """Seconds of a forward of the target, by its nodes."""
    step: Cost = field(default_factory=lambda: Cost(_PRIOR_STEP, mean=True))
    """Seconds of a step of the drafter, by its width."""
    piece: float = math.inf
    """Seconds of a step over a piece of a prompt; unknown before the first."""
    piece_token: float = 0.0
    """Seconds of a token of the latest piece: the longer the text before it, the more."""
    pace: Pace = field(default_factory=Pace)
    """How fast tokens come that the server drafts."""
    streak: Streak = field(default_factory=lambda: _streak(_PRIOR_ACCEPTANCE))
    """How many guesses in a row are right."""
    prefill: Smoothed = field(default_factory=Smoothed)
    """Seconds that the server needs for a token of a prompt."""
    first_text: float = 0.0
    """The longest wait of late for the first text of an engine behind the verifier, in seconds."""
    usefulness: Usefulness = field(default_factory=Usefulness)
    """Whether guesses are of use to a server that drafts."""
    acceptance: LevelRates = field(default_factory=lambda: LevelRates([_PRIOR_ACCEPTANCE] * DEPTHS))
    """How often a level of guesses is right."""
    server_acceptance: float = _PRIOR_SERVER_ACCEPTANCE
    """How often a level of the server's drafts is right; of use until its pace is measured."""

    # ---- what was measured

    def calibrate(self, chain: Sequence[float], tree: Sequence[float]) -> None:
        """Start from what was measured when the bundle was made: the chance that the token at each
        depth of a draft is accepted, given the one before it, for drafts that are chains and for
        trees. Depths beyond those measured count like the deepest."""
        if chain:
            self.server_acceptance = sum(chain) / len(chain)
        if tree:
            self.streak = _streak(sum(tree) / len(tree))
            prior = [tree[min(level, len(tree) - 1)] for level in range(DEPTHS)]
            self.acceptance = LevelRates(prior)

    def begin(self) -> None:
        """Begin a turn, maybe with text of another kind: acceptance in code says little about
        prose."""
        self.streak.begin(_EARLIER)
        self.usefulness.begin()

    def agreed(self, welcome: Welcome) -> None:
        """Learn the limits of this verifier."""
        self.most_guesses = min(welcome.limits.max_guess_tokens, MOST_IN_A_DRAFT) - 1

    def guessed(self, won: int, wrong: bool) -> None:
        """Learn that `won` of the new tokens were in the tree of guesses; `wrong`: the tree had only
        other guesses for the next one."""
        self.acceptance.add(won, won + wrong)

    def streamed(self, tokens: int, seconds: float) -> None:
        """Learn that so many tokens of a stream that the server drafts came within `seconds`."""
        if not self.pace.rate:
            # One answer says little, and while the verifier waits no other is measured.
            prior = _PRIOR_FORWARDS * self.forward.seconds(1)
            self.pace.add(prior * self.rate, prior)
        self.pace.add(tokens, seconds)

    def ran(self, nodes: int, seconds: float) -> None:
        """Learn that a forward of the target took so long for so many nodes."""
        if seconds > 0:
            self.forward.observe(nodes, seconds)

    def began(self, seconds: float) -> None:
        """Learn that an engine behind the verifier began an answer after so long."""
        self.first_text = max(seconds, _FIRST_KEPT * self.first_text)

    def waited_in_vain(self, seconds: float) -> None:
        """Learn that an engine that was at work for so long had not begun when the answer ended."""
        self.first_text = max(self.first_text, min(seconds, _LONGEST_IN_VAIN))

    def ran_piece(self, tokens: int, seconds: float) -> None:
        """Learn that a step of the drafter took so long over a piece of a prompt."""
        self.piece = seconds
        self.piece_token = seconds / tokens

    # ---- what to do

    def reading_seconds(self, tokens: int) -> float:
        """Seconds that the drafter usually takes to read so many tokens at once: by the latest
        piece, and before the first as many steps over one token."""
        return tokens * (self.piece_token or self.step.seconds(1))

    def answer_seconds(self, unread: int = 0) -> float:
        """Seconds within which an answer is expected, if the verifier must read so many tokens of
        the prompt first."""
        forward = self.forward.seconds(1) if self.forward else 0.0
        return self.rtt.usual(forward) + unread * self.prefill.value

    def waits(self, remaining: int, *, waits_already: bool) -> bool:
        """Whether the verifier of a running stream should wait for the device's guesses rather than
        draft for itself: it should where that is expected to bring more tokens a second.
        `remaining` is the number of tokens that the answer may still have."""
        if waits_already:
            return self._guessed_speed(remaining, self.streak.length) > self.rate
        # A wrong start costs two round trips, so it needs more evidence.
        is_known = self.streak.judged >= _EVIDENCE
        margin = _WAITING_MARGIN if is_known else _EARLY_MARGIN
        return self._guessed_speed(remaining, self.streak.at_least) > margin * self.rate

    def _guessed_speed(self, remaining: int, streak: float) -> float:
        """Tokens a second if the verifier uses only the device's guesses, of which `streak` in a
        row are right: each wrong one costs a round trip."""
        tokens = min(max(1, remaining), 1 + streak)  # the right guesses and the target's own token
        # To round up to whole forwards adds half of one on average.
        forwards = max(1.0, 0.5 + tokens / _PER_FORWARD)
        # A step over the log's last token, and about three more, before guesses are sent.
        first_guesses = self.step.seconds(1) + 3 * self.step.seconds(GUESSED)
        waited = self.rtt.smoothed + first_guesses + forwards * self.forward.seconds(_PER_FORWARD)
        # Nor do tokens come faster than the drafter guesses them, a step each.
        return tokens / max(waited, tokens * self.step.seconds(GUESSED))

    def first_guesses(self, remaining: int) -> FirstGuesses:
        """How deep to guess before the first guesses are sent to a verifier that stands still: the
        depth with the most expected tokens a second, if each answer is waited for and at most
        `remaining` tokens are left."""
        accepted_levels = self.acceptance.totals()  # expected accepted tokens, by depth - 1
        best_depth = 1
        best_speed = 0.0
        for depth in range(1, DEPTHS + 1):
            tokens = min(1 + accepted_levels[depth - 1], max(1, remaining))
            # The first step runs the log's last token, each further one a few guesses.
            drafting = self.step.seconds(1) + (depth - 1) * self.step.seconds(GUESSED)
            forward = self.forward.seconds(1 + _NODES_A_LEVEL * depth)
            speed = tokens / max(_SHORTEST, self.rtt.smoothed + forward + drafting)
            if speed > best_speed:
                best_depth = depth
                best_speed = speed
        # One more level wins as many tokens as the probability of the best path, and costs as many
        # as come in the time of one step.
        step = self.step.seconds(GUESSED)
        least = step * best_speed
        # Guesses that are sent later are verified by a forward of their own. Beside a forward that
        # is as long as many steps, a step before the first message costs little.
        least *= min(1.0, _STEPS_OF_A_FORWARD * step / self.forward.seconds(_PER_FORWARD))
        return FirstGuesses(best_depth, min(0.0, math.log(max(_LEAST_PROBABILITY, least))))

    @property
    def rate(self) -> float:
        """Tokens a second of a stream that the server drafts, once it has begun."""
        if self.pace.rate:
            return self.pace.rate
        tokens = sum(self.server_acceptance**level for level in range(_SERVER_DEPTH + 1))
        return tokens / (_SERVER_ROUND * self.forward.seconds(1 + _SERVER_DEPTH))
