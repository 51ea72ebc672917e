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
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from moa.errors import UsageError
from moa.grammar import compiling
from moa.grammar.children import CHILDREN, Children, Starved
from moa.grammar.spec import JSON_STYLE, Grammar, GrammarError
from moa.text_stream import common_prefix
from moa.tree import DraftTree

Bits = NDArray[np.uint8]
"""A bit for each token of the vocabulary, the first one lowest."""
MATCHER_BYTES = 2**18
"""What following a text is counted with: schemas of others take 70 kB, hostile ones up to 3 MB
within 30 tokens."""
_STEP_SECONDS, _TOKEN_SECONDS = 0.05, 0.0005
"""Processor time of one look at a text, and for each new token of it: what the limits do not bound,
this ends."""
_DEAR_SECONDS = 0.002
_PIECE = 64
"""Tokens of a text between two looks at the time."""
_CACHED = 64
"""Compiled grammars that are kept, and refusals of others."""
_CACHED_BYTES = 32 * 2**20
"""Memory of the compiled grammars that are kept."""
_CHILDREN = Children()
"""Those of all tokenizers: over bytes a grammar costs the same."""
_THREADS = CHILDREN
"""Beside the event loop: each waits for a process that compiles."""


class _Kept(NamedTuple):
    """A compiled grammar, or why it is refused, and the memory that it takes."""

    outcome: CompiledGrammar | str
    bytes: int = 0


class GrammarCompiler:
    """Compiles grammars over a tokenizer's tokens; usable from any thread."""

    def __init__(self, read: Callable[[], str], *, size: int, eos_ids: Sequence[int]) -> None:
        """`read` returns the content of `tokenizer.json`, which takes a while to prepare: at the
        first grammar."""
        self._read = read
        self._size = size
        self._eos_ids = list(eos_ids)
        self._tokens: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._kept: OrderedDict[Grammar, _Kept] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")

    async def matcher(self, grammar: Grammar, start: int, log: Sequence[int] = ()) -> Matcher:
        """What follows a text whose answer begins at `start`, behind what the log has of it; made
        beside the event loop."""

        def made() -> Matcher:
            matcher = self.compile(grammar).matcher(start)
            if not matcher._follow(list(log[start:])):
                raise GrammarError("the answer so far does not match its grammar")
            return matcher

        return await asyncio.get_running_loop().run_in_executor(self._threads, made)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar, or take one that was compiled before; a `GrammarError` says what is
        wrong with it."""
        with self._lock:
            found = self._kept.get(grammar)
        if found is None:
            grammar.check()
            found = self._compile(grammar)
        with self._lock:
            self._kept[grammar] = found
            self._kept.move_to_end(grammar)
            while self._too_much:
                self._kept.popitem(last=False)
        if isinstance(found.outcome, str):
            raise GrammarError(found.outcome)
        return found.outcome

    def _compile(self, grammar: Grammar) -> _Kept:
        """Compile it in a process with limits, and here only if that was cheap."""
        tokens = self._loaded()
        try:
            taken = _CHILDREN.check(grammar)
            source = compiling.Source(grammar.kind, grammar.text, JSON_STYLE)
            root = compiling.compiled(tokens, source)
        except Starved:
            raise
        except (GrammarError, compiling.Refused) as error:
            return _Kept(str(error))
        return _Kept(CompiledGrammar(root, self._eos_ids), taken)

    @property
    def _too_much(self) -> bool:
        kept = self._kept.values()
        return len(kept) > _CACHED or (
            len(kept) > 1 and sum(one.bytes for one in kept) > _CACHED_BYTES
        )

    def _loaded(self) -> LLTokenizer:
        with self._loading:
            if self._tokens is None:
                self._tokens = self._load()
            return self._tokens

    def _load(self) -> LLTokenizer:
        if not self._eos_ids:
            raise UsageError("a grammar needs an end token, and this model names none")
        try:
            return LLTokenizer(self._read(), n_vocab=self._size, eos_token=self._eos_ids)
        except ValueError as error:
            raise UsageError(f"this tokenizer cannot follow a grammar: {error}") from None


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
            error = compiling.line(self._matcher.get_error())
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
