"""A small model in a GGUF file, which drafts for a target beside it: by llama.cpp, token by token.

It reads nothing of the target but tokens, so any target will do that has the same tokenizer. What
it has drafted stays in llama.cpp's memory until the verdict: accepted tokens are not run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moa.config import TargetFacts
from moa.drafters.contract import DraftRequest
from moa.errors import FullError, UsageError
from moa.grammar.matcher import unpacked
from moa.llama.calls import Calls, Pieces
from moa.llama.runtime import Run
from moa.llama.target import LlamaTarget
from moa.sampling import gumbel
from moa.target.contract import LoadOptions
from moa.target.torch_target import Committed
from moa.text_stream import common_prefix
from moa.tree import MASKED, DraftTree, TreeGrower

_FEW = 16
"""Tokens that are not run before a draft is asked for: with the draft's first token they are one
call."""


@dataclass
class _Text:
    """A session's text, and what llama.cpp's memory holds of it."""

    ids: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    """The tokens in memory: of the text, and of the latest draft."""


class LlamaDrafting:
    """`moa.drafters.contract.RecordReader`, of chains."""

    reads_records = False
    record_lag = 0

    def __init__(self, model: LlamaTarget, vocab_size: int) -> None:
        """Draft with a `model` that is loaded for this alone. Only tokens below the target's
        `vocab_size` are guessed."""
        self._runtime = model.runtime
        self._vocab_size = min(vocab_size, model.runtime.vocab_size)
        self._capacity = model.cache.capacity
        batch = model.runtime.shape.batch
        self._calls = Calls(unit=1, longest=batch, batch=batch, block=model.runtime.shape.block)
        self._texts: dict[int, _Text] = {}
        self._unused = list(range(model.runtime.shape.sequences - 1, -1, -1))

    @classmethod
    def load(cls, path: Path, target: TargetFacts, options: LoadOptions) -> Self:
        """Load the model in a GGUF file as the drafter of a target with these facts; a `UsageError`
        if it has another tokenizer, or keeps a running state, which cannot be taken back."""
        # No number has to be the same in every batch: the target decides.
        model = LlamaTarget.open(str(path), replace(options, exact=False))
        reason = ""
        if model.facts.tokenizer_hash != target.tokenizer_hash:
            reason = "it has another tokenizer than the target"
        elif model.runtime.recurrent:
            reason = "its running state cannot go back to where a draft was rejected"
        if reason:
            model.close()
            raise UsageError(f"{path} cannot draft: {reason}", hint="leave --server-drafter out")
        return cls(model, target.vocab_size)

    # ---- texts

    @property
    def free(self) -> bool:
        """Whether there is an empty slot."""
        return bool(self._unused)

    def open(self) -> int:
        """Take an empty slot."""
        if not self._unused:
            raise FullError("all slots of the drafter are in use")
        self._runtime.reserve(self._unused[-1])
        slot = self._unused.pop()
        self._texts[slot] = _Text()
        return slot

    def close(self, slot: int) -> None:
        """Give a slot back."""
        del self._texts[slot]
        self._runtime.clear(slot)
        # The lowest is given first: llama.cpp runs sequences at once whose numbers follow each other.
        self._unused = sorted([*self._unused, slot], reverse=True)
        self._runtime.give_back(list(self._texts))

    def known(self, slot: int) -> int:
        """How many tokens of its text a slot has read."""
        return len(self._texts[slot].ids)

    def observe(self, slot: int, tokens: Sequence[int], committed: Committed) -> None:
        """The target has run `tokens`."""
        self.read(slot, tokens)

    def missing(self, slot: int, start: int, stop: int) -> tuple[int, int] | None:
        """It wants no records."""
        return None

    def give(self, slot: int, start: int, keys: NDArray[np.float32], values: object) -> None:
        """It reads no records."""

    def read(self, slot: int, tokens: Sequence[int]) -> None:
        """Read more tokens of a slot's text. They are run now only if there are many: a few cost
        nothing in the call that runs the next draft's first token."""
        text = self._texts[slot]
        text.ids += tokens
        not_run = len(text.ids) - common_prefix(text.held, text.ids)
        if len(text.ids) <= self._capacity and not_run > _FEW:
            self._run({slot: []})

    # ---- drafts

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """Draft a chain of guesses for each request, one token of all chains in each call. A
        request whose chain would not fit into the context gets no guesses: a tree of its pending
        token, the one that the target has not run yet."""
        chains = []
        for request in requests:
            grower = TreeGrower(request.pending, replace(request.shape, breadth=1))
            length_after = self.known(request.slot) + 1 + grower.shape.depth
            chains.append(_Chain(request, grower, length_after <= self._capacity))
        while growing := {chain.request.slot: chain for chain in chains if chain.grows}:
            drafts = {}
            for slot, chain in growing.items():
                drafts[slot] = [chain.request.pending, *chain.drafted]
            for slot, logits in self._run(drafts).items():
                chain = growing[slot]
                scores = self._scores(chain.request, logits, chain.drafted)
                best = int(scores.argmax())
                chain.grower.expand(np.array([[best]]), scores[best].reshape(1, 1))
        return [chain.grower.tree() for chain in chains]

    def _scores(
        self, request: DraftRequest, logits: NDArray[np.float32], path: Sequence[int]
    ) -> NDArray[np.float32]:
        """Log-probabilities `[vocab]` of the token after a request's pending one and the drafted
        `path`. The noise by which the target's token is drawn is added first, so that the likeliest
        is the one that it is likely to draw."""
        scores = logits[: self._vocab_size].astype(np.float64)
        sampling = request.sampling
        if not sampling.greedy:
            position = self.known(request.slot) + 1 + len(path)
            noise = gumbel(sampling.seed, position, self._vocab_size)
            scores = scores / sampling.temperature + noise
        if request.grammar is not None:
            allowed = request.grammar.guesses(path)
            if allowed is not None:  # None: behind the grammar's end
                scores = np.where(unpacked(allowed, self._vocab_size), scores, MASKED)
        scores -= scores.max()  # so that no exponential overflows
        logprobs: NDArray[np.float32] = (scores - np.log(np.exp(scores).sum())).astype(np.float32)
        return logprobs

    # ---- llama.cpp

    def _run(self, drafts: dict[int, list[int]]) -> dict[int, NDArray[np.float32]]:
        """Bring the texts of these slots, and the draft behind each, into llama.cpp's memory. Returns
        the logits `[vocab]` after each draft's last token; a slot without a draft gets none."""
        rows = []
        for slot, draft in drafts.items():
            piece = self._piece(slot, draft)
            if piece is not None:
                rows.append(piece)
        logits_by_slot = {}
        for call in self._calls.of(rows):
            runs = [Run(part.sequence, part.start, part.tokens, part.judged) for part in call]
            for part, logits in zip(call, self._runtime.run(runs), strict=True):
                if part.judged:
                    logits_by_slot[part.row] = logits[0]
        return logits_by_slot

    def _piece(self, slot: int, draft: Sequence[int]) -> Pieces | None:
        """The tokens of a slot's text, and of the draft behind it, that llama.cpp does not hold; None
        where it holds all. What it holds behind the tokens that they have in common is forgotten."""
        text = self._texts[slot]
        wanted = [*text.ids, *draft]
        keep = common_prefix(text.held, wanted)
        if draft:
            keep = min(keep, len(wanted) - 1)  # its last token's logits are wanted
        self._runtime.cut(slot, keep)  # what fills a call up is behind the held tokens, too
        text.held = wanted  # when the piece has run
        rest = wanted[keep:]
        if not rest:
            return None
        judged = [len(rest) - 1] if draft else []
        return Pieces(row=slot, sequence=slot, start=keep, tokens=rest, skipped=0, judged=judged)


@dataclass
class _Chain:
    """A request, and the chain that is drafted for it."""

    request: DraftRequest
    grower: TreeGrower
    fits: bool
    """Whether the longest chain that it asks for fits into the context."""

    @property
    def grows(self) -> bool:
        """Whether another token is to be drafted."""
        return self.fits and len(self.grower.frontier) > 0

    @property
    def drafted(self) -> list[int]:
        """The tokens drafted so far, without the pending one; only while it grows."""
        return self.grower.path(self.grower.frontier[0])
