"""What `--data` names: files, folders or a dataset's id, read one example at a time and turned into
documents.

A line of a `.jsonl` file, like a row of a dataset, is one of
    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}, ...]}
    {"prompt": ..., "answer": ...}
    {"text": ...}
    {"ids": [...], "prompt_tokens": n}      (what --generate writes)
and any other file is one plain text. Only the assistant's text is trained on ("wanted").
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from moa.errors import UsageError, first_line
from moa.process.user_folders import expanded
from moa.training.data import Document

JSON_LINES = (".jsonl", ".ndjson")
IN_FOLDERS = (*JSON_LINES, ".txt", ".md", ".rst", ".py")
"""Files of these endings are read from a folder; a file that is named itself may have any."""
_DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w\[\]%.:+-]+)?")


@dataclass(frozen=True)
class SourceExample:
    """One example as read, and its place: `file:line`."""

    where: str
    fields: Mapping[str, Any]


def examples(sources: Iterable[str]) -> Iterator[SourceExample]:
    """Yield every example of training text in these sources, in order: files, the files of folders,
    or datasets by their ids."""
    for source in sources:
        path = expanded(source)
        if path.is_dir():
            for file in files_of(path):
                yield from _of_file(file)
        elif path.exists():
            yield from _of_file(path)
        else:
            yield from _of_dataset(source)


def files_of(folder: Path) -> list[Path]:
    """The data files in a folder and the folders below it, sorted; a `UsageError` if there is
    none."""
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix in IN_FOLDERS and path.is_file() and not path.name.startswith(".")
    )
    if not files:
        raise UsageError(
            f"no training data in {folder}: it holds no file named *{', *'.join(IN_FOLDERS)}"
        )
    return files


def fingerprint(sources: Iterable[str]) -> list[dict[str, Any]]:
    """What identifies the data in these sources: the name, size and sha256 of every file, and the
    id of a dataset, whose content is not looked at."""
    entries: list[dict[str, Any]] = []
    for source in sources:
        path = expanded(source)
        if not path.exists():
            entries.append({"dataset": source})
            continue
        files = files_of(path) if path.is_dir() else [path]
        for file in files:
            with file.open("rb") as data:
                digest = hashlib.file_digest(data, "sha256").hexdigest()
            entries.append({"file": file.name, "bytes": file.stat().st_size, "sha256": digest})
    return entries


def _of_file(path: Path) -> Iterator[SourceExample]:
    """Yield the examples of a file: one for each line of JSON in a `.jsonl` file, else the whole
    text as one; a `UsageError` for a file that is no text."""
    try:
        if path.suffix in JSON_LINES:
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _of_line(f"{path}:{number}", line)
        else:
            yield SourceExample(str(path), {"text": path.read_text(encoding="utf-8")})
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from None


def _of_line(where: str, line: str) -> SourceExample:
    """The example of a line of JSON."""
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not valid JSON: {error.msg} in column {error.colno}") from None
    if not isinstance(fields, dict):
        raise UsageError(f"{where}: a line must be a JSON object, not {type(fields).__name__}")
    return SourceExample(where, fields)


def _of_dataset(source: str) -> Iterator[SourceExample]:
    """Yield the rows of the dataset with this id, which may name a split behind a colon. A
    `UsageError` if the source looks like the name of a file, which is not there."""
    names_a_file = Path(source).suffix in IN_FOLDERS or source.startswith(("/", ".", "~"))
    if names_a_file or not _DATASET_ID.fullmatch(source):
        raise UsageError(f"no training data at {source}: there is no such file or folder")
    try:
        import datasets  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise UsageError(
            f"no file or folder is named {source}, and reading it as a dataset's id needs the datasets package",
            hint="pip install datasets",
        ) from None
    name, _, split = source.partition(":")
    try:
        rows = datasets.load_dataset(name, split=split or "train", trust_remote_code=False)
    except Exception as error:  # the library raises its own errors, the hub's and pyarrow's
        raise UsageError(f"cannot load dataset {source}: {first_line(error)}") from None
    for number, row in enumerate(rows):
        yield SourceExample(f"{source}[{number}]", row)


class DocumentReader:
    """Turns examples into documents with the target's own tokenizer and chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        if len(tokenizer) > vocab_size:
            raise UsageError(
                f"the tokenizer has {len(tokenizer)} tokens, the target's vocabulary {vocab_size}: not of one model"
            )
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size

    def documents(self, example: SourceExample) -> list[Document]:
        """The documents of an example, token ids of which some are to be learnt: one, or several if
        the chat template writes a text otherwise when it goes on. A `UsageError` for an example of
        no known form."""
        fields = example.fields
        where = example.where
        if "messages" in fields:
            return self._chat(_messages(fields["messages"], where), where)
        if "prompt" in fields:
            prompt = string(fields, "prompt", where)
            answer = string(fields, "answer", where)
            if self.tokenizer.chat_template:
                return self._chat([_message("user", prompt), _message("assistant", answer)], where)
            prompt_ids = self._start() + self.encode(prompt)
            return [Document.answer(prompt_ids, self.encode(answer) + self._end())]
        if "text" in fields:
            text = string(fields, "text", where)
            return [Document.text(self._start() + self.encode(text))]
        if "ids" in fields:
            return [self._of_ids(fields, where)]
        raise UsageError(f'{where}: no "messages", "text", "prompt" with "answer", or "ids" in it')

    def prompt(self, example: SourceExample, text_tokens: int) -> list[int]:
        """The tokens of an example's prompt, for the target to write the answer itself: a chat up
        to the user's last message, a prompt, what is before the answer of token ids, or the first
        `text_tokens` of a text."""
        fields = example.fields
        where = example.where
        if "messages" in fields:
            messages = _messages(fields["messages"], where)
            while messages and messages[-1]["role"] != "user":
                messages = messages[:-1]
            if not messages:
                raise UsageError(f"{where}: no message of the user to answer")
            return self.encode(self._render(messages, where, ask=True))
        if "prompt" in fields:
            prompt = string(fields, "prompt", where)
            if self.tokenizer.chat_template:
                return self.encode(self._render([_message("user", prompt)], where, ask=True))
            return self._start() + self.encode(prompt)
        return self.documents(example)[0].prompt(text_tokens)

    def encode(self, text: str) -> list[int]:
        """Token ids, without adding special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _start(self) -> list[int]:
        """The tokenizer's start token, if it has one."""
        return [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]

    def _end(self) -> list[int]:
        """The tokenizer's end token, if it has one."""
        return [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]

    def _chat(self, messages: list[dict[str, str]], where: str) -> list[Document]:
        """The documents of a conversation, of which the answers are to be learnt: usually one. Each
        answer and its end mark are encoded by themselves, as a target produces them.

        Some templates rewrite earlier turns when later ones follow (they drop old reasoning), so no
        single text contains all prompts as prefixes. Then each answer becomes its own document,
        after its real prompt.
        """
        if not any(message["role"] == "assistant" for message in messages):
            raise UsageError(f"{where}: no message of the assistant to learn from")
        answers: list[_Answer] = []
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:place], where, ask=True)
            rendered = self._render(messages[: place + 1], where)
            if not rendered.startswith(prompt):
                raise UsageError(
                    f"{where}: the chat template puts no answer behind its own generation prompt"
                )
            answers.append(_Answer(prompt, rendered.rstrip()))
        whole = self._render(messages, where)
        if all(whole.startswith(answer.text) for answer in answers):
            return [self._document(answers)]
        return [self._document([answer]) for answer in answers]

    def _document(self, answers: list[_Answer]) -> Document:
        """A document with one or more answers of a conversation, of which the answers are to be
        learnt. Each answer's text is the conversation up to its end, and begins with the text of
        the one before it."""
        ids: list[int] = []
        wanted: list[bool] = []
        done = 0  # characters of the conversation that are encoded
        for prompt, text in answers:
            asked = self.encode(prompt[done:])
            answered = self.encode(text[len(prompt) :])
            ids += asked + answered
            wanted += [False] * len(asked) + [True] * len(answered)
            done = len(text)
        return Document(ids, wanted)

    def _render(self, messages: list[dict[str, str]], where: str, *, ask: bool = False) -> str:
        """The text that the target's chat template makes of messages; with `ask` it ends where the
        assistant's answer is to begin. A `UsageError` where there is no template, or it refuses
        them."""
        if not self.tokenizer.chat_template:
            raise UsageError(
                f"{where}: the target's tokenizer has no chat template for messages",
                hint="use prompt and answer",
            )
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=ask
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise UsageError(
                f"{where}: the chat template refuses these messages: {error}"
            ) from None
        return str(text)

    def _of_ids(self, fields: Mapping[str, Any], where: str) -> Document:
        """The document of an example that is in token ids already, `prompt_tokens` of which are not
        to be learnt; a `UsageError` where these are no ids of the vocabulary."""
        ids = fields["ids"]
        prompt_tokens = fields.get("prompt_tokens", 0)
        are_ids = isinstance(ids, list) and all(self._is_id(value) for value in ids)
        if not are_ids:
            raise UsageError(f"{where}: ids must be a list of token ids below {self.vocab_size}")
        if not isinstance(prompt_tokens, int) or not 0 <= prompt_tokens <= len(ids):
            raise UsageError(f"{where}: prompt_tokens must be within 0..{len(ids)}")
        return Document.answer(ids[:prompt_tokens], ids[prompt_tokens:])

    def _is_id(self, value: Any) -> bool:
        return isinstance(value, int) and 0 <= value < self.vocab_size


class _Answer(NamedTuple):
    """An answer in a conversation, as the chat template writes it."""

    prompt: str
    """The conversation up to the start of the answer."""
    text: str
    """The conversation with the answer and its end mark, without white space behind it."""


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    """The messages of an example, each with a role and a content."""
    if not isinstance(value, list) or not value:
        raise UsageError(f"{where}: messages must be a list with a message or more")
    for message in value:
        has_both = isinstance(message, dict) and all(
            isinstance(message.get(key), str) for key in ("role", "content")
        )
        if not has_both:
            raise UsageError(f"{where}: a message needs a role and a content, both text")
    return value


def string(fields: Mapping[str, Any], name: str, where: str) -> str:
    """A field of an example that must be text."""
    value = fields.get(name)
    if not isinstance(value, str):
        found = type(value).__name__ if name in fields else "missing"
        hint = "with --generate the target answers" if name == "answer" else ""
        raise UsageError(f'{where}: "{name}" must be text, not {found}', hint=hint)
    return value
