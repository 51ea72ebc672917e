"""The table of families in docs/real-models.md says what the code does."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from moa.config import TargetFacts
from moa.errors import UnsupportedModelError, UsageError
from moa.target.cuda.weights import DENSE_FAMILIES
from moa.target.families import (
    FAMILIES,
    chains_only,
    facts_of,
    refuse_as_sibling,
    running_states,
)
from moa.target.packed import PACKED_FAMILIES
from testing.tiny import available, tiny_config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "real-models.md"


class TableRow(NamedTuple):
    """Cells of one family."""

    server: str
    drafts: str
    sibling: str
    records: str
    tested: str


def rows() -> dict[str, TableRow]:
    """By `model_type`."""
    section = PAGE.read_text(encoding="utf-8").split("\n## Families\n")[1].split("\n### ")[0]
    found: dict[str, TableRow] = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        names = cells[0].split("(")[0].split("`")[1::2]
        for name in names if line.startswith("| `") else []:
            assert name not in found
            found[name] = TableRow(*cells[1:])
    return found


TABLE = rows()


def test_it_has_every_family_once() -> None:
    assert sorted(TABLE) == list(FAMILIES)


def of_records(facts: TargetFacts, chains: bool) -> str:
    """What the column of records must say."""
    if chains:
        return "none yet"
    try:
        facts.check_readable()
    except UsageError:
        return "of states"
    return "all"


@pytest.mark.parametrize("family", FAMILIES)
def test_its_cells_are_what_the_code_says(family: str) -> None:
    name = family.removesuffix("_text")
    if not available(name):
        pytest.skip("this release of transformers does not have it")
    config = tiny_config(name)
    row = TABLE[family]
    assert row.server.startswith("packed decoder") == (family in PACKED_FAMILIES)
    assert row.server.endswith("CUDA graphs") == (family in DENSE_FAMILIES)
    assert row.drafts == ("chains" if chains_only(config) else "trees")
    assert row.records == of_records(facts_of(config, None), chains_only(config))
    try:
        refuse_as_sibling(config)
    except UnsupportedModelError:
        assert row.sibling.startswith("no ")
    else:
        assert row.sibling.startswith("yes")
        assert ("chains" in row.sibling) == bool(running_states(config))
