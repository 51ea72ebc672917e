"""Sessions for tests without a model."""

from __future__ import annotations

from collections.abc import Sequence

from cloud_verifier.engine.contract import ModelFacts
from cloud_verifier.engine.job import Lease
from cloud_verifier.metrics import Metrics
from cloud_verifier.sessions.budgets import Meter
from cloud_verifier.sessions.outbox import Outbox
from cloud_verifier.sessions.session import ServerSession
from moa.wire import FEATURES, Limits
from moa.wire.messages import Open, RecordContract, Stream

LIMITS = Limits()
FACTS = ModelFacts(
    target="t",
    tokenizer="k",
    drafter="d",
    vocab_size=128,
    eos_ids=(2,),
    slots=2,
    capacity=100,
    records=RecordContract(1, 4, ["int8"]),
)


def outbox() -> Outbox:
    """The end of a connection that nobody reads."""
    return Outbox(Metrics(), LIMITS, lambda: 0.0, Meter(LIMITS, 0.0))


def session(
    name: int,
    *,
    principal: str = "p",
    ids: Sequence[int] = (4, 5, 6),
    live: bool = True,
    now: float = 0.0,
) -> ServerSession:
    """A session without a slot."""
    message = Open(bytes([name] * 16), list(ids))
    made = ServerSession(
        message,
        LIMITS,
        eos_ids=frozenset(),
        max_context=90,
        principal=principal,
        features=FEATURES,
        now=now,
    )
    if live:
        made.attach(outbox())
    return made


def works(session: ServerSession) -> ServerSession:
    """The same in the middle of a round."""
    session.stream(Stream(session.id, 1, session.base), 0.0)
    session.job = session.as_job(session.lease or Lease(session.id, session.principal), 0.0)
    return session
