"""The mask of a grammar is a function of the text, and the host's and the accelerator's choice
under it is the same."""

from __future__ import annotations

import itertools
import math
import random
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from moa.errors import UsageError
from moa.grammar import matcher as matching
from moa.grammar.children import Children
from moa.grammar.matcher import Bits, GrammarCompiler, forced_draft, has, unpacked
from moa.grammar.spec import MAX_BYTES, Grammar, GrammarError
from moa.sampling import SamplingSettings, choose
from moa.target.contract import Draw
from moa.target.cuda.sampling import choose as choose_all
from tests.grammar.corpus import compiler

SIZE = 4096
EOS = 0
SCHEMA = Grammar.of_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["red", "green"]},
            "n": {"type": "integer"},
        },
        "required": ["name", "kind", "n"],
        "additionalProperties": False,
    }
)


def tokens_of(bits: Bits) -> list[int]:
    return np.flatnonzero(unpacked(bits, SIZE)).tolist()


def test_a_mask_depends_on_nothing_but_the_text() -> None:
    compiled = compiler().compile(SCHEMA)
    rng = random.Random(3)
    matcher = compiled.matcher(2)
    text = [7, 8]
    for _ in range(300):
        if rng.random() < 0.2:
            text = text[: rng.randint(2, len(text))]
        bits = matcher.after(text).allowed()
        assert (bits == compiled.matcher(2).after(text).allowed()).all()
        token = rng.choice(tokens_of(bits))
        text = [7, 8] if token == EOS else [*text, token]


def test_a_look_that_took_too_long_changes_no_later_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails after llguidance has rolled back: what was consumed is then the shorter text."""
    compiled = compiler().compile(SCHEMA)
    matcher = compiled.matcher(0)
    text: list[int] = []
    while len(text) < 6:
        text.append(tokens_of(matcher.after(text).allowed())[0])
    seconds = itertools.count()
    with monkeypatch.context() as slow:
        slow.setattr(matching, "time", SimpleNamespace(thread_time=lambda: next(seconds)))
        assert matcher.after(text[:3]).guesses() is None
    assert (matcher.after(text).allowed() == compiled.matcher(0).after(text).allowed()).all()


def test_a_draft_is_judged_node_by_node() -> None:
    compiled = compiler().compile(Grammar("regex", "[ab]{3}"))
    a, b, c = (
        tokens_of(compiler().compile(Grammar("regex", one)).matcher(0).after([]).allowed())[0]
        for one in "abc"
    )
    mask = compiled.matcher(1).after([5])
    tokens, masks = mask.judge(
        [5, a, b, c, b, b, EOS, a], [-1, 0, 1, 1, 2, 3, 4, 6], until=math.inf
    )
    assert tokens == [5, a, b, -1, b, -1, -1, -1], (
        "forbidden tokens, and those behind them or behind the end"
    )
    assert [one is None for one in masks] == [token < 0 for token in tokens]
    for path, bits in (([], masks[0]), ([a], masks[1]), ([a, b], masks[2]), ([a, b, b], masks[4])):
        assert bits is not None
        assert (bits == mask.allowed(path)).all()
    assert tokens_of(masks[4]) == [EOS]  # type: ignore[arg-type]
    assert mask.judge([5, a, b], [-1, 0, 1], until=0)[0] == [5, -1, -1], (
        "no time: only what must be known"
    )


def test_what_must_follow_is_drafted_for_nothing() -> None:
    mask = compiler().compile(SCHEMA).matcher(1).after([5])
    forced = forced_draft(mask, 5, least=2, most=8)
    assert forced is not None
    assert forced.tokens == [5, *mask.forced()]
    assert forced.parents == list(range(-1, len(forced) - 1))
    assert forced_draft(mask, 5, least=6, most=8) is None, "a drafter may win more"
    assert (
        forced_draft(
            compiler().compile(Grammar("regex", "[a-z]+")).matcher(1).after([5]), 5, least=0, most=8
        )
        is None
    )
    guesses = mask.guesses()
    assert guesses is not None
    assert tokens_of(guesses) == mask.forced()[:1]
    assert has(mask.allowed(), mask.forced()[0])


@pytest.mark.parametrize(
    "settings",
    [
        SamplingSettings(),
        SamplingSettings(repetition_penalty=1.3),
        SamplingSettings(temperature=1.2, seed=4, top_k=40),
        SamplingSettings(temperature=1.0, seed=5, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
    ],
)
def test_host_and_accelerator_choose_the_same_allowed_token(settings: SamplingSettings) -> None:
    rng = np.random.default_rng(1)
    size = 1000
    nodes = 12
    logits = rng.normal(size=(nodes, size)).astype(np.float32) * 4
    masks: list[Bits | None] = []
    for node in range(nodes):
        flags = rng.random(1024) < (0.5, 0.01)[node % 2]  # more and fewer than top-k
        flags[17] = True
        masks.append(None if node % 5 == 4 else np.packbits(flags, bitorder="little"))
    text = rng.integers(0, size, 20).tolist()
    draws = [Draw(settings, 20 + node, text, (), masks[node]) for node in range(nodes)]
    together = choose_all(torch.from_numpy(logits), draws)
    for node, bits in enumerate(masks):
        allowed = None if bits is None else unpacked(bits, size)
        alone = choose(logits[node], settings, 20 + node, text, allowed)
        assert alone == together[node]
        assert allowed is None or allowed[alone]


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (Grammar.of_schema({"type": "person"}), "Invalid type: person"),
        (Grammar("json_schema", "{"), "json_schema"),
        (Grammar.of_schema(False), "object"),
        (Grammar("regex", "(("), "unclosed group"),
        (Grammar("regex", "[^\\x00-\\x{10FFFF}]"), "no text at all"),
        (Grammar.of_schema({"$ref": "#"}), "no text at all"),
        (Grammar("lark", "start: a\na: a"), "no text at all"),
        (Grammar("lark", "start: x"), "lark"),
        (Grammar("regex", "a" * (MAX_BYTES + 1)), "at most"),
        (Grammar("regex", "(" * 100 + ")" * 100), "brackets"),
    ],
)
def test_a_grammar_that_is_refused_says_why(grammar: Grammar, why: str) -> None:
    with pytest.raises(GrammarError, match=why):
        compiler().compile(grammar)


def test_a_grammar_is_refused_twice_at_the_price_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = Mock(side_effect=Children.check, autospec=Children.check)
    monkeypatch.setattr(Children, "check", lambda *given: checked(*given))
    for _ in range(3):
        with pytest.raises(GrammarError, match="regex"):
            compiler().compile(Grammar("regex", "(only here"))
    assert checked.call_count == 1


def test_a_grammar_that_becomes_too_ambiguous_is_given_up() -> None:
    matcher = (
        compiler().compile(Grammar("lark", 'start: s\ns: "a" s "a" | "a" | "b" | s s')).matcher(0)
    )
    a = tokens_of(matcher.after([]).allowed())[0]
    text = list[int]()
    began = time.thread_time()
    with pytest.raises(GrammarError, match="too much work"):  # noqa: PT012 - some look is the one
        while len(text) < 500:
            text += [a] * 8
            matcher.after(text).allowed()
    assert time.thread_time() - began < 5


@pytest.mark.parametrize(
    ("content", "eos_ids", "why"),
    [("{}", [0], "tokenizer"), ("nonsense", [0], "tokenizer"), ("{}", [], "end token")],
)
def test_a_tokenizer_that_cannot_be_used(content: str, eos_ids: list[int], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        GrammarCompiler(lambda: content, size=10, eos_ids=eos_ids).compile(SCHEMA)


async def test_an_answer_that_has_begun_is_followed_unless_it_breaks_its_grammar() -> None:
    matcher = await compiler().matcher(SCHEMA, 2)
    begun = matcher.after([7, 8]).forced()
    assert begun
    again = await compiler().matcher(SCHEMA, 2, [7, 8, *begun])
    assert (again.after([7, 8, *begun]).allowed() == matcher.after([7, 8, *begun]).allowed()).all()
    with pytest.raises(GrammarError, match="does not match"):
        matcher.after([7, 8, 17, 18]).allowed()
    with pytest.raises(GrammarError, match="so far does not match"):
        await compiler().matcher(SCHEMA, 2, [7, 8, 17, 18])
