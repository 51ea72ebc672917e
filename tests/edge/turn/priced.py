"""A turn in virtual time in which everything takes its time: each forward, each level of the server's
drafts, each step of the device's drafter, reading a prompt, the link.

The server decides by its real policy whether it drafts, the device by its real controller whether
the verifier is to wait for it. Both guess what a text says that they guess, right or wrong.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import msgspec

from edge_client.turn.actions import End, Grow, Send, Wait
from edge_client.turn.controller import GUESSED, WhoDrafts
from edge_client.turn.deadlines import Patience
from moa.speculation.guess_tree import GuessTreeGrower
from moa.speculation.policy import Drafted, Policy, RoundTime
from moa.tree import TreeShape, path_of
from moa.wire.finish import first_finish
from moa.wire.messages import StreamTokens, Welcome
from tests.edge.turn.world import VOCAB, Verifier, World

STREAM_TREE = TreeShape(breadth=8, depth=16, nodes=63, min_score=-4.0)
UNLIKELY = -4.0
"""Log-probability of a guess behind the end of the answer."""
PIECE = 128
"""Tokens of a prompt that the device reads in a step."""
LONG = 16
"""New tokens above which a step reads a piece of a prompt."""


class Guess(NamedTuple):
    """What a drafter says may follow."""

    token: int
    log_prob: float


class Kind(NamedTuple):
    """How well a kind of text is guessed."""

    easy: float
    """Share of the tokens that are easy to guess."""
    easy_right: float
    hard_right: float
    prompt: int
    """Tokens of its prompts."""


KINDS = {
    "code": Kind(easy=0.93, easy_right=0.999, hard_right=0.74, prompt=180),
    "tools": Kind(easy=0.93, easy_right=0.995, hard_right=0.82, prompt=520),
    "json": Kind(easy=0.72, easy_right=0.993, hard_right=0.44, prompt=95),
    "english": Kind(easy=0.59, easy_right=0.994, hard_right=0.74, prompt=360),
    "chat": Kind(easy=0.49, easy_right=0.987, hard_right=0.58, prompt=110),
}
"""As a 0.5B sibling guesses what a 1.5B instruct model says (`python -m benchmarks.real guesses`)."""
SECOND_RIGHT = 0.7
"""How often the second guess is right where the first one is wrong."""


class Text:
    """A prompt, an answer, and what a drafter guesses at each place of it."""

    def __init__(self, kind: Kind, tokens: int, seed: str) -> None:
        draw = random.Random(seed)
        self.start = kind.prompt
        self.ids = [draw.randrange(2, VOCAB) for _ in range(kind.prompt + tokens)]
        self._guesses: list[list[Guess]] = []
        for place in range(self.start, len(self.ids)):
            chance = kind.easy_right if draw.random() < kind.easy else kind.hard_right
            right = self.ids[place]
            first, second, *others = (
                (right + shift - 2) % (VOCAB - 2) + 2 for shift in range(1, GUESSED + 1)
            )
            if draw.random() < chance:
                first = right
            elif draw.random() < SECOND_RIGHT:
                second = right
            rest = math.log((1 - chance) / 2)
            guesses = [Guess(first, math.log(chance)), Guess(second, rest)]
            guesses += [Guess(other, rest - 1) for other in others]
            self._guesses.append(guesses)

    def says(self, log: Sequence[int]) -> int:
        """The target's next token."""
        return self.ids[len(log)] if self._is_on(log) else 2

    def guesses(self, log: Sequence[int]) -> list[Guess]:
        """What a drafter says may follow, the likeliest first. Behind a wrong guess it is as sure
        as it would be behind the right one."""
        place = len(log) - self.start
        if not 0 <= place < len(self._guesses):
            return [Guess(2 + n, UNLIKELY - n) for n in range(GUESSED)]
        if self._is_on(log):
            return self._guesses[place]
        return [guess._replace(token=2 + n) for n, guess in enumerate(self._guesses[place])]

    def _is_on(self, log: Sequence[int]) -> bool:
        return len(log) < len(self.ids) and self.ids[: len(log)] == list(log)


def texts(each: int, tokens: int) -> list[Text]:
    """So many of each kind, in turn."""
    return [
        Text(kind, tokens, f"{name} {number}")
        for number in range(each)
        for name, kind in KINDS.items()
    ]


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What takes how long, in seconds."""

    forward: float
    round_trip: float
    level_share: float | None = 0.3
    """A level of the server's drafts, of a forward; None: the server has no drafter."""
    step: float = 0.017
    token: float = 0.0055
    """A step of the device's drafter, and more for each of its tokens."""


@dataclass
class Draft:
    """What the next forward of a stream runs over."""

    tokens: list[int]
    parents: list[int]
    foreseen: int = 0
    """Of these, guesses of the device."""
    asked: int | None = None
    """Levels that the policy asked for; None where it was not asked."""
    seconds: float = 0.0
    """For drafting."""


class PricedVerifier(Verifier):
    """One that drafts by the real policy, in real proportions of time."""

    most = 63

    def __init__(self, text: Text, prices: Prices, policy: Policy) -> None:
        super().__init__(text.says)
        self.forward = prices.forward
        self._text = text
        self._level_share = prices.level_share
        self._policy = policy
        self._acceptance = policy.text(0.0)
        self._next: dict[bytes, Draft] = {}

    def prepare(self, id: bytes) -> Draft:
        """Decide what the next forward runs over, when it begins: guesses that come later must wait
        for the one after."""
        session = self.known[id]
        guesses = session.guesses
        assert guesses is not None
        assert session.running is not None
        picked = guesses.pick(session.log, self.most, 0.0, branches=True)
        drafts = session.running.speculate and self._level_share is not None
        matching = 0.0
        if drafts and not guesses.waits:
            matching = self._policy.matching(self._acceptance)
        if len(picked.tokens) > 1 and picked.expected >= matching:
            draft = Draft(picked.tokens, picked.parents, foreseen=len(picked.tokens) - 1)
        else:
            draft = Draft([session.log[-1]], [-1])
            if drafts:
                (draft.asked,) = self._policy.plan([self._acceptance], [0])
                self._draw_chain(session.log, draft)
        self._next[id] = draft
        return draft

    def _draw_chain(self, log: Sequence[int], draft: Draft) -> None:
        """Draft a chain, and count what its levels take: also the last one, which is left out."""
        assert self._level_share is not None
        shape = self._policy.shape(draft.asked or 1)
        score = 0.0
        for _ in range(draft.asked or 0):
            guess = self._text.guesses([*log[:-1], *draft.tokens])[0]
            draft.seconds += self._level_share * self.forward
            score += guess.log_prob
            if len(draft.tokens) > 1 and score < max(shape.least, shape.min_score):
                return
            draft.parents.append(len(draft.tokens) - 1)
            draft.tokens.append(guess.token)

    def step(self, id: bytes, times: tuple[float, float]) -> StreamTokens:
        session = self.known[id]
        assert session.job is not None
        draft = self._next.pop(id)
        found = self._accept(session, draft.tokens, draft.parents)
        new = [*(draft.tokens[node] for node in found.path[1:]), found.next_token]
        count, finish = first_finish(session.rules, session.log, new, self._decode)
        self.forwards += 1
        levels = len(draft.tokens) - 1
        if draft.asked is not None:
            accepted = len(found.path) - 1
            drafted = Drafted(self._acceptance, draft.asked, levels, levels, accepted)
            ran = RoundTime(len(draft.tokens), self.forward, draft.seconds)
            self._policy.record([drafted] if draft.asked else [], ran)
        queue_ms, forward_ms = times
        made = StreamTokens(
            session=id,
            round=session.job.request.round,
            base=session.base,
            tokens=new[:count],
            done=bool(finish),
            finish=finish,
            drafted=levels,
            queue_ms=queue_ms + 1000 * draft.seconds,
            forward_ms=forward_ms,
            foreseen=draft.foreseen,
        )
        session.job.ids += made.tokens
        session.stream_on(made, 0.0)
        return made


class Step(NamedTuple):
    """A step of the drafter, which nobody can stop."""

    until: float
    action: Grow
    length: int
    """Of the log that it was begun for."""
    growth: GuessTreeGrower


@dataclass
class PricedWorld(World):
    """One device and one verifier, for one answer after another."""

    policy: Policy = field(default_factory=lambda: Policy(STREAM_TREE))
    patience: Patience = field(
        default_factory=lambda: Patience(offline_after=1e4, answer=1e5, settle=1e5)
    )
    up_after: float | None = None
    """The connection is there before the first turn."""

    @property
    def welcome(self) -> Welcome:
        """That of a verifier with a vocabulary as large as real ones."""
        return msgspec.structs.replace(super().welcome, vocab_size=2**20)

    def answer_to(self, text: Text, prices: Prices, count: int) -> float:
        """The seconds of an answer in a conversation of its own."""
        self._text = text
        self._prices = prices
        self._step: Step | None = None
        self._growth = None
        self._queue.clear()
        self._streaming.clear()
        self._line_free = self._answered_at = self.now
        self.latency = prices.round_trip / 2
        if not self.is_up:
            self.connect()
        self.verifier = PricedVerifier(text, prices, self.policy)
        self.session_state = None
        self.log = text.ids[: text.start]
        self.begin(count=count)
        assert self.run() == "length"
        assert self.reader.tokens == text.ids[text.start : text.start + count]
        return self.now - self.begun[-1]

    # ---- the verifier's time

    def _stream(self, session: bytes) -> None:
        """Run the forwards of a stream, one after another; before the first one the prompt."""
        verifier = self.verifier
        assert isinstance(verifier, PricedVerifier)
        if session in self._streaming or not verifier.streams(session):
            return
        self._streaming.add(session)
        is_first = verifier.known[session].base < self.transcript.rules.start

        def begin() -> None:
            if not verifier.streams(session):
                self._streaming.discard(session)
                return
            draft = verifier.prepare(session)
            self.at(draft.seconds + verifier.forward, end)

        def end() -> None:
            self._streaming.discard(session)
            answer = verifier.step(session, (0.0, 1000 * verifier.forward))
            self._answer(self._attached[session], answer, self.now + self.latency)
            self._stream(session)

        self.at(verifier.forward if is_first else 0.0, begin)

    # ---- the device's time

    def run(self, *, seconds: float = 1e6, steps: int = 100_000) -> str:
        """To the end of the turn. Messages arrive while the drafter runs a step, and what it has
        grown for a log that has moved on meanwhile is of no use to the machine."""
        until = self.now + seconds
        for _ in range(steps):
            while self._queue and self._queue[0][0] <= self.now:
                heapq.heappop(self._queue)[2]()
            if self._step is not None and self._step.until <= self.now:
                self._end_step(self._step)
            action = self.machine.next_action(self.now)
            for event in self.machine.drain():
                self.reader.take(event, self.now)
            moments = [until]
            match action:
                case Send(messages):
                    for message in messages:
                        self._send(message)
                    continue
                case Grow() if self._step is None:
                    self._begin_step(action)
                case Wait(wake) if wake is not None:
                    moments.append(wake)
                case End(reason):
                    for message in self.machine.last_messages():
                        self._send(message)
                    return reason
                case _:
                    pass
            if self._queue:
                moments.append(self._queue[0][0])
            if self._step is not None:
                moments.append(self._step.until)
            self.now = min(moments)
            if self.now >= until:
                return ""
        raise AssertionError(f"{steps} steps, and the turn is not over at {self.now:.1f} s")

    def _begin_step(self, action: Grow) -> None:
        """Begin a step of the drafter: over open nodes of its tree, or over what it has not read."""
        ids = list(action.ids)
        growth, unread = self._growth_for(ids)
        if growth is None:
            growth = GuessTreeGrower(ids[-1])
            nodes = [0]
        else:
            growth = growth.copy()
            nodes = growth.best(action.breadth)
            unread = len(nodes)
        self.machine.drafter_reads(unread > LONG)
        seconds = 0.0
        while unread > 0:
            tokens = min(unread, PIECE)
            seconds_of_piece = self._prices.step + tokens * self._prices.token
            if tokens > LONG:
                self.controller.piece = seconds_of_piece
            else:
                self.controller.step.observe(tokens, seconds_of_piece)
            seconds += seconds_of_piece
            unread -= tokens
        self._expand(ids, growth, nodes, action)
        self._step = Step(self.now + seconds, action, len(ids), growth)

    def _growth_for(self, ids: list[int]) -> tuple[GuessTreeGrower | None, int]:
        """The tree below the end of `ids`, if there is one; else how many tokens are unread."""
        if self._growth is None:
            return None, len(ids)
        before, grown = self._growth
        new = ids[len(before) :]
        path = grown.find(new)
        if path is not None and not any(node in grown.open for node in [0, *path][:-1]):
            return (grown.below(path[-1])[0] if path else grown), 0
        read = len(before) - 1
        node: int | None = 0
        for token in [*new, None]:
            if node is None or node in grown.open:
                break
            read += 1
            node = _child(grown, node, token)
        return None, max(1, len(ids) - read)

    def _expand(
        self, ids: list[int], growth: GuessTreeGrower, nodes: Sequence[int], action: Grow
    ) -> None:
        """Add the guesses after these nodes, as the real drafter keeps them."""
        tokens = []
        scores = []
        for node in nodes:
            path = path_of(growth.tree.tokens, growth.tree.parents, node)
            guesses = self._text.guesses([*ids, *path])[: action.breadth]
            score = growth.tree.scores[node]
            likely = sum(score + guess.log_prob >= action.least for guess in guesses)
            kept = guesses[: max(1, likely)]
            tokens.append([guess.token for guess in kept])
            scores.append([guess.log_prob for guess in kept])
        growth.expand(nodes, tokens, scores)

    def _end_step(self, step: Step) -> None:
        """The drafter has grown its tree; the machine takes it if the log is still the same."""
        self._step = None
        self._growth = list(step.action.ids[: step.length]), step.growth
        self.machine.drafter_reads(False)
        is_current = step.action.ids is self.machine.session.log
        if is_current and len(step.action.ids) == step.length:
            self.machine.ran(step.action, step.growth, self.now)


def _child(growth: GuessTreeGrower, parent: int, token: int | None) -> int | None:
    """The node of this token after another one."""
    tree = growth.tree
    for node in range(parent + 1, len(tree)):
        if tree.parents[node] == parent and tree.tokens[node] == token:
            return node
    return None


WAYS: dict[str, tuple[WhoDrafts, bool]] = {
    "plain": ("none", False),
    "device": ("device", True),
    "server": ("server", False),
    "auto": ("auto", True),
}
"""By name: who drafts, and whether the device guesses ahead."""
WITHOUT_THE_SERVER = ("plain", "device")
"""Ways in which the server drafts nothing, whatever its drafter costs."""


def seconds_of(way: str, asked: Sequence[Any], prices: Prices, count: int) -> list[float]:
    """The seconds of these answers, one after another on one connection."""
    if way in WITHOUT_THE_SERVER:
        prices = replace(prices, level_share=None)  # so that they are found in the cache
    return _seconds_of(way, tuple(asked), prices, count)


@cache
def _seconds_of(way: str, asked: tuple[Any, ...], prices: Prices, count: int) -> list[float]:
    draft, ahead = WAYS[way]
    world = PricedWorld(draft=draft, guess_ahead=ahead)
    return [world.answer_to(text, prices, count) for text in asked]


def speedup(way: list[float], other: list[float]) -> float:
    """How many times as fast, text by text: a geometric mean."""
    logarithms = [math.log(theirs / ours) for ours, theirs in zip(way, other, strict=True)]
    return math.exp(sum(logarithms) / len(logarithms))


def cell(asked: Sequence[Any], prices: Prices, count: int) -> dict[str, float]:
    """How many times as fast as plain streaming each way is."""
    seconds = {way: seconds_of(way, asked, prices, count) for way in WAYS}
    return {way: speedup(seconds[way], seconds["plain"]) for way in WAYS}


def share_of_best(speeds: dict[str, float]) -> float:
    """The speed of `auto`, of the fastest other way's."""
    return speeds["auto"] / max(speed for way, speed in speeds.items() if way != "auto")
