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
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from moa.errors import UsageError
from moa.process.user_folders import expanded
from moa.training.data import Document

JSON_LINES = (".jsonl", ".ndjson")
IN_FOLDERS = (*JSON_LINES, ".txt", ".md", ".rst", ".py")
"""Files of these endings are read from a folder; a file that is named itself may have any."""
KINDS = ("messages", "prompt", "text", "ids")

_DATASET_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w\[\]%.:+-]+)?")


@dataclass(frozen=True)
class SourceExample:
    """One example as read, and its place: `file:line`."""

    where: str
    fields: Mapping[str, Any]


def examples(sources: Iterable[str]) -> Iterator[SourceExample]:
    """Every example of every source, in order."""
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
    """The data files under a folder, sorted; none is an error."""
    files = sorted(
        p
        for p in folder.rglob("*")
        if p.suffix in IN_FOLDERS and p.is_file() and not p.name.startswith(".")
    )
    if not files:
        raise UsageError(
            f"no training data in {folder}: it holds no file named *{', *'.join(IN_FOLDERS)}"
        )
    return files


def fingerprint(sources: Iterable[str]) -> list[dict[str, Any]]:
    """Identity of the data: every file's size and sha256; for a dataset only its id."""
    found: list[dict[str, Any]] = []
    for source in sources:
        path = expanded(source)
        if not path.exists():
            found.append({"dataset": source})
            continue
        for file in files_of(path) if path.is_dir() else [path]:
            with file.open("rb") as data:
                digest = hashlib.file_digest(data, "sha256").hexdigest()
            found.append({"file": file.name, "bytes": file.stat().st_size, "sha256": digest})
    return found


def _of_file(path: Path) -> Iterator[SourceExample]:
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
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not valid JSON: {error.msg} in column {error.colno}") from None
    if not isinstance(fields, dict):
        raise UsageError(f"{where}: a line must be a JSON object, not {type(fields).__name__}")
    return SourceExample(where, fields)


def _of_dataset(source: str) -> Iterator[SourceExample]:
    path = Path(source)
    if (
        not _DATASET_ID.fullmatch(source)
        or path.suffix in IN_FOLDERS
        or source.startswith(("/", ".", "~"))
    ):
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
        raise UsageError(
            f"cannot load dataset {source}: {next(iter(str(error).splitlines()), 'unknown')}"
        ) from None
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
        """The documents of an example: one, none, or several if the template requires it."""
        fields = example.fields
        where = example.where
        kind = next((kind for kind in KINDS if kind in fields), None)
        if kind == "messages":
            return self._chat(_messages(fields["messages"], where), where)
        if kind == "prompt":
            prompt = string(fields, "prompt", where)
            answer = string(fields, "answer", where)
            if self.tokenizer.chat_template:
                return self._chat([_message("user", prompt), _message("assistant", answer)], where)
            end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
            return [
                Document.answer(self._opening() + self.encode(prompt), self.encode(answer) + end)
            ]
        if kind == "text":
            return [Document.text(self._opening() + self.encode(string(fields, "text", where)))]
        if kind == "ids":
            return [self._ready(fields, where)]
        raise UsageError(f'{where}: no "messages", "text", "prompt" with "answer", or "ids" in it')

    def prompt(self, example: SourceExample, text_tokens: int) -> list[int]:
        """The prompt if the target writes the answer itself: a chat up to the user's last message,
        a prompt, what is before the answer of token ids, or the first tokens of a text."""
        fields = example.fields
        where = example.where
        if "messages" in fields:
            messages = _messages(fields["messages"], where)
            asked = max(
                (i for i, message in enumerate(messages) if message["role"] == "user"), default=None
            )
            if asked is None:
                raise UsageError(f"{where}: no message of the user to answer")
            return self.encode(self._render(messages[: asked + 1], where, ask=True))
        if "prompt" in fields:
            prompt = string(fields, "prompt", where)
            if self.tokenizer.chat_template:
                return self.encode(self._render([_message("user", prompt)], where, ask=True))
            return self._opening() + self.encode(prompt)
        return self.documents(example)[0].prompt(text_tokens)

    def encode(self, text: str) -> list[int]:
        """Token ids, without adding special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _opening(self) -> list[int]:
        return [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]

    def _chat(self, messages: list[dict[str, str]], where: str) -> list[Document]:
        """The whole conversation as one document; each answer and its end mark are encoded as a
        target produces them.

        Some templates rewrite earlier turns when later ones follow (they drop old reasoning), so no
        single text contains all prompts as prefixes. Then each answer becomes its own document,
        after its real prompt.
        """
        if not any(message["role"] == "assistant" for message in messages):
            raise UsageError(f"{where}: no message of the assistant to learn from")
        spans: list[tuple[str, str]] = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:i], where, ask=True)
                after = self._render(messages[: i + 1], where)
                if not after.startswith(before):
                    raise UsageError(
                        f"{where}: the chat template puts no answer behind its own generation prompt"
                    )
                spans.append((before, after[: len(after.rstrip())]))
        whole = self._render(messages, where)
        stable = all(whole.startswith(after) for _, after in spans)
        return [self._document(spans)] if stable else [self._document([span]) for span in spans]

    def _document(self, spans: list[tuple[str, str]]) -> Document:
        ids: list[int] = []
        wanted: list[bool] = []
        done = 0
        for before, after in spans:
            for part, is_wanted in ((before[done:], False), (after[len(before) :], True)):
                tokens = self.encode(part)
                ids += tokens
                wanted += [is_wanted] * len(tokens)
            done = len(after)
        return Document(ids, wanted)

    def _render(self, messages: list[dict[str, str]], where: str, *, ask: bool = False) -> str:
        if not self.tokenizer.chat_template:
            raise UsageError(
                f"{where}: the target's tokenizer has no chat template for messages",
                hint="use prompt and answer",
            )
        try:
            text = str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=ask
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise UsageError(
                f"{where}: the chat template refuses these messages: {error}"
            ) from None
        return text

    def _ready(self, fields: Mapping[str, Any], where: str) -> Document:
        ids = fields["ids"]
        asked = fields.get("prompt_tokens", 0)
        if not isinstance(ids, list) or not all(
            isinstance(i, int) and 0 <= i < self.vocab_size for i in ids
        ):
            raise UsageError(f"{where}: ids must be a list of token ids below {self.vocab_size}")
        if not isinstance(asked, int) or not 0 <= asked <= len(ids):
            raise UsageError(f"{where}: prompt_tokens must be within 0..{len(ids)}")
        return Document.answer(ids[:asked], ids[asked:])


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _messages(value: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"{where}: messages must be a list with a message or more")
    for message in value:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
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
