"""Tokens of the form <...> that a tokenizer calls text are text in a grammar, too."""

from __future__ import annotations

import json
import sys
from functools import cache

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, normalizers

from moa.api.tools import Function, Tool, ToolFormat, Tools
from moa.grammar import tokens, vocabulary
from moa.grammar.matcher import GrammarCompiler, has
from moa.grammar.spec import Grammar
from moa.grammar.tokens import Encode, tokens_of
from tests.grammar.corpus import FILE

EOS = 0
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 17}}\n</tool_call>'
ADD = Function("add", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})


@cache
def qwens() -> Tokenizer:
    """The embedded tokenizer with marks of calls as Qwen has them, and a mark that is special."""
    tokenizer = Tokenizer.from_file(str(FILE))
    marks = ["<tool_call>", "</tool_call>"]
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in marks])
    tokenizer.add_special_tokens([AddedToken("<|mark|>", normalized=False, special=True)])
    return tokenizer


def size() -> int:
    return int(qwens().get_vocab_size(with_added_tokens=True))


def ids_of(text: str) -> list[int]:
    return list(qwens().encode(text, add_special_tokens=False).ids)


def pieces_of(text: str) -> list[int]:
    """The same text without the marks' own tokens."""
    return list(Tokenizer.from_file(str(FILE)).encode(text, add_special_tokens=False).ids)


def compiler(encode: Encode | None = None) -> GrammarCompiler:
    return GrammarCompiler(qwens().to_str, size=size(), eos_ids=[EOS], encode=encode)


def allowed_after(compiler: GrammarCompiler, grammar: Grammar, text: list[int]) -> list[int]:
    bits = compiler.compile(grammar).matcher(0).after(text).allowed()
    return np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()


@pytest.mark.parametrize("choice", ["required", "auto", "add"])
def test_a_call_may_be_written_in_the_marks_own_tokens_or_in_pieces(choice: str) -> None:
    grammar = ToolFormat.of("tools <tool_call>").grammar(Tools((Tool(ADD),), choice), None)
    assert grammar is not None
    matcher = compiler().compile(grammar).matcher(0)
    text: list[int] = []
    for token in ids_of(CALL):
        assert has(matcher.after(text).allowed(), token), qwens().decode(text)
        text.append(token)
    for whole in (text, pieces_of(CALL)):
        assert has(matcher.after(whole).allowed(), EOS)


def test_what_must_follow_is_the_tokenizers_own_division() -> None:
    grammar = Grammar("lark", f"start: {json.dumps(CALL)}")
    forced = compiler().compile(grammar).matcher(0).after([]).forced()
    assert forced[:1] == ids_of("<tool_call>")
    assert forced == ids_of(CALL)[: len(forced)]


def test_all_other_tokens_are_what_they_were() -> None:
    """In a vocabulary that is longer than the tokenizer's, as models have them."""
    longer = size() + 7
    theirs = LLTokenizer(qwens().to_str(), n_vocab=longer, eos_token=[EOS])
    ours = tokens_of(qwens().to_str(), size=longer, eos_ids=[EOS])
    marks = [qwens().token_to_id(mark) for mark in ("<tool_call>", "</tool_call>")]
    opening, _ = marks
    marks_in = {
        "start: /(?s:.*)/": marks,
        "start: /[^\\/]*/": [opening],
        "start: <|mark|>": [],
    }
    for grammar in marks_in:
        masks = []
        for one in (theirs, ours):
            matcher = LLMatcher(one, LLMatcher.grammar_from_lark(grammar))
            assert not matcher.is_error(), matcher.get_error()
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            masks.append(np.unpackbits(bits, bitorder="little"))
        changed = np.flatnonzero(masks[0] != masks[1]).tolist()
        assert changed == marks_in[grammar]
    assert ours.is_special_token(qwens().token_to_id("<|mark|>"))
    assert ours.tokenize_str(CALL) == theirs.tokenize_str(CALL) == ids_of(CALL)
    assert ours.eos_tokens == theirs.eos_tokens


CALLS = ToolFormat.of("tools <tool_call>").grammar(Tools((Tool(ADD),), "required"), None)
GRAMMARS = [
    Grammar.of_schema({"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}),
    Grammar("lark", f"start: {json.dumps(CALL)}"),
    CALLS,
]


def test_a_tokenizer_that_is_loaded_already_serves_grammars_in_place_of_a_second_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """llguidance's own would stay in memory, 100 MB and more for 150,000 words."""
    theirs = compiler()
    theirs.compile(GRAMMARS[0])
    monkeypatch.setattr(vocabulary, "opened", None)  # in this process
    ours = compiler(ids_of)
    for grammar in GRAMMARS:
        assert grammar is not None
        text: list[int] = []
        for _ in range(60):
            allowed = allowed_after(theirs, grammar, text)
            assert allowed_after(ours, grammar, text) == allowed
            mask = ours.compile(grammar).matcher(0).after(text)
            assert mask.forced() == theirs.compile(grammar).matcher(0).after(text).forced()
            if EOS in allowed:
                break
            text.append(allowed[len(text) % len(allowed)])
        assert len(text) > 1


def test_tokens_are_read_once_for_all_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0

    def content() -> str:
        nonlocal read
        read += 1
        return qwens().to_str()

    ours = GrammarCompiler(content, size=size(), eos_ids=[EOS], encode=ids_of)
    for grammar in GRAMMARS:
        assert grammar is not None
        ours.compile(grammar)
    assert read == 1


def test_what_a_tokenizer_puts_before_a_text_is_not_put_into_the_middle_of_an_answer() -> None:
    before = Tokenizer.from_str(qwens().to_str())
    before.normalizer = normalizers.Prepend("x")
    with_x = list(before.encode(CALL, add_special_tokens=False).ids)
    assert with_x != ids_of(CALL)
    ours = tokens_of(
        before.to_str(),
        size=size(),
        eos_ids=[EOS],
        encode=lambda text: before.encode(text, add_special_tokens=False).ids,
    )
    assert ours.tokenize_str(CALL) == ids_of(CALL)


def test_a_tokenizer_that_is_none_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        tokens_of('{"added_tokens": []}', size=5, eos_ids=[EOS], encode=ids_of)


@pytest.mark.parametrize("trouble", ["no process can be started", "it is given no time"])
def test_where_no_other_process_reads_a_tokenizer_it_is_read_here(
    trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar of a sound tokenizer is not refused because a machine is busy."""
    if trouble == "it is given no time":
        monkeypatch.setattr(tokens, "_SECONDS", 0.0)
    else:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
    grammar = GRAMMARS[0]
    assert grammar is not None
    ours = compiler(ids_of)
    assert allowed_after(ours, grammar, []) == allowed_after(compiler(), grammar, [])
