"""What a chat's commands do, without a terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_client.cli.dialogue import (
    COMMANDS,
    Ask,
    Continue,
    Dialogue,
    Edit,
    Loaded,
    Quit,
    Unverified,
)
from edge_client.screen.reader import EditingReader, PlainReader
from edge_client.settings import ClientSettings
from moa.errors import MoaError, UsageError


@pytest.fixture
def dialogue() -> Dialogue:
    return Dialogue(ClientSettings())


def said(dialogue: Dialogue, line: str) -> str:
    step = dialogue.take(line)
    if isinstance(step, Loaded):
        return step.text
    assert isinstance(step, str)
    return step


def test_a_line_is_a_question_and_has_an_answer(dialogue: Dialogue) -> None:
    assert dialogue.take("  ") is None
    assert dialogue.take("two\nlines") == Ask()
    assert dialogue.correct(dialogue.answered("yes"), "no")
    assert dialogue.messages == [
        {"role": "user", "content": "two\nlines"},
        {"role": "assistant", "content": "no"},
    ]
    dialogue.take("and?")
    dialogue.unanswered()
    assert len(dialogue.messages) == 2


@pytest.mark.parametrize(
    ("line", "hint"), [("/sysetm x", "/system"), ("/etc/passwd", "/help"), ("/\x1b[2J", "/help")]
)
def test_an_unknown_command_never_reaches_the_model(
    dialogue: Dialogue, line: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        dialogue.take(line)
    assert hint in caught.value.line()
    assert "\x1b" not in str(caught.value)
    assert dialogue.messages == []
    assert dialogue.take(" " + line) == Ask()


def test_every_command_is_in_the_help_and_how_the_reader_in_use_takes_many_lines(
    dialogue: Dialogue,
) -> None:
    dialogue.keys = EditingReader.keys
    shown = said(dialogue, "/help")
    lines = shown.splitlines()[: len(COMMANDS)]
    columns = {line.index(says) for line, says in zip(lines, COMMANDS.values(), strict=True)}
    assert columns == {max(map(len, COMMANDS)) + 1}
    assert all(name in shown for name in COMMANDS)
    assert "Alt-Enter" in shown
    dialogue.keys = PlainReader.keys
    assert '"""' in said(dialogue, "/help")
    assert "Alt-Enter" not in said(dialogue, "/help")
    assert dialogue.take("/quit") == dialogue.take("/exit") == Quit()


def test_a_file_goes_with_the_next_question_and_with_no_other(
    dialogue: Dialogue, tmp_path: Path
) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("Ada has a fox.\n")
    for unusable, why in ((tmp_path / "missing", "cannot read"), (tmp_path, "cannot read")):
        with pytest.raises(UsageError, match=why):
            dialogue.take(f"/read {unusable}")
    with pytest.raises(UsageError, match="name a file"):
        dialogue.take("/read")
    assert "14 characters" in said(dialogue, f"/read {notes}")
    assert dialogue.messages == [], "it is no question yet"
    assert dialogue.take("What has Ada?") == Ask()
    assert dialogue.messages[-1]["content"] == "Ada has a fox.\n\nWhat has Ada?"
    dialogue.answered("a fox")
    dialogue.take("And who?")
    assert dialogue.messages[-1]["content"] == "And who?"
    said(dialogue, f"/read {notes}")
    said(dialogue, "/new")
    dialogue.take("Hello")
    assert dialogue.messages == [{"role": "user", "content": "Hello"}]


def test_system(dialogue: Dialogue) -> None:
    assert said(dialogue, "/system") == "nothing is said first"
    said(dialogue, "/system Be brief.")
    dialogue.take("hi")
    assert dialogue.to_send() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    said(dialogue, "/new")
    assert dialogue.to_send() == [{"role": "system", "content": "Be brief."}]


def test_set(dialogue: Dialogue) -> None:
    said(dialogue, "/set temperature 0.8")
    said(dialogue, "/set stop a,b")
    assert dialogue.changes == {"temperature": 0.8, "stop": ("a", "b")}
    assert "stop                 a,b\n" in said(dialogue, "/set")
    assert said(dialogue, "/set stop") == "stop is none from the next answer on"
    assert dialogue.changes["stop"] == ()
    assert "temperature          0.8" in said(dialogue, "/set")
    for line, what in (
        ("/set temperature hot", "temperature must be a number, not 'hot'"),
        ("/set temperature -1", "temperature must be"),
        ("/set token x", "token cannot be set here"),
        ("/set draft nobody", "draft must be one of"),
    ):
        with pytest.raises(UsageError, match=what):
            dialogue.take(line)
    assert dialogue.changes["temperature"] == 0.8


def test_the_seed_of_a_temperature_is_told_and_one_that_makes_noise_is_refused(
    dialogue: Dialogue,
) -> None:
    """Whoever meant 0.9 took the model for broken."""
    assert said(dialogue, "/set seed 7") == "seed is 7 from the next answer on"
    told = "temperature is 0.9 from the next answer on, with seed 7"
    assert said(dialogue, "/set temperature 0.9") == told
    with pytest.raises(MoaError, match=r"temperature must be 0 \(greedy\) or 0.001..2, not 9"):
        dialogue.take("/set temperature 9")
    assert dialogue.changes["temperature"] == 0.9
    assert said(dialogue, "/set temperature 0") == "temperature is 0.0 from the next answer on"


def test_retry_asks_again_with_another_seed(dialogue: Dialogue) -> None:
    with pytest.raises(UsageError, match="nothing was asked"):
        dialogue.take("/retry")
    dialogue.take("hi")
    dialogue.answered("ho")
    assert dialogue.take("/retry") == Ask()
    assert dialogue.messages == [{"role": "user", "content": "hi"}]
    assert dialogue.changes["seed"] == 1
    dialogue.answered("hu")
    dialogue.take("/retry")
    assert dialogue.changes["seed"] == 2


def test_save_and_load(dialogue: Dialogue, tmp_path: Path) -> None:
    said(dialogue, "/system Be brief.")
    dialogue.take("hi")
    dialogue.answered("ho\x1b[2J")
    assert "2 messages" in said(dialogue, f"/save {tmp_path}/chat.json")
    assert [path.name for path in tmp_path.iterdir()] == ["chat.json"]
    other = Dialogue(ClientSettings())
    said(other, f"/load {tmp_path}/chat.json")
    assert (other.system, other.messages) == (dialogue.system, dialogue.messages)
    dialogue.take("more")
    for _ in range(2):  # what a chat has saved or loaded it may replace
        assert "messages are in" in said(dialogue, f"/save {tmp_path}/chat.json")
    (tmp_path / "precious.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        dialogue.take(f"/save {tmp_path}/precious.txt")
    assert (tmp_path / "precious.txt").read_text() == "mine"


def test_what_is_not_verified_is_marked_in_the_file_and_told_when_it_is_loaded(
    dialogue: Dialogue, tmp_path: Path
) -> None:
    dialogue.system = "Be kind."
    for answer in ("first", "second", "third", "fourth"):
        dialogue.take(f"the {answer}?")
        dialogue.answered(answer)
    _, second, third, fourth = dialogue.messages[1::2]
    dialogue.unverified = [
        Unverified(second, tokens=2, verified_characters=3),
        Unverified(third, tokens=0, verified_characters=None),  # it stands behind the second
        Unverified(fourth, tokens=1, verified_characters=6, is_wanted=False),
    ]
    assert ", of which 3 tokens are not verified" in said(dialogue, f"/save {tmp_path}/chat.json")
    saved = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [message.get("verified_characters") for message in saved[2::2]] == [None, 3, None, 6]
    assert [message.get("stopped", False) for message in saved[2::2]] == [False, False, False, True]
    other = Dialogue(ClientSettings())
    loaded = other.take(f"/load {tmp_path}/chat.json")
    assert isinstance(loaded, Loaded)
    assert loaded.text.count("[not all of this was verified by the target]") == 2
    assert "assistant: second\n[not all" in loaded.text
    assert [(one.verified_characters, one.is_wanted) for one in loaded.unverified] == [
        (3, True),
        (None, True),
        (6, False),
    ]
    expected = other.messages[3::2]
    assert all(
        one.message is message for one, message in zip(loaded.unverified, expected, strict=True)
    )


def test_an_answer_that_was_gone_on_with_alone_is_marked_from_its_first_unverified_text(
    dialogue: Dialogue, tmp_path: Path
) -> None:
    dialogue.take("hi")
    message = dialogue.answered("begun and ended")
    dialogue.unverified = [
        Unverified(message, tokens=1, verified_characters=3, is_wanted=False),
        Unverified(message, tokens=2, verified_characters=9),
    ]
    said(dialogue, f"/save {tmp_path}/chat.json")
    _, saved = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert saved["verified_characters"] == 3
    assert "stopped" not in saved


@pytest.mark.parametrize("command", ["/new", "/retry", "/load"])
def test_a_late_correction_of_a_message_that_is_gone_changes_nothing(
    dialogue: Dialogue, tmp_path: Path, command: str
) -> None:
    dialogue.take("hi")
    message = dialogue.answered("ho")
    said(dialogue, f"/save {tmp_path}/chat.json")  # the same texts, and yet another message
    dialogue.take(f"/load {tmp_path}/chat.json" if command == "/load" else command)
    left = [dict(one) for one in dialogue.messages]
    assert not dialogue.holds(message)
    assert not dialogue.correct(message, "the target's")
    assert dialogue.messages == left


def test_what_another_program_has_saved_is_not_replaced(dialogue: Dialogue, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    dialogue.take("hi")
    said(dialogue, f"/save {file}")
    other = Dialogue(ClientSettings())
    said(other, f"/load {file}")
    dialogue.take("mine")
    other.take("theirs")
    said(other, f"/save {file}")
    content = file.read_bytes()
    with pytest.raises(UsageError, match="another program has changed"):
        dialogue.take(f"/save {file}")
    assert file.read_bytes() == content
    said(dialogue, f"/load {file}")
    dialogue.take("mine")
    said(dialogue, f"/save {file}")
    assert b"theirs" in file.read_bytes()
    file.unlink()
    said(dialogue, f"/save {file}")  # a file that is gone loses nothing


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"{", "is no conversation"),
        (b'{"messages": [{"role": "tool", "content": ""}]}', "is no conversation"),
        (
            b'{"messages": [{"role": "assistant", "content": "", "verified_characters": -1}]}',
            "is no conversation",
        ),
        (b'{"messages": ' + b"[" * 100_000, "is no conversation"),
        (b"\xff", "is no conversation"),
        (b" " * (2**24 + 1), "too large"),
    ],
)
def test_what_is_no_conversation_changes_nothing(
    dialogue: Dialogue, tmp_path: Path, content: bytes, what: str
) -> None:
    dialogue.take("hi")
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(UsageError, match=what):
        dialogue.take(f"/load {tmp_path}/x")
    for line, what in (
        (f"/load {tmp_path}/y", "cannot read"),
        ("/save /nowhere/x", "cannot write"),
        ("/save", "name"),
    ):
        with pytest.raises(UsageError, match=what):
            dialogue.take(line)
    assert len(dialogue.messages) == 1


def test_completions(dialogue: Dialogue) -> None:
    assert dialogue.completions("/s") == ["/system", "/set", "/save"]
    assert dialogue.completions("/set temp") == ["temperature"]
    assert dialogue.completions("") == dialogue.completions("hello wor") == []


def test_the_last_question_is_taken_back_changed_or_its_answer_gone_on_with(
    dialogue: Dialogue,
) -> None:
    for line in ("/undo", "/edit", "/edit x", "/continue"):
        with pytest.raises(UsageError, match=r"nothing was asked|no answer"):
            dialogue.take(line)
    dialogue.take("one")
    with pytest.raises(UsageError, match="no answer"):
        dialogue.take("/continue")
    first = dialogue.answered("a")
    assert dialogue.take("/continue") == Continue()
    assert dialogue.extended(first, "bc") is first
    dialogue.take("two")
    dialogue.answered("d")
    assert said(dialogue, "/undo") == "taken back: two"
    assert dialogue.to_send() == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "abc"},
    ]
    assert dialogue.take("/edit uno") == Ask()
    assert dialogue.to_send() == [{"role": "user", "content": "uno"}]
    dialogue.answered("e")
    assert dialogue.take("/edit") == Edit("uno")
    assert dialogue.messages == []
