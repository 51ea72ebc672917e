"""A grammar that would cost much is refused by name, and costs nobody else anything: known ones
before they are compiled, all others by the limits of a process that compiles first."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import string
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moa.errors import MoaError
from moa.grammar import children as children_module
from moa.grammar.children import Children
from moa.grammar.matcher import GrammarCompiler
from moa.grammar.spec import MAX_DEPTH, Grammar, GrammarError
from moa.process.memory import resident_bytes
from tests.grammar.corpus import FILE
from tests.torture.costs import costs

HONEST = Grammar.of_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
NEEDS_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def fresh() -> GrammarCompiler:
    return GrammarCompiler(FILE.read_text, size=4096, eos_ids=[0])


def test_what_the_first_grammar_needs_is_there_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Children(1)
    monkeypatch.setattr("moa.grammar.matcher._CHILDREN", pool)
    grammars = fresh()
    for _ in range(4):
        grammars.prepare()
    grammars._threads.shutdown()  # which waits for them
    assert grammars._tokens is not None
    (child,) = pool._idle
    assert child.alive
    assert pool.check(HONEST) >= 0
    assert list(pool._idle) == [child]


def multiples(*factors: float) -> Grammar:
    return Grammar.of_schema({"allOf": [{"type": "integer", "multipleOf": one} for one in factors]})


def containing(letters: str) -> list[dict[str, str]]:
    return [{"type": "string", "pattern": f".*{one}.*"} for one in letters]


def referring(first: int, second: int) -> Grammar:
    """The product of two numbers, one of them behind a reference."""
    return Grammar.of_schema(
        {
            "$defs": {"one": {"type": "integer", "multipleOf": first}},
            "type": "integer",
            "multipleOf": second,
            "$ref": "#/$defs/one",
        }
    )


KNOWN = {
    "a large prime": (
        Grammar.of_schema({"type": "integer", "multipleOf": 9_999_991}),
        "multipleOf",
    ),
    "a fraction": (Grammar.of_schema({"type": "number", "multipleOf": 0.1234567}), "multipleOf"),
    "several numbers": (multiples(7, 11, 13, 17, 19, 23), "multipleOf"),
    "52 patterns": (Grammar.of_schema({"allOf": containing(string.ascii_letters)}), "52 patterns"),
    "patterns in patterns": (
        Grammar.of_schema({"allOf": [{"allOf": containing("abcdefg")}, *containing("hijklmn")]}),
        "14 patterns",
    ),
    "patterns of lark": (
        Grammar(
            "lark", "start: A\nA: " + " & ".join(f"/.*{one}.*/" for one in string.ascii_letters)
        ),
        "52 patterns",
    ),
}
UNKNOWN = {
    "numbers behind a reference": referring(9973, 9967),
    "patterns behind references": Grammar.of_schema(
        {
            "$defs": {
                one: {"type": "string", "pattern": f".*{one}.*", "$ref": f"#/$defs/{after}"}
                for one, after in zip(
                    string.ascii_lowercase, string.ascii_lowercase[1:], strict=False
                )
            }
            | {"z": {"type": "string"}},
            "$ref": "#/$defs/a",
        }
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_to_cost_much_is_refused_before_it_is_compiled(name: str) -> None:
    grammar, why = KNOWN[name]
    with pytest.raises(GrammarError, match=why):
        grammar.check()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 10_000},
        {"type": "number", "multipleOf": 0.01},
        {"multipleOf": 1e-7},
        {"allOf": [{"multipleOf": 7}, {"multipleOf": 11}, {"multipleOf": 13}]},
        {"properties": {one: {"pattern": f"^{one}"} for one in string.ascii_letters}},
        {"properties": {"multipleOf": {"type": "integer"}, "allOf": {"type": "string"}}},
        {"enum": [{"multipleOf": "x"}, {"multipleOf": True}, {"allOf": 7}]},
    ],
)
def test_what_is_honest_is_not(schema: dict[str, object]) -> None:
    Grammar.of_schema(schema).check()


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_needs_too_much_ends_with_its_process(name: str) -> None:
    compiler = fresh()
    compiler.compile(HONEST)  # tokens and processes are there
    before = resident_bytes()
    mine = time.process_time()
    with pytest.raises(GrammarError, match=r"too much|more than|Unable to determine"):
        compiler.compile(UNKNOWN[name])
    assert time.process_time() - mine < 0.5
    assert resident_bytes() - before < 50 * 2**20
    compiler.compile(Grammar("regex", f"still {name}"))


def test_a_refusal_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children_module, "_WALL_SECONDS", 60.0)  # the machine may be busy
    compiler = fresh()
    with pytest.raises(GrammarError, match="too much"):
        compiler.compile(referring(9949, 9941))
    monkeypatch.setattr(Children, "check", lambda *_: pytest.fail("it is compiled again"))
    with pytest.raises(GrammarError, match="too much"):
        compiler.compile(referring(9949, 9941))


async def test_a_grammar_that_needs_all_of_its_time_leaves_another_its_own() -> None:
    compiler = fresh()
    await compiler.matcher(HONEST, 0)
    ended: list[str] = []

    async def ask(name: str, grammar: Grammar) -> None:
        try:
            await compiler.matcher(grammar, 0)
        except GrammarError:
            name = f"{name}, refused"
        ended.append(name)

    slow = asyncio.create_task(ask("slow", referring(9931, 9929)))
    await asyncio.sleep(0)  # it is the first to be taken
    await ask("honest", Grammar("regex", "beside a slow one"))
    await slow
    assert ended == ["honest", "slow, refused"]


@NEEDS_LINUX
def test_the_process_has_limits_of_its_own() -> None:
    pool = Children(1)
    pool.check(HONEST)
    child = pool._idle[0]._process
    limits = Path(f"/proc/{child.pid}/limits").read_text().splitlines()
    (memory,) = [line.split()[3] for line in limits if line.startswith("Max address space")]
    assert int(memory) < 2**30
    mapped = int(Path(f"/proc/{child.pid}/statm").read_text().split()[0]) * 4096
    assert int(memory) - mapped < 80 * 2**20


def test_a_process_that_died_is_replaced() -> None:
    pool = Children(1)
    pool.check(HONEST)
    first = pool._idle[0]._process
    first.send_signal(signal.SIGKILL if sys.platform != "win32" else signal.SIGTERM)
    first.wait()
    assert pool.check(HONEST) >= 0
    assert pool._idle[0]._process is not first


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_a_process_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process uses no processor time that its own limit could count."""
    pool = Children(1)
    pool.check(HONEST)
    monkeypatch.setattr(children_module, "_WALL_SECONDS", 0.3)
    first = pool._idle[0]._process
    first.send_signal(signal.SIGSTOP)
    with pytest.raises(children_module.Starved, match=r"more than 0\.3 s"):
        pool.check(HONEST)
    assert first.returncode == -signal.SIGKILL
    monkeypatch.undo()
    assert pool.check(HONEST) >= 0


def test_no_process_is_an_error_that_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(children_module.subprocess, "Popen", nothing)
    pool = Children(1)
    for _ in range(3):
        with pytest.raises(MoaError, match="Too many open files") as found:
            pool.check(HONEST)
        assert not isinstance(found.value, GrammarError)


def test_text_that_is_none_is_refused() -> None:
    with pytest.raises(GrammarError, match="not text"):
        fresh().compile(Grammar("regex", "\ud800"))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", json.dumps({"]" * 200: "}" * 200})[:-1] + ', "a": ' + "[" * 100),
        Grammar("json_schema", '{"\\"]]]]": ' + '{"]": ' * 100),
        Grammar("regex", r"\)" * 200 + "(" * 100 + "a" + ")" * 100),
        Grammar("regex", "[)](" * 100),
        Grammar("lark", "# ))))))\n// ]]]]\nstart: " + '")" (' * 100),
        Grammar("lark", "start: /" + r"\)(" * 100 + "/"),
    ],
    ids=["names", "an escape", "an escape of a regex", "classes", "comments", "a regex in lark"],
)
def test_brackets_in_texts_and_comments_close_none(grammar: Grammar) -> None:
    with pytest.raises(GrammarError, match=f"at most {MAX_DEPTH}"):
        grammar.check()


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.of_schema({"enum": ["(" * 100, "[" * 100]}),
        Grammar("regex", r"\(" * 100),
        Grammar("lark", 'start: "' + "(" * 100 + '" // ' + "[" * 100),
    ],
)
def test_brackets_in_texts_open_none(grammar: Grammar) -> None:
    grammar.check()


def test_a_search_for_costly_grammars_finds_none() -> None:
    """A little of `python -m tests.torture costs`."""
    options = argparse.Namespace(keep=None, seed=3, grammars=60)
    found, _ = asyncio.run(costs(options))
    assert found["counts"]["grammars"] == 60
    assert found["counts"]["compiled"] > 10
    assert found["most"]["own_seconds"] < 1.0
    assert found["most"]["megabytes"] < 60


def test_an_object_that_lists_its_properties_has_no_others_unless_the_schema_says_so() -> None:
    """A target wrote one property after another until a limit cut it."""
    person = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    people = {"type": "array", "items": person}
    asked = json.loads(Grammar.of_schema(people).text)
    assert asked["items"] == {**person, "additionalProperties": False}
    for said in ({"additionalProperties": True}, {"patternProperties": {}}):
        assert json.loads(Grammar.of_schema({**person, **said}).text) == {**person, **said}
    assert json.loads(Grammar.of_schema({"type": "object"}).text) == {"type": "object"}


def test_a_schema_that_nests_too_deep_is_refused_before_it_is_looked_through() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(3000):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(GrammarError, match="nests too deep"):
        Grammar.of_schema(schema)
