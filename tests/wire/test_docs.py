from __future__ import annotations

from pathlib import Path

import pytest

from moa.wire import describe
from moa.wire.codes import CloseCode, Code

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire-protocol.md"


def test_the_generated_parts_are_up_to_date() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert describe.filled(text) == text, "run: python -m moa.wire.describe docs/wire-protocol.md"


def test_everything_is_described() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for part in ("client", "server", "structures", "codes", "closes"):
        assert f"<!-- generated: {part} -->" in text
    assert all(f"| `{code.value}` |" in text for code in Code)
    assert '### Verify `"verify"`' in text


def test_what_python_adds_to_a_class_is_no_close_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CloseCode, "__firstlineno__", 7, raising=False)  # as Python 3.13 does
    assert "__firstlineno__" not in describe.close_table()
    assert "`RESTART`" in describe.close_table()
