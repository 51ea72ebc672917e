"""A world in virtual time around the turn machine: a verifier made of the real session histories, a
link, a drafter.

No sockets, no torch, no sleeping. The verifier's faults are switches that a test throws, also while
a turn runs.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from cloud_verifier.sessions.budgets import Principal
from edge_client.link.estimates import RoundTrip
from edge_client.link.retry import Retry
from edge_client.turn.actions import Drop, End, Grow, Send, Wait, Write
from edge_client.turn.budget import Spending
from edge_client.turn.controller import Controller, WhoDrafts
from edge_client.turn.deadlines import Deadlines, Patience
from edge_client.turn.guard import OfflineGuard, OfflineLimits
from edge_client.turn.machine import TurnMachine
from edge_client.turn.reachability import RATE, Reachability
from edge_client.turn.records import Records
from edge_client.turn.session_state import SessionState
from edge_client.turn.stats import Stats
from edge_client.turn.transcript import OnReconnect, Transcript
from moa.errors import LinkError, MoaError
from moa.speculation.guess_tree import GuessTreeGrower
from moa.speculation.prediction import Prediction
from moa.text_stream import TextStream
from moa.tree import MASKED, path_of
from moa.wire import ClientSession, Code, Limits
from moa.wire.finish import TurnRules
from moa.wire.messages import (
    Ack,
    Append,
    ClientMessage,
    Close,
    Error,
    Foresee,
    Open,
    Progress,
    Resume,
    Resumed,
    Stream,
    StreamTokens,
    Sync,
    Welcome,
    WireLimits,
    round_of,
)
from tests.edge.reader import Reader
from tests.wire.histories import SteppedHistories

VOCAB = 60
EOS = 1
LIMITS = WireLimits(2**18, 8192, 8192, 4096, 64, 256)
WELCOME = Welcome(
    3,
    ["append", "foresee", "records", "resume"],
    "v",
    "i",
    "",
    "",
    "",
    VOCAB,
    [EOS],
    LIMITS,
)


def says(log: Sequence[int]) -> int:
    """The target: a fixed function of the log."""
    mixed = (sum(log[-3:]) * 31 + len(log) * 7 + log[-1]) % 997
    return 2 + mixed % (VOCAB - 3)


def truth(prompt: Sequence[int], count: int) -> list[int]:
    log = list(prompt)
    for _ in range(count):
        log.append(says(log))
    return log[len(prompt) :]


def damaged(log: Sequence[int]) -> int:
    """What a replica says whose weights have a flipped byte."""
    return says(log) if sum(log) % 3 else 2 + (says(log) - 1) % (VOCAB - 3)


class Letters:
    """Each id is a letter."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(64 + i % 60) for i in ids)


class Verifier(SteppedHistories):
    """Many sessions, and every fault that a verifier may show."""

    def __init__(self, target: Callable[[Sequence[int]], int] = says) -> None:
        super().__init__(target, EOS, max_context=8192, decode=Letters().decode)
        self.fault: str = ""
        """A code with which everything is refused, or `mute`: nothing is answered."""
        self.refuses: tuple[type, ...] = (Open, Append, Resume, Stream, Foresee)
        """The messages that the fault concerns."""
        self.forward = 0.01
        self.retry_after_ms = 0
        self.limit = ""
        """Which limit it names with a refusal."""
        self.claims = 0.0
        """Seconds that it says each answer took, beyond those it did."""
        self.requests: list[tuple[float, ClientMessage]] = []
        self.principal: Principal | None = None
        """What the device may have of it; None: as much as it wants."""

    def handle(self, message: ClientMessage, now: float) -> list[Any]:
        self.requests.append((now, message))
        refused = bool(self.fault) and isinstance(message, self.refuses)
        if isinstance(message, Ack | Sync) or (refused and self.fault == "mute"):
            return []
        session: bytes = getattr(message, "session", b"")
        round = round_of(message)
        if isinstance(message, Close):
            self.known.pop(session, None)
            return []
        if refused and not isinstance(message, Foresee):
            if self.fault in ("quarantined", "unknown_session"):
                self.known.pop(session, None)
            if isinstance(message, Resume):
                return [Resumed(session, "gone")]
            pause, limit = self.retry_after_ms, self.limit
            return [Error(self.fault, "as the test has it", session, round, pause, limit)]
        wait = self._wait(message, now)
        if wait > 0:
            return [_above_rate(session, round, wait)]
        answers = self.answers(message, (1000 * self.claims, 1000 * (self.forward + self.claims)))
        self._allow_guesses(session, now)
        return answers

    def _wait(self, message: ClientMessage, now: float) -> float:
        """Seconds until this message may be heard, by the device's rate; what it asks for is paid
        where that is now."""
        if self.principal is None:
            return 0.0
        tokens = 0
        match message:
            case Open(session=id) if id not in self.known:
                tokens = len(message.ids)
            case Append():
                tokens = len(message.ids)
            case Stream(session=id) if id in self.known and self.known[id].running is None:
                pass
            case _:
                return 0.0
        wait = self.principal.tokens.wait(tokens, now)
        if not wait:
            self.principal.tokens.spend(tokens)
        return wait

    def _allow_guesses(self, id: bytes, now: float) -> None:
        session = self.known.get(id)
        if self.principal is not None and session is not None and session.guesses is not None:
            session.guesses.most = self.principal.most_guesses(now)

    def paid(self, id: bytes, answer: StreamTokens, now: float) -> list[Any]:
        """As `Service._pay`: the end of a stream whose device has used up its rate."""
        if self.principal is None:
            return []
        self.principal.ran(len(answer.tokens), answer.foreseen)
        self._allow_guesses(id, now)
        wait = self.principal.tokens.wait(0, now)
        if wait <= 0 or self.known[id].job is None:
            return []
        return [_above_rate(id, 0, wait), *self.end(id)]


def _above_rate(session: bytes, round: int, wait: float) -> Error:
    pause = int(1000 * wait) + 1
    return Error(Code.BUSY, "the rate is used up", session, round, pause, RATE)


@dataclasses.dataclass
class World:
    """One device, one verifier, and the time."""

    prompt: Sequence[int] = (3, 1, 4)
    count: int = 40
    right: float = 0.8
    seed: int = 0
    latency: float = 0.02
    """One way."""
    draft: WhoDrafts = "device"
    patience: Patience = dataclasses.field(default_factory=Patience)
    on_reconnect: OnReconnect = "rewind"
    max_kbps: float = 0.0
    stop_at: int = 0
    """Of the offline guard."""
    up_after: float | None = 0.05
    """When the first connection is welcomed; None is never."""
    redial: float = 0.1
    """Seconds between two attempts to connect."""
    unreachable: bool = False
    linked: bool = True
    stop: tuple[str, ...] = ()
    prediction: Sequence[int] = ()
    guess_ahead: bool = False
    replica: str = "sound"
    """Which replica answers: `sound` or `damaged`."""
    step: float = 0.001
    """Seconds of a draft, and of a guess."""
    server_right: float | None = None
    """How often the server's own drafter is right; None: it has none."""
    chances: Callable[[Sequence[int]], float] | None = None
    """Instead of both: how likely the token after a log is guessed."""
    forward: float = 0.01
    """Seconds of a forward, and of the server's draft for it."""
    tells: bool = False
    """Whether the verifier says twice a second that it works on a round."""
    tells_for: float = math.inf
    """For how many seconds it says so at most."""
    reads: float = 0.0
    """Seconds that it reads the prompt for before the first forward of a turn."""
    engine_behind: bool = False
    """Whether it stands in front of an engine that says nothing of how far it has read."""
    limits: Limits | None = None
    """What the device may have of the verifier; None is no limit."""

    def __post_init__(self) -> None:
        self.now, self.verifier, self.random = 0.0, Verifier(), random.Random(self.seed)
        self.other = Verifier(damaged)
        """The replica that does not answer now."""
        self.loss = self.repeat = 0.0
        self.change: Callable[[Any], Any] = lambda answer: answer
        """What the link makes of an answer."""
        self.connection = 0
        self.is_up = False
        self.down_since = 0.0
        self.controller = Controller()
        self.rtt = RoundTrip()
        self.controller.rtt = self.rtt
        self.verifier.forward = self.forward
        if self.limits is not None:
            self.verifier.principal = Principal.of(self.limits, self.now)
        if self.server_right is not None:
            self.verifier.drafter = lambda ids: self._guess(ids, self.server_right)
            self.verifier.matching = sum(
                self.server_right**n for n in range(1, self.verifier.drafted + 1)
            )
        self._line_free = self._answered_at = 0.0
        self.sent: list[tuple[float, ClientMessage]] = []
        """What the device sent; the verifier may see a message twice, or not at all."""
        self._attached: dict[bytes, int] = {}
        """The connection that each session was last opened or resumed on: others must not use it."""
        self.strange: list[ClientMessage] = []
        """Messages of sessions that were not opened or resumed before on the same connection."""
        self._streaming: set[bytes] = set()
        self._growth: tuple[list[int], GuessTreeGrower] | None = None
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.session_state: SessionState | None = None
        self.begun: list[float] = []
        """When each turn began."""
        self.left: list[bytes] = []
        self.log = list(self.prompt)
        self.begin()
        if self.up_after is not None:
            self.at(self.up_after, self.connect)

    def begin(self, *, count: int | None = None) -> None:
        """A turn begins; the log is its prompt."""
        self.count = count or self.count
        self.begun.append(self.now)
        if self.session_state is None:
            self.session_state = SessionState(
                ClientSession(list(self.log), max_new_tokens=self.count, stop=list(self.stop))
            )
        codec: Any = Letters()
        rules = TurnRules(len(self.log), self.count, 8192, frozenset({EOS}), self.stop)
        self.transcript = Transcript(
            self.session_state.session,
            rules,
            codec.decode,
            TextStream(codec, self.stop),
            self.on_reconnect,
        )
        unread = len(self.log) - self.session_state.session.settled
        self.machine = TurnMachine(
            self.transcript,
            self.session_state,
            self.controller,
            Spending(self.max_kbps),
            Records(None),
            OfflineGuard(OfflineLimits(warn_at=0, stop_at=self.stop_at)),
            Deadlines(
                self.patience,
                self.controller,
                waiting_since=self.now,
                unread=unread,
                text_stays=self.on_reconnect == "keep",
            ),
            Stats(started=self.now),
            Reachability(self.linked, Retry(0.1, 1.0, self.random.random)),
            self.left,
            who_drafts=self.draft,
            guesses=self.guess_ahead,
            prediction=Prediction(self.prediction) if self.prediction else None,
        )
        self.reader = Reader(self.log)
        if self.is_up:
            self.machine.link_up(self.welcome, self.connection, self.now)
        elif self.linked:
            self.machine.link_down(self.down_since, None)

    def next_turn(self, *ids: int, count: int | None = None, anew: bool = False) -> None:
        """The user adds these ids: in the same session if it can be continued, and not `anew`."""
        state = self.session_state
        session = self.machine.session
        log = [*self.log, *ids]
        if (
            not anew
            and state is not None
            and not session.unsettled
            and session.settled == len(session.log)
        ):
            session.append(log[len(session.log) :], max_new_tokens=count or self.count)
        else:
            self.left.append(session.id)
            self.session_state = None
        self.log = log
        self.begin(count=count)

    # ---- what happens

    def trouble(self, fault: str, start: float = 0.0, stop: float = math.inf) -> None:
        """The verifier has this fault from `start` until `stop`."""
        for moment, what in ((start, fault), (stop, "")):
            if moment == 0.0:
                self.verifier.fault = what
            elif moment < math.inf:
                self.at(moment, lambda what=what: setattr(self.verifier, "fault", what))  # type: ignore[misc]

    def outage(self, start: float, stop: float) -> None:
        """The network is away from `start` until `stop`."""

        def away() -> None:
            self.unreachable = True
            self.cut()

        self.at(start, away)
        self.at(stop, lambda: setattr(self, "unreachable", False))

    # ---- the link

    def at(self, seconds: float, happen: Callable[[], None]) -> None:
        """Let something happen `seconds` from now."""
        heapq.heappush(self._queue, (self.now + seconds, next(self._order), happen))

    def connect(self) -> None:
        if self.is_up:
            return
        if self.unreachable:
            self.machine.link_down(self.down_since, LinkError("cannot reach it"))
            self.at(self.redial, self.connect)
            return
        self.connection += 1
        self.is_up = True
        self.rtt.add(2 * self.latency)  # of the handshake
        self.machine.link_up(self.welcome, self.connection, self.now)

    @property
    def welcome(self) -> Welcome:
        """That of the replica that answers."""
        features = [*WELCOME.features, "behind"] if self.engine_behind else WELCOME.features
        return msgspec.structs.replace(WELCOME, computes=self.replica, features=features)

    def fail_over(self, replica: str) -> None:
        """The connection is lost, and another replica answers the next one."""
        if replica != self.replica:
            self.replica = replica
            self.verifier, self.other = self.other, self.verifier
            self.cut()

    def recheck(self, *, persists: bool = False) -> None:
        """The user waits once more; as the shell does, the machine is told the state of the link
        again."""
        self.machine.continue_settling(self.now, persists=persists)
        if self.is_up:
            self.machine.link_up(self.welcome, self.connection, self.now)

    def cut(self, why: MoaError | None = None) -> None:
        """The connection is lost, with all that is under way."""
        if not self.is_up:
            return
        self.is_up = False
        self.down_since = self.now
        if (
            self.random.random() < 0.7
        ):  # else the verifier does not notice until it is asked on another connection
            self.verifier.abandon()
        self.machine.link_down(self.now, why or LinkError("cut"))
        self.at(self.redial, self.connect)

    def _send(self, message: ClientMessage) -> None:
        connection = self.connection
        if not self.is_up:
            return
        self.sent.append((self.now, message))
        self._line_free = max(
            self._line_free, self.now + self.latency
        )  # a connection keeps the order

        def arrive() -> None:
            if connection != self.connection or not self.is_up:
                return
            if (
                self.random.random() < self.loss
            ):  # messages are only ever lost with their connection
                self.cut()
                return
            asks = isinstance(message, Stream)
            if asks and self.tells:
                began = self.now
                self.at(0.5, lambda: self._tell(connection, message.session, message.round, began))
            for _ in range(2 if self.random.random() < self.repeat else 1):
                free = self.now
                for answer in self._handle(message):
                    free += self.verifier.forward
                    self._answer(connection, answer, free + self.latency)
            self._stream(getattr(message, "session", b""))

        self.at(self._line_free - self.now, arrive)

    def _tell(self, connection: int, session: bytes, round: int, began: float) -> None:
        """While a round is not answered, how far the verifier is."""
        if connection != self.connection or not self.machine.session.waits_for(round):
            return
        if session != self.machine.session.id or self.now - began > self.tells_for:
            return
        done = total = 100
        if self.engine_behind:
            done, total = 0, self.verifier.known[session].base
        elif self.reads:
            done = min(100, int(100 * (self.now - began) / self.reads))
        self.at(
            self.latency, lambda: self._deliver(connection, Progress(session, round, done, total))
        )
        self.at(0.5, lambda: self._tell(connection, session, round, began))

    def _handle(self, message: ClientMessage) -> list[Any]:
        session: bytes = getattr(message, "session", b"")
        if isinstance(message, Open | Resume):
            self._attached[session] = self.connection
        elif (
            not isinstance(message, Ack | Close) and self._attached.get(session) != self.connection
        ):
            self.strange.append(message)
            refusal = Error(
                Code.UNKNOWN_SESSION, "not on this connection", session, round_of(message)
            )
            return [] if isinstance(message, Foresee) else [refusal]
        return self.verifier.handle(message, self.now)

    def _stream(self, session: bytes) -> None:
        """Let the verifier run its streams, a forward at a time."""
        if session in self._streaming or not self.verifier.streams(session):
            return
        self._streaming.add(session)

        first = self.verifier.known[session].base < self.transcript.rules.start
        reads = self.reads if first else 0.0

        def forward() -> None:
            self._streaming.discard(session)
            verifier = self.verifier
            if verifier.fault and Stream in verifier.refuses and verifier.streams(session):
                if (
                    verifier.fault != "mute"
                ):  # a stream that runs is ended, and the next one is refused
                    for answer in verifier.end(session):
                        self._answer(self._attached[session], answer, self.now + self.latency)
                self.at(self.forward, lambda: self._stream(session))
            elif verifier.streams(session):
                answer = verifier.step(session, (0.0, 1000 * self.verifier.forward))
                for said in (answer, *verifier.paid(session, answer, self.now)):
                    self._answer(self._attached[session], said, self.now + self.latency)
                self._stream(session)

        self.at(reads + self.verifier.forward, forward)

    def _answer(self, connection: int, answer: Any, at: float) -> None:
        self._answered_at = max(self._answered_at, at)  # a connection keeps the order
        self.at(self._answered_at - self.now, lambda: self._deliver(connection, answer))

    def _deliver(self, connection: int, answer: Any) -> None:
        if connection == self.connection and self.is_up:
            self.machine.receive(self.change(answer), self.now)

    # ---- the drafter

    def _guess(self, ids: Sequence[int], right: float | None = None) -> int:
        chance = random.Random(f"{self.seed} {list(ids[-4:])} {len(ids)}")
        right = (
            self.chances(ids)
            if self.chances is not None
            else self.right
            if right is None
            else right
        )
        return says(ids) if chance.random() < right else chance.randrange(2, VOCAB)

    def _grow(self, ids: list[int], breadth: int, least: float) -> GuessTreeGrower:
        """As the real drafter does: what was grown before, as far as it is below the end of `ids`."""
        growth = GuessTreeGrower(ids[-1])
        if self._growth is not None:
            before, old = self._growth
            path = old.find(ids[len(before) :]) if ids[: len(before)] == before else None
            if path is not None:
                growth = old.below(path[-1])[0] if path else old
        nodes = growth.best(breadth)
        tokens = []
        scores = []
        for node in nodes:
            log = [*ids, *path_of(growth.tree.tokens, growth.tree.parents, node)]
            guess = self._guess(log)
            second = says(log) if says(log) != guess and len(log) % 2 else (guess + 7) % VOCAB
            right = self.chances(log) if self.chances is not None else self.right
            chances = [
                math.log(chance) if chance > 0 else MASKED for chance in (right, (1 - right) / 2)
            ]
            kept = max(1, sum(growth.tree.scores[node] + chance >= least for chance in chances))
            tokens.append([guess, second][:kept])
            scores.append(chances[:kept])
        growth.expand(nodes, tokens, scores)
        self._growth = list(ids), growth
        return growth

    # ---- time

    def run(self, *, seconds: float = 600.0, steps: int = 100_000) -> str:
        """To the end of the turn; why it ended. "" when the time was over first."""
        until = self.now + seconds
        for _ in range(steps):
            while self._queue and self._queue[0][0] <= self.now:
                heapq.heappop(self._queue)[2]()
            action = self.machine.next_action(self.now)
            for event in self.machine.drain():
                self.reader.take(event, self.now)
            match action:
                case Send(messages):
                    for message in messages:
                        self._send(message)
                case Grow(ids, breadth, least):
                    growth = self._grow(list(ids), breadth, least)
                    self.now += self.step
                    self.machine.ran(action, growth, self.now)
                case Write(ids):
                    self.now += self.step
                    self.machine.ran(action, self._guess(ids), self.now)
                case Drop():
                    self.cut()
                case Wait(wake):
                    assert wake is None or wake > self.now, (
                        "a wait for what is over would be a busy loop"
                    )
                    self._will_be_woken(wake)
                    next_event = self._queue[0][0] if self._queue else None
                    times = [t for t in (wake, next_event) if t is not None]
                    assert times, "waits for what never comes"
                    self.now = max(
                        self.now, min(*times, until) if len(times) > 1 else min(times[0], until)
                    )
                case End(reason):
                    for message in self.machine.last_messages():
                        self._send(message)
                    for event in self.machine.drain():
                        self.reader.take(event, self.now)
                    self.log = self.transcript.ids
                    self.session_state = self.machine.session_state
                    return reason
            if self.now >= until:
                return ""
        raise AssertionError(f"{steps} steps, and the turn is not over at {self.now:.1f} s")

    # ---- what must hold

    def _will_be_woken(self, wake: float | None) -> None:
        """Whatever is not answered is sent again at its time, or given up with its connection."""
        machine = self.machine
        assert (machine.reach.link == "up") == self.is_up
        if machine.reach.usable and (
            machine.session.unsettled or machine.session_state.again_at is not None
        ):
            assert wake is not None, "an answer that never comes would be waited for for ever"
            assert wake <= (machine.session_state.again_at or math.inf), "a retry would be late"

    @property
    def answer(self) -> list[int]:
        return self.reader.tokens

    @property
    def expected(self) -> list[int]:
        return truth(self.log[: len(self.reader.prompt)], self.count)

    def most_requests_per_second(self) -> int:
        """Openings, appends and resumes that the device sent in any second beside the one of each
        turn that began in it, of the last 200 messages."""
        times = [
            at for at, message in self.sent[-200:] if isinstance(message, Open | Append | Resume)
        ]

        def within(moments: Sequence[float], at: float) -> int:
            return sum(at <= moment < at + 1 for moment in moments)

        return max((within(times, at) - within(self.begun, at) for at in times), default=0)
