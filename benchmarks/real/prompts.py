"""Prompts of five kinds, from published data that a person downloads.

* code: HumanEval's `HumanEval.jsonl.gz` (MIT), 164 functions with tests;
* chat and english: Spec-Bench's `question.jsonl` (Apache-2.0): MT-bench's 80 first turns and its
  questions; translations and summaries;
* tools: a `BFCL_*.json` of the Berkeley function-calling leaderboard (Apache-2.0);
* json: texts made here, and the schema of the answer.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.real.lines import Line, read
from moa.errors import UsageError

KINDS = ("code", "chat", "english", "json", "tools")
_TASK = (
    "Please provide a self-contained Python script that solves the following problem"
    " in a markdown code block:\n```python\n{}\n```"
)
FENCE_CLOSED = "\n```\n"
"""Behind it nothing of an answer is run."""
_MT_BENCH = {
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
}
_LONGEST = 3000
"""Characters of a prompt: longer articles take minutes on two cores."""
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""BFCL's words for JSON schema's."""


@dataclass(frozen=True)
class Prompt:
    """A conversation that an answer follows."""

    kind: str
    name: str
    messages: list[dict[str, str]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    schema: dict[str, Any] | None = None

    @property
    def key(self) -> str:
        """Its name among all."""
        return f"{self.kind}/{self.name}"


def asked(kind: str, name: str, text: str, **more: Any) -> Prompt:
    """One message of a user."""
    return Prompt(kind, name, [{"role": "user", "content": text}], **more)


def code(path: Path) -> Iterator[Prompt]:
    """HumanEval's problems."""
    for problem in problems(path):
        yield asked("code", _last(problem["task_id"]), _TASK.format(problem["prompt"].strip()))


def problems(path: Path) -> list[Line]:
    """HumanEval as published."""
    found = list(read(path))
    if not found or "entry_point" not in found[0]:
        raise UsageError(
            f"{path} is no HumanEval", hint="data/HumanEval.jsonl.gz of its repository"
        )
    return found


def spec_bench(path: Path) -> Iterator[Prompt]:
    """Questions by kind: short ones, in the file's order."""
    for question in read(path):
        category = question["category"]
        text = question["turns"][0]
        if len(text) > _LONGEST:
            continue
        name = str(question["question_id"])
        if category in _MT_BENCH or category == "qa":
            yield asked("chat", name, text)
        elif category in ("translation", "summarization"):
            yield asked("english", name, text)


def tools(path: Path) -> Iterator[Prompt]:
    """Questions that a tool answers."""
    for question in read(path):
        functions = [
            {"type": "function", "function": {**f, "parameters": _as_schema(f["parameters"])}}
            for f in question["function"]
        ]
        yield Prompt("tools", question["id"], question["question"][0], tools=functions)


def _as_schema(part: Any) -> Any:
    if isinstance(part, list):
        return [_as_schema(one) for one in part]
    if not isinstance(part, dict):
        return part
    return {
        name: _TYPES.get(value, value)
        if name == "type" and isinstance(value, str)
        else _as_schema(value)
        for name, value in part.items()
    }


INVOICE = {
    "type": "object",
    "properties": {
        "number": {"type": "string"},
        "date": {"type": "string", "format": "date"},
        "customer": {"type": "string"},
        "currency": {"enum": ["EUR", "USD", "GBP"]},
        "lines": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "article": {"type": "string"},
                    "quantity": {"type": "integer"},
                    "price": {"type": "number"},
                },
                "required": ["article", "quantity", "price"],
                "additionalProperties": False,
            },
        },
        "paid": {"type": "boolean"},
    },
    "required": ["number", "date", "customer", "currency", "lines", "paid"],
    "additionalProperties": False,
}
_NAMES = ["Anna Weber", "Li Chen", "Omar Haddad", "Maria Silva", "John Carter", "Yuki Tanaka"]
_ARTICLES = ["desk lamp", "office chair", "USB cable", "paper ream", "whiteboard", "headset"]


def invoices(count: int) -> Iterator[Prompt]:
    """Letters about invoices, each with other facts; the answer is the invoice."""
    for number in range(count):
        rng = random.Random(number)
        bought = [
            f"{rng.randint(1, 12)} x {article} at {rng.randint(2, 300)}.{rng.choice(['00', '50'])}"
            for article in rng.sample(_ARTICLES, rng.randint(1, 3))
        ]
        text = (
            f"Invoice {rng.choice('ABC')}-{rng.randint(1000, 9999)} of {rng.randint(1, 28)} "
            f"{rng.choice(['March', 'June', 'October'])} 2025 for {rng.choice(_NAMES)}: "
            f"{', '.join(bought)}, all prices in {rng.choice(['euros', 'US dollars'])}. "
            f"{rng.choice(['It was paid at once.', 'It is still open.'])}"
        )
        yield asked("json", str(number), f"Write this invoice as JSON.\n\n{text}", schema=INVOICE)


def all_prompts(data: list[Path], per_kind: int) -> list[Prompt]:
    """The prompts of these files by their names, and invoices; so many of each kind at most, 0: all."""
    found: list[Prompt] = []
    for path in data:
        if "humaneval" in path.name.lower():
            found += code(path)
        elif "bfcl" in path.name.lower():
            found += tools(path)
        else:
            found += spec_bench(path)
    found += invoices(per_kind or 100)
    chosen = []
    for kind in KINDS:
        some = [prompt for prompt in found if prompt.kind == kind]
        # Always the same order, in which the parts of a file are mixed.
        some.sort(key=lambda prompt: zlib.crc32(prompt.key.encode()))
        chosen += some[: per_kind or None]
    return chosen


def encoded(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Its tokens, up to where the answer begins."""
    text = tokenizer.apply_chat_template(
        prompt.messages,
        tools=prompt.tools or None,
        tokenize=False,
        add_generation_prompt=True,
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def as_line(prompt: Prompt) -> str:
    """For a look at what was asked."""
    return json.dumps(vars(prompt), ensure_ascii=False)
