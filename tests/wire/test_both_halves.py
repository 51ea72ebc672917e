"""The device's half of a session against the verifier's: any order of requests, losses, repetitions
and guesses."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moa.logprobs import TokenLogprobs
from moa.wire import Advanced, ClientSession, Recovered, Refused
from moa.wire.messages import Open, Resume
from tests.wire.histories import AT_ONCE, EOS, SteppedHistories, says


class BothHalves(RuleBasedStateMachine):
    """A link that delivers in order, until it is cut: then everything under way is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.verifier = SteppedHistories(says, EOS, max_context=10_000)
        self.up: deque[Any] = deque()
        self.down: deque[Any] = deque()
        self.said: list[int] = []
        """Tokens that the device's events have brought."""
        self.attached = True
        """Whether the verifier has heard of the session on this connection."""

    @initialize(top=st.integers(-1, 1))
    def open(self, top: int) -> None:
        self.top = top
        self.device = ClientSession([3, 1, 4], max_new_tokens=6, logprobs=top)
        self.up.append(self.device.open())

    # ---- the device asks

    @precondition(lambda self: not self.device.unsettled and not self.device.finish)
    @rule(waits=st.booleans())
    def stream(self, waits: bool) -> None:
        self.up.append(self.device.stream(speculate=False, waits=waits))

    @precondition(lambda self: self.device.streaming is not None)
    @rule(
        right=st.lists(st.booleans(), max_size=6),
        branch=st.booleans(),
        waits=st.sampled_from([None, True, False]),
    )
    def foresee(self, right: list[bool], branch: bool, waits: bool | None) -> None:
        tokens = [self.device.log[-1]]
        parents = [-1]
        log = list(self.device.log)
        for node, good in enumerate(right):
            token = says(log) if good else 99
            tokens.append(token)
            parents.append(node if not branch or good else max(0, node - 1))
            log.append(token)
        self.up.append(self.device.foresee(tokens, parents, [1] * len(tokens), waits))

    @precondition(lambda self: self.device.busy)
    @rule()
    def cancel(self) -> None:
        if (message := self.device.cancel()) is not None:
            self.up.append(message)

    @precondition(lambda self: self.device.finish and not self.device.unsettled)
    @rule(ids=st.lists(st.integers(1, 49), min_size=1, max_size=3), count=st.integers(1, 8))
    def append(self, ids: list[int], count: int) -> None:
        self.up.append(self.device.append(ids, max_new_tokens=count, logprobs=self.top))

    # ---- the verifier works

    @precondition(lambda self: self.up)
    @rule(times=st.integers(1, 2))
    def arrives(self, times: int) -> None:
        """The oldest message, perhaps twice."""
        message = self.up.popleft()
        self.attached = self.attached or isinstance(message, Open | Resume)
        for _ in range(times):
            self.down += self.verifier.answers(message, AT_ONCE)

    @precondition(lambda self: self.verifier.streams(self.device.id))
    @rule()
    def forward(self) -> None:
        answers: list[Any] = [self.verifier.step(self.device.id, AT_ONCE)]
        if self.verifier.is_cancelled(self.device.id):
            answers += self.verifier.end(self.device.id)
        if self.attached:
            self.down += answers

    # ---- the device hears

    @precondition(lambda self: self.down)
    @rule(times=st.integers(1, 2))
    def answered(self, times: int) -> None:
        """The oldest answer, perhaps twice."""
        message = self.down.popleft()
        for _ in range(times):
            event = self.device.receive(message)
            assert not isinstance(event, Refused), event
            if isinstance(event, Advanced | Recovered):
                self.said += event.tokens
            if isinstance(event, Recovered):
                self.up += event.resend

    @rule(forgets=st.booleans(), in_forward=st.booleans())
    def cut(self, forgets: bool, in_forward: bool) -> None:
        """The connection is lost; perhaps the verifier too. A forward that is under way ends
        later, perhaps when the device is back."""
        self.verifier.abandon(in_forward=in_forward)
        if forgets:
            self.verifier.known.clear()
        self.attached = False
        self.down.clear()
        self.up = deque(self.device.recover())

    # ---- what always holds

    @invariant()
    def the_log_is_the_targets(self) -> None:
        at = self.device.turn_start
        log = self.device.log[:at]
        while len(log) < len(self.device.log):
            log.append(says(log))
        assert self.device.log == log
        assert self.said[len(self.said) - (len(log) - at) :] == log[at:]
        found = self.device.token_logprobs
        assert found == {at: TokenLogprobs(-at / 8, ((at, -at / 8),) * self.top) for at in found}

    @invariant()
    def the_verifier_is_ahead(self) -> None:
        ours = self.verifier.known.get(self.device.id)
        if ours is not None and self.device.settled:
            assert ours.log[: self.device.settled] == self.device.log[: self.device.settled]

    def teardown(self) -> None:
        """From any state two turns come to their end when nothing is lost any more, and all is sent
        twice."""
        self._finish()
        self.append([7, 8], 5)
        self._finish()

    def _finish(self) -> None:
        for _ in range(1000):
            if self.up:
                self.arrives(2)
            elif self.down:
                self.answered(2)
            elif self.verifier.streams(self.device.id):
                self.forward()
            elif self.device.streaming is not None:
                self.foresee([True, True, False], False, False)
            elif not self.device.unsettled and not self.device.finish:
                self.stream(False)
            else:
                break
        assert self.device.finish
        assert not self.device.unsettled
        self.the_log_is_the_targets()
        expected = range(self.device.turn_start, len(self.device.log)) if self.top >= 0 else []
        assert set(self.device.token_logprobs) == set(expected)


BothHalves.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestBothHalves = BothHalves.TestCase
