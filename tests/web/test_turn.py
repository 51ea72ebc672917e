"""The browser's turn machine against Python's: what went into Python's machine, at which time, is
played to the browser's, and what comes out must be the same."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from edge_client.events import Event
from edge_client.link import retry
from edge_client.turn import actions, ahead, controller, guard, reachability, records, rounds
from edge_client.turn.deadlines import Patience
from edge_client.turn.machine import TurnMachine
from moa.errors import MoaError
from moa.speculation.guess_tree import GuessTreeGrower
from moa.tree import DraftTree
from moa.wire.codec import encode
from moa.wire.messages import Append
from tests.edge.turn import test_ahead, test_history, test_machine, world
from tests.web.node import FOLDER, Node, camel

IMPORTS = 'import { Replay } from "./../../../tests/web/replay.js";'
HANDLE = "const replay = new Replay(); return ask.map((op) => replay.do(op) ?? null);"


class Tape:
    """What went into the machines of one world, and what came out."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.told: list[Any] = []
        self.jitter: list[float] = []
        self.ids = 0
        self.latest: Recorded | None = None

    def new_id(self, size: int) -> bytes:
        self.ids += 1
        return (self.ids - 1).to_bytes(size, "big")

    def note(self, op: str, told: Any = None, **about: Any) -> None:
        self.asked.append({"op": op, "jitter": self.jitter, **about})
        self.told.append(told)
        self.jitter = []


class Recorded:
    """Python's machine, with a tape beside it."""

    def __init__(
        self, tape: Tape, transcript: Any, state: Any, controller: Any, *parts: Any, **how: Any
    ) -> None:
        self._tape = tape
        self._state = state
        _, _, guard, deadlines, stats, reach, left = parts
        assert how.pop("prediction") is None
        assert transcript.on_reconnect == "rewind"
        before = tape.latest
        session = transcript.session
        rules = transcript.rules
        known = before is not None and (state is before._state or state is before.session_state)
        append = (
            session.unsettled[-1]
            if session.unsettled and isinstance(session.unsettled[-1], Append)
            else None
        )
        assert append is None or (before is not None and session is before.session)
        draw = reach.retry.jitter

        def jitter() -> float:
            tape.jitter.append(draw())
            return tape.jitter[-1]

        reach.retry.jitter = jitter
        tape.note(
            "begin",
            state="new"
            if not known
            else "begun"
            if before is not None and state is before._state
            else "current",
            session={
                "log": list(session.log),
                "maxNewTokens": session.max_new_tokens,
                "stop": session.stop,
            },
            append=append
            and {"ids": append.ids, "max_new_tokens": append.max_new_tokens, "stop": append.stop},
            rules=camel(dataclasses.asdict(rules)) | {"eosIds": list(rules.eos_ids)},
            patience=camel(dataclasses.asdict(deadlines.patience)),
            stop_at=guard.limits.stop_at,
            warn_at=guard.limits.warn_at,
            linked=reach.linked,
            now=stats.started,
            left=list(left),
            draft=how["who_drafts"],
            guesses=how["guesses"],
        )
        self.inner = TurnMachine(transcript, state, controller, *parts, prediction=None, **how)
        tape.latest = self

    def __getattr__(self, name: str) -> Any:
        """Of the machine; its calls go on the tape."""
        found = getattr(self.inner, name)
        if name not in CALLS:
            return found

        def called(*arguments: Any, **named: Any) -> Any:
            about = dict(zip(CALLS[name], arguments, strict=False)) | named
            if name == "link_up":
                about["rtt"] = dataclasses.asdict(self.inner.controller.rtt)
            result = found(*arguments, **named)
            self._tape.note(
                name, plain(result), **{key: plain(value) for key, value in about.items()}
            )
            return result

        return called


CALLS = {
    "link_up": ("welcome", "connection", "now"),
    "link_down": ("since", "why"),
    "receive": ("frame", "now"),
    "next_action": ("now",),
    "ran": ("action", "result", "now"),
    "drain": (),
    "last_messages": (),
    "continue_settling": ("now",),
    "events_read": ("since", "now"),
    "drafter_failed": ("why",),
}
"""What the shell calls, with the names that the browser's side has for the arguments."""


def plain(value: Any) -> Any:
    """As the browser's side has it."""
    match value:
        case list():
            return [plain(item) for item in value]
        case Event():
            return msgspec.to_builtins(value)
        case msgspec.Struct():
            return encode(value)
        case MoaError():
            return value.line()
        case DraftTree():
            return {
                "tokens": [*value.tokens],
                "parents": [*value.parents],
                "scores": [*value.scores],
            }
        case GuessTreeGrower():
            about = {"root": value.root, "depths": list(value.depths), "open": list(value.open)}
            return plain(value.tree) | about
        case actions.Send(messages):
            return {"kind": "send", "frames": [encode(message) for message in messages]}
        case actions.Draft(ids, shape, quick):
            wanted = {
                "breadth": shape.breadth,
                "depth": shape.depth,
                "nodes": shape.nodes,
                "minScore": shape.min_score,
            }
            return {"kind": "draft", "ids": list(ids), "shape": wanted, "quick": quick}
        case actions.Grow() | actions.Write() | actions.Wait() | actions.End() | actions.Drop():
            about = {
                field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
            }
            return {"kind": type(value).__name__.lower(), **about}
        case _:
            return value


def close(found: Any, wanted: Any) -> bool:
    """The same, but for the last digits of numbers: `exp` and `log` of two libraries may differ
    there."""
    if isinstance(wanted, float) and isinstance(found, int | float):
        return math.isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-9)
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(
            close(found.get(key), value) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(found, list) and len(found) == len(wanted) and all(map(close, found, wanted))
        )
    return bool(found == wanted)


def replayed(node: Node, tape: Tape) -> None:
    told = node.ask(tape.asked)
    for step, (asked, found, wanted) in enumerate(zip(tape.asked, told, tape.told, strict=True)):
        assert close(found, wanted), (
            f"step {step} of {len(told)}, {asked}: {found} and not {wanted}"
        )


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    """Of the worlds that are made from now on."""
    tape = Tape()
    monkeypatch.setattr(world, "TurnMachine", lambda *parts, **how: Recorded(tape, *parts, **how))
    monkeypatch.setattr(
        "moa.wire.session.secrets", type("Ids", (), {"token_bytes": staticmethod(tape.new_id)})
    )
    return tape


_refused = test_machine.test_refused_for_now_or_a_session_that_is_lost
_left_alone = test_machine.test_a_verifier_that_gets_nowhere_or_refuses_for_good_is_left_alone
_failing = test_machine.test_a_drafter_that_fails_between_two_connections_leaves_no_stream_that_waits_for_it


def _lost(draft: controller.WhoDrafts, seed: int) -> None:
    """Connections that are lost, until second 20."""
    scenario = world.World(draft=draft, seed=seed)
    scenario.loss = 0.3
    scenario.repeat = 0.2
    scenario.at(20, lambda: setattr(scenario, "loss", 0.0))
    exact(scenario)


SCENARIOS: dict[str, Callable[[], None]] = {
    **{
        f"{draft}-{right}-{ahead}": lambda draft=draft, right=right, ahead=ahead: exact(
            world.World(draft=draft, right=right, guess_ahead=ahead)
        )
        for draft, ahead in (
            ("auto", True),
            ("auto", False),
            ("device", True),
            ("device", False),
            ("server", False),
        )
        for right in (0.5, 0.95)
    },
    "plain": lambda: exact(world.World(draft="none")),
    "a call a token": lambda: exact(world.World(draft="single", count=10)),
    "lost connections": lambda: _lost("device", 1),
    "lost streams": lambda: _lost("server", 2),
    "busy": lambda: _refused("device", "busy", 3.0),
    "quarantined": lambda: _refused("server", "quarantined", 0.9),
    "conflict": lambda: _refused("device", "conflict", 0.9),
    "nowhere": lambda: _left_alone("conflict", 30),
    "for good": lambda: _left_alone("limit", 3),
    "an hour": test_machine.test_a_verifier_cannot_ask_for_an_hour,
    "silent": test_machine.test_the_device_writes_after_its_patience_on_a_silent_link,
    "known to be down": test_machine.test_a_link_that_is_known_to_be_down_is_not_waited_for_again,
    "slow": test_machine.test_a_slow_target_is_no_dead_one_and_once_known_it_is_not_written_over,
    "between two connections": test_machine.test_what_was_not_sent_before_a_loss_is_not_sent_before_the_resume,
    "no drafter": partial(_failing, False),
    "no drafter, run again": partial(_failing, True),
    "it still waits": test_ahead.test_a_verifier_that_still_waits_after_a_loss_is_told_to_go_on,
    "never": test_machine.test_an_answer_that_never_comes_ends_on_another_connection,
}


def exact(scenario: world.World) -> None:
    assert scenario.run() == "length"
    assert scenario.answer == scenario.expected


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenarios(node: Node, tape: Tape, name: str) -> None:
    SCENARIOS[name]()
    assert len(tape.asked) > 5
    replayed(node, tape)


@pytest.mark.parametrize("seed", range(6))
def test_histories(node: Node, tape: Tape, seed: int) -> None:
    """Turns of a conversation with faults, cuts and outages thrown in."""
    history = test_history.AnyHistory(
        seed, ["device", "server", "auto"][seed % 3], guess_ahead=seed % 4 > 0
    )
    history.happens(60)
    history.ends_well()
    replayed(node, tape)


def test_the_modules_that_are_named_exist() -> None:
    for file in FOLDER.glob("*.js"):
        for name in re.findall(r"[a-z_]+(?:/[a-z_]+)+\.py", file.read_text(encoding="utf-8")):
            assert (FOLDER.parents[2] / name).exists() or (FOLDER.parents[1] / name).exists(), (
                f"{name} in {file.name}"
            )


def test_numbers_are_pythons() -> None:
    """The constants of both machines, which few scenarios would tell apart."""
    modules = {
        "ahead": [ahead],
        "controller": [controller],
        "deadlines": [guard],
        "reach": [reachability, retry],
        "records": [records],
        "rounds": [rounds],
    }
    compared = 0
    for name, homes in modules.items():
        text = (FOLDER / f"{name}.js").read_text(encoding="utf-8")
        for constant, number in re.findall(r"\b([A-Z][A-Z0-9_]+) = ([\d.e-]+)", text):
            values = [
                getattr(home, found)
                for home in homes
                for found in (constant, f"_{constant}")
                if hasattr(home, found)
            ]
            assert values in ([], [float(number)]), f"{constant} of {name}.js"
            compared += len(values)
    assert compared >= 35
    patience = re.search(
        r"PATIENCE = \{(.*)\}", (FOLDER / "deadlines.js").read_text(encoding="utf-8")
    )
    assert patience is not None
    wanted = Patience()
    told = [float(part.split(":")[1]) for part in patience[1].split(",")]
    assert told == [wanted.offline_after, wanted.settle, wanted.answer, wanted.late_pace]
