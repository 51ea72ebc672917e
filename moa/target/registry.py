"""Which target loads what: the only place that knows them all.

A target is a class with the contract's methods (`moa.target.contract.Target`), decorated with
`@registered`, and an entry of `SOURCES`. The decorator compares its signatures with the contract's,
so a method that is missing or takes other arguments is found when the module is imported.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from moa.gguf.reader import is_gguf
from moa.target import contract

T = TypeVar("T", bound=type)


@dataclass(frozen=True)
class Source:
    """One kind of thing that targets are loaded from."""

    name: str
    accepts: Callable[[str], bool]
    """Whether `--target` names such a thing. Cheap: nothing heavy is imported, no network is used."""
    target: str
    """`module:class` of the target that loads it; imported when it is first needed."""
    planned: bool = False
    """Whether its memory is planned before its weights are read (`moa/target/memory_plan.py`)."""
    states: bool = False
    """Whether its commits carry states (`Capabilities.states`), which can be asked before anything is
    loaded."""


SOURCES: list[Source] = [
    Source(
        name="gguf",
        accepts=is_gguf,
        target="moa.llama.target:LlamaTarget",
    ),
    Source(
        name="transformers",
        accepts=lambda source: True,  # a folder or a hub id: what no other knows
        target="moa.target.torch_target:Target",
        planned=True,
        states=True,
    ),
]
"""Asked in this order: what is added goes before `transformers`, which accepts everything."""


def source_of(source: str) -> Source:
    """What kind of thing `source` is."""
    for kind in SOURCES:
        if kind.accepts(source):
            return kind
    raise AssertionError("the last of SOURCES accepts everything")


def open_target(source: str, options: contract.LoadOptions) -> contract.Target:
    """Load what `source` names: a folder, a hub id, or a file."""
    return target_class(source_of(source)).open(source, options)


def target_class(source: Source) -> type[contract.Target]:
    """The class that loads such a thing."""
    module, _, name = source.target.partition(":")
    found: type[contract.Target] = getattr(importlib.import_module(module), name)
    if found not in _REGISTERED:
        raise TypeError(f"{source.target} is not decorated with @registered")
    return found


def registered(*, step: type, cache: type) -> Callable[[T], T]:
    """A decorator for a target's class, which notes that it may be loaded. It raises a `TypeError`
    unless the class, that of its steps (results of a forward) and that of its KV cache have every
    method that the contract asks for."""

    def check(target: T) -> T:
        check_all_conform(
            (target, contract.Target), (step, contract.Step), (cache, contract.KVCache)
        )
        _REGISTERED.add(target)
        return target

    return check


_REGISTERED: set[type] = set()


def check_all_conform(*pairs: tuple[type, type]) -> None:
    """Raise a `TypeError` if, in any of these pairs, the class lacks something of the protocol. It
    names all that is lacking, so that a newcomer mends it in one go."""
    wrong = []
    for found, protocol in pairs:
        if lacks := _lacks(found, protocol):
            wrong.append(f"{found.__name__} is no {protocol.__name__}: {'; '.join(lacks)}")
    if wrong:
        raise TypeError("\n".join(wrong))


def check_conforms(found: type, protocol: type) -> None:
    """A `TypeError` that names what a class lacks of a protocol, or has with other arguments."""
    check_all_conform((found, protocol))


def _lacks(found: type, protocol: type) -> list[str]:
    """The members of a protocol that a class lacks, or has with other arguments: a line for
    each."""
    wrong = []
    for name in sorted(_members(protocol)):
        wanted = inspect.getattr_static(protocol, name, None)
        if not _has(found, name):
            is_method = callable(getattr(protocol, name, None))
            # Only the class is looked at: what an instance will have cannot be seen there.
            hint = "" if is_method else " (annotate it in the class if __init__ sets it)"
            wrong.append(f"{name} is missing{hint}")
        elif callable(getattr(protocol, name, None)):
            wrong += _differences(name, wanted, inspect.getattr_static(found, name, None))
    return wrong


def _members(protocol: type) -> set[str]:
    """Names of a protocol's methods, properties and annotated attributes."""
    names = {*vars(protocol), *protocol.__annotations__}
    return {name for name in names if not name.startswith("_")}


def _has(found: type, name: str) -> bool:
    """Whether a class has an attribute, method or property of this name, or is annotated with it."""
    if hasattr(found, name):
        return True
    return any(name in vars(base).get("__annotations__", {}) for base in found.__mro__)


def _differences(name: str, wanted: Any, has: Any) -> list[str]:
    """The ways in which a class's method (`has`) cannot be called as the protocol's (`wanted`) can:
    a line for each."""
    if isinstance(wanted, classmethod) and not isinstance(has, classmethod):
        return [f"{name} is no classmethod"]
    wanted = getattr(wanted, "__func__", wanted)
    has = getattr(has, "__func__", has)
    if not callable(has):
        return [f"{name} is no method"]
    passed = inspect.signature(wanted).parameters
    taken = inspect.signature(has).parameters
    wrong = [f"{name} does not take {argument}" for argument in passed if argument not in taken]
    for argument, parameter in taken.items():
        is_needed = parameter.default is parameter.empty and not _collects(parameter)
        if is_needed and argument not in passed:
            wrong.append(f"{name} needs {argument}, which nobody passes")
    return wrong


def _collects(parameter: inspect.Parameter) -> bool:
    """Whether a parameter is `*args` or `**kwargs`."""
    return parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
