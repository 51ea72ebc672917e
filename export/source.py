"""The source of a bundle: a drafter and the parts of its target that it shares, read and checked."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from export.mapped import move_to_file
from moa.config import TargetFacts
from moa.drafters.contract import Drafter
from moa.drafters.graph import GraphSpec
from moa.drafters.registry import find
from moa.model.borrowed import SharedWeights
from moa.target.identity import tokenizer_hash
from moa.target.loading import load_tokenizer, locate, read_facts, read_partial_target


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
        """The tokenizer of a model's folder, with its chat template and special tokens."""
        tokenizer = load_tokenizer(folder)
        file = folder / "tokenizer.json"
        content = file.read_bytes() if file.is_file() else _as_json(tokenizer)
        template = tokenizer.chat_template
        if not isinstance(template, str):  # none, or several by name
            template = None
        special_tokens = {
            name: text
            for name, text in tokenizer.special_tokens_map.items()
            if isinstance(text, str)
        }
        return cls(
            json=content,
            hash=tokenizer_hash(content),
            chat_template=template,
            special_tokens=special_tokens,
        )


@dataclass(frozen=True)
class Source:
    """A drafter ready for export. `module` is the reference that the graphs are compared with."""

    facts: TargetFacts
    tokenizer: TargetTokenizer
    module: Drafter
    drafter_id: str

    @cached_property
    def spec(self) -> GraphSpec:
        """Inputs and outputs of its graph."""
        return self.module.graph_spec

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
        """The embedding's matrix, `[vocabulary, hidden]`."""
        return _numpy(self.shared.embedding)

    def per_layer(self) -> NDArray[np.float32]:
        """The table of what tokens bring to the layers beside their embedding."""
        assert self.shared.per_layer is not None
        return _numpy(self.shared.per_layer)

    def head(self) -> NDArray[np.float32]:
        """The head's matrix, `[vocabulary, hidden]`."""
        return _numpy(self.shared.head)


def load_source(target: str, drafter: str, work: Path | None = None) -> Source:
    """Read a drafter, `independent:ID_OR_DIR` or a folder of ours, and the weights of the target
    that it shares: the embedding, the head, and layers that it borrows. The weights are moved to
    files in the folder `work` if one is given."""
    stored = find(drafter)
    stored.refuse_off_device()
    shares = stored.kind.shares_weights
    folder = locate(target, weights=shares)
    tokenizer = TargetTokenizer.of(folder)
    facts, _ = read_facts(folder)
    model = None
    if shares:  # else the drafter has an embedding and a head of its own
        borrowed = stored.config(facts).borrowed_layers
        part = read_partial_target(folder, borrowed=borrowed)
        facts = part.facts
        model = part.model
        if work is not None:
            move_to_file(model, work)  # before others refer to them
    module = stored.load(model, dataclasses.replace(facts, tokenizer_hash=tokenizer.hash))
    if work is not None:
        move_to_file(module, work)
    return Source(facts, tokenizer, module.eval(), stored.weights_id(facts))


def _as_json(tokenizer: PreTrainedTokenizerBase) -> bytes:
    """The `tokenizer.json` of a tokenizer that was read in another form."""
    return str(tokenizer.backend_tokenizer.to_str()).encode()


def _numpy(weight: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = weight.detach().float().numpy()
    return array
