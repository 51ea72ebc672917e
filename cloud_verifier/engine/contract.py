"""What sessions and whatever runs their rounds say to each other: jobs go in (`EngineWork`), reports
come out (`Post`). No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cloud_verifier.engine.job import Job, Lease
from moa.wire.codes import Refusal
from moa.wire.messages import RecordContract, StreamTokens


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What the service must know about the model."""

    target: str
    tokenizer: str
    drafter: str
    vocab_size: int
    eos_ids: tuple[int, ...]
    slots: int
    capacity: int
    records: RecordContract | None
    stream_records: bool = True
    """Whether the server's own drafter reads records."""
    pages: int = 0
    """Pages of KV cache; 0 if all slots can be full."""
    page_tokens: int = 16
    slots_limit: str = "slots"
    """The setting that gives more slots; `kv_tokens` where fewer pages than slots were asked for."""
    takes_guesses: bool = True
    """Whether guesses are verified: an engine behind HTTP decides on its own what comes next."""
    tells_logprobs: bool = True
    """Whether the log-probabilities of tokens can be told."""
    counts_penalties: bool = True
    """Whether penalties apply to all of an answer: of a continuation an engine behind HTTP counts
    what it writes, and not the answer that it continues."""
    sends_records: bool = True
    """Whether there could be activation records: an engine behind HTTP has none."""
    has_engine_behind: bool = False
    """Whether another process does the work, of which devices want to know whether it answers."""
    takes_messages: bool = False
    """Whether devices are to tell conversations as messages, too."""
    notices: tuple[str, ...] = ()
    """What devices are told when they connect."""
    grammars: bool = False
    """Whether there is a tokenizer, which grammars need."""
    computes: str = ""
    """The identity of what the target computes; empty if it came from no file."""
    promise: str = ""
    """What "verified" says of a text, in one sentence."""


class EngineWork(Protocol):
    """Rounds go in here; reports come to `Service.take`."""

    @property
    def queued(self) -> int:
        """Rounds that wait."""

    def submit(self, job: Job) -> None:
        """Queue a round; a `Refusal` when there is no room."""

    def prefill(self, lease: Lease, ids: Sequence[int], goal: int) -> None:
        """Have the slot hold the first `goal` tokens of `ids`."""

    def release(self, lease: Lease) -> None:
        """Void the lease; a round that is still queued for it is not run."""

    def holds(self, job: Job) -> bool:
        """Whether a round waits or runs. One that does neither, and of which nothing was reported,
        is lost."""

    def wake(self) -> None:
        """Look around, although nothing is to be run."""


class Latency(NamedTuple):
    """Of an answer: when the forward was asked for, by the clock, and the seconds that it took."""

    arrived: float
    forward: float


@dataclass(frozen=True, slots=True)
class Answered:
    """A stream has new tokens, which the slot holds but for the last; or it ends."""

    job: Job
    message: StreamTokens
    latency: Latency | None = None

    @classmethod
    def ended(cls, job: Job) -> Answered:
        """A stream that ends with the tokens it has sent."""
        return cls(job, StreamTokens(job.lease.session, job.request.round, job.base, [], done=True))


@dataclass(frozen=True, slots=True)
class Waiting:
    """A stream that waits for the edge has nothing to verify: it was not run."""

    job: Job


@dataclass(frozen=True, slots=True)
class Dropped:
    """A job was not run."""

    job: Job
    refusal: Refusal


@dataclass(frozen=True, slots=True)
class Recorded:
    """Activation records of positions start..stop are in the lease's rows."""

    lease: Lease
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Failed:
    """This lease's work raised: its slot was given back."""

    lease: Lease
    job: Job | None
    reason: str


Report = Answered | Waiting | Dropped | Recorded | Failed
Post = Callable[[list[Report]], None]
