"""The picture of imports has no circle: not at the top of modules, in functions, or for type
checkers only."""

from graphlib import TopologicalSorter

import grimp

PACKAGES = ("moa", "export", "edge_client", "cloud_verifier")


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert sum(map(len, imports.values())) > 1000
    TopologicalSorter(imports).prepare()  # a `CycleError` names the circle
