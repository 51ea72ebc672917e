"""Tokens of the form <...> that a tokenizer calls text are text in a grammar, too."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from moa.api.tools import Function, Tool, ToolFormat, Tools
from moa.grammar.matcher import GrammarCompiler, has
from moa.grammar.spec import Grammar
from moa.grammar.tokens import tokens_of
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


def compiler() -> GrammarCompiler:
    return GrammarCompiler(qwens().to_str, size=size(), eos_ids=[EOS])


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
        for tokens in (theirs, ours):
            matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(grammar))
            assert not matcher.is_error(), matcher.get_error()
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            masks.append(np.unpackbits(bits, bitorder="little"))
        changed = np.flatnonzero(masks[0] != masks[1]).tolist()
        assert changed == marks_in[grammar]
    assert ours.is_special_token(qwens().token_to_id("<|mark|>"))
    assert ours.tokenize_str(CALL) == theirs.tokenize_str(CALL) == ids_of(CALL)
    assert ours.eos_tokens == theirs.eos_tokens
