"""Simulated servers in virtual time, and how fast the policy is on them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moa.speculation.policy import Drafted, Policy, RoundTime, TextAcceptance
from moa.tree import TreeShape

PROMPT = 100
"""Tokens of a prompt, which the drafter must read."""
MANY = 10**9
"""Tokens of a text that does not end."""


@dataclass
class World:
    """A forward of one token takes a second, and `token` more for each further one; a level takes
    `level` for each text that drafts; reading a token takes `reading`. A level is accepted with the
    chance `right`."""

    level: float = 0.1
    token: float = 0.0
    reading: float = 0.0
    noise: float = 0.06
    """Of a long-tailed factor of mean 1, as on a machine that does other things too."""
    sleeps: float = 0.0
    """How often the machine sleeps for a minute in a round, which does not count as time spent."""
    texts: int = 1
    policy: Policy = field(default_factory=lambda: Policy(TreeShape.chain(8)))
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    depths: list[int] = field(default_factory=list)
    """Deepest draft of each round."""
    before: Sequence[tuple[float, int]] = ()
    """Texts before those that are measured: how often a level is right, and tokens."""
    cold: dict[str, tuple[int, float]] = field(default_factory=dict)
    """How many of the first forwards, drafts and readings of a new process are slower, and by what
    factor."""

    def forward(self, tokens: float) -> float:
        return 1.0 + self.token * (tokens - 1)

    def speed(self, right: float, tokens: int, *, of_text: int = MANY) -> float:
        """Tokens a second of texts of so many tokens, `texts` at a time, in units of plain
        decoding's."""
        spent = 0.0
        won = 0
        while won < tokens:
            batch = [self.policy.text(0.0) for _ in range(self.texts)]
            missed = [PROMPT] * self.texts
            begun = won
            while won < tokens and won - begun < of_text * self.texts:
                depths = self.policy.plan(batch, list(missed))
                for place, depth in enumerate(depths):
                    if depth and missed[place]:
                        spent += (
                            seconds := missed[place] * self.reading * self._coldness("reading")
                        )
                        self.policy.read(missed[place], seconds)
                    missed[place] = 0 if depth else missed[place] + 1
                accepted = [self._accepted(right, depth) for depth in depths]
                spent += self.run(batch, depths, accepted)
                won += self.texts + sum(accepted)
        return won / spent / self.texts * self.forward(self.texts)

    def run(self, batch: list[TextAcceptance], depths: list[int], accepted: list[int]) -> float:
        """A round; returns its seconds."""
        tokens = len(batch) + sum(depths)
        luck = self.rng.lognormvariate(-(self.noise**2) / 2, self.noise)
        draft = luck * self.level * max(depths) * sum(map(bool, depths))
        draft *= self._coldness("draft") if draft else 1.0
        forward = luck * self.forward(tokens) * self._coldness("forward")
        drafts = [
            Drafted(text, d, d, d, right)
            for text, d, right in zip(batch, depths, accepted, strict=True)
            if d
        ]
        asleep = 60.0 if self.sleeps and self.rng.random() < self.sleeps else 0.0
        self.policy.record(drafts, RoundTime(tokens, forward + asleep, draft))
        self.depths.append(max(depths))
        return draft + forward

    def _coldness(self, what: str) -> float:
        left, factor = self.cold.get(what, (0, 1.0))
        self.cold[what] = left - 1, factor
        return factor if left > 0 else 1.0

    def _accepted(self, right: float, depth: int) -> int:
        return next((level for level in range(depth) if self.rng.random() >= right), depth)

    def ideal(self, right: float, of_text: int) -> float:
        """The best speed of texts of so many tokens, one at a time, at a fixed depth, 0 included."""
        speeds = [1.0]
        for depth in range(1, 9):
            speed = sum(right**n for n in range(depth + 1)) / (
                self.forward(1 + depth) + self.level * depth
            )
            speeds.append(of_text / (PROMPT * self.reading + of_text / speed))
        return max(speeds)


class Mixture:
    """Experts of which memory holds a part: forwards over drafts need many others, so that plain
    ones behind them find little in memory, each more than the one before."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.missing = 1.0
        """How much of what plain decoding needs is not in memory."""

    def forward(self, tokens: int) -> float:
        wide = 0.3 + 0.7 * min(1, tokens / 8)
        from_disk = 1.9 * self.missing * wide * self.rng.uniform(0.5, 1.5)
        more = 0.72 * self.missing if tokens == 1 else self.missing + 0.12 * (tokens - 1)
        self.missing = min(1.0, more)
        return 0.042 * tokens + from_disk + 0.1 * self.rng.expovariate(1)


class Bursts:
    """A forward over a draft waits for the disk most of the time, and the others promise twice the
    speed of plain decoding."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def forward(self, tokens: int) -> float:
        if tokens == 1:
            return 0.1
        return 0.12 if self.rng.random() < 0.3 else 0.9


class Dense:
    """Each forward reads all weights from the disk, whatever it is over: drafts are nearly free."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def forward(self, tokens: int) -> float:
        return self.rng.uniform(0.8, 1.3) + 0.03 * tokens


def beside_plain(
    kind: type[Mixture | Bursts | Dense],
    *,
    varies: bool,
    right: float = 0.9,
    answers: Sequence[int] = (600,),
    seeds: Iterable[int] = range(24),
) -> float:
    """The speed of answers of so many tokens, of which nine in ten are guessed unless `right` says
    otherwise, in that of plain decoding. The first of several is not counted, and each of them
    begins with a prompt, as in `benchmarks.real mixture`."""
    plain = 0.0
    planned = 0.0
    for seed in seeds:
        plain += seconds_a_token(kind, None, right, answers, seed)
        policy = Policy(TreeShape.chain(16, min_score=-math.inf), varies=varies)
        planned += seconds_a_token(kind, policy, right, answers, seed)
    return plain / planned


def seconds_a_token(
    kind: type[Mixture | Bursts | Dense],
    policy: Policy | None,
    right: float,
    answers: Sequence[int],
    seed: int,
) -> float:
    rng = random.Random(seed)
    world = kind(rng)
    counted = 0
    seconds = 0.0
    for number, tokens in enumerate(answers):
        if len(answers) > 1:
            world.forward(32)
        counts = number > 0 or len(answers) == 1
        text = policy.text(0.0) if policy else None
        said = 0
        while said < tokens:
            depth = policy.plan([text], [0])[0] if policy and text else 0
            accepted = 0
            while accepted < depth and rng.random() < right:
                accepted += 1
            taken = world.forward(1 + depth)
            if policy and text:
                drafts = [Drafted(text, depth, depth, depth, accepted)] if depth else []
                policy.record(drafts, RoundTime(1 + depth, taken, 1e-4 if depth else 0.0))
            said += 1 + accepted
            seconds += taken * counts
        counted += said * counts
    return seconds / counted
