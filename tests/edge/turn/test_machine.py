"""The turn machine in virtual time: every cause of trouble, one policy."""

from __future__ import annotations

import pytest

from edge_client.turn.budget import Budget
from edge_client.turn.deadlines import Patience
from moa.errors import RemoteError
from moa.wire.messages import Close, Error, Open, StreamTokens, Verdict
from tests.edge.turn.world import WELCOME, World, truth

BOTH = pytest.mark.parametrize("draft", ["device", "server"])


def exact(world: World) -> None:
    """The answer is the target's, all of it is verified, and the reader was told the same."""
    assert world.answer == world.expected
    assert all(world.reader.verified)
    assert world.reader.text == world.transcript.stream.text


@pytest.mark.parametrize("draft", ["device", "server", "none", "single", "auto"])
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_an_undisturbed_turn(draft: str, right: float) -> None:
    world = World(draft=draft, right=right)  # type: ignore[arg-type]
    assert world.run() == "length"
    exact(world)
    assert world.reader.states == ["connecting", "online"][-len(world.reader.states) :]
    assert len([m for _, m in world.verifier.requests if isinstance(m, Open)]) == 1


@BOTH
@pytest.mark.parametrize("fault", ["busy", "draining", "internal", "deadline", "cancelled"])
def test_refused_for_now(draft: str, fault: str) -> None:
    """The device writes after its patience, and what it wrote is checked when the verifier takes requests again."""
    world = World(draft=draft)  # type: ignore[arg-type]
    world.at(0.2, lambda: setattr(world.verifier, "fault", fault))
    world.at(3.0, lambda: setattr(world.verifier, "fault", ""))
    world.verifier.forward = 0.05
    world.run()
    exact(world)
    assert world.most_requests_per_second() <= 6


@BOTH
@pytest.mark.parametrize("fault", ["quarantined", "unknown_session", "conflict"])
def test_a_session_that_is_lost(draft: str, fault: str) -> None:
    world = World(draft=draft)  # type: ignore[arg-type]
    world.verifier.forward = 0.05
    world.at(0.2, lambda: setattr(world.verifier, "fault", fault))
    world.at(0.9, lambda: setattr(world.verifier, "fault", ""))
    world.run()
    exact(world)
    assert world.most_requests_per_second() <= 6


@pytest.mark.parametrize("fault", ["quarantined", "unknown_session", "conflict"])
def test_a_verifier_that_gets_nowhere_is_left_alone(fault: str) -> None:
    world = World(patience=Patience(settle=3.0))
    world.verifier.fault = fault
    assert world.run(seconds=60) == "length"
    assert len(world.answer) == 40
    assert not any(world.reader.verified)
    assert "refused" in world.reader.states
    assert len(world.verifier.requests) <= 30


@pytest.mark.parametrize("fault", ["limit", "bad_message", "unsupported", "from_the_future"])
def test_what_is_refused_for_good_is_not_asked_again(fault: str) -> None:
    world = World()
    world.verifier.fault = fault
    assert world.run(seconds=30) == "length"
    assert len(world.answer) == 40
    assert "refused" in world.reader.states
    assert len(world.verifier.requests) <= 3


def test_a_busy_verifier_is_asked_when_it_said() -> None:
    world = World(patience=Patience(offline_after=10.0))
    world.verifier.fault, world.verifier.retry_after_ms = "busy", 250
    world.at(0.2, lambda: setattr(world.verifier, "fault", ""))
    world.run()
    exact(world)
    first, second = [at for at, message in world.verifier.requests if isinstance(message, Open)]
    assert 0.25 <= second - first - 2 * world.latency - world.verifier.forward <= 0.35


@BOTH
def test_a_verifier_that_claims_to_need_hours_is_not_waited_for(draft: str) -> None:
    world = World(draft=draft, patience=Patience(settle=60.0))  # type: ignore[arg-type]
    world.verifier.claims = 10_000.0
    world.at(0.3, lambda: setattr(world.verifier, "fault", "mute"))
    world.run(seconds=10)
    assert len(world.answer) == 40
    world.verifier.fault = ""
    world.cut()
    world.run()
    exact(world)


def test_a_verifier_cannot_ask_for_an_hour() -> None:
    world = World(patience=Patience(offline_after=0.5, settle=700.0))
    world.verifier.fault, world.verifier.retry_after_ms = "busy", 3_600_000
    world.at(1.0, lambda: setattr(world.verifier, "fault", ""))
    world.run()
    exact(world)
    assert world.now < 400


# ---- patience


def test_the_device_writes_after_its_patience_on_a_silent_link() -> None:
    world = World()
    world.verifier.fault = "mute"
    world.run(seconds=1.3)
    assert world.reader.states == ["online", "late"]
    assert 3 <= len(world.answer) <= 10, "as fast as it may while an answer is merely late"
    world.verifier.fault = ""
    world.cut()
    world.run()
    exact(world)


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
    world = World(up_after=None, patience=Patience(settle=0.5))
    world.unreachable = True
    world.at(0.01, world.connect)
    world.run()
    assert len(world.answer) == 40
    before = world.now
    world.log = [*world.log, 5]
    world.session_state = None
    world.begin()
    world.run(seconds=0.05)
    assert world.answer, "written at once"
    assert world.now - before < 0.1


def test_a_slow_target_is_no_dead_one() -> None:
    world = World(count=4, draft="device", right=1.0, patience=Patience(settle=60.0))
    world.verifier.forward = 15.0
    world.run()
    exact(world)
    assert world.connection == 1, "the connection was not given up"
    assert "late" in world.reader.states


def test_a_slow_target_that_is_known_is_not_written_over() -> None:
    world = World(count=4, draft="single")
    world.verifier.forward = 3.0
    world.run()
    world.log = [*world.log, 5]
    world.session_state = None
    world.begin(count=3)
    world.run()
    exact(world)
    assert "late" not in world.reader.states


def test_an_answer_that_never_comes_ends_on_another_connection() -> None:
    world = World(patience=Patience(answer=30.0, settle=100.0))
    world.verifier.fault = "mute"
    world.at(40.0, lambda: setattr(world.verifier, "fault", ""))
    world.run()
    exact(world)
    assert world.connection == 3, "at 30 and 60 seconds"


def test_a_slow_reader_is_no_slow_link() -> None:
    world = World()
    world.run(seconds=0.2)
    told = len(world.answer)
    assert told
    world.now += 30.0
    world.machine.events_read(world.now - 30.0, world.now)
    world.run()
    exact(world)
    assert "late" not in world.reader.states


# ---- two outages, and none that ends


@BOTH
@pytest.mark.parametrize("policy", ["rewind", "keep"])
def test_two_outages(draft: str, policy: str) -> None:
    world = World(draft=draft, on_reconnect=policy, count=80, patience=Patience(settle=5.0))  # type: ignore[arg-type]
    world.verifier.forward = 0.05
    for moment in (0.4, 6.0):
        world.at(moment, lambda: (setattr(world, "unreachable", True), world.cut()))  # type: ignore[arg-type]
        world.at(moment + 4.0, lambda: setattr(world, "unreachable", False))
    world.step = 0.05
    world.run()
    if policy == "rewind":
        exact(world)
    assert len(world.answer) == 80


def test_a_second_outage_does_not_restart_the_settle_clock() -> None:
    world = World(count=8, patience=Patience(offline_after=0.1, settle=5.0))
    world.verifier.fault = "mute"
    world.at(0.5, world.cut)
    world.at(0.55, lambda: setattr(world, "unreachable", True))
    world.at(4.0, lambda: setattr(world, "unreachable", False))
    world.at(4.5, lambda: (setattr(world, "unreachable", True), world.cut()))  # type: ignore[arg-type]
    assert world.run() == "length"
    assert world.now - world.reader.told_at[-1] == pytest.approx(5.0, abs=0.1)


def test_a_turn_ends_when_nothing_more_can_be_written_and_nobody_comes() -> None:
    world = World(up_after=None, patience=Patience(settle=5.0))
    world.unreachable = True
    world.at(0.5, world.connect)
    assert world.run() == "length"
    assert 5.0 < world.now < 8.0
    assert not any(world.reader.verified)


def test_what_stayed_unverified_can_be_checked_later() -> None:
    world = World(up_after=None, patience=Patience(settle=1.0), right=0.5)
    world.unreachable = True
    world.at(0.5, world.connect)
    world.run()
    assert not any(world.reader.verified)
    world.unreachable = False
    world.machine.continue_settling(world.now)
    world.run()
    exact(world)


def test_what_was_not_sent_before_a_loss_is_not_sent_before_the_resume() -> None:
    """A round whose draft becomes ready between two connections: the next one would refuse its session, and the whole
    text would be run again."""
    world = World(redial=0.0, step=0.05)
    for n in range(10):
        world.at(0.3 + 0.11 * n, world.cut)
    world.run()
    exact(world)
    assert world.machine.stats.resumes >= 8
    assert world.strange == []


@pytest.mark.parametrize("forgets", [False, True])
def test_a_drafter_that_fails_between_two_connections_leaves_no_stream_that_waits_for_it(forgets: bool) -> None:
    """The verifier has not noticed the loss, or it runs the stream again: either way nobody will send a guess."""
    world = World(guess_ahead=True)
    world.verifier.abandon = lambda: None  # type: ignore[method-assign]
    world.run(seconds=0.2)
    stream = world.machine.session.streaming
    assert stream is not None
    assert stream.waits
    world.cut()
    world.machine.drafter_failed("the drafter failed")
    if forgets:
        world.verifier.known.clear()
    world.run()
    exact(world)
    assert world.now < 3


@pytest.mark.parametrize("times", [5, 60])
def test_a_link_that_flaps(times: int) -> None:
    world = World(redial=0.3, patience=Patience(settle=60.0))
    world.verifier.fault = "mute"
    for n in range(times):
        world.at(0.2 + 0.4 * n, world.cut)
    world.at(0.4 * times, lambda: setattr(world.verifier, "fault", ""))
    world.run()
    assert len(world.answer) == 40
    if times == 5:
        exact(world)
    else:
        assert "refused" in world.reader.states, "the connection is lost again and again"


def test_the_guard_ends_a_turn_far_from_the_verifier() -> None:
    world = World(up_after=None, stop_at=10, patience=Patience(settle=1.0))
    world.unreachable = True
    world.at(0.1, world.connect)
    assert world.run() == "guard"
    assert len(world.answer) == 10


def test_without_a_verifier_nothing_is_waited_for() -> None:
    world = World(linked=False, up_after=None)
    assert world.run() == "length"
    assert world.now < 0.1
    assert world.reader.states == ["none"]


def test_wrong_credentials_end_the_link_but_not_the_answer() -> None:
    world = World(up_after=None)
    world.at(0.1, lambda: world.machine.link_down(0.0, RemoteError("unauthorized", "no token"), refused=True))
    assert world.run() == "length"
    assert world.now < 1.0, "waiting is no use"
    assert world.reader.states[-1] == "refused"


# ---- budgets


def test_a_budget_of_bytes_is_kept() -> None:
    world = World(budget=Budget(max_kbps=8.0), draft="single", count=10)
    world.machine.spending.passed = 0
    real = world._send

    def counted(message: object) -> None:
        world.machine.spending.passed += 1000
        real(message)  # type: ignore[arg-type]

    world._send = counted  # type: ignore[assignment,method-assign]
    world.run()
    exact(world)
    assert world.now > 5.0


# ---- a verifier that breaks the rules


def _in_answer(world: World, change: object) -> None:
    real = world.verifier.handle

    def handle(message: object, now: float) -> list[object]:
        return [change(answer) for answer in real(message, now)]  # type: ignore[operator,arg-type]

    world.verifier.handle = handle  # type: ignore[assignment,method-assign]


def _changed(message: object, **changes: object) -> object:
    fields = {name: getattr(message, name) for name in message.__struct_fields__}  # type: ignore[attr-defined]
    return type(message)(**(fields | changes))


@pytest.mark.parametrize(
    "change",
    [
        {"base": 7},
        {"path": [0, 5000]},
        {"path": []},
        {"path": [3]},
        {"next_token": 2**31 - 1},
    ],
    ids=str,
)
def test_verdicts_that_do_not_fit(change: dict[str, object]) -> None:
    world = World(patience=Patience(settle=3.0))
    _in_answer(world, lambda m: _changed(m, **change) if isinstance(m, Verdict) else m)
    assert world.run(seconds=120) == "length"
    assert len(world.answer) == 40
    assert "refused" in world.reader.states
    assert len(world.verifier.requests) <= 60


@pytest.mark.parametrize("forward_ms", [0.0, 1e8])
def test_times_that_are_no_times(forward_ms: float) -> None:
    world = World()
    _in_answer(world, lambda m: _changed(m, forward_ms=forward_ms) if isinstance(m, Verdict) else m)
    world.run()
    exact(world)


def test_a_stream_without_tokens_is_not_asked_for_again_and_again() -> None:
    world = World(draft="server", patience=Patience(settle=3.0))
    _in_answer(world, lambda m: _changed(m, tokens=[], done=True, finish="") if isinstance(m, StreamTokens) else m)
    world.run(seconds=120)
    assert len(world.answer) == 40
    assert len(world.verifier.requests) <= 60


def test_more_tokens_than_were_asked_for_end_the_session() -> None:
    world = World(draft="server", count=10)
    _in_answer(
        world, lambda m: _changed(m, tokens=[5] * 500, finish="", done=False) if isinstance(m, StreamTokens) else m
    )
    world.run(seconds=120)
    assert len(world.answer) == 10


@pytest.mark.parametrize("guess_ahead", [False, True])
@pytest.mark.parametrize("draft", ["server", "device", "auto"])
@pytest.mark.parametrize("hole", [1, 4])
def test_no_hole_is_called_verified(draft: str, guess_ahead: bool, hole: int) -> None:
    """Tokens of a stream whose base is too low look as if the first of them were known."""
    world = World(draft=draft, guess_ahead=guess_ahead, patience=Patience(settle=1.0), right=0.9)  # type: ignore[arg-type]
    deliver = world._deliver

    def lower(connection: int, answer: object) -> None:
        wrong = isinstance(answer, StreamTokens) and answer.base >= hole and world.now > 0.3
        deliver(connection, _changed(answer, base=answer.base - hole) if wrong else answer)  # type: ignore[attr-defined]

    world._deliver = lower  # type: ignore[method-assign]
    assert world.run(seconds=120) == "length"
    assert len(world.answer) == 40
    verified = [token for token, right in zip(world.answer, world.reader.verified, strict=True) if right]
    assert verified == world.expected[: len(verified)]


def test_messages_of_other_sessions_mean_nothing() -> None:
    world = World()
    for n in range(200):
        world.at(0.02 * n, lambda: world.machine.receive(Error("busy", "not you", bytes(16)), world.now))
    world.run()
    exact(world)


# ---- conversations


def test_the_next_turn_goes_on_in_the_same_session() -> None:
    world = World()
    for turn in range(3):
        world.run()
        exact(world)
        assert world.session_state is not None
        world.session_state.session.append([5, 6, 7 + turn], max_new_tokens=20)
        world.log = [*world.log, 5, 6, 7 + turn]
        world.begin(count=20)
    world.run()
    exact(world)
    assert sum(isinstance(message, Open) for _, message in world.verifier.requests) == 1


def test_a_successor_is_opened_before_its_predecessor_is_closed() -> None:
    world = World()
    world.run()
    old = world.machine.session.id
    world.left.append(old)
    world.log = [9, 8, 7]
    world.session_state = None
    world.begin()
    world.run()
    exact(world)
    kinds = [type(m).__name__ for _, m in world.verifier.requests if isinstance(m, Open | Close)]
    assert kinds == ["Open", "Open", "Close"]
    assert old not in world.verifier.known


def test_a_broken_session_is_closed() -> None:
    world = World()
    world.at(0.1, lambda: setattr(world.verifier, "fault", "conflict"))
    world.at(0.2, lambda: setattr(world.verifier, "fault", ""))
    world.run()
    exact(world)
    world.at(1.0, lambda: None)
    world.now += 1
    assert list(world.verifier.known) == [world.machine.session.id]


# ---- ends


@BOTH
def test_stop_strings_end_a_turn_on_either_side(draft: str) -> None:
    text = "".join(chr(64 + i % 60) for i in truth((3, 1, 4), 40))
    world = World(draft=draft, stop=(text[10:13],))  # type: ignore[arg-type]
    assert world.run() == "stop"
    assert world.reader.text == text[: text.index(text[10:13])]
    assert all(world.reader.verified)


def test_an_end_written_offline_is_checked() -> None:
    world = World(right=0.0, count=12, patience=Patience(offline_after=0.1))
    world.verifier.fault = "mute"
    world.at(2.0, lambda: (setattr(world.verifier, "fault", ""), world.cut()))  # type: ignore[arg-type]
    world.run()
    exact(world)


# ---- predictions


def test_a_prediction_is_taken_as_far_as_it_is_right() -> None:
    expected = truth((3, 1, 4), 40)
    world = World(right=0.0, prediction=[*expected[:20], 50, 50, 50, *expected[20:]])
    world.run()
    exact(world)
    assert world.machine.stats.rounds <= 16, "40 tokens one by one, but for the prediction"


def test_a_wrong_prediction_costs_little() -> None:
    world = World(right=1.0, prediction=[50] * 40)
    world.run()
    exact(world)
    assert world.machine.stats.rounds <= 12


def test_a_connection_number_is_what_a_session_stands_on() -> None:
    world = World()
    world.run()
    world.cut()
    assert world.session_state is not None
    world.session_state.session.append([5], max_new_tokens=10)
    world.log = [*world.log, 5]
    world.begin(count=10)
    assert WELCOME.version == 2
    world.run()
    exact(world)
    assert world.machine.stats.resumes == 1
