"""One name means one thing: no public class or type of the product packages has the name of
another."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("moa", "export", "edge_client", "cloud_verifier")


def _types(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Each public class or type alias, with its definition. An alias may be repeated, if it is the
    same."""
    for node in module.body:
        match node:
            case ast.ClassDef(name=name) if not name.startswith("_"):
                yield name, ast.dump(node)
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if (
                name[0].isupper() and not name.isupper()
            ):
                yield name, ast.dump(value)


def test_every_type_has_a_name_of_its_own() -> None:
    homes: dict[str, dict[str, str]] = defaultdict(dict)
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for name, definition in _types(ast.parse(path.read_text(encoding="utf-8"))):
            homes[name][definition] = str(path.relative_to(ROOT))
    assert len(homes) > 300
    assert {name: sorted(paths.values()) for name, paths in homes.items() if len(paths) > 1} == {}
