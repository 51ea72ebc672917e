from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.web.node import Node


@pytest.fixture(scope="module")
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """A process for the module's own questions."""
    with Node(request.module.IMPORTS, request.module.HANDLE) as process:
        yield process
