"""The turn machine in virtual time: every cause of trouble, one policy."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from edge_client.events import Link, Notice, Progress
from edge_client.settings import ClientSettings
from edge_client.turn.deadlines import Patience
from edge_client.turn.reachability import Reachability
from moa.errors import LinkError, RemoteError
from moa.wire.messages import Append, Close, Error, Foresee, Open, Stream, StreamTokens, Usage
from tests.edge.turn.world import World, truth

BOTH = pytest.mark.parametrize("draft", ["device", "server"])


def exact(world: World) -> None:
    """The answer is the target's, all of it is verified, and the reader was told the same."""
    assert world.answer == world.expected
    assert all(world.reader.verified)
    assert world.reader.text == world.transcript.stream.text


def ends_exact(world: World) -> None:
    world.run()
    exact(world)


def unreachable(**how: Any) -> World:
    """The first attempt to reach the verifier fails, and so do all others until it is reachable."""
    world = World(up_after=None, unreachable=True, **how)
    world.at(0.1, world.connect)
    return world


@BOTH
def test_a_replica_that_computes_otherwise_does_not_go_on_with_a_turn(draft: Any) -> None:
    world = World(draft=draft, patience=Patience(offline_after=0.1, settle=1.0))
    world.at(0.3, lambda: world.fail_over("damaged"))
    assert world.run() != ""
    verified = [
        token for token, sure in zip(world.answer, world.reader.verified, strict=True) if sure
    ]
    assert 0 < len(verified) < len(world.answer)
    assert verified == world.expected[: len(verified)]
    assert not world.verifier.requests
    assert world.reader.states[-1] == "refused"
    world.fail_over("sound")
    world.recheck()
    ends_exact(world)


@pytest.mark.parametrize("draft", ["device", "server", "none", "auto"])
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_an_undisturbed_turn(draft: Any, right: float) -> None:
    world = World(draft=draft, right=right)
    assert world.run() == "length"
    exact(world)
    assert world.reader.states == ["connecting", "online"][-len(world.reader.states) :]
    assert len([m for _, m in world.verifier.requests if isinstance(m, Open)]) == 1


@BOTH
@pytest.mark.parametrize(
    ("fault", "until"),
    [
        *((fault, 3.0) for fault in ("busy", "draining", "internal", "deadline")),
        *((fault, 0.9) for fault in ("quarantined", "unknown_session", "conflict")),
    ],
)
def test_refused_for_now_or_a_session_that_is_lost(draft: Any, fault: str, until: float) -> None:
    """The device writes after its patience, and what it wrote is checked when the verifier takes
    requests again."""
    world = World(draft=draft, forward=0.05)
    world.trouble(fault, 0.2, until)
    ends_exact(world)
    assert world.most_requests_per_second() <= 6


@pytest.mark.parametrize(
    ("fault", "most"),
    [
        *((fault, 30) for fault in ("quarantined", "unknown_session", "conflict")),
        *((fault, 3) for fault in ("limit", "bad_message", "unsupported", "from_the_future")),
    ],
)
def test_a_verifier_that_gets_nowhere_or_refuses_for_good_is_left_alone(
    fault: str, most: int
) -> None:
    world = World(patience=Patience(settle=3.0))
    world.trouble(fault)
    assert world.run(seconds=60) == "length"
    assert len(world.answer) == 40
    assert not any(world.reader.verified)
    assert "refused" in world.reader.states
    asked = [m for _, m in world.verifier.requests if not isinstance(m, Foresee)]
    assert len(asked) <= most
    links = [event for event in world.reader.events if isinstance(event, Link)]
    fails = fault in ("quarantined", "unknown_session", "conflict")
    assert links[-1].for_now is fails, "the next question may be answered: nobody has refused"


def test_a_refusal_that_names_a_time_is_for_now() -> None:
    world = World(patience=Patience(settle=3.0))
    world.verifier.retry_after_ms = 5000
    world.trouble("unsupported")
    assert world.run(seconds=60) == "length"
    links = [event for event in world.reader.events if isinstance(event, Link)]
    assert (links[-1].state, links[-1].for_now) == ("refused", True)
    asked = [m for _, m in world.verifier.requests if isinstance(m, Stream)]
    assert len(asked) == 1, "it is asked no more for this answer"


def test_a_busy_verifier_is_asked_when_it_said() -> None:
    world = World(patience=Patience(offline_after=10.0))
    world.trouble("busy", stop=0.2)
    world.verifier.retry_after_ms = 250
    ends_exact(world)
    first, second = [at for at, message in world.verifier.requests if isinstance(message, Open)]
    assert 0.25 <= second - first - 2 * world.latency - world.verifier.forward <= 0.35


@BOTH
@pytest.mark.parametrize("patience", [Patience(offline_after=0.01), Patience()])
def test_a_reader_at_a_limit_of_his_own_is_told_so_in_the_end(
    draft: Any, patience: Patience
) -> None:
    """Of a verifier that "did not answer in time" the helpdesk looks for a fault of the network."""
    world = World(draft=draft, patience=dataclasses.replace(patience, settle=1.0))
    world.verifier.limit = "max_tokens_per_second"
    world.trouble("busy")
    world.run()
    last = [event for event in world.reader.events if isinstance(event, Link)][-1]
    assert last.state == "limited"
    words = "your rate at the verifier is used up (max_tokens_per_second)"
    assert last.detail in (words, f"{words}: it goes on in 1 s")
    assert "late" not in world.reader.states


@BOTH
def test_a_reader_whose_prompt_is_read_at_last_is_not_told_of_the_refusal_before(
    draft: Any,
) -> None:
    world = World(draft=draft, reads=60.0, tells=True, patience=Patience(offline_after=5.0))
    world.verifier.limit = "slots"
    world.trouble("busy", stop=0.5)
    world.run(seconds=40)
    assert world.machine.reach.news() == Link(state="late")
    told = [event.detail for event in world.reader.events if isinstance(event, Link)]
    assert not any("refuses" in detail for detail in told), told


def test_a_refusal_is_forgotten_where_tokens_have_come_since() -> None:
    reach = Reachability(link="up")
    reach.refused_for_now(Error("busy", "all 4 slots are busy", limit="slots"))
    words = "the verifier refuses for now: all 4 slots are busy (slots)"
    assert reach.news() == Link(state="late", detail=words)
    reach.progressed()
    assert reach.news() == Link(state="late")
    reach.refused_for_now(Error("internal", "a fault"))
    assert reach.news() == Link(state="late"), "that is no matter of room"


def test_a_verifier_cannot_ask_for_an_hour() -> None:
    world = World(patience=Patience(offline_after=0.5, settle=700.0))
    world.trouble("busy", stop=1.0)
    world.verifier.retry_after_ms = 3_600_000
    ends_exact(world)
    assert world.now < 400


@BOTH
def test_a_verifier_that_claims_to_need_hours_is_not_waited_for(draft: Any) -> None:
    world = World(draft=draft, patience=Patience(settle=60.0))
    world.verifier.claims = 10_000.0
    world.trouble("mute", 0.3)
    world.run(seconds=10)
    assert len(world.answer) == 40
    world.trouble("")
    world.cut()
    ends_exact(world)


# ---- patience


def test_the_device_writes_after_its_patience_on_a_silent_link() -> None:
    world = World()
    world.trouble("mute")
    world.run(seconds=1.3)
    assert world.reader.states == ["online", "late"]
    assert 3 <= len(world.answer) <= 10, "as fast as it may while an answer is merely late"
    world.trouble("")
    world.cut()
    ends_exact(world)


def test_a_verifier_whose_engine_away_is_not_called_online() -> None:
    world = World()
    world.machine.engine_away("the upstream is not reached")
    world.trouble("mute")
    world.run(seconds=1.3)
    assert world.reader.states == ["offline"]
    assert world.answer, "the device writes as where nothing answers"
    world.machine.engine_away("")
    world.trouble("")
    world.cut()
    ends_exact(world)
    assert world.reader.states[-1] == "online", "tokens of the engine's own have come"


def test_a_request_that_was_refused_is_repeated_when_the_engine_is_back() -> None:
    """The refusal had asked for a pause of ten seconds, and the text of that time was the
    device's."""
    world = World(count=20, up_after=0.0, patience=Patience(settle=60.0))
    world.machine.engine_away("the upstream is not reached")
    world.verifier.retry_after_ms = 10_000
    world.trouble("busy", stop=2.0)
    world.at(3.0, lambda: world.machine.engine_away(""))
    ends_exact(world)
    assert 3.0 < world.now < 5.0


def test_a_verifier_whose_engine_has_answered_nothing_yet_is_not_called_online() -> None:
    world = World()
    world.machine.engine_away("", unanswered="it has not answered yet")
    world.trouble("mute")
    world.run(seconds=0.3)
    assert world.reader.states == []
    world.machine.engine_away("")
    world.run(seconds=0.3)
    assert world.reader.states == ["online"]


def test_a_verifier_that_is_back_and_reads_is_online_before_its_tokens_come() -> None:
    """It was started again, and has the whole prompt to read: only a stream that began anew, or
    tokens, used to say so."""
    world = World(count=10, reads=10.0, tells=True, patience=Patience(settle=60.0))
    world.outage(0.2, 3.0)
    world.at(2.0, world.verifier.known.clear)
    ends_exact(world)
    assert "offline" in world.reader.states
    told = [event for event in world.reader.events if isinstance(event, Link | Progress)]
    kinds = [event.state if isinstance(event, Link) else "reads" for event in told]
    away = len(kinds) - 1 - kinds[::-1].index("offline")
    assert kinds[away + 1 : away + 3] == ["online", "reads"]


def test_an_engine_that_goes_away_in_mid_answer_is_no_late_answer() -> None:
    world = World()
    world.run(seconds=0.2)
    world.trouble("mute")
    world.machine.engine_away("the upstream is not reached")
    world.run(seconds=1.3)
    assert world.reader.states == ["online", "offline"]


@pytest.mark.parametrize("offline_after", [0.0, 0.3, 2.0])
def test_patience_is_a_setting(offline_after: float) -> None:
    world = World(up_after=None, patience=Patience(offline_after=offline_after, settle=1.0))
    world.at(0.01, lambda: setattr(world, "unreachable", True))
    world.at(0.02, world.connect)
    assert world.run(seconds=offline_after - 0.01 if offline_after else 0.0) == ""
    assert not world.answer
    world.run(seconds=0.1)
    assert world.answer


def test_a_link_that_is_known_to_be_down_is_not_waited_for_again() -> None:
    world = unreachable(patience=Patience(settle=0.5))
    world.run()
    assert len(world.answer) == 40
    before = world.now
    world.next_turn(5, anew=True)
    world.run(seconds=0.05)
    assert world.answer, "written at once"
    assert world.now - before < 0.1


def test_a_slow_target_is_no_dead_one_and_once_known_it_is_not_written_over() -> None:
    world = World(count=4, draft="device", right=1.0, patience=Patience(settle=60.0), forward=15.0)
    ends_exact(world)
    assert world.connection == 1, "the connection was not given up"
    assert "late" in world.reader.states
    world.next_turn(5, count=3, anew=True)
    ends_exact(world)
    assert "late" not in world.reader.states


def test_a_verifier_that_says_that_it_reads_is_not_written_over() -> None:
    """A prompt of thousands of tokens takes a minute; without news of it the device writes."""
    for tells in (True, False):
        world = World(
            count=4,
            draft="device",
            right=0.5,
            tells=tells,
            reads=60.0,
            patience=Patience(settle=99.0),
        )
        ends_exact(world)
        assert ("late" in world.reader.states) is not tells
        assert world.reader.read == ([100] if tells else [])


def test_a_verifier_that_says_so_and_gets_nowhere_is_written_over_after_a_while() -> None:
    world = World(count=4, draft="device", tells=True, forward=30.0, patience=Patience(settle=99.0))
    ends_exact(world)
    assert world.reader.states == ["online", "late", "online"]
    assert 11 < world.reader.late_at < 13


def test_a_check_that_makes_progress_is_not_given_up_and_one_that_makes_none_is() -> None:
    """Offline text of a real size, and a target that needs longer for it than the user settles."""
    for forward, verified in ((8.0, True), (400.0, False)):
        world = World(count=30, right=0.9, up_after=None, patience=Patience(settle=1.0), tells=True)
        assert world.run() == "length"
        assert len(world.answer) == 30
        world.verifier.forward = world.forward = forward
        world.connect()
        told = len(world.reader.read)
        world.recheck()
        world.run()
        assert len(world.reader.read) - told > 10, "that it is at work is told again and again"
        assert world.transcript.verified is verified
        if verified:
            assert world.answer == world.expected


@pytest.mark.parametrize("asked_pause", [0.0, 10.0, 60.0])
@pytest.mark.parametrize("fault", ["busy", "draining", "deadline"])
def test_a_check_goes_on_while_the_verifier_refuses_for_now(fault: str, asked_pause: float) -> None:
    """As one does whose upstream is away: for longer than any wait for an answer."""
    patience = Patience(settle=1.0, answer=30.0)
    world = World(count=8, right=0.5, up_after=None, patience=patience)
    assert world.run() == "length"
    world.verifier.retry_after_ms = int(1000 * asked_pause)
    world.trouble(fault, stop=500.0)
    world.connect()
    world.recheck(persists=True)
    world.run()
    assert world.now > 500.0
    assert world.connection == 1, "a verifier that has asked for a pause is not taken for dead"
    exact(world)


@pytest.mark.parametrize("is_away", [False, True])
@pytest.mark.parametrize("asked_pause", [0.0, 10.0, 60.0])
@pytest.mark.parametrize("fault", ["busy", "draining", "deadline"])
def test_a_check_that_a_program_waits_for_ends_while_nobody_can_check(
    fault: str, asked_pause: float, is_away: bool
) -> None:
    """It went on for as long as an upstream was away: the program gave no answers meanwhile."""
    world = World(count=8, right=0.5, up_after=None, patience=Patience(settle=2.0, answer=300.0))
    assert world.run() == "length"
    world.verifier.retry_after_ms = int(1000 * asked_pause)
    world.verifier.fault = fault
    world.connect()
    for _ in range(2):
        began = world.now
        world.recheck()
        if is_away:
            world.machine.engine_away("it is not reached", since=0.0, unheard=True)
        world.run()
        assert 2.0 <= world.now - began < 4.0
        assert not world.transcript.verified
    world.verifier.fault = ""
    world.machine.engine_away("")
    world.recheck()
    ends_exact(world)


@pytest.mark.parametrize(
    ("fault", "persists"), [("internal", True), ("mute", True), ("mute", False)]
)
def test_a_check_ends_where_the_verifier_only_fails_or_is_silent(
    fault: str, persists: bool
) -> None:
    world = World(count=8, up_after=None, patience=Patience(settle=1.0, answer=30.0))
    assert world.run() == "length"
    world.trouble(fault)
    world.connect()
    world.recheck(persists=persists)
    began = world.now
    world.run()
    assert 29.0 < world.now - began < 40.0
    assert not world.transcript.verified


def test_an_answer_that_never_comes_ends_on_another_connection() -> None:
    world = World(patience=Patience(answer=30.0, settle=100.0))
    world.trouble("mute", stop=40.0)
    ends_exact(world)
    assert world.connection == 3, "at 30 and 60 seconds"


# ---- outages


@BOTH
@pytest.mark.parametrize("policy", ["rewind", "keep"])
def test_two_outages(draft: Any, policy: Any) -> None:
    world = World(
        draft=draft,
        on_reconnect=policy,
        count=80,
        patience=Patience(settle=5.0),
        forward=0.05,
        step=0.05,
    )
    world.outage(0.4, 4.4)
    world.outage(6.0, 10.0)
    world.run()
    if policy == "rewind":
        exact(world)
    assert len(world.answer) == 80


def test_a_second_outage_does_not_restart_the_settle_clock() -> None:
    world = World(count=8, patience=Patience(offline_after=0.1, settle=5.0))
    world.trouble("mute")
    world.outage(0.5, 4.0)
    world.outage(4.5, 100.0)
    assert world.run() == "length"
    assert world.now - world.reader.told_at[-1] == pytest.approx(5.0, abs=0.1)


def test_nobody_waits_for_the_answer_of_a_slow_target_that_is_known_to_be_away() -> None:
    """With 4 s a forward the prompt came back 4 s late after a cut."""
    world = World(count=12, draft="server", forward=4.0, patience=Patience(settle=1.0), tells=True)
    world.outage(9.0, 300.0)
    assert world.run() == "length"
    assert world.now - world.reader.told_at[-1] == pytest.approx(1.0, abs=0.2)


def test_what_stays_unverified_ends_the_turn_after_a_while_and_can_be_checked_later() -> None:
    world = unreachable(patience=Patience(settle=5.0), right=0.5)
    assert world.run() == "length"
    assert 5.0 < world.now < 8.0
    assert not any(world.reader.verified)
    world.unreachable = False
    world.machine.continue_settling(world.now)
    ends_exact(world)


def test_what_was_not_sent_before_a_loss_is_not_sent_before_the_resume() -> None:
    """A round whose draft becomes ready between two connections: the next one would refuse its
    session, and the whole text would be run again."""
    world = World(redial=0.0, step=0.05)
    for n in range(10):
        world.at(0.3 + 0.11 * n, world.cut)
    ends_exact(world)
    assert world.machine.stats.resumes >= 8
    assert world.strange == []


@pytest.mark.parametrize("forgets", [False, True])
def test_a_drafter_that_fails_between_two_connections_leaves_no_stream_that_waits_for_it(
    forgets: bool,
) -> None:
    """The verifier has not noticed the loss, or it runs the stream again: either way nobody will
    send a guess."""
    world = World(guess_ahead=True)
    world.verifier.abandon = lambda: None  # type: ignore[method-assign]
    world.run(seconds=0.2)
    assert world.machine.session.streaming is not None
    assert world.machine.session.streaming.waits
    world.cut()
    world.machine.drafter_failed("the drafter failed")
    if forgets:
        world.verifier.known.clear()
    ends_exact(world)
    assert world.now < 3


@pytest.mark.parametrize("times", [5, 60])
def test_a_link_that_flaps(times: int) -> None:
    world = World(redial=0.3, patience=Patience(settle=60.0))
    world.trouble("mute", stop=0.4 * times)
    for n in range(times):
        world.at(0.2 + 0.4 * n, world.cut)
    world.run()
    assert len(world.answer) == 40
    if times == 5:
        exact(world)
    else:
        assert "refused" in world.reader.states, "the connection is lost again and again"


def test_the_guard_ends_a_turn_far_from_the_verifier() -> None:
    world = unreachable(stop_at=10, patience=Patience(settle=1.0))
    assert world.run() == "guard"
    assert len(world.answer) == 10


def test_without_a_verifier_or_with_wrong_credentials_nothing_is_waited_for() -> None:
    alone = World(linked=False, up_after=None)
    refused = World(up_after=None)
    error = RemoteError("unauthorized", "no token")
    refused.at(0.1, lambda: refused.machine.link_down(0.0, error, refused=True))
    for world, longest, state in ((alone, 0.1, "none"), (refused, 1.0, "refused")):
        assert world.run() == "length"
        assert world.now < longest
        assert world.reader.states[-1] == state


def unheard(*, back_after: float | None = None, **how: Any) -> World:
    """Nothing listens at the verifier's address, until one is started there if that is asked for."""
    world = World(up_after=None, count=8, **how)
    why = LinkError("refused")
    world.at(0.1, lambda: world.machine.link_down(0.0, why, unheard=True))
    if back_after is not None:
        world.at(back_after, world.connect)
    return world


def test_a_verifier_that_was_never_there_is_waited_for_half_a_second() -> None:
    """It was waited for as long as for one whose connection was lost."""
    world = unheard()
    assert world.run() == "length"
    assert 0.5 <= world.now < 2.0, "the first wait before it writes is a second"
    assert world.reader.states[-1] == "offline"
    started = unheard(back_after=1.2)
    ends_exact(started)


def test_a_wait_that_was_asked_for_is_kept_for_a_verifier_that_is_yet_to_be_started() -> None:
    patience = ClientSettings(settle_seconds=8.0).patience
    ends_exact(unheard(back_after=6.0, patience=patience))


def test_a_verifier_that_was_there_is_waited_for_although_its_port_is_closed_now() -> None:
    world = World(patience=ClientSettings().patience)
    world.outage(0.2, 5.0)
    ends_exact(world)
    assert world.now > 5.0


def test_whoever_asks_for_a_check_waits_for_a_verifier_that_was_never_there() -> None:
    world = unheard()
    world.run()
    world.recheck()
    world.machine.link_down(0.0, LinkError("refused"), unheard=True)
    world.at(4.0, world.connect)
    ends_exact(world)


# ---- what an engine behind the verifier counts


def counted(**how: Any) -> World:
    """Each stream that ends is told to have cost 3 tokens to read, and 40 to write."""
    world = World(count=40, draft="server", engine_behind=True, **how)

    def tell(message: Any) -> Any:
        ends = isinstance(message, StreamTokens) and message.done
        return replace(message, usage=Usage(3, 40)) if ends else message

    world.change = tell
    return world


def some_have_come(world: World) -> None:
    world.run(seconds=0.3)
    assert 0 < len(world.answer) < 40


def test_what_the_engine_counts_is_told_where_it_told_all() -> None:
    world = counted()
    ends_exact(world)
    assert world.machine.stats.usage == Usage(3, 40)


def test_a_stream_that_outlives_a_connection_is_counted_at_its_end() -> None:
    world = counted(redial=0.0)
    world.verifier.abandon = lambda: None  # type: ignore[method-assign]
    some_have_come(world)
    world.cut()
    ends_exact(world)
    assert world.machine.stats.resumes == 1
    assert world.machine.stats.usage == Usage(3, 40)


@pytest.mark.parametrize("how", ["killed", "refused", "ended", "differs"])
def test_the_engines_count_is_not_told_where_a_stream_was_cut_before_its_end(how: str) -> None:
    """That of the last stream alone was told as that of the whole answer."""
    world = counted(redial=0.5 if how == "ended" else 0.0)
    world.verifier.abandon = lambda: None  # type: ignore[method-assign]
    some_have_come(world)
    session = world.machine.session
    stream = session.streaming
    assert stream is not None
    match how:
        case "killed":  # another process knows nothing of the session
            world.verifier.known.clear()
            world.cut()
        case "refused":
            refusal = Error("busy", "the upstream is away", session.id, stream.round)
            world.machine.receive(refusal, world.now)
        case "ended":
            world.cut()
        case "differs":
            refusal = Error("conflict", "another log", session.id, stream.round)
            world.machine.receive(refusal, world.now)
    ends_exact(world)
    assert world.machine.stats.usage is None


# ---- a verifier that breaks the rules


@BOTH
@pytest.mark.parametrize("change", [{"base": 7}, {"tokens": [2**31 - 1]}], ids=str)
def test_answers_that_do_not_fit(draft: Any, change: dict[str, Any]) -> None:
    world = World(draft=draft, patience=Patience(settle=3.0))
    world.change = lambda m: replace(m, **change) if isinstance(m, StreamTokens) else m
    assert world.run(seconds=120) == "length"
    assert len(world.answer) == 40
    assert "refused" in world.reader.states
    assert len(world.verifier.requests) <= 60


@pytest.mark.parametrize(("tokens", "done"), [(0, True), (500, False)])
def test_streams_without_tokens_or_with_too_many_are_asked_for_ever_more_rarely(
    tokens: int, done: bool
) -> None:
    """What was written offline meanwhile is checked when they are sound again."""
    world = World(draft="server", patience=Patience(settle=3.0))
    wrong: dict[str, Any] = {"tokens": [5] * tokens, "done": done, "finish": ""}

    def spoilt(answer: Any) -> Any:
        if world.now < 2.0 and isinstance(answer, StreamTokens):
            return replace(answer, **wrong)
        return answer

    world.change = spoilt
    ends_exact(world)
    assert world.most_requests_per_second() <= 6


@pytest.mark.parametrize("forward_ms", [0.0, 1e8])
def test_times_that_are_no_times(forward_ms: float) -> None:
    world = World()
    world.change = lambda m: replace(m, forward_ms=forward_ms) if isinstance(m, StreamTokens) else m
    ends_exact(world)


@pytest.mark.parametrize("guess_ahead", [False, True])
@pytest.mark.parametrize("draft", ["server", "device", "auto"])
@pytest.mark.parametrize("hole", [1, 4])
def test_no_hole_is_called_verified(draft: Any, guess_ahead: bool, hole: int) -> None:
    """Tokens of a stream whose base is too low look as if the first of them were known."""
    world = World(draft=draft, guess_ahead=guess_ahead, patience=Patience(settle=1.0), right=0.9)

    def lower(answer: Any) -> Any:
        wrong = isinstance(answer, StreamTokens) and answer.base >= hole and world.now > 0.3
        return replace(answer, base=answer.base - hole) if wrong else answer

    world.change = lower
    assert world.run(seconds=120) == "length"
    assert len(world.answer) == 40
    verified = [
        token for token, right in zip(world.answer, world.reader.verified, strict=True) if right
    ]
    assert verified == world.expected[: len(verified)]


def test_messages_of_other_sessions_mean_nothing() -> None:
    world = World()
    for n in range(200):
        world.at(
            0.02 * n, lambda: world.machine.receive(Error("busy", "not you", bytes(16)), world.now)
        )
    ends_exact(world)


# ---- conversations


@BOTH
@pytest.mark.parametrize("fault", ["busy", "draining", "deadline"])
def test_a_question_that_is_refused_for_now_goes_on_in_the_same_session(
    draft: Any, fault: str
) -> None:
    """The stream that was asked for right behind it is a conflict then: the turn before is over.
    The device took that for a broken session, and the whole conversation was read and paid anew."""
    world = World(draft=draft, patience=Patience(offline_after=10.0))
    world.run()
    world.verifier.refuses = (Append,)
    world.verifier.retry_after_ms = 500
    world.next_turn(5, 6, 7, count=20)
    world.trouble(fault, stop=0.2)
    assert world.run() == "length"
    assert world.answer == world.expected
    assert not any(isinstance(event, Notice) for event in world.reader.events)
    assert len([m for _, m in world.verifier.requests if isinstance(m, Open)]) == 1
    assert len([m for _, m in world.verifier.requests if isinstance(m, Append)]) == 2


def test_the_next_turn_goes_on_in_the_same_session_also_on_another_connection() -> None:
    world = World()
    ends_exact(world)
    for turn in range(3):
        world.next_turn(5, 6, 7 + turn, count=20)
        ends_exact(world)
    world.cut()
    world.next_turn(5, count=10)
    ends_exact(world)
    assert sum(isinstance(message, Open) for _, message in world.verifier.requests) == 1
    assert world.machine.stats.resumes == 1


@pytest.mark.parametrize("how", ["cut", "restarted", "cut before the first token"])
def test_an_answer_that_goes_on_behind_a_loss_is_counted_as_resumed(how: str) -> None:
    """A verifier that had lost the session counted for nothing: `resumes` was 0."""
    world = World(redial=0.3, draft="server")
    if how == "cut before the first token":
        world.trouble("mute", stop=0.2)
        world.run(seconds=0.1)
    else:
        some_have_come(world)
    if how == "restarted":
        world.verifier.known.clear()
    world.cut()
    ends_exact(world)
    assert world.machine.stats.resumes == 1


def test_checks_one_after_another_tell_a_state_of_the_link_once() -> None:
    """A program that asks for a check until all is verified read the same news with each."""
    world = World(count=8, up_after=None, patience=Patience(settle=1.0))
    assert world.run() == "length"
    before = len(world.reader.states)
    for _ in range(4):
        world.recheck()
        world.run()
    assert len(world.reader.states) - before == 1, "the first check tells it"
    world.connect()
    world.recheck()
    ends_exact(world)
    assert world.reader.states[before + 1 :] == ["online"]


def test_a_successor_is_opened_before_its_predecessor_is_closed() -> None:
    world = World()
    world.run()
    old = world.machine.session.id
    world.next_turn(9, anew=True)
    ends_exact(world)
    kinds = [type(m).__name__ for _, m in world.verifier.requests if isinstance(m, Open | Close)]
    assert kinds == ["Open", "Open", "Close"]
    assert old not in world.verifier.known


def test_a_broken_session_is_closed() -> None:
    world = World()
    world.trouble("conflict", 0.1, 0.2)
    ends_exact(world)
    assert list(world.verifier.known) == [world.machine.session.id]


# ---- ends, and predictions


@BOTH
def test_stop_strings_end_a_turn_on_either_side(draft: Any) -> None:
    text = "".join(chr(64 + i % 60) for i in truth((3, 1, 4), 40))
    world = World(draft=draft, stop=(text[10:13],))
    assert world.run() == "stop"
    assert world.reader.text == text[: text.index(text[10:13])]
    assert all(world.reader.verified)


@pytest.mark.parametrize(("right", "words", "rounds"), [(0.0, 20, 16), (1.0, 0, 12)])
def test_a_prediction_is_taken_as_far_as_it_is_right_and_costs_little_where_it_is_wrong(
    right: float, words: int, rounds: int
) -> None:
    expected = truth((3, 1, 4), 40)
    wrong = [*expected[:words], 50, 50, 50, *expected[words:]] if words else [50] * 40
    world = World(right=right, prediction=wrong)
    ends_exact(world)
    assert world.machine.stats.rounds <= rounds
