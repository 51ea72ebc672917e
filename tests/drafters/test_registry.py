"""Nobody outside `moa/drafters` asks of which kind a drafter is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from moa.drafters.registry import KINDS, find
from moa.errors import ConfigError
from moa.manifest import BundleKind

ROOT = Path(__file__).parents[2]
PACKAGES = ("moa", "export", "edge_client", "cloud_verifier")
OF_ONE_KIND = {
    "export/static_forms.py": "forms for other runtimes, which only one kind has",
}
"""Modules that import from a kind's folder, and why."""
KIND_OF_IMPORT = re.compile(rf"moa\.drafters\.({'|'.join(KINDS)})\b")
QUESTIONS = ("use_ca", "is_states", "is_eagle3", "bundle_kind")
"""Attributes and functions that tell kinds apart."""


def sources() -> Iterator[tuple[str, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("moa/drafters/"):
                yield name, ast.parse(path.read_text(encoding="utf-8"))


def test_no_module_imports_a_kind_of_drafter() -> None:
    found = {
        name
        for name, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and KIND_OF_IMPORT.match(node.module or "")
    }
    assert found <= set(OF_ONE_KIND)


def test_no_module_asks_a_drafter_of_which_kind_it_is() -> None:
    asked = []
    for name, tree in sources():
        for node in ast.walk(tree):
            match node:
                case ast.Attribute(attr=attribute) if attribute in QUESTIONS:
                    asked.append(f"{name}:{node.lineno} {attribute}")
                case ast.Compare(
                    left=ast.Attribute(attr="kind"),
                    ops=[ast.Eq() | ast.NotEq()],
                    comparators=[ast.Constant(value=word)],
                ) if word in get_args(BundleKind):
                    asked.append(f"{name}:{node.lineno} kind beside {word}")
                case ast.Call(func=ast.Name(id="isinstance"), args=[_, kinds]):
                    named = {one.id for one in ast.walk(kinds) if isinstance(one, ast.Name)}
                    asked += [
                        f"{name}:{node.lineno} isinstance of {one}"
                        for one in named
                        if re.search("Drafter$|Drafting$|FeatureModel|BodyModel", one)
                    ]
    # The one who writes the manifest copies the word into it, and the manifest says what it means.
    allowed = ("export/build.py", "moa/manifest.py")
    assert [one for one in asked if not one.startswith(allowed)] == []


def test_a_folder_of_no_known_kind_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="model_type 'bert' is no drafter's"):
        find(tmp_path)
