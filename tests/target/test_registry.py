"""A target that lacks something is found when it registers, not when it first fails."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from moa.target import registry
from moa.target.pages import PagePool
from moa.target.torch_target import Step, Target


def test_every_source_names_a_target_with_the_contracts_methods() -> None:
    for source in registry.SOURCES:
        registry.target_class(source)


def test_a_method_that_is_missing_or_takes_something_else_is_named() -> None:
    class Half(Target):
        def forward(self, rows: Any, hurry: bool) -> Any:  # type: ignore[override]
            raise AssertionError("not called")

        def commit(self, step: Any, path: Any) -> Any:  # type: ignore[override]
            raise AssertionError("not called")

    class NoSteps:
        sizes = ()

    with pytest.raises(TypeError, match="Half is no Target") as caught:
        registry.registered(step=Step, cache=PagePool)(Half)
    assert "forward needs hurry" in str(caught.value)
    assert "commit does not take b" in str(caught.value)
    with pytest.raises(TypeError, match="NoSteps is no Step: argmax is missing; choose is missing"):
        registry.registered(step=NoSteps, cache=PagePool)(Target)


def test_the_contract_needs_no_torch() -> None:
    heavy = "{'torch', 'transformers', 'onnx'} & set(sys.modules)"
    script = f"import sys, moa.target.choosing, moa.target.registry; sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
