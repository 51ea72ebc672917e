"""A target in forty lines of arithmetic, without torch: what docs/extending.md builds.

A file `NAME.toy` holds a seed. The model is a recurrent one: the state after a token is a mixture of
the state before it and the token's embedding, so a logit depends on the whole text. What other
targets keep as keys and values of a token is here the state after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moa.config import TargetFacts
from moa.errors import FullError, NumericalError, UsageError
from moa.grammar.matcher import GrammarCompiler
from moa.sampling import NO_LOGITS
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

VOCABULARY = 128
WIDTH = 32
State = NDArray[np.float64]


class ToyModel:
    """The arithmetic."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.embedding = rng.normal(size=(VOCABULARY, WIDTH))
        self.mixing = rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5
        self.head = 3 * rng.normal(size=(WIDTH, VOCABULARY)) / WIDTH**0.5
        self.start = np.zeros(WIDTH)

    def after(self, state: State, token: int) -> State:
        """The state after one more token."""
        return np.tanh(self.mixing @ state + self.embedding[token])

    def logits(self, state: State) -> NDArray[np.float32]:
        """Of the token that follows."""
        return (state @ self.head).astype(np.float32)

    def plainly(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """The logits after a text, without any cache."""
        state = self.start
        for token in ids:
            state = self.after(state, token)
        return self.logits(state)


class ToyCache(Slots):
    """The states of each slot's tokens; a page is one token."""

    page_tokens = 1
    pages: int
    pages_held: list[int]

    def __init__(self, slots: int, capacity: int, tokens: int) -> None:
        super().__init__(slots, capacity)
        self.pages = tokens or slots * capacity
        self.pages_held = [0] * slots
        self.states: list[list[State]] = [[] for _ in range(slots)]
        self.versions = [0] * slots
        """Counts the changes of a slot, so that an older forward cannot be committed."""

    @property
    def free_pages(self) -> int:
        return self.pages - sum(self.pages_held)

    def share(self, source: int, tokens: int) -> int:
        self.check_taken(source)
        if not 0 < tokens <= self.lengths[source]:
            raise UsageError(f"slot {source} has no {tokens} tokens to share")
        if tokens > self.free_pages:
            raise FullError(f"{tokens} tokens do not fit into the cache")
        slot = self.acquire()
        self.states[slot] = self.states[source][:tokens]
        self._counted(slot)
        return slot

    def release(self, slot: int) -> None:
        self.check_taken(slot)
        self.states[slot] = []
        self._counted(slot)
        self._give_back(slot)

    def begin(self, batch: RowBatch) -> list[int]:
        """A forward of these rows begins: returns the versions of its slots."""
        self.check_room(batch.slots, batch.sizes)
        if sum(batch.sizes) > self.free_pages:
            raise FullError("the key/value memory is full")
        for slot in batch.slots:
            self.versions[slot] += 1
        return [self.versions[slot] for slot in batch.slots]

    def append(self, slot: int, states: Sequence[State]) -> None:
        """Commit the tokens with these states."""
        self.states[slot] += states
        self._counted(slot)

    def _counted(self, slot: int) -> None:
        self.lengths[slot] = self.pages_held[slot] = len(self.states[slot])
        self.versions[slot] += 1


class ToyStep:
    """The states after each node of a forward."""

    path = "toy"
    choose: Chooser | None = None  # the host's walk chooses

    def __init__(
        self, model: ToyModel, batch: RowBatch, versions: list[int], states: list[list[State]]
    ) -> None:
        self.batch = batch
        self.versions = versions
        self.states = states
        self._model = model

    @property
    def sizes(self) -> Sequence[int]:
        return self.batch.sizes

    def wait(self) -> None:
        """All is computed."""

    def argmax(self, b: int) -> NDArray[np.int64]:
        logits = np.stack([self._model.logits(state) for state in self.states[b]])
        judged = self.batch.judged()[self.batch.starts[b] : self.batch.starts[b + 1]]
        if not np.isfinite(logits[judged]).all():
            raise NumericalError(NO_LOGITS)
        return np.where(judged, logits.argmax(1), -1)

    def host_logits(self, nodes: Sequence[Node]) -> NDArray[np.float32]:
        return np.stack([self._model.logits(self.states[b][node]) for b, node in nodes])


@registered(step=ToyStep, cache=ToyCache)
class ToyTarget:
    """The model behind the contract."""

    facts: TargetFacts
    cache: ToyCache
    unprepared = False
    has_tokenizer = False
    capabilities = Capabilities(
        decoder="toy",
        trees=True,
        states=False,  # drafters that read torch's states cannot be used with it
        batch_invariant=True,
    )
    computes = ""  # no replica goes on with its sessions
    machine = Machine(device="cpu", dtype="float64", hardware="numpy")

    def __init__(
        self, seed: int = 0, *, slots: int = 1, capacity: int = 2048, kv_tokens: int = 0
    ) -> None:
        self.model = ToyModel(seed)
        self.facts = toy_facts(seed)
        capacity = min(capacity, self.facts.max_positions)
        self.cache = ToyCache(slots, capacity, min(kv_tokens, slots * capacity))

    @classmethod
    def open(cls, source: str, options: LoadOptions) -> Self:
        """Load a `.toy` file."""
        options.refuse(
            source,
            "dtype",
            "quantize",
            "gpu_layers",
            "kv_type",
            "cpu_moe",
            "rpc",
            "threads",
            "library",
        )
        try:
            seed = int(Path(source).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{source} is no toy: it must hold one number") from error
        return cls(
            seed, slots=options.slots, capacity=options.capacity, kv_tokens=options.kv_tokens
        )

    def forward(self, rows: Sequence[Row]) -> ToyStep:
        batch = RowBatch.of(rows, VOCABULARY)  # refuses what no target can run
        versions = self.cache.begin(batch)
        states = []
        for row in rows:
            before = self.cache.states[row.slot][-1:] or [self.model.start]
            found: list[State] = []
            for token, parent in zip(row.tokens, row.parents, strict=True):
                found.append(self.model.after(before[0] if parent < 0 else found[parent], token))
            states.append(found)
        return ToyStep(self.model, batch, versions, states)

    def commit(self, step: ToyStep, b: int, path: Sequence[int]) -> CommittedTokens:
        slot = step.batch.slots[b]
        if self.cache.versions[slot] != step.versions[b]:
            raise UsageError(f"slot {slot} has moved on since this forward")
        step.batch.check_path(b, path)
        start = self.cache.lengths[slot]
        self.cache.append(slot, [step.states[b][node] for node in path])
        return CommittedTokens(start, [step.batch.rows[b].tokens[node] for node in path])

    @property
    def tokenizer(self) -> Tokenizer:
        raise UsageError("a toy gets only ids")

    @cached_property
    def grammars(self) -> GrammarCompiler:
        return GrammarCompiler(lambda: str(self.tokenizer), size=VOCABULARY, eos_ids=())

    @property
    def memory(self) -> Memory:
        per_token = 8 * WIDTH
        return Memory(
            kv_bytes_per_token=per_token,
            kv_bytes=per_token * self.cache.pages,
            buffer_bytes=0,
        )

    def prepare(self, load: ExpectedLoad, seconds: float) -> None:
        """Nothing is faster for having been done before."""

    def prepare_more(self) -> None:
        """Nor this."""


def toy_facts(seed: int) -> TargetFacts:
    return TargetFacts(
        family="toy",
        layers=1,
        hidden_size=WIDTH,
        vocab_size=VOCABULARY,
        heads=1,
        kv_heads=1,
        head_dim=WIDTH,
        rope_theta=0.0,
        rms_norm_eps=0.0,
        max_positions=512,
        tie_embeddings=False,
        eos_ids=(2,),
        weights_id=f"toy-{seed}",
    )
