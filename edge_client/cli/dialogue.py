"""The state and the commands of a chat, without terminal or network: lines in, next steps out."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from edge_client.cli.options import read_file
from edge_client.screen.words import not_verified
from edge_client.settings import ClientSettings, from_text
from moa.errors import UsageError
from moa.process.files import Changed, digest_of, replace_known
from moa.process.user_folders import expanded
from moa.safe_text import safe_line

COMMANDS = {
    "/help": "this list",
    "/new": "forget the conversation and begin another",
    "/system": "TEXT: set the system message; alone: show it",
    "/set": "NAME VALUE: change a setting from the next answer on; alone: show all",
    "/read": "FILE: a text file, which goes with your next question",
    "/continue": "go on with the last answer, where it was cut or stopped",
    "/edit": "TEXT: ask the last question again with this text; alone: change it",
    "/undo": "take back the last question and its answer",
    "/retry": "answer the last question again, with another seed (the same at temperature 0)",
    "/save": "FILE: write the conversation, as JSON",
    "/load": "FILE: go on with a conversation that was saved",
    "/quit": "end (also Ctrl-D)",
}
SETTABLE = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "max_new_tokens",
    "stop",
    "draft",
    "on_reconnect",
    "max_offline_tokens",
    "settle_seconds",
)
_MARK = "\n[not all of this was verified by the target]"
_LARGEST_FILE = 2**24
"""Bytes of a saved conversation that is loaded."""

DialogueMessage = dict[str, str]


class Ask(msgspec.Struct, frozen=True):
    """Ask for an answer to the latest message."""


class Continue(msgspec.Struct, frozen=True):
    """Go on with the latest answer."""


class Edit(msgspec.Struct, frozen=True):
    """Let the user change this text, which was the last question."""

    text: str


class Quit(msgspec.Struct, frozen=True):
    """The end."""


@dataclass(frozen=True)
class Unverified:
    """How much of an answer is verified. One that stands behind text which may be withdrawn is noted
    too, verified or not."""

    message: DialogueMessage
    tokens: int
    """Those that are not verified; 0 where they are yet to be counted."""
    verified_characters: int | None
    """Characters of its text, from the beginning, that are verified; None: all, and its end."""
    is_wanted: bool = True
    """Whether it is to be checked: one that the user has stopped is not."""
    is_being_corrected: bool = False
    """Whether the verifier writes it anew at this moment: until that is whole, this is the text."""


@dataclass(frozen=True)
class Loaded:
    """A conversation was loaded, and this text of it is shown; `unverified` are its answers from the
    first one on of which not all is verified."""

    text: str
    unverified: list[Unverified]


NextStep = str | Ask | Continue | Edit | Loaded | Quit
"""A text is shown to the user."""


class _Said(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A message in a saved conversation."""

    role: Literal["system", "user", "assistant"]
    content: str
    verified_characters: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Of an answer that is not all verified: how many of its first characters are."""
    stopped: bool = False
    """Whether the user has stopped it, so that it is not checked."""

    @property
    def is_unverified(self) -> bool:
        """Whether it is an answer of which not all is verified."""
        return self.role == "assistant" and self.verified_characters is not None


class _File(msgspec.Struct):
    """A saved conversation."""

    messages: list[_Said]


_file_of = msgspec.json.Decoder(_File)


@dataclass
class Dialogue:
    """The messages so far, and the settings that were changed since the start."""

    settings: ClientSettings
    system: str = ""
    keys: str = ""
    """How a message of several lines is typed."""
    messages: list[DialogueMessage] = field(default_factory=list)
    """Without the system message."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Settings that were changed, by name."""
    unverified: list[Unverified] = field(default_factory=list)
    """What is not verified of the messages."""
    _read_texts: list[str] = field(default_factory=list)
    """Files that wait for the question that they go with."""
    _files: dict[Path, bytes] = field(default_factory=dict)
    """Digests of the files that this chat has saved or loaded: `/save` may replace them while they
    are what this chat knows."""

    def take(self, line: str) -> NextStep | None:
        """Returns what is to be done for a line that the user has typed: a question or a command;
        None for an empty line. A mistyped command is an error, and is not sent to the model."""
        if not line.strip():
            return None
        if not line.startswith("/"):
            question = "\n\n".join([*self._read_texts, line])
            self._read_texts.clear()
            self.messages.append({"role": "user", "content": question})
            return Ask()
        name, _, rest = line.strip().partition(" ")
        name = {"/exit": "/quit", "/?": "/help"}.get(name, name)
        if name not in COMMANDS:
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {close[0]}?" if close else "/help lists the commands"
            raise UsageError(
                f"there is no {safe_line(name, 40)}",
                hint=f"{hint}; to say it, put a space before it",
            )
        # "/new" is done by `_new`: only names in COMMANDS come this far.
        step: NextStep = getattr(self, f"_{name[1:]}")(rest.strip())
        return step

    def answered(self, text: str) -> DialogueMessage:
        """Add the answer to the latest question. Returns its message, which a check of it corrects."""
        message = {"role": "assistant", "content": text}
        self.messages.append(message)
        return message

    def extended(self, message: DialogueMessage, text: str) -> DialogueMessage:
        """More of an answer; the same message, which is what a check of it corrects."""
        message["content"] += text
        return message

    def holds(self, message: DialogueMessage) -> bool:
        """Whether this very message, and not only its text, is still part of the conversation:
        `/new`, `/load` and `/retry` take messages away."""
        return any(one is message for one in self.messages)

    def correct(self, message: DialogueMessage, text: str) -> bool:
        """Correct a message late; returns False, and does nothing, if the message is gone."""
        if not self.holds(message):
            return False
        message["content"] = text
        return True

    def remove(self, message: DialogueMessage) -> None:
        """Take this very message out of the conversation."""
        self.messages = [one for one in self.messages if one is not message]

    def unanswered(self) -> None:
        """Remove the latest question, which could not be asked."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def to_send(self) -> list[DialogueMessage]:
        """The whole conversation, with the system message."""
        return [*self.opening(), *(dict(message) for message in self.messages)]

    def opening(self) -> list[DialogueMessage]:
        """The system message, if there is one."""
        return [{"role": "system", "content": self.system}] if self.system else []

    def before(self, message: DialogueMessage) -> list[DialogueMessage]:
        """The conversation before this very message, without the system message."""
        index = next(index for index, one in enumerate(self.messages) if one is message)
        return [dict(one) for one in self.messages[:index]]

    def completions(self, text: str) -> list[str]:
        """Completions of the last word typed."""
        words = text.split(" ")
        if len(words) == 1:
            return [name for name in COMMANDS if text and name.startswith(text)]
        if words[0] == "/set" and len(words) == 2:
            return [name for name in SETTABLE if name.startswith(words[1])]
        return []

    # ---- the commands: each is called with what follows its name, and returns the next step

    def _help(self, _: str) -> NextStep:
        width = max(map(len, COMMANDS))
        lines = [f"{name:{width}} {says}" for name, says in COMMANDS.items()]
        return "\n".join([*lines, f"Ctrl-C stops an answer. {self.keys}".rstrip()])

    def _new(self, _: str) -> NextStep:
        self.messages.clear()
        self._read_texts.clear()
        return "a new conversation"

    def _system(self, text: str) -> NextStep:
        if not text:
            return self.system or "nothing is said first"
        self.system = text
        return "said first from now on"

    def _set(self, rest: str) -> NextStep:
        """Change a setting from the next answer on; without a name, show all settings."""
        if not rest:
            return "\n".join(f"{name:20} {_written(self._setting(name))}" for name in SETTABLE)
        name, _, text = rest.partition(" ")
        if name not in SETTABLE:
            raise UsageError(
                f"{safe_line(name, 40)} cannot be set here", hint=f"known: {', '.join(SETTABLE)}"
            )
        if not text and name != "stop":
            raise UsageError(f"{name} needs a value", hint=f"it is {self._setting(name)}")
        value = from_text(name, text)
        changed = {**self.changes, name: value}
        dataclasses.replace(self.settings, **changed)  # refuses values out of range
        self.changes = changed
        told = f"{name} is {_written(value)} from the next answer on"
        if name == "temperature" and value > 0:
            told += f", with seed {self._setting('seed')}"
        return told

    def _setting(self, name: str) -> Any:
        """A setting's value for the next answer."""
        return self.changes.get(name, getattr(self.settings, name))

    def _read(self, name: str) -> NextStep:
        path = _path(name)
        text = read_file(path)
        if not text.strip():
            raise UsageError(f"{path} is empty")
        self._read_texts.append(text)
        return f"{path}: {len(text):,} characters go with your next question"

    def _continue(self, _: str) -> NextStep:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise UsageError("there is no answer to go on with")
        return Continue()

    def _edit(self, text: str) -> NextStep:
        question = self._taken_back()
        if not text:
            return Edit(question)
        self.messages.append({"role": "user", "content": text})
        return Ask()

    def _undo(self, _: str) -> NextStep:
        return f"taken back: {safe_line(self._taken_back(), 60)}"

    def _taken_back(self) -> str:
        """Take the last question out of the conversation, with all that followed, and return its
        text."""
        questions = [
            index for index, message in enumerate(self.messages) if message["role"] == "user"
        ]
        if not questions:
            raise UsageError("nothing was asked yet")
        last = questions[-1]
        question = self.messages[last]["content"]
        del self.messages[last:]
        return question

    def _retry(self, _: str) -> NextStep:
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            raise UsageError("nothing was asked yet")
        self.changes["seed"] = self.changes.get("seed", self.settings.seed) + 1
        return Ask()

    def _save(self, name: str) -> NextStep:
        """Write the conversation into a file. A file that is there already is replaced only if it
        still is as this chat has read or written it."""
        path = _path(name)
        known = self._files.get(path.absolute())
        said = [_Said("system", self.system)] if self.system else []
        said += [self._marked(message) for message in self.messages]
        content = msgspec.json.format(msgspec.json.encode(_File(said)), indent=1) + b"\n"
        try:
            replace_known(path, content, known)
        except Changed:
            if known is None:
                raise UsageError(
                    f"{path} exists already, and is not of this chat", hint="give another name"
                ) from None
            raise UsageError(
                f"another program has changed {path} since this chat read or wrote it",
                hint="give another name",
            ) from None
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from None
        self._files[path.absolute()] = digest_of(content)
        count = sum(one.tokens for one in self.unverified)
        unverified = f", of which {not_verified(count)}" if count else ""
        if any(one.is_being_corrected for one in self.unverified):
            unverified += "; one is being corrected: the file has it as this device wrote it"
        return f"{len(self.messages)} messages are in {path}{unverified}"

    def _marked(self, message: DialogueMessage) -> _Said:
        """Returns a message as it is saved, with what is known of its verification."""
        said = msgspec.convert(message, _Said)
        # One that was gone on with while there was no verifier has two: of its beginning and its end.
        marks = [
            one
            for one in self.unverified
            if one.message is message and one.verified_characters is not None
        ]
        if marks:
            said.verified_characters = marks[0].verified_characters
            said.stopped = not marks[-1].is_wanted
        return said

    def _load(self, name: str) -> NextStep:
        """Go on with the conversation in a file, in place of the present one; returns its text."""
        path = _path(name)
        try:
            if path.stat().st_size > _LARGEST_FILE:
                raise UsageError(f"{path} is too large for a conversation")
            content = path.read_bytes()
            said = _file_of.decode(content).messages
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(
                f"{path} is no conversation: {safe_line(str(error))}", hint="/save writes one"
            ) from None
        self._files[path.absolute()] = digest_of(content)
        self.system = said.pop(0).content if said and said[0].role == "system" else ""
        self.messages = [{"role": one.role, "content": one.content} for one in said]
        if not said:
            return Loaded("an empty conversation", [])
        text = "\n\n".join(
            f"{one.role}: {one.content}{_MARK if one.is_unverified else ''}" for one in said
        )
        return Loaded(text, _unverified_of(said, self.messages))

    def _quit(self, _: str) -> NextStep:
        return Quit()


def _unverified_of(said: Sequence[_Said], messages: Sequence[DialogueMessage]) -> list[Unverified]:
    """Returns what a file says of its answers, from the first one on of which not all is verified;
    `messages` are those of the dialogue."""
    found: list[Unverified] = []
    for one, message in zip(said, messages, strict=True):
        if one.role != "assistant" or not (found or one.is_unverified):
            continue
        found.append(Unverified(message, 0, one.verified_characters, is_wanted=not one.stopped))
    return found


def _path(name: str) -> Path:
    """The file that the user has named."""
    if not name:
        raise UsageError("name a file")
    return expanded(name)


def _written(value: Any) -> str:
    """A setting's value as `/set` takes it; a list is separated by commas."""
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return str(value)
