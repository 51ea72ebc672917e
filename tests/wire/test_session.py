"""Both state machines against each other: what one says, the other must understand, whatever gets
lost between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cloud_verifier.sessions.session import PREFILL, Run, ServerSession
from moa.errors import ProtocolError
from moa.wire import (
    Advanced,
    ClientSession,
    Code,
    Ready,
    RecordsArrived,
    Recovered,
    Refusal,
    Refused,
)
from moa.wire.messages import (
    Activations,
    Append,
    ChatMessage,
    Error,
    Open,
    Opened,
    Resumed,
    Stream,
    StreamTokens,
)
from tests.wire.histories import AT_ONCE, EOS, Histories, says


class Pair:
    """A session that has been opened, and its server: it may forget everything, and be slow to run
    what it admitted. A stream is a token at a time."""

    def __init__(self, **settings: Any) -> None:
        self.server = Histories(says, EOS, max_context=10_000, stream_tokens=1)
        self.session = ClientSession([3, 1, 4], **settings)
        assert isinstance(self.say(self.session.open()), Ready)

    def answer(self, message: Any) -> Any:
        """The server's one answer; None while the round is under way."""
        return next(iter(self.server.answers(message, AT_ONCE)), None)

    def say(self, message: Any) -> Any:
        return self.session.receive(self.answer(message))

    @property
    def ours(self) -> ServerSession:
        return self.server.known[self.session.id]


@pytest.mark.parametrize(
    ("code", "why", "message"),
    [
        (
            Code.CONFLICT,
            "round 3 after round 0",
            lambda session: _changed(session.stream(), round=3),
        ),
        (
            Code.CONFLICT,
            "pending token is at 2",
            lambda session: _changed(session.stream(), base=1),
        ),
        (
            Code.CONFLICT,
            "with another prompt",
            lambda session: ClientSession([8, 8], id=session.id).open(),
        ),
        (
            Code.CONFLICT,
            "logs differ",
            lambda session: _changed(session.recover()[0], chain=bytes(16)),
        ),
        (Code.LIMIT, "tokens in the context", lambda session: session.append([1] * 10_000)),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_does_not_fit_the_log_is_refused(
    code: Code, why: str, message: Callable[[ClientSession], Any]
) -> None:
    pair = Pair()
    error = pair.answer(message(pair.session))
    assert (error.code, error.limit) == (code, "max_context_tokens" if code == Code.LIMIT else "")
    assert why in error.message


def test_only_one_round_at_a_time() -> None:
    pair = Pair()
    message = pair.session.stream()
    with pytest.raises(ProtocolError, match="under way"):
        pair.session.stream()
    assert pair.ours.stream(message, 1.0) == [Run(1.0)]
    assert pair.ours.stream(message, 2.0) == [], "its answer comes once"
    with pytest.raises(Refusal, match="still running"):
        pair.ours.stream(_changed(message, speculate=False), 3.0)
    pair.ours.give_up()
    assert pair.ours.stream(message, 4.0) == [Run(4.0)], (
        "what was not run may be sent again under its number"
    )


def test_a_finished_turn_takes_no_more_rounds_until_the_next() -> None:
    pair = Pair(max_new_tokens=1)
    assert pair.say(pair.session.stream()).finish == "length"
    event = pair.say(pair.session.stream())
    assert isinstance(event, Refused)
    assert not event.retry
    assert isinstance(pair.say(pair.session.append([5, 6], max_new_tokens=2)), Ready)
    assert not pair.say(pair.session.stream()).finish
    assert pair.say(pair.session.stream()).finish == "length"


def test_reopening_goes_on_with_rounds_output_count_and_records() -> None:
    pair = Pair(max_new_tokens=5)
    pair.say(pair.session.stream())
    pair.say(pair.session.stream())
    pair.session.receive(Activations(pair.session.id, 0, 0, 3, "int8", 1, 2, b""))
    pair.server.known.clear()
    event = pair.say(pair.session.recover()[0])
    assert event.outcome == "gone"
    (opening,) = event.resend
    assert (opening.ids, opening.generated, opening.round, opening.held) == (
        pair.session.log,
        2,
        2,
        [(0, 3)],
    )
    assert isinstance(pair.say(opening), Ready)


def test_a_stream_that_had_begun_goes_on_from_where_it_was_when_its_verifier_is_lost() -> None:
    pair = Pair(max_new_tokens=5)
    stream = pair.session.stream(speculate=False, waits=True)
    pair.ours.stream(stream, 0.0)
    job = pair.server.job(pair.ours)
    answer = StreamTokens(pair.ours.id, job.request.round, 2, [says([3, 1, 4])])
    pair.ours.stream_on(answer, 0.0)
    pair.session.receive(answer)
    pair.server.known.clear()
    event = pair.say(pair.session.recover()[0])
    opening, again = event.resend
    assert isinstance(pair.say(opening), Ready)
    assert (again.round, again.base, again.waits) == (stream.round, stream.base + 1, True)
    assert pair.ours.stream(again, 0.0) == [PREFILL], "it waits for guesses"


def test_an_append_stands_behind_an_opening_that_is_answered_twice() -> None:
    pair = Pair(max_new_tokens=1)
    pair.say(pair.session.stream())
    opened = Opened(pair.session.id, len(pair.session.log))
    append = pair.session.append([5, 6], max_new_tokens=2)
    assert pair.session.receive(opened) is None
    assert pair.session.unsettled == [append]


def test_a_round_that_still_runs_at_resume_is_waited_for() -> None:
    pair = Pair()
    message = pair.session.stream()
    pair.ours.stream(message, 0.0)
    event = pair.say(pair.session.recover()[0])
    assert isinstance(event, Recovered)
    assert event.resend == ()
    assert isinstance(pair.session.receive(pair.server.run(pair.ours, AT_ONCE)[0]), Advanced)


def test_a_round_that_still_runs_where_nothing_was_heard_is_told_from_its_beginning() -> None:
    """The connection was lost before the first answer, and the forward under way ends when the
    device has asked again on another one."""
    server = Histories(says, EOS, max_context=10_000, stream_tokens=1)
    session = ClientSession([3, 1, 4])
    opening, stream = session.open(), session.stream()
    server.answers(opening, AT_ONCE)
    ours = server.known[session.id]
    ours.stream(stream, 0.0)
    unheard = StreamTokens(session.id, stream.round, 2, [says(session.log)])
    ours.stream_on(unheard, 0.0)
    assert session.recover() == [opening, stream]
    assert isinstance(session.receive(server.answers(opening, AT_ONCE)[0]), Ready)
    (so_far,) = ours.stream(stream, 1.0)
    assert isinstance(so_far, StreamTokens)
    event = session.receive(so_far)
    assert isinstance(event, Advanced)
    assert (event.tokens, event.done) == (tuple(unheard.tokens), False)
    later = StreamTokens(session.id, stream.round, 3, [says(session.log)], done=True)
    ours.stream_on(later, 2.0)
    assert isinstance(session.receive(later), Advanced)
    assert session.log == ours.log


def test_an_opening_that_is_repeated_is_told_what_the_running_round_has_brought() -> None:
    """The forward under way ends between the repeated opening and the repeated request behind it:
    the rest of the round was told to a device that had not its beginning."""
    server = Histories(says, EOS, max_context=10_000, stream_tokens=1)
    session = ClientSession([3, 1, 4])
    opening, stream = session.open(), session.stream()
    server.answers(opening, AT_ONCE)
    ours = server.known[session.id]
    ours.stream(stream, 0.0)
    ours.stream_on(StreamTokens(session.id, stream.round, 2, [says(session.log)]), 0.0)
    assert session.recover() == [opening, stream]
    for answer in server.answers(opening, AT_ONCE):
        session.receive(answer)
    later = StreamTokens(session.id, stream.round, 3, [says(ours.log)], done=True)
    ours.stream_on(later, 1.0)
    assert isinstance(session.receive(later), Advanced)
    assert session.log == ours.log
    (again,) = ours.stream(stream, 2.0)
    assert isinstance(again, StreamTokens)
    assert session.receive(again) is None


def test_a_quarantined_session_is_opened_again() -> None:
    pair = Pair()
    message = pair.session.stream()
    event = pair.session.receive(Error(Code.QUARANTINED, "failed", pair.session.id, 1))
    assert isinstance(event, Recovered)
    assert [type(r) for r in event.resend] == [Open, Stream]
    assert event.resend[1] == message


def test_a_retryable_refusal_keeps_the_request_and_another_drops_it() -> None:
    pair = Pair()
    message = pair.session.stream()
    busy = pair.session.receive(Error(Code.BUSY, "busy", pair.session.id, 1, 1500))
    assert isinstance(busy, Refused)
    assert (busy.retry, busy.retry_after) == (True, 1.5)
    assert pair.session.unsettled == [message]
    dropped = pair.session.receive(Error(Code.CONFLICT, "it does not fit", pair.session.id, 1))
    assert isinstance(dropped, Refused)
    assert not dropped.retry
    assert not pair.session.busy


def test_stream_tokens_come_once_and_in_order() -> None:
    pair = Pair()
    pair.session.stream()
    first = StreamTokens(pair.session.id, 1, 2, [10, 11])
    assert pair.session.receive(first).tokens == (10, 11)  # type: ignore[union-attr]
    assert pair.session.receive(first).tokens == ()  # type: ignore[union-attr]
    assert pair.session.receive(StreamTokens(pair.session.id, 1, 3, [11, 12])).tokens == (12,)  # type: ignore[union-attr]
    with pytest.raises(ProtocolError, match="stream tokens at 9"):
        pair.session.receive(StreamTokens(pair.session.id, 1, 8, [1]))
    assert pair.session.receive(StreamTokens(pair.session.id, 1, 5, [13], True)).done  # type: ignore[union-attr]
    assert pair.session.receive(StreamTokens(pair.session.id, 1, 6, [14], True)) is None


@pytest.mark.parametrize(
    ("base", "tokens"), [(2, [10, 12]), (3, [12, 13]), (1, [10, 11, 12]), (2, [11])]
)
def test_tokens_that_are_told_again_must_be_ours(base: int, tokens: list[int]) -> None:
    """A base that is too low makes a hole: the tokens in front would be dropped unread."""
    pair = Pair()
    pair.session.stream()
    pair.session.receive(StreamTokens(pair.session.id, 1, 2, [10, 11]))
    with pytest.raises(ProtocolError, match="differ from ours"):
        pair.session.receive(StreamTokens(pair.session.id, 1, base, tokens))
    assert pair.session.log[3:] == [10, 11]


def test_a_turn_that_is_told_again_must_be_ours() -> None:
    pair = Pair()
    session = pair.session
    session.append([7, 8])
    (resume,) = session.recover()
    with pytest.raises(ProtocolError, match="differ from ours"):
        session.receive(Resumed(session.id, "resumed", resume.length + 3, 0, [7, 9, 20]))


def test_records_are_booked() -> None:
    pair = Pair()
    event = pair.session.receive(Activations(pair.session.id, 2, 1, 2, "int8", 1, 2, b""))
    assert isinstance(event, RecordsArrived)
    assert list(pair.session.held) == [(1, 3)]
    assert pair.session.epoch == 2


def _changed(message: Any, **change: Any) -> Any:
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    return type(message)(**(fields | change))


def test_a_conversation_is_told_as_messages_only_where_that_was_agreed() -> None:
    asked = [ChatMessage("user", "three one four")]
    more = [*asked, ChatMessage("assistant", "one"), ChatMessage("user", "five")]
    for agreed in (False, True):
        session = ClientSession([3, 1, 4], messages=asked, tells_messages=agreed)
        assert session.open().messages == (asked if agreed else [])
        session.receive(Opened(session.id, 3))
        append = session.append([1, 5], messages=more)
        assert isinstance(append, Append)
        assert append.messages == (more if agreed else [])
        # Another verifier, which knows nothing of the session, is told the whole conversation.
        session.recover()
        recovered = session.receive(Resumed(session.id, "gone"))
        assert isinstance(recovered, Recovered)
        (opening, *_) = recovered.resend
        assert isinstance(opening, Open)
        assert opening.messages == (more if agreed else [])
        assert session.another([3, 1, 4, 1]).open().messages == (more if agreed else [])
