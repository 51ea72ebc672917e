"""Flags from options: words, lists, switches, choices, and numbers that are too small."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import pytest

from benchmarks.kit.options import add_flags, one_of, options_from
from moa.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Base:
    """What two experiments share."""

    seed: int = 0
    tokens: int = 96
    """Of an answer."""


@dataclass(frozen=True, kw_only=True)
class Options(Base):
    """Of one of them."""

    tokens: int = 8
    """Of an answer, 3 % of them words."""
    links: tuple[str, ...] = one_of(("wifi",), ("wifi", "4g"))
    steps: tuple[float, ...] = (1.5, 2.0)
    fast: bool = True


def parsed(*arguments: str) -> Options:
    parser = argparse.ArgumentParser()
    add_flags(parser, Options)
    return options_from(Options, parser.parse_args(list(arguments)))


def test_a_field_is_a_flag_and_its_docstring_the_help() -> None:
    assert parsed() == Options()
    assert parsed("--links", "4g", "wifi", "--steps", "3", "--no-fast", "--seed", "7") == Options(
        links=("4g", "wifi"), steps=(3.0,), fast=False, seed=7
    )
    parser = argparse.ArgumentParser()
    add_flags(parser, Options)
    assert "Of an answer, 3 % of them words. (default: 8)" in parser.format_help()


@pytest.mark.parametrize(
    ("arguments", "least"), [(["--tokens", "0"], 1), (["--seed", "-1"], 0), (["--steps", "-1"], 0)]
)
def test_a_number_may_not_be_too_small(arguments: list[str], least: int) -> None:
    with pytest.raises(UsageError, match=f"must be at least {least}"):
        parsed(*arguments)
