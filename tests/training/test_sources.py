from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from moa.errors import UsageError
from moa.target.loading import load_tokenizer
from moa.training.data import Document
from moa.training.sources import DocumentReader, SourceExample, examples, fingerprint
from testing.tiny import BOS, EOS
from tests.training.conftest import chat

# Drops the answers of earlier turns once there is a later one, as some templates drop old reasoning
FORGETFUL = (
    "<bos>{% for m in messages %}{{ m.role[0] }}>"
    "{% if m.role == 'user' or loop.last %}{{ m.content }}{% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a>{% endif %}"
)


@pytest.fixture
def tokenizer(target: Path) -> Any:
    return load_tokenizer(target)


@pytest.fixture
def reader(tokenizer: Any) -> DocumentReader:
    return DocumentReader(tokenizer, 128)


def _write(path: Path, *lines: object) -> str:
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines),
        encoding="utf-8",
    )
    return str(path)


def _read(reader: DocumentReader, *sources: str) -> list[Document]:
    return [document for example in examples(sources) for document in reader.documents(example)]


def _wanted(reader: DocumentReader, document: Document) -> str:
    return reader.tokenizer.decode(
        [i for i, wanted in zip(document.ids, document.wanted, strict=True) if wanted]
    )


TWO_TURNS = {"messages": [*chat("hi", "hello")["messages"], *chat("1+1", "2")["messages"]]}


def test_only_answers_and_their_ends_are_wanted(reader: DocumentReader, tmp_path: Path) -> None:
    (document,) = _read(reader, _write(tmp_path / "c.jsonl", TWO_TURNS))
    assert (
        reader.tokenizer.decode(document.ids)
        == "<bos>u>hi<eos>\na>hello<eos>\nu>1+1<eos>\na>2<eos>"
    )
    assert _wanted(reader, document) == "hello<eos>2<eos>"


def test_the_prompt_of_every_answer_is_a_prefix(reader: DocumentReader) -> None:
    """What the drafter sees before an answer in training is what it will see when the target is
    asked."""
    example = SourceExample("here:1", chat("hi", "hello"))
    (document,) = reader.documents(example)
    asked = reader.prompt(example, 0)
    assert document.ids[: len(asked)] == asked
    assert not any(document.wanted[: len(asked)])
    assert all(document.wanted[len(asked) :])


@pytest.mark.parametrize(("asked", "prompt"), [(70, 70), (0, 3), (90, 90)])
def test_the_prompt_of_ids_is_what_is_before_their_answer(
    reader: DocumentReader, asked: int, prompt: int
) -> None:
    """Lines that --generate wrote, answered again by another target; all or nothing may be prompt."""
    example = SourceExample("here:1", {"ids": [1] * 90, "prompt_tokens": asked})
    assert reader.prompt(example, 3) == [1] * prompt
    assert reader.documents(example) == [
        Document([1] * 90, [place >= asked for place in range(90)])
    ]


def test_a_template_that_rewrites_the_past_gives_a_document_per_answer(
    tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer.chat_template = FORGETFUL
    reader = DocumentReader(tokenizer, 128)
    documents = _read(reader, _write(tmp_path / "c.jsonl", TWO_TURNS))
    assert [_wanted(reader, d) for d in documents] == ["hello<eos>", "2<eos>"]


def test_prompt_and_answer_without_a_template(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="not of one model"):
        DocumentReader(tokenizer, 64)
    reader = DocumentReader(tokenizer, 128)
    (document,) = _read(reader, _write(tmp_path / "p.jsonl", {"prompt": "ab", "answer": "cd"}))
    assert document.ids == [BOS, *reader.encode("abcd"), EOS]
    assert document.wanted == [False] * 3 + [True] * 3


def test_texts_files_and_folders(reader: DocumentReader, tmp_path: Path) -> None:
    _write(tmp_path / "b.txt", "second")
    _write(tmp_path / "a.jsonl", {"text": "first"}, "", {"text": "more"})
    _write(tmp_path / ".hidden.txt", "not this")
    _write(tmp_path / "picture.bin", "nor this")
    found = _read(reader, str(tmp_path))
    assert [reader.tokenizer.decode(d.ids) for d in found] == [
        "<bos>first",
        "<bos>more",
        "<bos>second",
    ]
    assert all(all(d.wanted) for d in found)


BAD = {
    "{": "not valid JSON",
    "[1]": "must be a JSON object",
    "{}": 'no "messages"',
    '{"messages": []}': "messages must be a list",
    '{"messages": [{"role": "user"}]}': "role and a content",
    '{"messages": [{"role": "user", "content": "x"}]}': "no message of the assistant",
    '{"messages": [{"role": "system", "content": "x"}, {"role": "assistant", "content": "y"}]}': "refuses",
    '{"prompt": "x"}': '"answer" must be text, not missing (with --generate the target answers)',
    '{"text": 5}': '"text" must be text, not int',
    '{"ids": [128]}': "below 128",
    '{"ids": [5], "prompt_tokens": 2}': "within 0..1",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_named(reader: DocumentReader, tmp_path: Path, line: str) -> None:
    source = _write(tmp_path / "bad.jsonl", {"text": "fine"}, line)
    with pytest.raises(UsageError) as caught:
        _read(reader, source)
    assert f"{source}:2: " in caught.value.line()
    assert BAD[line] in caught.value.line()


@pytest.mark.parametrize("source", ["gone.jsonl", "./gone", "/gone/file", "three/part/name"])
def test_what_is_not_there_is_named(reader: DocumentReader, source: str) -> None:
    with pytest.raises(UsageError, match="no training data at"):
        _read(reader, source)


def test_a_dataset_id_without_the_package_says_what_to_install(
    reader: DocumentReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError) as caught:
        _read(reader, "someone/chats:train")
    assert "pip install datasets" in caught.value.line()


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    source = _write(tmp_path / "a.txt", "one")
    before = fingerprint([source])
    assert fingerprint([source]) == before
    _write(tmp_path / "a.txt", "two")
    assert fingerprint([source]) != before
