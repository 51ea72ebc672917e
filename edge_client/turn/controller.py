"""Who drafts, and how deep: the plan with the most expected verified tokens a second.

    device   the drafter here proposes a chain or tree, the verifier checks it: a round trip a round
    server   the verifier drafts for itself and streams: a round trip in all
    none     the verifier decodes plainly and streams, as an ordinary API does: never chosen here, because a verifier
             that may draft stops by itself where that loses
    single   a call for every token: a baseline for measurements

All inputs are measured while it runs; until then the priors below count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from edge_client.link.estimates import Pace, RoundTrip, Smoothed, Streak
from moa.speculation.cost import Cost
from moa.speculation.policy import LevelRates
from moa.tree import DraftTree, TreeShape
from moa.wire.messages import MOST_IN_A_DRAFT, Welcome

WhoDrafts = Literal["auto", "device", "server", "none", "single"]

_CHAINS = (1, 2, 3, 4, 6, 8, 12, 16)
_TREES = ((4, 3, 12), (4, 5, 24), (8, 6, 48), (4, 12, 48), (4, 16, 62))
_CHAIN = TreeShape.chain(_CHAINS[0])
DEPTHS = 16
"""Levels of a draft at most."""
_LEAST_PROBABILITY = 1e-5
"""No path of a draft is followed below this probability, however cheap it is."""
_BLIND_TOKENS = 4
"""Expected tokens of a round whose draft was made without the records of the prompt."""
_PRIOR_ACCEPTANCE = {False: 0.65, True: 0.75}
"""Prior acceptance of a level, given the level before, of a chain and of a tree."""
_KEEP = 0.95
"""Weight that older rounds keep in the acceptance, a round."""
_PRIOR_GUESSES = 4.0
"""Guesses that the prior of the streak counts as."""
_PRIOR_FORWARD, _PRIOR_STEP = 0.03, 0.003
"""Seconds of a verification and of a step of the drafter, before the first measurement."""
_SHORTEST = 1e-6
"""Seconds: the least round trip, whatever was measured."""
GUESSED = 4
"""Guesses that a step of the drafter makes."""
_PER_FORWARD = 8
"""Approximate nodes of a forward over guesses; most of them are accepted."""
_WAITING_MARGIN = 1.15
"""Expected gain above which the verifier waits for the device's guesses, without drafts of its own."""
_EVIDENCE = 16
"""Guesses of a turn to judge before it waits at all."""
_EARLIER = 8.0
"""Guesses that all earlier turns count as, at most."""
_UNUSED, _FIRST_REST, _LONGEST_REST = 16, 32, 512
"""Forwards without a guess in time before the device stops guessing, and for how many: at first,
and at last."""
_TRIES = 5
"""Forwards at the beginning of a turn over which it guesses in any case."""
_SERVER_MARGIN = 1.05
"""Expected gain above which the server drafts: on the device drafting costs the server nothing."""


def _streak(rate: float) -> Streak:
    return Streak(_PRIOR_GUESSES * rate, _PRIOR_GUESSES * (1 - rate))


@cache
def _shapes(can_tree: bool, max_nodes: int, max_chain: int) -> tuple[TreeShape, ...]:
    """The tree shapes that a verifier with these limits accepts."""
    chains = [TreeShape.chain(depth) for depth in _CHAINS if depth <= max_chain]
    trees = (
        [TreeShape(b, d, min(n, max_nodes)) for b, d, n in _TREES]
        if can_tree and max_nodes > 0
        else []
    )
    return (*chains, *trees)


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan for the next round. `shape` is used if the device drafts."""

    who_drafts: Literal["device", "server", "none", "single"]
    shape: TreeShape
    tokens_per_second: float = 0.0
    drafting: float = 0.0
    """Seconds that the device needs for a draft of this shape."""


@dataclass(slots=True)
class Usefulness:
    """Whether a server that drafts too uses the guesses. After 16 forwards without one the device
    rests for 32, then for 64, up to 512."""

    _pause: int = _FIRST_REST
    _unused: int = 0
    """Forwards in a row without a guess in time; below 0 the device rests."""
    _tries: int = 0
    """Forwards of a new text over which it does not rest."""

    @property
    def rests(self) -> bool:
        """Whether to make no guesses for now."""
        return self._unused < 0 and not self._tries

    def begin(self) -> None:
        """Another text, which may be easier to guess: try before resting on."""
        self._tries = _TRIES

    def forward(self, used: bool) -> None:
        """A forward of such a stream ran; `used`: over guesses of the device."""
        self._tries = max(0, self._tries - 1)
        self._unused += 1
        if used:
            self._pause = _FIRST_REST
            self._unused = 0
        elif self._unused >= _UNUSED:
            self._unused, self._pause = -self._pause, min(2 * self._pause, _LONGEST_REST)


@dataclass
class Controller:
    """Measures and decides."""

    rtt: RoundTrip = field(default_factory=RoundTrip)
    can_stream: bool = True
    can_tree: bool = True
    takes_drafts: bool = True
    """Whether it verifies drafts; else it only streams."""
    max_nodes: int = 63
    max_chain: int = 255

    forward: Cost = field(default_factory=lambda: Cost(_PRIOR_FORWARD, mean=True))
    """Of a verification by its nodes, the wait in the server's queue included."""
    step: Cost = field(default_factory=lambda: Cost(_PRIOR_STEP, mean=True))
    """Of a step of the drafter by its width."""
    piece: float = math.inf
    """Of a step over a piece of a prompt; unknown before the first."""
    pace: Pace = field(default_factory=Pace)
    """Of streams that the server drafts where no guess of the device fits."""
    streak: Streak = field(default_factory=lambda: _streak(_PRIOR_ACCEPTANCE[True]))
    """Of guesses for streams."""
    prefill: Smoothed = field(default_factory=Smoothed)
    """Seconds that the server needs for a token of a prompt."""
    usefulness: Usefulness = field(default_factory=Usefulness)
    """Of guesses for streams that the server drafts."""
    acceptance: dict[bool, LevelRates] = field(
        default_factory=lambda: {
            tree: LevelRates([prior] * DEPTHS, _KEEP) for tree, prior in _PRIOR_ACCEPTANCE.items()
        }
    )
    """Of chains, and of trees."""

    # ---- what was measured

    def calibrate(self, chain: Sequence[float], tree: Sequence[float]) -> None:
        """Start from acceptance by level as it was measured when the bundle was made, deeper ones
        like the deepest."""
        if tree:
            self.streak = _streak(sum(tree) / len(tree))
        for branching, rates in ((False, chain), (True, tree)):
            if rates:
                prior = [rates[min(level, len(rates) - 1)] for level in range(DEPTHS)]
                self.acceptance[branching] = LevelRates(prior, _KEEP)

    def begin(self) -> None:
        """A turn begins, maybe with text of another kind: acceptance in code says little about
        prose."""
        self.streak.begin(_EARLIER)
        self.usefulness.begin()

    def agreed(self, welcome: Welcome) -> None:
        """What this verifier can do, and its limits."""
        self.can_stream = "stream" in welcome.features
        self.can_tree = "tree" in welcome.features
        self.takes_drafts = "streams_only" not in welcome.features
        limits = welcome.limits
        self.max_nodes, self.max_chain = (
            min(most, MOST_IN_A_DRAFT) - 1
            for most in (limits.max_tree_nodes, limits.max_chain_tokens)
        )

    def verified(self, tree: DraftTree, accepted: int, server_seconds: float) -> None:
        """A round came back with `accepted` drafted tokens."""
        # plain lists: this is on the critical path, and small arrays are slower
        depths = [0]
        branching = False
        for node, parent in enumerate(tree.parents[1:], start=1):
            depths.append(depths[parent] + 1)
            branching |= parent != node - 1
        depth = max(depths)
        if depth:
            self.acceptance[branching].add(accepted, depth)
        self.forward.observe(len(tree), server_seconds)

    def guessed(self, won: int, wrong: bool) -> None:
        """Of new tokens, `won` were in the tree of guesses; `wrong`: the tree had other guesses for
        the next one."""
        self.acceptance[True].add(won, won + wrong)

    def streamed(
        self, tokens: int, seconds: float, *, drafts: WhoDrafts, server_seconds: float = 0.0
    ) -> None:
        """Tokens of a stream arrived within `seconds`; the server ran the target for
        `server_seconds` of that."""
        if drafts == "server":
            self.pace.add(tokens, seconds)
        if server_seconds > 0:
            self.forward.observe(1, server_seconds)

    # ---- what to do

    def answer_seconds(self, unread: int = 0) -> float:
        """Seconds within which an answer is expected, if the verifier must read so many tokens of
        the prompt first."""
        forward = self.forward.seconds(1) if self.forward else 0.0
        return self.rtt.usual(forward) + unread * self.prefill.value

    def plan(
        self, remaining: int, who: WhoDrafts = "auto", *, blind: bool = False, guesses: bool = False
    ) -> Plan:
        """The next round, if at most `remaining` tokens are left.

        A stream for which the device sends `guesses` begins with the server's drafts; then it
        `waits` or not. `blind` (made without the prompt's records) limits the depth of a draft; it
        does not change who drafts.
        """
        device = self._best_device(remaining)
        if not self.takes_drafts:
            return Plan("none" if who == "none" else "server", device.shape)
        if who == "auto":
            who = "server" if guesses or self._stream_pays(device, remaining) else "device"
        if who == "single" or (who != "device" and self.can_stream):
            return Plan(who, device.shape)
        return (
            self._best_device(min(remaining, _BLIND_TOKENS))
            if blind and device.who_drafts == "device"
            else device
        )

    def _stream_pays(self, device: Plan, remaining: int) -> bool:
        """Whether a stream that the server drafts is better than rounds of the device."""
        tokens = max(1, min(remaining, 64))
        stream = tokens / (self.rtt.smoothed + tokens / self.rate)
        return stream > _SERVER_MARGIN * device.tokens_per_second

    def waits(self, remaining: int, *, now: bool) -> bool:
        """Whether the verifier of a running stream should wait for the device's guesses; `now`: it
        does so already."""
        if self.streak.judged < _EVIDENCE:
            return now
        if now:
            return self._guessed_speed(remaining, self.streak.length) > self.rate
        # A wrong start costs two round trips, so it needs more evidence.
        return self._guessed_speed(remaining, self.streak.at_least) > _WAITING_MARGIN * self.rate

    def _guessed_speed(self, remaining: int, streak: float) -> float:
        """Tokens a second if the verifier uses only our guesses: a round trip for every wrong one."""
        run = min(max(1, remaining), 1 + streak)
        forwards = max(1.0, 0.5 + run / _PER_FORWARD)
        drafting = self.step.seconds(1) + 3 * self.step.seconds(GUESSED)
        waited = self.rtt.smoothed + drafting + forwards * self.forward.seconds(_PER_FORWARD)
        return run / max(waited, run * self.step.seconds(GUESSED))

    def _best_device(self, remaining: int) -> Plan:
        round_trip = self.rtt.smoothed
        most = max(1, remaining)
        expected = {branching: rates.totals() for branching, rates in self.acceptance.items()}
        shapes = _shapes(self.can_tree, self.max_nodes, self.max_chain)
        best = (
            Plan("device", _CHAIN)
            if shapes
            else Plan("single", _CHAIN, 1 / max(_SHORTEST, round_trip))
        )
        for shape in shapes:
            tokens = min(1 + expected[shape.breadth > 1][shape.depth - 1], most)
            drafting = self._drafting(shape)
            speed = tokens / (round_trip + self.forward.seconds(shape.nodes + 1) + drafting)
            if speed > best.tokens_per_second:
                best = Plan("device", shape, speed, drafting)
        # One more level wins the probability of the best path, and costs the tokens of one step's
        # time.
        least = math.log(
            max(_LEAST_PROBABILITY, self.step.seconds(best.shape.breadth) * best.tokens_per_second)
        )
        return replace(best, shape=replace(best.shape, min_score=min(0.0, least)))

    def _drafting(self, shape: TreeShape) -> float:
        """Seconds that the device needs for a draft."""
        return self.step.seconds(1) + (shape.depth - 1) * self.step.seconds(shape.breadth)

    @property
    def rate(self) -> float:
        """Tokens a second of a stream that the server drafts, once it has begun."""
        if measured := self.pace.rate:
            return measured
        tokens = 1 + self.acceptance[False].totals()[3]
        return tokens / (
            1.3 * self.forward.seconds(5)
        )  # on the server, drafting is a small part of a round
