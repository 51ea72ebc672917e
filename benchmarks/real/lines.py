"""Files of JSON lines that a long run appends to, and goes on with after it was killed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def read(path: Path) -> Iterator[Line]:
    """Every line; a last one that a kill has cut is left out."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


class Lines:
    """Results by key, kept in a file as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Line] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _drop_cut_line(path)
            self.found = {line["key"]: line for line in read(path)}

    def __contains__(self, key: str) -> bool:
        return key in self.found

    def add(self, key: str, **facts: Any) -> None:
        """Keep one more, on disk at once."""
        line = {"key": key, **facts}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.found[key] = line


def _drop_cut_line(path: Path) -> None:
    """What is appended must begin a line of its own."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        path.write_bytes(data[: data.rfind(b"\n") + 1])
