"""A round that takes long says so: to edges that want to know, and no more often than they need."""

from __future__ import annotations

import time
from dataclasses import replace

from cloud_verifier.app import Verifier
from cloud_verifier.emulated import slowed_down
from cloud_verifier.engine.job import Lease
from cloud_verifier.forward_time import ForwardTime
from cloud_verifier.model import serve_model
from cloud_verifier.sessions.session import PROGRESS_SECONDS
from moa.target.torch_target import Target
from moa.wire import PROTOCOL_VERSIONS
from moa.wire.messages import Hello, Progress, Stream
from tests.verifier import kit
from tests.verifier.sessions import outbox, session


def test_only_a_round_that_is_worked_on_and_silent_tells_how_far_it_is() -> None:
    one = session(1, ids=range(4, 24))
    assert one.progress(7, 9.0) is None, "nothing runs"
    one.stream(Stream(one.id, 1, one.base, waits=True), 0.0)
    assert one.progress(7, 9.0) is None, "a stream that waits for guesses waits for the edge"
    lease = Lease(one.id, "p", length=7)
    one.lease = lease
    one.job = one.as_job(lease, 0.0)
    assert one.progress(lease.length, 0.4) is None
    assert one.progress(lease.length, 0.5) == Progress(one.id, 1, 7, 19)
    assert one.progress(lease.length, 0.9) is None
    one.used = 0.9
    assert one.progress(lease.length, 1.3) is None
    lease.length = 40  # with a draft that has not been judged
    assert one.progress(lease.length, 1.5) == Progress(one.id, 1, 19, 19)
    one.detach()
    assert one.progress(7, 9.0) is None
    one.attach(outbox())
    one._hears_progress = False
    assert one.progress(7, 9.0) is None


async def test_a_slow_target_is_heard_of_before_it_answers() -> None:
    """Four tokens at a time, each piece of the prompt 0.3 s: the edge hears of every one or two."""
    target = slowed_down(
        Target.from_model(kit.model(), slots=2, capacity=160), ForwardTime(forward=0.3)
    )
    settings = replace(kit.SETTINGS, prefill_tokens=4)
    slow = Verifier(serve_model(target), settings)
    prompt = kit.prompt(1, 24)
    async with slow.open() as running, kit.connection(running) as raw:
        edge = kit.Client(raw)
        await edge.send(Hello(list(PROTOCOL_VERSIONS), ["progress"]))
        await edge.receive()
        asked = await edge.start(prompt, max_new_tokens=2)
        began = time.monotonic()
        await edge.send(asked.stream())
        told: list[Progress] = []
        while isinstance(news := await edge.receive(), Progress):
            told.append(news)
        seconds = time.monotonic() - began  # more than six pieces take, where the machine is busy
    done = [one.done for one in told]
    assert [one.total for one in told] == [len(prompt) - 1] * len(told)
    assert 2 <= len(done) <= 1 + seconds / PROGRESS_SECONDS
    assert done == sorted(done)
    assert 0 < done[-1] < len(prompt)
