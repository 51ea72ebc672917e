"""A target and a sibling that look up what they said: answers are the real target's, guesses the
real sibling's at every place of them, and a forward or a step takes as long as is asked for.

So links and times of a forward that this machine does not have can be tried with the acceptance of
a real pair. Greedy texts only. What a sibling guesses behind a wrong guess is not known: something
that no verdict reaches, as sure as it was of the right text's token at that place.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.real.acceptance import check
from benchmarks.real.lines import Lines
from moa.bundle import Bundle
from moa.config import TargetFacts
from moa.drafters.contract import DraftRequest
from moa.errors import FullError, UsageError
from moa.grammar.matcher import GrammarCompiler
from moa.graph.step import Heads, StepGraph
from moa.target.contract import (
    Capabilities,
    Chooser,
    CommittedTokens,
    ExpectedLoad,
    LoadOptions,
    Machine,
    Memory,
    Node,
    Tokenizer,
)
from moa.target.registry import registered
from moa.target.rows import Row, RowBatch
from moa.target.slots import Slots
from moa.tree import DraftTree, TreeShape

_UNLIKELY = -4.0
"""Log-probability of a guess of which nothing is known: before and behind the answer."""


@dataclass(frozen=True)
class Text:
    """A prompt, the target's answer, and the sibling's guesses at every place of that."""

    kind: str
    prompt: list[int]
    answer: list[int]
    tokens: list[list[int]]
    logp: list[list[float]]
    drafts: list[list[int]] = field(default_factory=list)
    """What another drafter drafts at a server, at every place."""
    scores: list[list[float]] = field(default_factory=list)
    """The log-probability of each of these drafts, as far as that token."""

    @cached_property
    def ids(self) -> list[int]:
        """All of it."""
        return self.prompt + self.answer


def texts(work: Path, count: int, tokens: int, drafter: str = "") -> list[Text]:
    """So many greedy answers of at least so many tokens, of all kinds in turn; only those along
    which the drafter of this name has drafted, if one is named."""
    answers = Lines(work / "answers.jsonl")
    guesses = Lines(work / "guesses.jsonl")
    drafts = Lines(work / "drafts.jsonl").found if drafter else {}
    check(answers, guesses)
    by_kind: dict[str, list[Text]] = {}
    for key, line in guesses.found.items():
        answer = answers.found[key]
        if not key.endswith("@0") or len(answer["ids"]) < tokens:
            continue
        if drafter and f"{drafter} {key}" not in drafts:
            continue
        kind = key.partition("/")[0]
        text = Text(kind, answer["prompt"], answer["ids"], line["tokens"], line["logp"])
        if drafter:
            drafted = drafts[f"{drafter} {key}"]
            text = replace(text, drafts=drafted["tokens"], scores=drafted["scores"])
        by_kind.setdefault(kind, []).append(text)
    found: list[Text] = []
    place = 0
    while len(found) < count and any(place < len(some) for some in by_kind.values()):
        found += [some[place] for some in by_kind.values() if place < len(some)]
        place += 1
    return found[:count]


# ---- the target


class RecordedCache(Slots):
    """The tokens of each slot; a page is one token."""

    page_tokens = 1
    pages: int
    pages_held: list[int]

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__(slots, capacity)
        self.pages = slots * capacity
        self.pages_held = [0] * slots
        self.pages_per_slot = capacity
        self.tokens: list[list[int]] = [[] for _ in range(slots)]
        self.versions = [0] * slots

    @property
    def free_pages(self) -> int:
        """Pages that no slot holds."""
        return self.pages - sum(self.pages_held)

    def share(self, source: int, tokens: int) -> int:
        """Take a slot that begins as another does."""
        self.check_taken(source)
        if not 0 < tokens <= self.lengths[source]:
            raise UsageError(f"slot {source} has no {tokens} tokens to share")
        if tokens > self.free_pages:
            raise FullError(f"{tokens} tokens do not fit into the cache")
        slot = self.acquire()
        self.append(slot, self.tokens[source][:tokens])
        return slot

    def release(self, slot: int) -> None:
        """Give a slot back."""
        self.check_taken(slot)
        self.tokens[slot] = []
        self.append(slot, [])
        self._give_back(slot)

    def begin(self, batch: RowBatch) -> list[int]:
        """A forward of these rows begins: the versions of its slots."""
        self.check_room(batch.slots, batch.sizes)
        for slot in batch.slots:
            self.versions[slot] += 1
        return [self.versions[slot] for slot in batch.slots]

    def append(self, slot: int, tokens: Sequence[int]) -> None:
        """Commit tokens."""
        self.tokens[slot] = [*self.tokens[slot], *tokens]
        self.lengths[slot] = self.pages_held[slot] = len(self.tokens[slot])
        self.versions[slot] += 1


class RecordedStep:
    """What the target says after each node."""

    path = "recorded"
    choose: Chooser | None = None

    def __init__(
        self, batch: RowBatch, versions: list[int], said: list[list[int]], vocabulary: int
    ) -> None:
        self.batch = batch
        self.versions = versions
        self._said = said
        self._vocabulary = vocabulary

    @property
    def sizes(self) -> Sequence[int]:
        """Tokens of each row."""
        return self.batch.sizes

    def wait(self) -> None:
        """All is known."""

    def argmax(self, b: int) -> NDArray[np.int64]:
        """The token after each node of a row."""
        judged = self.batch.judged()[self.batch.starts[b] : self.batch.starts[b + 1]]
        return np.where(judged, np.array(self._said[b]), -1)

    def host_logits(self, nodes: Sequence[Node]) -> NDArray[np.float32]:
        """All on that token."""
        found = np.zeros((len(nodes), self._vocabulary), dtype=np.float32)
        for at, (b, node) in enumerate(nodes):
            found[at, self._said[b][node]] = 20.0
        return found


@registered(step=RecordedStep, cache=RecordedCache)
class RecordedTarget:
    """The target of a bundle, behind the contract."""

    facts: TargetFacts
    cache: RecordedCache
    unprepared = False
    has_tokenizer = False
    capabilities = Capabilities(decoder="recorded", trees=True, states=False, batch_invariant=True)
    computes = ""
    machine = Machine(device="cpu", dtype="recorded", hardware="none")

    def __init__(
        self, bundle: Path, known: Sequence[Text], *, seconds: float, slots: int, capacity: int
    ) -> None:
        """A forward takes so many seconds."""
        manifest = Bundle.open(bundle).manifest
        self.facts = replace(manifest.target.facts, tokenizer_hash=manifest.tokenizer.hash)
        self.cache = RecordedCache(slots, capacity)
        self.seconds = seconds
        self.forwards = 0
        self.late = 0
        """Forwards that took longer: the processor was too busy."""
        self._known = known

    @classmethod
    def open(cls, source: str, options: LoadOptions) -> Self:
        """It is made from lines, not from a file."""
        raise UsageError(f"{source} is no recorded target")

    def forward(self, rows: Sequence[Row]) -> RecordedStep:
        """Look up, and wait for the rest of the time."""
        until = time.perf_counter() + self.seconds
        batch = RowBatch.of(rows, self.facts.vocab_size)
        versions = self.cache.begin(batch)
        said = [self._said(row) for row in rows]
        left = until - time.perf_counter()
        self.forwards += 1
        self.late += left < 0
        if left > 0:
            time.sleep(left)
        return RecordedStep(batch, versions, said, self.facts.vocab_size)

    def _said(self, row: Row) -> list[int]:
        """The token after each node, in the text that most of the row continues."""
        before = self.cache.tokens[row.slot]
        known = [*before, row.tokens[0]]
        found = [
            _along(text.ids, len(before), row)
            for text in self._known
            if text.ids[: len(known)] == known
        ]
        return max(found, key=lambda one: len(one.nodes)).said if found else [0] * len(row.tokens)

    def commit(self, step: Any, b: int, path: Sequence[int]) -> CommittedTokens:
        """Append nodes to their slot."""
        slot = step.batch.slots[b]
        if self.cache.versions[slot] != step.versions[b]:
            raise UsageError(f"slot {slot} has moved on since this forward")
        step.batch.check_path(b, path)
        start = self.cache.lengths[slot]
        tokens = [int(step.batch.rows[b].tokens[node]) for node in path]
        self.cache.append(slot, tokens)
        return CommittedTokens(start, tokens)

    @property
    def tokenizer(self) -> Tokenizer:
        """It gets only ids."""
        raise UsageError("a recorded target gets only ids")

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """None is asked for."""
        return GrammarCompiler(lambda: str(self.tokenizer), size=self.facts.vocab_size, eos_ids=())

    @property
    def memory(self) -> Memory:
        """Next to none."""
        return Memory(kv_bytes_per_token=8, kv_bytes=8 * self.cache.pages, buffer_bytes=0)

    def prepare(self, load: ExpectedLoad, seconds: float) -> None:
        """All is known."""

    def prepare_more(self) -> None:
        """All is known."""


class _Along(NamedTuple):
    """What a text says after each node of a row, and which nodes are on it."""

    said: list[int]
    nodes: list[int]


def _along(ids: Sequence[int], length: int, row: Row) -> _Along:
    found = _Along([], [])
    places: list[int] = []
    for node, (token, parent) in enumerate(zip(row.tokens, row.parents, strict=True)):
        place = length if parent < 0 else places[parent] + 1
        known = place < len(ids) and ids[place] == token
        places.append(place if known else len(ids))
        found.said.append(ids[place + 1] if known and place + 1 < len(ids) else 0)
        if known:
            found.nodes.append(node)
    return found


# ---- the sibling


class RecordedGraph(StepGraph):
    """A step graph that looks its guesses up, for one conversation."""

    def __init__(self, known: Sequence[Text], step_ms: float, token_ms: float) -> None:
        """A step takes `step_ms`, and `token_ms` for each of its tokens."""
        self.threads = 1
        self.session = self
        self.layers = 1
        self.cache = [Heads(1, 1)]
        self.records = None
        self.states = []
        self.state_inputs = []
        self.state_outputs = []
        self.features = False
        self.top = len(known[0].tokens[0])
        self.cache_inputs = ["past_k_0", "past_v_0"]
        self.outputs = ["top_logp", "top_tokens", "new_k_0", "new_v_0"]
        self._known = list(known)
        self._seconds = step_ms / 1000, token_ms / 1000
        self._latest_options = None

    def io_binding(self) -> _Binding:
        """As ONNX Runtime's session has it."""
        return _Binding()

    def run(self, binding: Any) -> None:
        """Look up, and wait for the rest of the time."""
        began = time.perf_counter()
        ids = binding.inputs["ids"][0].tolist()
        positions = binding.inputs["positions"][0].tolist()
        if len(ids) > 1 and len(self._known) > 1:
            agreeing = [
                text
                for text in self._known
                if all(
                    p >= len(text.ids) or text.ids[p] == i
                    for i, p in zip(ids, positions, strict=True)
                )
            ]
            self._known = agreeing or self._known
        for at, query in enumerate(binding.inputs["queries"].tolist()):
            tokens, logp = self._guesses(ids[query], positions[query])
            binding.outputs["top_tokens"][0, at] = tokens
            binding.outputs["top_logp"][0, at] = logp
        once, each = self._seconds
        left = began + once + each * len(ids) - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def _guesses(self, token: int, position: int) -> tuple[list[int], list[float]]:
        for text in self._known:
            place = position + 1 - len(text.prompt)
            on_text = position < len(text.ids) and text.ids[position] == token
            if on_text and 0 <= place < len(text.tokens):
                return text.tokens[place], text.logp[place]
        place = position + 1 - len(self._known[0].prompt)
        if 0 <= place < len(self._known[0].logp):
            return list(range(self.top)), self._known[0].logp[place]
        return list(range(self.top)), [_UNLIKELY - n for n in range(self.top)]

    def end_steps(self) -> None:
        """A step ends by itself."""


class _Binding:
    """The arrays of a call."""

    def __init__(self) -> None:
        self.inputs: dict[str, NDArray[Any]] = {}
        self.outputs: dict[str, NDArray[Any]] = {}

    def bind_cpu_input(self, name: str, array: NDArray[Any]) -> None:
        """An input."""
        self.inputs[name] = array

    def bind_output(
        self, name: str, place: str, number: int, kind: Any, shape: Sequence[int], at: int
    ) -> None:
        """Memory for a result."""
        del place, number
        size = int(np.prod(shape)) * np.dtype(kind).itemsize
        memory = (ctypes.c_char * size).from_address(at)
        self.outputs[name] = np.frombuffer(memory, dtype=kind).reshape(shape)


class RecordedDrafting:
    """The sibling beside the target: chains of known guesses; a level takes `level_seconds`, also
    the one behind the last guess that is kept."""

    def __init__(self, known: Sequence[Text], *, level_seconds: float) -> None:
        self._known = known
        self._level_seconds = level_seconds
        self.read: dict[int, list[int]] = {}
        """By slot: the text so far, but for its pending token."""

    def open(self) -> int:
        """Take a slot."""
        slot = next(n for n in range(len(self.read) + 1) if n not in self.read)
        self.read[slot] = []
        return slot

    def close(self, slot: int) -> None:
        """Give it back."""
        del self.read[slot]

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """The chains after these pending tokens."""
        trees = [self.tree(request) for request in requests]
        levels = [
            min(request.shape.depth, len(tree))
            for request, tree in zip(requests, trees, strict=True)
        ]
        time.sleep(self._level_seconds * max(levels))
        return trees

    def tree(self, request: DraftRequest) -> DraftTree:
        """The chain after this pending token; only that token where the text is not known."""
        tree = DraftTree([request.pending], [-1], [0.0])
        log = [*self.read[request.slot], request.pending]
        text = next((one for one in self._known if one.ids[: len(log)] == log), None)
        if text is not None:
            self.extend(tree, text, len(log) - len(text.prompt), request.shape)
        return tree

    def extend(self, tree: DraftTree, text: Text, place: int, shape: TreeShape) -> None:
        """Add the guesses that follow so many tokens of an answer."""
        score = 0.0
        right = True
        for level in range(min(shape.depth, shape.nodes)):
            at = place + level
            known = 0 <= at < len(text.tokens)
            token = text.tokens[at][0] if known and right else level
            score += text.logp[at][0] if known else _UNLIKELY
            if level and score < shape.least:
                break
            tree.tokens.append(token)
            tree.parents.append(level)
            tree.scores.append(score)
            right = right and at < len(text.answer) and token == text.answer[at]


class RecordedDrafts(RecordedDrafting):
    """Another drafter at the server, which has drafted at every place of these texts."""

    def extend(self, tree: DraftTree, text: Text, place: int, shape: TreeShape) -> None:
        """Add its draft there."""
        if not 0 <= place < len(text.drafts):
            return
        known = zip(text.drafts[place], text.scores[place], strict=True)
        for level, (token, score) in enumerate(known):
            if level == min(shape.depth, shape.nodes) or (level and score < shape.least):
                break
            tree.tokens.append(token)
            tree.parents.append(level)
            tree.scores.append(score)
