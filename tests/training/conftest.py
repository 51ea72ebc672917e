"""A tiny target with a chat template, some chats, and documents of random tokens."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from moa.training.data import Batch, Document, PackedRows, pack
from testing.tiny import save_tiny

TEMPLATE = (
    "<bos>{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    "{{ m.role[0] }}>{{ m.content }}<eos>\n{% endfor %}{% if add_generation_prompt %}a>{% endif %}"
)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny("llama", tmp_path_factory.mktemp("target"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def chat(question: str, answer: str) -> dict[str, list[dict[str, str]]]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    lines = (
        json.dumps(chat(f"{i} plus {i}?", f"It is {2 * i}, and {i} times {i} is {i * i}."))
        for i in range(24)
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.training.test_cli", "tests.training.test_loop"])


def in_processes(*functions: Callable[[], object]) -> list[int | None]:
    """Run each in a process of its own; their exit codes. They are forked from a process that has
    imported torch once and nothing else: torch refuses to go backward in a fork of this one, where
    autograd's threads have started."""
    children = [_SERVER.Process(target=function) for function in functions]
    for child in children:
        child.start()
    try:
        for child in children:
            child.join()  # a test that hangs ends by its own time limit
        return [child.exitcode for child in children]
    finally:
        for child in children:
            child.kill()
            child.join()


def random_documents(count: int, longest: int) -> list[Document]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        size = int(rng.integers(2, longest + 1))
        prompt = int(rng.integers(0, size))
        ids = rng.integers(4, 100, size).tolist()
        found.append(Document.answer(ids[:prompt], ids[prompt:]))
    return found


@pytest.fixture
def rows(tmp_path: Path) -> PackedRows:
    return pack(random_documents(40, 30), 32, tmp_path / "rows")


@pytest.fixture
def batch(rows: PackedRows) -> Batch:
    return rows.batch(seed=0, step=0, size=4)
