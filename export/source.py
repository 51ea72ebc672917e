"""The source of a bundle: a drafter and the parts of its target that it shares, read and checked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from export.body import BodySpec
from moa.config import DrafterConfig, TargetFacts
from moa.manifest import KVHeads
from moa.model.borrowed import SharedWeights
from moa.model.checkpoint import drafter_around, load_drafter
from moa.model.drafter import Drafter
from moa.model.identity import tokenizer_hash, weights_id
from moa.model.loading import load_model, load_tokenizer, locate, read_facts, read_partial_target
from moa.model.state_drafter import StateDrafter, is_states

INDEPENDENT = "independent:"


@dataclass(frozen=True)
class TargetTokenizer:
    """The target's tokenizer as the device needs it."""

    json: bytes
    hash: str
    chat_template: str | None
    special_tokens: dict[str, str]
    """Special tokens by the names that chat templates use. `eos_token` need not be the first id
    that ends a text."""

    @classmethod
    def of(cls, folder: Path) -> TargetTokenizer:
        """That of a model's folder."""
        file = folder / "tokenizer.json"
        tokenizer = load_tokenizer(folder)
        content = (
            file.read_bytes() if file.is_file() else tokenizer.backend_tokenizer.to_str().encode()
        )
        template = tokenizer.chat_template
        named = {
            name: text
            for name, text in tokenizer.special_tokens_map.items()
            if isinstance(text, str)
        }
        return cls(
            content, tokenizer_hash(content), template if isinstance(template, str) else None, named
        )


@dataclass(frozen=True)
class Source:
    """A drafter ready for export. `module` is the reference that the graphs are compared with."""

    facts: TargetFacts
    tokenizer: TargetTokenizer
    module: Drafter | StateDrafter
    drafter_id: str

    @cached_property
    def spec(self) -> BodySpec:
        """The layers' dimensions."""
        if isinstance(self.module, StateDrafter):
            cache = tuple(
                KVHeads(kv_heads=heads, head_dim=width) for heads, width in self.module.config.cache
            )
            return BodySpec(
                self.module.config.hidden_size, cache, None, borrowed=len(cache), features=True
            )
        config, (heads, width) = self.module.config, self.module.cache_heads
        own = KVHeads(kv_heads=heads, head_dim=width)
        theirs = KVHeads(kv_heads=self.facts.kv_heads, head_dim=self.facts.head_dim)
        return BodySpec(
            hidden_size=config.hidden_size,
            cache=(*[own] * config.layers, *[theirs] * config.tli),
            records=KVHeads(kv_heads=config.record_heads, head_dim=config.head_dim)
            if config.use_ca
            else None,
            borrowed=config.tli,
        )

    @property
    def kind(self) -> Literal["moa", "independent", "states"]:
        """What the drafter is."""
        if isinstance(self.module, StateDrafter):
            return "states"
        return "moa" if self.module.config.use_ca else "independent"

    @property
    def shared(self) -> SharedWeights:
        """Embedding and head."""
        return self.module.shared

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one matrix."""
        return self.shared.embedding.data_ptr() == self.shared.head.data_ptr()

    @property
    def vocabulary(self) -> int:
        """Vocabulary size common to target and drafter: their tables may have different padding."""
        return min(self.facts.vocab_size, len(self.shared.head))

    def embedding(self) -> NDArray[np.float32]:
        """`[vocabulary, hidden]`."""
        return _numpy(self.shared.embedding)

    def head(self) -> NDArray[np.float32]:
        """`[vocabulary, hidden]`."""
        return _numpy(self.shared.head)


def load_source(target: str, drafter: str) -> Source:
    """Read a drafter, `independent:ID_OR_DIR` or a folder of ours, and the parts of `target` that
    it shares."""
    if drafter.startswith(INDEPENDENT):
        folder = locate(target, weights=False)
        return _independent(folder, TargetTokenizer.of(folder), drafter)
    folder = locate(target)
    tokenizer = TargetTokenizer.of(folder)
    path = Path(drafter).expanduser()
    if is_states(path):
        part = read_partial_target(folder)
        states = StateDrafter.load(path, part.facts, SharedWeights.of(part.model))
        return Source(part.facts, tokenizer, states.float(), weights_id(path, part.facts))
    config = DrafterConfig.read(path)
    part = read_partial_target(folder, borrowed=config.tli)
    module = load_drafter(path, part.model, part.facts)
    return Source(part.facts, tokenizer, module, weights_id(path, part.facts))


def _independent(folder: Path, tokenizer: TargetTokenizer, drafter: str) -> Source:
    """A small language model: a body without records."""
    body = load_model(drafter.removeprefix(INDEPENDENT))
    facts, _ = read_facts(folder)
    with_tokenizer = dataclasses.replace(facts, tokenizer_hash=tokenizer.hash)
    # It has an embedding and a head of its own: nothing of the target's weights is read.
    module = drafter_around(body.model, with_tokenizer, body, {"use_ca": False}, frozen=True).eval()
    return Source(facts, tokenizer, module, body.facts.weights_id)


def _numpy(weight: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = weight.detach().float().numpy()
    return array
