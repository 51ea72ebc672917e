"""A turn's session on the link: brought up, resumed, asked, sent again, and watched for answers that do not come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from edge_client.link.websocket import LinkToVerifier
from edge_client.turn.reconcile import Turn
from edge_client.turn.sync import RecordSync
from moa.wire.messages import Append, Open, Resume, Stream, Verify

Request = Open | Append | Verify | Stream


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds to wait for things."""

    first_answer: float = 5.0
    """For the first answer of a turn, which may include a long prompt, and after a reconnection."""
    floor: float = 0.25
    """The shortest wait before an answer counts as overdue."""
    dead: float = 8.0
    """Without a single byte for so long while an answer is owed, the connection is given up."""
    settle: float = 5.0
    """At the end of a turn, for the verifier to check what was written offline."""


@dataclass
class Uplink:
    """Where the session stands with the verifier."""

    link: LinkToVerifier
    turn: Turn
    sync: RecordSync
    patience: Patience
    generation: int = 0
    """The connection that the session was last brought up on."""
    clock: Callable[[], float] = perf_counter
    asked_at: float = 0.0
    deadline: float = 0.0
    """After this, the answer is overdue."""
    resumes: int = 0
    _begun: bool = False
    """Whether this turn has sent anything yet: its session may be new on a connection that is not."""
    _standing: bool = False
    """Whether the session stands on this connection, so that requests may be sent."""
    _answered: bool = False
    _resend_at: float | None = None
    """When refused requests are to be sent again."""

    @property
    def ready(self) -> bool:
        """Whether a request may be made now."""
        if not self.link.up or self.link.generation != self.generation:
            return False
        return self._standing and self._resend_at is None and not self.turn.session.busy

    @property
    def overdue(self) -> bool:
        """Whether an answer should have come by now."""
        return self.clock() > self.deadline

    async def tend(self) -> None:
        """Keep the session up: open or resume it on a new connection, repeat what was refused, give up what is dead."""
        now = self.clock()
        if self.link.generation != self.generation or not self._begun:
            await self._stand_up()
        elif self._resend_at is not None and now >= self._resend_at:
            self._resend_at = None
            await self.resend(self.turn.session.unsettled)
        elif not self.ready and now - max(self.asked_at, self.link.last_heard) > self.patience.dead:
            self.link.drop()

    async def restart(self) -> None:
        """The turn goes on in another session: open that one."""
        self._standing = False
        await self._stand_up()

    async def ask(self, request: Verify | Stream, *, server_seconds: float) -> None:
        """Send a round that the server is expected to need so long for."""
        self.asked_at = self.clock()
        patience = self.link.rtt.deadline(server_seconds, floor=self.patience.floor)
        self.deadline = self.asked_at + (patience if self._answered else max(patience, self.patience.first_answer))
        await self.link.send(request)

    def answered(self, *, server_seconds: float) -> None:
        """An answer came; in a stream, another is expected."""
        self._answered = True
        self.deadline = self.clock() + self.link.rtt.deadline(2 * server_seconds, floor=self.patience.floor)

    def stands(self) -> None:
        """The verifier has taken the session over."""
        self._standing = True
        self.resumes += 1

    def refused(self, retry_after: float) -> None:
        """Too busy: the same again, later."""
        self._resend_at = self.clock() + max(0.05, retry_after)

    async def resend(self, requests: list[Request] | tuple[Request, ...]) -> None:
        """Send requests that still stand."""
        self._wait_patiently()
        for request in list(requests):
            await self.link.send(request)

    async def _stand_up(self) -> None:
        session = self.turn.session
        self._begun = True
        fresh = self.generation != self.link.generation
        self.generation = self.link.generation
        self._resend_at = None
        if fresh:
            self.sync.connected()
        session.records = self.sync.dtype
        if not session.settled and not session.unsettled:
            session.open()
        requests: list[Request | Resume] = list(session.unsettled)
        # A session that the verifier has never heard of is opened, and one that was brought up on this very
        # connection goes on; any other must be resumed first.
        self._standing = not session.settled or not fresh
        if not self._standing:
            requests = list(session.recover())
        if requests:
            self._wait_patiently()
        for request in requests:
            await self.link.send(request)

    def _wait_patiently(self) -> None:
        self.asked_at = self.clock()
        self.deadline = self.asked_at + self.patience.first_answer
