"""Nothing keeps the formatter away, and the counts that show how packed the code is are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import density
from tools.density import PACKAGES, ROOT, Density, density_of, table

PACKED = '''"""A docstring counts for nothing."""
a, b = 1, 2  # fmt: skip
c = [*("x", "y"), "z"]

# A comment.
e = {**{"x": 1}, "y": 2}
d = a if b else c
'''


def test_the_counts_of_a_packed_module() -> None:
    found = Density()
    found.add(PACKED)
    assert found == Density(
        code_lines=4,
        tokens=7 + 12 + 14 + 7,
        comment_lines=1,
        tuple_assignments=1,
        ternaries=1,
        kept_from_formatter=1,
        splatted_literals=2,
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_keeps_the_formatter_from_one_idea_a_line(package: str) -> None:
    found = density_of((ROOT / package).rglob("*.py"))
    assert found.kept_from_formatter == 0
    assert found.splatted_literals == 0


def test_other_checkouts_join_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(density, "PACKAGES", ("examples",))  # one of ours: all take seconds
    other = tmp_path / "nano"
    other.mkdir()
    (other / "module.py").write_text("x = 1\n")
    assert "| (nano) | 1 | 3.0 | 0.0 |" in table([other])
