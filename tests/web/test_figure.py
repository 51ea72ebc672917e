"""The line below a figure of the page."""

from __future__ import annotations

from tests.web.node import Node

IMPORTS = 'import { lineOf } from "./../../../moa/api/assets/figure.js";'
HANDLE = "return lineOf(ask);"


def test_what_is_not_known_is_a_gap_and_no_zero(node: Node) -> None:
    assert node.ask([2, 1, None, None, 0, 4]) == "M54 10L55 14.5M58 19L59 1"
    assert node.ask([None, None]) == ""
