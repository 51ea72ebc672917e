from __future__ import annotations

from pathlib import Path

from moa.wire import describe
from moa.wire.codes import Code

DOCUMENT = Path(__file__).parents[2] / "docs" / "wire-protocol.md"


def test_the_generated_parts_are_up_to_date() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert describe.filled(text) == text, "run: python -m moa.wire.describe docs/wire-protocol.md"


def test_everything_is_described() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for part in ("client", "server", "structures", "limits", "codes", "closes"):
        assert f"<!-- generated: {part} -->" in text
    assert all(f"| `{code.value}` |" in text for code in Code)
    assert '### Verify `"verify"`' in text
