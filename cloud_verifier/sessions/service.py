"""All connections and sessions of one process, with common limits, rates and drain. No sockets."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Protocol

from cloud_verifier.engine.scheduler import Scheduler
from cloud_verifier.engine.work import Detokenizer, ModelFacts
from cloud_verifier.metrics import Metrics
from cloud_verifier.serving.budgets import Principal, WorkBudget
from cloud_verifier.sessions.outbox import Outbox
from cloud_verifier.sessions.rounds import Rounds
from cloud_verifier.sessions.store import SessionStore
from moa.errors import ConfigError
from moa.token_bucket import TokenBucket
from moa.wire.codes import Code, Refusal
from moa.wire.limits import Limits
from moa.wire.messages import Goaway


class Connected(Protocol):
    """What the service needs of a connection."""

    principal: str
    outbox: Outbox


class Service:
    """All connections and sessions of a process."""

    def __init__(
        self,
        facts: ModelFacts,
        limits: Limits,
        scheduler: Scheduler,
        *,
        text: Detokenizer | None = None,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        free_pages: Callable[[], int] = lambda: 0,
    ) -> None:
        self.facts, self.limits, self.text, self.clock = facts, limits, text, clock
        self.metrics = metrics or Metrics()
        self.scheduler, self.free_pages = scheduler, free_pages
        self.store = SessionStore(
            limits,
            facts,
            clock=clock,
            release=scheduler.release,
            evicted=lambda reason: self.metrics.evictions.labels(reason).inc(),
            free_pages=free_pages,
        )
        self.rounds = Rounds(self.store, scheduler, self.metrics, limits, clock, self.spend)
        self.channels: set[Connected] = set()
        self.instance = secrets.token_hex(8)
        self.draining = False
        self.max_connections = limits.max_connections
        """Lower than the limit if the process may not open so many files."""
        self._principals: dict[str, Principal] = {}
        self.max_context = min(
            limits.max_context_tokens, facts.capacity - max(limits.max_tree_nodes, limits.max_chain_tokens)
        )
        if self.max_context < 1:
            raise ConfigError(
                f"a slot of {facts.capacity} tokens has no room for a draft of {limits.max_chain_tokens}",
                hint="lower --max-chain-tokens and --max-tree-nodes",
            )

    def drain(self, reason: str, seconds: float) -> None:
        """Accept no new work; send Goaway to every client."""
        self.draining = True
        self.rounds.drain()
        for channel in self.channels:
            channel.outbox.answer(Goaway(reason=reason, drain_ms=int(1000 * seconds)))

    @property
    def idle(self) -> bool:
        """Whether no round runs and nothing waits to be sent."""
        running = any(session.history.running is not None for session in self.store)
        return not running and not any(channel.outbox.has_answers for channel in self.channels)

    def principal(self, name: str) -> Principal:
        """The shared budgets of a principal's connections. Names come from the token file, so they are few."""
        found = self._principals.get(name)
        if found is None:
            limits, now = self.limits, self.clock()
            found = self._principals[name] = Principal(
                WorkBudget(limits, now, times=limits.connection_budgets_per_principal),
                TokenBucket(limits.max_tokens_per_second, limits.max_burst_tokens, now),
            )
        return found

    def full(self, name: str) -> bool:
        """Whether there is no room for another connection of this principal."""
        own = self.principal(name).connections
        return len(self.channels) >= self.max_connections or own >= self.limits.max_connections_per_principal

    def join(self, channel: Connected) -> None:
        """Add a connection."""
        self.channels.add(channel)
        self.principal(channel.principal).connections += 1

    def leave(self, channel: Connected) -> None:
        """Remove a connection."""
        if channel in self.channels:
            self.channels.remove(channel)
            self.principal(channel.principal).connections -= 1

    def charge(self, name: str, tokens: int) -> None:
        """Count tokens against the principal's rate; `busy` when it is used up."""
        budget, now = self.principal(name).tokens, self.clock()
        if (wait := budget.wait(tokens, now)) > 0:
            raise Refusal(
                Code.BUSY,
                "too many tokens a second",
                limit="max_tokens_per_second",
                retry_after_ms=int(1000 * wait) + 1,
            )
        budget.spend(tokens)

    def spend(self, name: str, tokens: int) -> bool:
        """Count what a stream has had run against the principal's rate; whether it may go on now."""
        budget = self.principal(name).tokens
        budget.spend(tokens)
        return budget.wait(0, self.clock()) == 0

    def observe(self) -> None:
        """Update the gauges."""
        for state, count in self.store.count().items():
            self.metrics.sessions.labels(state).set(count)
        self.metrics.connections.set(len(self.channels))
        self.metrics.slots_free.set(self.store.slots_free)
        self.metrics.pages_free.set(self.free_pages())
        self.metrics.queue.set(self.scheduler.queued)
