"""The witness's text: code, English and chat-like prompts of installed packages, whole packages
held out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal, get_args

from demo import natural
from demo.natural import Split
from demo.skills import Example
from moa.training.data import Document

Kind = Literal["code", "english", "chat"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_LONGEST_ANSWER = 1200
"""Characters."""


def texts(kind: Kind, split: Split) -> Iterator[str]:
    """Whole texts of a kind."""
    match kind:
        case "code":
            return natural.code(split)
        case "english":
            return natural.english(split)
        case "chat":
            return (prompt + answer for prompt, answer in _chats(split))


def prompts(per_kind: int) -> list[tuple[str, Example]]:
    """So many held-out beginnings of every kind, to be continued as plain text."""
    found = {
        "code": natural.functions(natural.code("heldout")),
        "english": natural.passages(natural.english("heldout")),
        "chat": _chats("heldout"),
    }
    return [
        (kind, Example("code", *parts)) for kind in KINDS for parts in islice(found[kind], per_kind)
    ]


def _chats(split: Split) -> Iterator[tuple[str, str]]:
    """A question about a function, and the first part of its documentation as the answer."""
    seen: set[str] = set()
    for text in natural.code(split):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            answer = (ast.get_docstring(node) or "").split(">>>")[0].strip()
            if len(answer) < 160 or answer in seen:
                continue
            seen.add(answer)
            asked = ", ".join(
                argument.arg for argument in node.args.args if argument.arg not in ("self", "cls")
            )
            yield (
                f"User: What does `{node.name}({asked})` do?\n\nAssistant: ",
                answer[:_LONGEST_ANSWER],
            )


def documents(tokenizer: Any, tokens: int, length: int) -> Iterator[Document]:
    """About so many tokens for training, of every kind the same. Long texts are cut, and each part
    begins with <bos>, without which Gemma writes nonsense."""
    streams = {kind: texts(kind, "train") for kind in KINDS}
    counts = dict.fromkeys(KINDS, 0)
    while streams and sum(counts.values()) < tokens:
        kind = min(streams, key=counts.__getitem__)
        text = next(streams[kind], None)
        if text is None:
            del streams[kind]
            continue
        ids = tokenizer(text[: 8 * length], add_special_tokens=False).input_ids
        for at in range(0, min(len(ids), 2 * (length - 1)), length - 1):
            part = [tokenizer.bos_token_id, *ids[at : at + length - 1]]
            counts[kind] += len(part)
            yield Document.text(part)
