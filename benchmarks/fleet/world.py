"""The simulation: verifiers that batch waiting work, answers that proceed round by round, and failures of the fleet.

Verifiers share nothing, so each runs by itself from one event of the whole fleet to the next. An idle device is part of
an arrival rate and not an object, and a round is an entry in its verifier's heap: only a forward is an event. So a
million devices are a few hundred verifiers with their forwards.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain
from typing import NamedTuple

from benchmarks.fleet.model import Draws, Service, Work


@dataclass(slots=True, eq=False)
class Answer:
    """One answer under way."""

    asked: float
    tokens: int
    """Tokens that are still missing."""
    prompt: int
    """Tokens of the prompt that have not run yet."""
    ready: float = 0.0
    """When it comes, and later when its next draft is here."""
    began: float = 0.0
    """Time of its first token."""
    moves: int = 0

    def __lt__(self, other: Answer) -> bool:
        return self.ready < other.ready


class Flight(NamedTuple):
    """A forward under way, with its drafts and with the answers whose prompt ends in it."""

    began: float
    end: float
    rows: list[Answer]
    prompted: list[Answer]


class Verifier:
    """One verifier. Its devices' next turns arrive at the fleet's rate."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.up = fleet, False
        self.busy = 0.0
        self.rows = self.forwards = 0
        self.come_back()

    def come_back(self) -> None:
        """Start, with nothing."""
        self.up, self._now = True, self.fleet.now
        self._next_turn = self._now + self.fleet.pause()
        self.coming: list[Answer] = []
        """From elsewhere, by when they come."""
        self.waiting: list[Answer] = []
        """By when their next draft is here."""
        self.prompts: deque[Answer] = deque()
        self.backlog: deque[Answer] = deque()
        """Without a slot."""
        self.active = 0
        self._flight: Flight | None = None

    def bring(self, answers: Iterable[Answer], at: float = 0.0) -> None:
        """Answers come from elsewhere, at once or later."""
        for answer in answers:
            answer.ready = max(at, self.fleet.now)
            heappush(self.coming, answer)

    def leave(self) -> list[Answer]:
        """Stop; the answers that were under way."""
        self.up = False
        flight = [*self._flight.rows, *self._flight.prompted] if self._flight is not None else []
        return [*flight, *self.waiting, *self.prompts, *self.backlog, *self.coming]

    def run(self, until: float) -> None:
        """One forward after another, idle while there is no work."""
        service = self.fleet.service
        while self.up and self._now < until:
            if self._flight is not None:
                if self._flight.end > until:
                    break
                self._land(self._flight)
            self._arrive()
            rows: list[Answer] = []
            while self.waiting and self.waiting[0].ready <= self._now and len(rows) < service.max_rows:
                rows.append(heappop(self.waiting))
            chunk, prompted = self._prompt_chunk(service.prompt_chunk)
            if rows or chunk:
                seconds = service.forward(len(rows), chunk)
                self.busy += seconds
                self.forwards += bool(rows)
                self.rows += len(rows)
                self._flight = Flight(self._now, self._now + seconds, rows, prompted)
            else:
                heads = [heap[0].ready for heap in (self.coming, self.waiting) if heap]
                self._now = min(until, self._next_turn, *heads)

    def _arrive(self) -> None:
        while self._next_turn <= self._now:
            self._give(Answer(self._next_turn, self.fleet.work.tokens, self.fleet.work.prompt))
            self._next_turn += self.fleet.pause()
        while self.coming and self.coming[0].ready <= self._now:
            self._give(heappop(self.coming))

    def _give(self, answer: Answer) -> None:
        if self.active < self.fleet.service.slots:
            self.active += 1
            self.prompts.append(answer)
        else:
            self.backlog.append(answer)

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

    def _land(self, flight: Flight) -> None:
        fleet, self._now, self._flight = self.fleet, flight.end, None
        for answer in flight.rows:
            fleet.waits.append(flight.began - answer.ready)
            won = min(fleet.draws.won(), answer.tokens)
            answer.tokens -= won
            fleet.tokens += won
            if not answer.began:
                answer.began = self._now
                fleet.first.append(self._now - answer.asked)
            if answer.tokens > 0:
                answer.ready = self._now + fleet.draws.away()
                heappush(self.waiting, answer)
            else:
                fleet.done(answer, self._now)
                self.active -= 1
                if self.backlog:
                    self._give(self.backlog.popleft())
        for answer in flight.prompted:
            answer.ready = self._now  # its first draft is here: it came with the prompt
            heappush(self.waiting, answer)


class Fleet:
    """So many verifiers, and the devices that are spread evenly over those that are up."""

    def __init__(self, service: Service, work: Work, *, verifiers: int, devices: float, seed: int = 0) -> None:
        self.service, self.work, self.devices, self.now = service, work, devices, 0.0
        self.draws = Draws(work, seed)
        self.up = verifiers
        self.ended = 0.0
        """When the latest answer was whole."""
        self._homeless: list[Answer] = []
        self.verifiers = [Verifier(self) for _ in range(verifiers)]
        self.count_anew()

    def count_anew(self) -> None:
        """Count from now on."""
        self.waits, self.first, self.speeds = array("d"), array("d"), array("d")
        """Seconds from a draft's arrival to its forward, and from a turn's beginning to its first token; and readers'
        tokens a second."""
        self.tokens = self.answers = self.moved = 0
        for verifier in self.verifiers:
            verifier.busy = 0.0
            verifier.rows = verifier.forwards = 0

    def run(self, seconds: float) -> None:
        """Let so many more seconds pass."""
        for verifier in self.verifiers:
            verifier.run(self.now + seconds)
        self.now += seconds

    def pause(self) -> float:
        """Seconds to the next turn at one verifier."""
        rate = self.devices * self.work.turns_per_hour / 3600 / max(1, self.up)
        return self.draws.rng.expovariate(rate) if rate > 0 else math.inf

    def done(self, answer: Answer, now: float) -> None:
        """An answer is whole."""
        self.answers += 1
        self.ended = max(self.ended, now)
        self.moved += answer.moves > 0
        if now > answer.began:
            self.speeds.append(self.work.tokens / (now - answer.asked))

    def lose(self, gone: list[Verifier], *, noticed: float) -> int:
        """Stop verifiers; their answers continue elsewhere once their devices have noticed. Returns how many. Prompt
        and text are prefilled again."""
        self.up -= len(gone)
        left = list(chain.from_iterable(verifier.leave() for verifier in gone))
        for answer in left:
            answer.moves += 1
            answer.prompt = self.work.prompt + self.work.tokens - answer.tokens
        self._house(left, self.now + noticed)
        return len(left)

    def restore(self, verifiers: list[Verifier]) -> None:
        """Start verifiers again; their devices return with their next turns."""
        self.up += len(verifiers)
        for verifier in verifiers:
            verifier.come_back()
        homeless, self._homeless = self._homeless, []
        self._house(homeless, self.now)

    def _house(self, answers: list[Answer], at: float) -> None:
        there = [verifier for verifier in self.verifiers if verifier.up]
        if not there:
            self._homeless += answers
            return
        for answer in answers:
            self.draws.rng.choice(there).bring([answer], at)
