"""The events: verifiers that batch what has come, answers that go round by round, and what befalls the fleet.

A device at rest is a part of a rate and no object, and a round is an entry in its verifier's heap and no event of
SimPy's: only a forward is one. So a million devices are a few hundred verifiers with their forwards.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable
from heapq import heappop, heappush
from typing import Any

import simpy

from benchmarks.fleet.model import Draws, Service, Work

_BUCKETS_PER_DOUBLING = 8
_SHORTEST = 1e-4

Events = Generator[simpy.Event, Any, None]


class Histogram:
    """Durations in buckets of 9 %."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.count = 0

    def add(self, seconds: float) -> None:
        """Count one."""
        bucket = int(_BUCKETS_PER_DOUBLING * math.log2(max(seconds, _SHORTEST) / _SHORTEST))
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        self.count += 1

    def quantile(self, q: float) -> float:
        """The middle of the bucket that holds it; 0 without any."""
        left = q * self.count
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 0:
                return float(_SHORTEST * 2 ** ((bucket + 0.5) / _BUCKETS_PER_DOUBLING)) if bucket else 0.0
        return 0.0


class Answer:
    """One answer under way."""

    __slots__ = ("asked", "began", "moves", "prompt", "ready", "tokens")

    def __init__(self, asked: float, tokens: int, prompt: int) -> None:
        self.asked, self.tokens, self.prompt = asked, tokens, prompt
        self.began = 0.0
        """When its first token was there."""
        self.ready = asked
        self.moves = 0

    def __lt__(self, other: Answer) -> bool:
        return self.ready < other.ready


class Verifier:
    """One verifier. Its devices' next turns arrive at `rate()` a second."""

    def __init__(self, fleet: Fleet, index: int) -> None:
        self.fleet, self.index = fleet, index
        self.up = True
        self.waiting: list[Answer] = []
        """Answers by when their next draft is here."""
        self.backlog: deque[Answer] = deque()
        """Answers without a slot."""
        self.prompts: deque[Answer] = deque()
        self.active = 0
        self.busy = 0.0
        self.rows = self.forwards = 0
        self._next = fleet.pause(self)
        self._process = fleet.env.process(self._run())

    def give(self, answer: Answer) -> None:
        """An answer comes here, from a device at rest or from another verifier."""
        if self.active < self.fleet.service.slots:
            self._start(answer)
        else:
            self.backlog.append(answer)

    def bring(self, answers: Iterable[Answer]) -> None:
        """Answers come from elsewhere: look at them now."""
        for answer in answers:
            self.give(answer)
        if self._process.target is not None and self.up:
            self._process.interrupt()

    def leave(self) -> list[Answer]:
        """Stop; the answers that were under way."""
        self.up = False
        left = [*self.waiting, *self.prompts, *self.backlog]
        self.waiting, self.active = [], 0
        self.prompts.clear()
        self.backlog.clear()
        self._process.interrupt()
        return left

    def come_back(self) -> None:
        """Start again, with nothing."""
        self.up = True
        self._next = self.fleet.pause(self)
        self._process = self.fleet.env.process(self._run())

    def _start(self, answer: Answer) -> None:
        self.active += 1
        self.prompts.append(answer)

    def _run(self) -> Events:
        env, service = self.fleet.env, self.fleet.service
        while self.up:
            try:
                self._arrive(env.now)
                ready = [heappop(self.waiting) for _ in range(self._due(env.now, service.max_rows))]
                chunk, prompted = self._prompt_chunk(service.prompt_chunk)
                if not ready and not chunk:
                    soonest = min(self._next, self.waiting[0].ready if self.waiting else math.inf)
                    yield env.timeout(max(0.0, soonest - env.now) if soonest < math.inf else 3600.0)
                    continue
                seconds = service.forward(len(ready), chunk)
                self.busy += seconds
                self.forwards += bool(ready)
                self.rows += len(ready)
                end = env.now + seconds
                began = env.now
                while env.now < end:
                    try:
                        yield env.timeout(end - env.now)
                    except simpy.Interrupt:  # news, which a forward does not stop for; or the end, which it does
                        if not self.up:
                            self.fleet.stranded(ready + prompted)
                            return
                self._settle(ready, began)
                for answer in prompted:
                    answer.ready = env.now
                    heappush(self.waiting, answer)  # its first draft is here: it came with the prompt
            except simpy.Interrupt:
                continue

    def _arrive(self, now: float) -> None:
        while self._next <= now:
            self.give(self.fleet.new_answer(self._next))
            self._next += self.fleet.pause_from(self._next, self)

    def _due(self, now: float, most: int) -> int:
        waiting = self.waiting
        count = 0
        # A heap is no sorted list: count what is due without looking at more than that many.
        stack = [0] if waiting else []
        while stack and count < most:
            node = stack.pop()
            if node < len(waiting) and waiting[node].ready <= now:
                count += 1
                stack += (2 * node + 1, 2 * node + 2)
        return count

    def _prompt_chunk(self, most: int) -> tuple[int, list[Answer]]:
        """Prompt tokens to run now, and the answers whose prompt has run with them."""
        taken, done = 0, []
        while self.prompts and taken < most:
            answer = self.prompts[0]
            part = min(answer.prompt, most - taken)
            answer.prompt -= part
            taken += part
            if answer.prompt:
                break
            done.append(self.prompts.popleft())
        return taken, done

    def _settle(self, rows: list[Answer], began: float) -> None:
        fleet, now = self.fleet, self.fleet.env.now
        for answer in rows:
            fleet.waits.add(began - answer.ready)
            won = min(fleet.draws.won(), answer.tokens)
            answer.tokens -= won
            fleet.tokens += won
            if not answer.began:
                answer.began = now
                fleet.first.add(now - answer.asked)
            if answer.tokens > 0:
                answer.ready = now + fleet.draws.away()
                heappush(self.waiting, answer)
            else:
                fleet.done(answer, now)
                self.active -= 1
                if self.backlog:
                    self._start(self.backlog.popleft())


class Fleet:
    """So many verifiers, and the devices that are spread evenly over those that are up."""

    def __init__(
        self,
        service: Service,
        work: Work,
        *,
        verifiers: int,
        devices: float,
        seed: int = 0,
        load: Callable[[float], float] = lambda now: 1.0,
    ) -> None:
        self.env = simpy.Environment()
        self.service, self.work, self.devices, self._load = service, work, devices, load
        self.draws = Draws(work, seed)
        self.waits, self.first = Histogram(), Histogram()
        """From a draft's arrival to its forward; from a turn's beginning to its first token."""
        self.speeds: list[float] = []
        self.tokens = self.answers = self.moved = 0
        self.ended = 0.0
        """When the latest answer was whole."""
        self.up = verifiers
        self.verifiers = [Verifier(self, index) for index in range(verifiers)]

    def run(self, seconds: float) -> None:
        """Let so many more seconds pass."""
        self.env.run(until=self.env.now + seconds)

    def rate(self, now: float) -> float:
        """New turns a second at one verifier."""
        return self.devices * self.work.turns_per_hour / 3600 * self._load(now) / max(1, self.up)

    def pause(self, verifier: Verifier) -> float:
        """When the first turn after now begins."""
        return self.env.now + self.pause_from(self.env.now, verifier)

    def pause_from(self, moment: float, verifier: Verifier) -> float:
        """Seconds to the next turn."""
        rate = self.rate(moment)
        return self.draws.rng.expovariate(rate) if rate > 0 and verifier.up else math.inf

    def new_answer(self, now: float) -> Answer:
        """A device wants an answer."""
        return Answer(now, self.work.tokens, self.work.prompt)

    def done(self, answer: Answer, now: float) -> None:
        """An answer is whole."""
        self.answers += 1
        self.ended = now
        self.moved += answer.moves > 0
        if now > answer.began:
            self.speeds.append(self.work.tokens / (now - answer.asked))

    def lose(self, gone: list[Verifier], *, noticed: float) -> int:
        """Verifiers go, and their answers go on elsewhere once their devices have noticed; how many."""
        self.up -= len(gone)
        left = [answer for verifier in gone for answer in verifier.leave()]
        self.stranded(left, noticed)
        return len(left)

    def stranded(self, answers: list[Answer], noticed: float = 0.1) -> None:
        """Take answers up elsewhere: their prompt and what was written is run again."""
        if answers:
            self.env.process(self._resume(answers, noticed))

    def _resume(self, answers: list[Answer], noticed: float) -> Events:
        for answer in answers:
            answer.moves += 1
            answer.prompt = self.work.prompt + self.work.tokens - answer.tokens
        yield self.env.timeout(noticed)
        while not (there := [verifier for verifier in self.verifiers if verifier.up]):
            yield self.env.timeout(1.0)
        shares: dict[int, list[Answer]] = {}
        for answer in answers:
            shares.setdefault(self.draws.rng.randrange(len(there)), []).append(answer)
        for index, share in shares.items():
            there[index].bring(share)

    def restore(self, verifiers: list[Verifier]) -> None:
        """Verifiers are there again; their devices come back to them with their next turns."""
        self.up += len(verifiers)
        for verifier in verifiers:
            verifier.come_back()
