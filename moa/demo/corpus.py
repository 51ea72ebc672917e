"""The demo pair's text: skill exercises and Python's own standard library, each split into train and held-out."""

import ast
import random
import sysconfig
from collections.abc import Collection, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from .skills import SKILLS, Example

Split = Literal["train", "heldout"]

# Tests, bundled packages and generated tables say little about how Python is written; build data names the machine.
_SKIPPED_FOLDERS = frozenset({
    "__pycache__", "test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib", "lib2to3",
    "pydoc_data", "encodings", "turtledemo", "ensurepip",
})  # fmt: skip
_LARGEST_FILE = 150_000


def split_of(key: str) -> Split:
    """The split that a prompt or path belongs to: one in sixteen is held out, by a stable hash."""
    return "heldout" if blake2b(key.encode(), digest_size=8).digest()[-1] % 16 == 0 else "train"


def examples(split: Split, seed: int, more: Collection[str] = (), times: int = 3) -> Iterator[Example]:
    """Exercises without end, every skill once per round in random order; those named in `more` so many times."""
    rng = random.Random(f"{split}-{seed}")
    skills = [skill for name, skill in SKILLS.items() for _ in range(times if name in more else 1)]
    while True:
        rng.shuffle(skills)
        for skill in skills:
            example = skill.make(rng)
            while split_of(example.prompt) != split:
                example = skill.make(rng)
            yield example


def messages(example: Example) -> list[dict[str, str]]:
    """The exercise as a chat."""
    return [{"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.answer}]


def _stdlib_files() -> Iterator[tuple[str, Path]]:
    """The library's source files worth learning from, by their path inside it, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if not _SKIPPED_FOLDERS.intersection(inside.parts) and not path.name.startswith("_sysconfigdata"):
            yield inside.as_posix(), path


def stdlib_text(split: Split = "train") -> Iterator[str]:
    """The standard library's source files of a split, in a fixed shuffled order."""
    files = [path for name, path in _stdlib_files() if split_of(name) == split]
    random.Random(0).shuffle(files)
    for path in files:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if 0 < len(text) <= _LARGEST_FILE:
            yield text


def stdlib_prompts(lines: int = 8, shortest: int = 14, longest: int = 40) -> Iterator[Example]:
    """Held-out functions to be continued as plain text: the first lines are the prompt, the rest the answer."""
    for text in stdlib_text("heldout"):
        rows = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                function = rows[node.lineno - 1 : node.end_lineno]
                if shortest <= len(function) <= longest:
                    yield Example("code", "".join(function[:lines]), "".join(function[lines:]))
