"""The mask of a grammar: which tokens may follow a text. A function of the text alone, computed by
llguidance.

    grammars = GrammarCompiler(read_tokenizer_json, size=4096, eos_ids=(0,))
    matcher = grammars.compile(grammar).matcher(start=len(prompt))
    matcher.after(log).allowed()            # bits: what may follow the log
    matcher.after(log).allowed([5, 17])     # ... the log and a draft of these tokens

Whatever a matcher has seen before, the answer is the same: it keeps the part of its state that the
text shares with what it saw last. So nothing of it is sent, resumed or rolled back elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from moa.errors import UsageError
from moa.grammar.spec import JSON_STYLE, Grammar, GrammarError
from moa.text_stream import common_prefix
from moa.tree import DraftTree

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Bits = NDArray[np.uint8]
"""A bit for each token of the vocabulary, the first one lowest."""
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,  # 4 ms of reading regular expressions
    step_lexer_fuel=50_000,  # 4 ms for a mask
    step_max_items=20_000,  # 1 ms for a mask
    max_lexer_states=2_000,  # 4 MB; none of 841 schemas that others wrote needs 250
    max_grammar_size=100_000,
    verbose_errors=False,
)
MATCHER_BYTES = 2**18
"""What following a text is counted with: schemas of others take 70 kB, hostile ones up to 3 MB
within 30 tokens."""
_STEP_SECONDS, _TOKEN_SECONDS = 0.05, 0.0005
"""Processor time of one look at a text, and for each new token of it: what the limits do not bound,
this ends."""
_DEAR_SECONDS = 0.002
_PIECE = 64
"""Tokens of a text between two looks at the time."""
_JSON = cast("JsonCompileOptions", {**JSON_STYLE, "lenient": False})
_TRIES = 100
"""Parts of a schema that are compiled to find the place of an error."""
_CACHED = 64
"""Compiled grammars that are kept, and refusals of others."""


class GrammarCompiler:
    """Compiles grammars over a tokenizer's tokens; usable from any thread."""

    def __init__(self, read: Callable[[], str], *, size: int, eos_ids: Sequence[int]) -> None:
        """`read` returns the content of `tokenizer.json`, which takes a while to prepare: at the
        first grammar."""
        self._read = read
        self._size = size
        self._eos_ids = list(eos_ids)
        self._tokens: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, CompiledGrammar | str] = OrderedDict()
        """Or why it is refused."""
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    async def matcher(self, grammar: Grammar, start: int, log: Sequence[int] = ()) -> Matcher:
        """What follows a text whose answer begins at `start`, behind what the log has of it; made
        beside the event loop."""

        def made() -> Matcher:
            matcher = self.compile(grammar).matcher(start)
            if not matcher._follow(list(log[start:])):
                raise GrammarError("the answer so far does not match its grammar")
            return matcher

        return await asyncio.get_running_loop().run_in_executor(self._thread, made)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar, or take one that was compiled before; a `GrammarError` says what is
        wrong with it."""
        grammar.check()
        with self._lock:
            if (found := self._compiled.get(grammar)) is None:
                if self._tokens is None:
                    self._tokens = self._load()
                try:
                    found = CompiledGrammar(_compiled(self._tokens, grammar), self._eos_ids)
                except GrammarError as error:
                    found = str(error)
                self._compiled[grammar] = found
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > _CACHED:
                self._compiled.popitem(last=False)
        if isinstance(found, str):
            raise GrammarError(found)
        return found

    def _load(self) -> LLTokenizer:
        if not self._eos_ids:
            raise UsageError("a grammar needs an end token, and this model names none")
        try:
            return LLTokenizer(self._read(), n_vocab=self._size, eos_token=self._eos_ids)
        except ValueError as error:
            raise UsageError(f"this tokenizer cannot follow a grammar: {error}") from None


def _compiled(tokens: LLTokenizer, grammar: Grammar) -> LLMatcher:
    found = _tried(tokens, grammar)
    if isinstance(found, str):
        place = _place(tokens, grammar, found) if grammar.kind == "json_schema" else ""
        raise GrammarError(f"{grammar.kind}{place}: {found}")
    matcher = found
    if not any(matcher.compute_bitmask()) or matcher.is_error():
        raise GrammarError(
            f"{grammar.kind}: it allows no text at all {_line(matcher.get_error())}".strip()
        )
    return matcher


def _tried(tokens: LLTokenizer, grammar: Grammar) -> LLMatcher | str:
    """A compiled grammar, or what is wrong with it."""
    try:
        match grammar.kind:
            case "json_schema":
                text = LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON)
            case "regex":
                text = LLMatcher.grammar_from_regex(grammar.text)
            case _:
                text = LLMatcher.grammar_from_lark(grammar.text)
        matcher = LLMatcher(tokens, text, log_level=0, limits=_LIMITS)
    except ValueError as error:
        return _line(str(error))
    return _line(matcher.get_error()) if matcher.is_error() else matcher


def _place(tokens: LLTokenizer, grammar: Grammar, error: str) -> str:
    """Where in a schema the error is: the smallest part of it that alone has the same error."""
    try:
        part = json.loads(grammar.text)
        place = "#"
        tries = _TRIES
    except (ValueError, RecursionError):
        return ""
    within = _parts(part)
    while (found := next(within, None)) is not None and (tries := tries - 1) > 0:
        if _tried(tokens, Grammar.of_schema(found[1])) == error:
            place = f"{place}/{found[0]}"
            within = _parts(found[1])
    return f" at {place}"


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly within a schema."""
    for key, inner in schema.items() if isinstance(schema, dict) else ():
        if key in ("items", "additionalProperties", "not", "if", "then", "else") and isinstance(
            inner, dict
        ):
            yield key, inner
        elif key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(
            inner, dict
        ):
            yield from (
                (f"{key}/{name}", one) for name, one in inner.items() if isinstance(one, dict)
            )
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(inner, list):
            yield from (
                (f"{key}/{at}", one) for at, one in enumerate(inner) if isinstance(one, dict)
            )


def _line(error: str) -> str:
    return " ".join(error.partition("<state>")[0].split())


class CompiledGrammar(NamedTuple):
    """A grammar that can be followed; shared by all texts."""

    root: LLMatcher
    eos_ids: Sequence[int]

    def matcher(self, start: int) -> Matcher:
        """For a text whose answer begins at position `start`."""
        return Matcher(self, start)


class Matcher:
    """Follows one text. Not for two threads at once."""

    def __init__(self, compiled: CompiledGrammar, start: int) -> None:
        self._matcher = compiled.root.deep_copy()
        self._eos_ids = compiled.eos_ids
        self.start = start
        self._at: list[int] = []
        """The tokens that it has consumed."""
        self.dear = False
        """Whether the latest mask took so long that drafts cost more than they win."""

    def after(self, log: Sequence[int]) -> TextMask:
        """The masks of this text and of what may follow it."""
        return TextMask(self, list(log[self.start :]))

    def _follow(self, output: list[int]) -> bool:
        """Be behind these tokens; False if the grammar forbids them, or ended before them."""
        began = time.thread_time()
        same = common_prefix(self._at, output)
        if same < len(self._at) and not self._matcher.rollback(len(self._at) - same):
            self._matcher.reset()
            same = 0
        new = output[same:]
        self._raise_error(began)
        if any(token in self._eos_ids for token in new):
            del self._at[same:]
            return False
        del self._at[same:]
        for at in range(0, len(new), _PIECE):
            piece = new[at : at + _PIECE]
            taken = self._matcher.try_consume_tokens(piece)
            self._at += piece[:taken]
            self._raise_error(began, at + taken)
            if taken < len(piece):
                return False
        return True

    def _bits(self) -> Bits:
        began = time.thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self.dear = time.thread_time() - began > _DEAR_SECONDS
        self._raise_error(began)
        return bits

    def _forced(self) -> list[int]:
        tokens = list(self._matcher.compute_ff_tokens())
        self._raise_error(time.thread_time())
        return tokens

    def _raise_error(self, began: float, tokens: int = 0) -> None:
        if (took := time.thread_time() - began) > _STEP_SECONDS + _TOKEN_SECONDS * tokens:
            raise GrammarError(
                f"the grammar needs too much work here: {1000 * took:.0f} ms for a token"
            )
        if self._matcher.is_error():
            error = _line(self._matcher.get_error())
            self._at = []
            self.dear = True
            self._matcher.reset()
            raise GrammarError(f"the grammar needs too much work here: {error}")


class TextMask(NamedTuple):
    """What a grammar allows after a text."""

    matcher: Matcher
    output: list[int]

    def allowed(self, path: Sequence[int] = ()) -> Bits:
        """What may follow the text and these tokens."""
        if not self.matcher._follow([*self.output, *path]):
            raise GrammarError("the text does not match its grammar")
        return self.matcher._bits()

    def forced(self) -> list[int]:
        """The tokens that must follow, in the tokenizer's own division of their text. Other
        divisions may be allowed: so it is a draft, and a good one."""
        with suppress(GrammarError):
            if self.matcher._follow(self.output):
                return self.matcher._forced()
        return []

    def guesses(self, path: Sequence[int] = ()) -> Bits | None:
        """What a draft may go on with: what is forced, else what is allowed; None behind the
        grammar's end, and where it is given up."""
        with suppress(GrammarError):
            if self.matcher._follow([*self.output, *path]):
                bits = self.matcher._bits()
                if forced := self.matcher._forced():
                    only = np.zeros_like(bits)
                    only[forced[0] >> 3] = 1 << (forced[0] & 7)
                    return only
                return bits
        return None

    def judge(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        *,
        root: Bits | None = None,
        until: float = math.inf,
    ) -> tuple[list[int], list[Bits | None]]:
        """The masks after each node of a draft, and its tokens with -1 in place of those that
        nothing may be accepted of: forbidden ones, and those whose turn did not come by `until` (of
        `time.perf_counter`). A shorter draft changes no text. `root`: the first mask, where it is
        known."""
        kept = [tokens[0]]
        paths = [list[int]()]
        found: list[Bits | None] = [self.allowed() if root is None else root]
        for token, parent in zip(tokens[1:], list(parents)[1:], strict=True):
            above = found[parent]
            paths.append([*paths[parent], token])
            good = above is not None and has(above, token) and time.perf_counter() < until
            good = good and self.matcher._follow([*self.output, *paths[-1]])
            kept.append(token if good else -1)
            found.append(self.matcher._bits() if good else None)
        return kept, found


def forced_draft(
    grammar: TextMask | None, pending: int, *, least: int, most: int
) -> DraftTree | None:
    """A chain of what must follow, which costs no drafter, of `most` tokens; None where that is
    less than a drafter may win."""
    forced = grammar.forced()[:most] if grammar is not None else []
    if len(forced) < max(1, min(least, most)):
        return None
    return DraftTree([pending, *forced], list(range(-1, len(forced))), [0.0] * (1 + len(forced)))


def has(bits: Bits, token: int) -> bool:
    """Whether these bits allow a token."""
    return bool(0 <= token < 8 * len(bits) and bits[token >> 3] >> (token & 7) & 1)


def unpacked(bits: Bits, size: int) -> NDArray[np.bool_]:
    """A flag for each of `size` tokens; of tokens beyond the vocabulary none is allowed."""
    flags = np.unpackbits(bits, bitorder="little")[:size].astype(np.bool_)
    return np.pad(flags, (0, size - len(flags)))
