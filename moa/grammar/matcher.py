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

from moa.errors import MoaError, UsageError
from moa.grammar import compiling
from moa.grammar.children import CHILDREN, Children, Starved
from moa.grammar.spec import JSON_STYLE, Grammar, GrammarError
from moa.grammar.tokens import Encode, tokens_of
from moa.process.memory import give_back_free_memory
from moa.text_stream import common_prefix
from moa.tree import DraftTree

Bits = NDArray[np.uint8]
"""A bit for each token of the vocabulary, the first one lowest."""
MATCHER_BYTES = 2**18
"""Bytes that following a text counts as: schemas of others take 70 kB, hostile ones up to 3 MB
within 30 tokens."""
_STEP_SECONDS = 0.05
"""Processor time of one look at a text: what the compiler's limits do not bound, this ends."""
_TOKEN_SECONDS = 0.0005
"""Processor time that each new token of the text adds to it."""
_SLOW_SECONDS = 0.002
"""Processor time of a mask from which drafts, which need one for each node, cost more than they
win."""
_PIECE = 64
"""Tokens of a text between two looks at the time."""
_CACHED = 64
"""Compiled grammars that are kept, and refusals of others."""
_CACHED_BYTES = 32 * 2**20
"""Memory of the compiled grammars that are kept."""
_CHILDREN = Children()
"""The processes that compile first, for all tokenizers: over bytes a grammar costs the same."""
_THREADS = CHILDREN
"""Threads beside the event loop: each waits for a process that compiles."""


class _Kept(NamedTuple):
    """A compiled grammar, or why it is refused, and the memory that it takes."""

    outcome: CompiledGrammar | str
    bytes: int = 0


class GrammarCompiler:
    """Compiles grammars over a tokenizer's tokens; usable from any thread."""

    def __init__(
        self,
        read: Callable[[], str],
        *,
        size: int,
        eos_ids: Sequence[int],
        encode: Encode | None = None,
    ) -> None:
        """Compile for a model whose logits are over `size` tokens, and whose texts end with one of
        `eos_ids`. `read` returns the content of its `tokenizer.json`; that takes a while, and is
        called at the first grammar. `encode` is that tokenizer, where it is loaded already: without
        it a second one stays in memory."""
        self._read = read
        self._encode = encode
        self._size = size
        self._eos_ids = list(eos_ids)
        self._tokens: LLTokenizer | None = None
        self._loading = threading.Lock()
        """Held while `_tokens` is made."""
        self._kept: OrderedDict[Grammar, _Kept] = OrderedDict()
        """What compiling came to, the latest used last."""
        self._lock = threading.Lock()
        """Held while `_kept` is read or changed."""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")

    async def matcher(self, grammar: Grammar, start: int, log: Sequence[int] = ()) -> Matcher:
        """Compile a grammar in a thread, and return a matcher for a text whose answer begins at
        position `start`. The matcher is moved to the end of `log`, the text so far; a
        `GrammarError` if what the log has of the answer does not match."""

        def make() -> Matcher:
            matcher = self.compile(grammar).matcher(start)
            if not matcher._follow(list(log[start:])):
                raise GrammarError("the answer so far does not match its grammar")
            return matcher

        return await asyncio.get_running_loop().run_in_executor(self._threads, make)

    def prepare(self) -> None:
        """Begin with what the first grammar needs: it would wait some seconds for it, in which a
        device takes its verifier for silent."""
        self._threads.submit(self._prepare)

    def _prepare(self) -> None:
        _CHILDREN.prepare()
        with suppress(MoaError):  # the first grammar says it
            self._loaded()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar, or take one that was compiled before; a `GrammarError` says what is
        wrong with it."""
        with self._lock:
            kept = self._kept.get(grammar)
        if kept is None:
            grammar.check()
            kept = self._compile(grammar)
        with self._lock:
            self._kept[grammar] = kept
            self._kept.move_to_end(grammar)
            while self._too_much:
                self._kept.popitem(last=False)
        if isinstance(kept.outcome, str):
            raise GrammarError(kept.outcome)
        return kept.outcome

    def _compile(self, grammar: Grammar) -> _Kept:
        """Compile a grammar in a child process with limits, and here only if that went well.
        Returns it with the memory that it takes, or the reason why it is refused."""
        tokens = self._loaded()
        try:
            memory = _CHILDREN.check(grammar)
            source = compiling.Source(grammar.kind, grammar.text, JSON_STYLE)
            root = compiling.compiled(tokens, source)
        except Starved:
            raise  # says nothing of the grammar: not kept as its outcome
        except (GrammarError, compiling.Refused) as error:
            return _Kept(str(error))
        return _Kept(CompiledGrammar(root, self._eos_ids), memory)

    @property
    def _too_much(self) -> bool:
        """Whether the oldest outcome is to go; the latest stays, however large."""
        if len(self._kept) > _CACHED:
            return True
        memory = sum(kept.bytes for kept in self._kept.values())
        return len(self._kept) > 1 and memory > _CACHED_BYTES

    def _loaded(self) -> LLTokenizer:
        """The tokenizer, which the first caller makes while others wait."""
        with self._loading:
            if self._tokens is None:
                self._tokens = self._load()
            return self._tokens

    def _load(self) -> LLTokenizer:
        if not self._eos_ids:
            raise UsageError("a grammar needs an end token, and this model names none")
        try:
            tokens = tokens_of(
                self._read(), size=self._size, eos_ids=self._eos_ids, encode=self._encode
            )
        except ValueError as error:
            raise UsageError(f"this tokenizer cannot follow a grammar: {error}") from None
        give_back_free_memory()  # what they were made of
        return tokens


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
        """Follow a text whose answer, which must match, begins at position `start`."""
        self._matcher = compiled.root.deep_copy()
        self._eos_ids = compiled.eos_ids
        self.start = start
        self._consumed: list[int] = []
        """The tokens that llguidance's matcher has consumed."""
        self.is_slow = False
        """Whether the latest mask took so long that drafts cost more than they win."""

    def after(self, log: Sequence[int]) -> TextMask:
        """The masks of this text and of what may follow it."""
        return TextMask(self, list(log[self.start :]))

    def _follow(self, output: list[int]) -> bool:
        """Move llguidance's matcher to behind these tokens of the answer; False if the grammar
        forbids one of them, or has ended before. Only what differs from the tokens that it was at
        is undone and consumed."""
        started = time.thread_time()
        common = common_prefix(self._consumed, output)
        beyond = len(self._consumed) - common
        if beyond and not self._matcher.rollback(beyond):
            self._matcher.reset()  # it cannot go back so far: begin anew
            common = 0
        del self._consumed[common:]
        self._raise_error(started)
        new = output[common:]
        if any(token in self._eos_ids for token in new):
            return False  # a text goes on behind its end
        for first in range(0, len(new), _PIECE):
            piece = new[first : first + _PIECE]
            taken = self._matcher.try_consume_tokens(piece)
            self._consumed += piece[:taken]
            self._raise_error(started, tokens=first + taken)
            if taken < len(piece):
                return False
        return True

    def _bits(self) -> Bits:
        """What may follow here."""
        started = time.thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self.is_slow = time.thread_time() - started > _SLOW_SECONDS
        self._raise_error(started)
        return bits

    def _forced(self) -> list[int]:
        """The tokens that must follow here."""
        tokens = list(self._matcher.compute_ff_tokens())
        self._raise_error(time.thread_time())
        return tokens

    def _raise_error(self, started: float, tokens: int = 0) -> None:
        """Raise a `GrammarError` if work on this text that began at `started`, in seconds of this
        thread's processor time, took too long for so many new tokens; or if llguidance gave up."""
        seconds = time.thread_time() - started
        if seconds > _STEP_SECONDS + _TOKEN_SECONDS * tokens:
            raise GrammarError(
                f"the grammar needs too much work here: {1000 * seconds:.0f} ms for a token"
            )
        if self._matcher.is_error():
            error = compiling.line(self._matcher.get_error())
            # A matcher in error is of no use: begin again, should somebody ask for a shorter text.
            self._consumed = []
            self.is_slow = True
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
        """What a draft should go on with behind the text and these tokens, as a bit for each token:
        the one that must follow, if there is one, else all that may. None behind the grammar's end,
        and where the grammar is given up."""
        with suppress(GrammarError):
            if not self.matcher._follow([*self.output, *path]):
                return None
            allowed = self.matcher._bits()
            forced = self.matcher._forced()
            return _only(forced[0], len(allowed)) if forced else allowed
        return None

    def judge(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        *,
        root: Bits | None = None,
        until: float = math.inf,
    ) -> tuple[list[int], list[Bits | None]]:
        """Look at a draft, a tree given by tokens and parents. Returns its tokens, with -1 in place
        of those that must not be accepted, and for each node the mask of tokens that may follow it.

        Not to be accepted are tokens that the grammar forbids, and those whose turn did not come by
        `until` (of `time.perf_counter`): a shorter draft changes no text. `root` is the mask after
        node 0, where it is known already.
        """
        kept_tokens = [tokens[0]]
        masks: list[Bits | None] = [self.allowed() if root is None else root]
        paths: list[list[int]] = [[]]
        for token, parent in zip(tokens[1:], list(parents)[1:], strict=True):
            path = [*paths[parent], token]
            paths.append(path)
            allowed = masks[parent]
            may_follow = allowed is not None and has(allowed, token)
            in_time = time.perf_counter() < until
            if may_follow and in_time and self.matcher._follow([*self.output, *path]):
                kept_tokens.append(token)
                masks.append(self.matcher._bits())
            else:
                kept_tokens.append(-1)
                masks.append(None)
        return kept_tokens, masks


def forced_draft(
    grammar: TextMask | None, pending: int, *, least: int, most: int
) -> DraftTree | None:
    """A draft of the tokens that must follow a text by its grammar, at most `most` of them, which
    costs no run of a drafter. None where there is no grammar, or where fewer than `least` must
    follow: then a drafter may win more."""
    if grammar is None:
        return None
    forced = grammar.forced()[:most]
    if len(forced) < max(1, min(least, most)):
        return None
    tokens = [pending, *forced]
    parents = list(range(-1, len(forced)))  # each follows the one before it
    scores = [0.0] * len(tokens)  # they are certain
    return DraftTree(tokens, parents, scores)


def has(bits: Bits, token: int) -> bool:
    """Whether these bits allow a token."""
    if not 0 <= token < 8 * len(bits):
        return False
    return bool(bits[token // 8] >> (token % 8) & 1)


def _only(token: int, size: int) -> Bits:
    """Bits of `size` bytes that allow one token."""
    bits = np.zeros(size, np.uint8)
    bits[token // 8] = 1 << (token % 8)
    return bits


def unpacked(bits: Bits, size: int) -> NDArray[np.bool_]:
    """A flag for each of `size` tokens; of tokens beyond the vocabulary none is allowed."""
    flags = np.unpackbits(bits, bitorder="little")[:size].astype(np.bool_)
    return np.pad(flags, (0, size - len(flags)))
