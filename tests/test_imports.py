"""The picture of imports has no circle: not at the top of modules, in functions, or for type
checkers only."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("moa", "export", "edge_client", "cloud_verifier")


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert sum(map(len, imports.values())) > 1000
    TopologicalSorter(imports).prepare()  # a `CycleError` names the circle


def _imported(folder: str) -> Iterator[tuple[str, str]]:
    """Every module below `folder` and each name that one of its imports begins with."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                yield str(path.relative_to(ROOT)), node.module.split(".")[0]
            elif isinstance(node, ast.Import):
                for name in node.names:
                    yield str(path.relative_to(ROOT)), name.name.split(".")[0]


def test_tests_and_benchmarks_share_kits_and_never_import_each_other() -> None:
    circles = [
        f"{module} imports {package}"
        for folder, forbidden in (
            ("benchmarks", {"tests"}),
            ("testing", {"tests", "benchmarks"}),
            ("tests", {"benchmarks"}),
        )
        for module, package in _imported(folder)
        if package in forbidden and not module.startswith("tests/benchmarks/")
    ]
    assert circles == []
