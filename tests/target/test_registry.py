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


def test_all_three_classes_are_compared_before_anything_is_raised() -> None:
    class NoTarget:
        pass

    class NoStep:
        pass

    class NoCache:
        pass

    with pytest.raises(TypeError) as caught:
        registry.registered(step=NoStep, cache=NoCache)(NoTarget)
    lines = str(caught.value).splitlines()
    firsts = [line.split(":")[0] for line in lines]
    assert firsts == ["NoTarget is no Target", "NoStep is no Step", "NoCache is no KVCache"]


def test_an_attribute_that_init_sets_is_asked_for_as_an_annotation_and_one_is_enough() -> None:
    class Bare:
        def __init__(self) -> None:
            self.path = "bare"

    class Said(Bare):
        path: str

    hint = "(annotate it in the class if __init__ sets it)"
    with pytest.raises(TypeError) as caught:
        registry.registered(step=Bare, cache=PagePool)(Target)
    assert f"path is missing {hint}" in str(caught.value)
    assert f"wait is missing {hint}" not in str(caught.value), "a method is written, not annotated"
    with pytest.raises(TypeError) as caught:
        registry.registered(step=Said, cache=PagePool)(Target)
    assert "path is missing" not in str(caught.value)


def test_the_line_of_sources_goes_before_the_one_that_accepts_everything() -> None:
    *others, last = registry.SOURCES
    assert last.name == "transformers"
    assert last.accepts("anything at all")
    assert not any(source.accepts("anything at all") for source in others)


def test_the_contract_needs_no_torch() -> None:
    heavy = "{'torch', 'transformers', 'onnx'} & set(sys.modules)"
    script = f"import sys, moa.target.choosing, moa.target.registry; sys.exit(bool({heavy}))"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
