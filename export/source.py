"""What a bundle is made from: a drafter and the parts of its target that it shares, read and checked."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from export.body import BodySpec, CacheLayer, IndependentBody, MoaBody
from moa.config import DrafterConfig, TargetFacts
from moa.errors import UsageError
from moa.model.borrowed import BorrowedLayers
from moa.model.checkpoint import backbone_of, load_drafter
from moa.model.drafter import Drafter
from moa.model.identity import tokenizer_hash, weights_id
from moa.model.loading import load_model, load_tokenizer, locate
from moa.model.shared import SharedWeights
from moa.model.streaming import read_facts, stream_target

INDEPENDENT = "independent:"


@dataclass(frozen=True)
class TargetTokenizer:
    """The target's tokenizer as the device needs it."""

    json: bytes
    hash: str
    chat_template: str | None
    special_tokens: dict[str, str]
    """By the names that chat templates use. `eos_token` need not be the first id that ends a text."""

    @classmethod
    def of(cls, folder: Path) -> TargetTokenizer:
        """That of a model's folder."""
        file = folder / "tokenizer.json"
        tokenizer = load_tokenizer(folder)
        content = file.read_bytes() if file.is_file() else tokenizer.backend_tokenizer.to_str().encode()
        template = tokenizer.chat_template
        named = {name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
        return cls(content, tokenizer_hash(content), template if isinstance(template, str) else None, named)


@dataclass(frozen=True)
class Source:
    """A drafter ready for export. `module` is the reference that the graphs are compared with."""

    kind: Literal["moa", "independent"]
    target: str
    drafter: str
    facts: TargetFacts
    tokenizer: TargetTokenizer
    body: nn.Module
    spec: BodySpec
    shared: SharedWeights
    drafter_id: str
    config: dict[str, Any]
    rope_theta: float
    module: Drafter | None

    @property
    def tied(self) -> bool:
        """Whether embedding and head are one matrix."""
        return self.shared.embedding.data_ptr() == self.shared.head.data_ptr()

    @property
    def vocabulary(self) -> int:
        """Tokens that target and drafter have in common: tables may be padded differently."""
        return min(self.facts.vocab_size, len(self.shared.head))

    def embedding(self) -> NDArray[np.float32]:
        """`[vocabulary, hidden]`."""
        return _numpy(self.shared.embedding)

    def head(self) -> NDArray[np.float32]:
        """`[vocabulary, hidden]`."""
        return _numpy(self.shared.head)


def load_source(target: str, drafter: str) -> Source:
    """Read a drafter, `independent:ID_OR_DIR` or a folder of ours, and what it shares of `target`."""
    folder = locate(target)
    tokenizer = TargetTokenizer.of(folder)
    if drafter.startswith(INDEPENDENT):
        return _independent(target, folder, tokenizer, drafter)
    path = Path(drafter).expanduser()
    config = DrafterConfig.read(path)
    part = stream_target(folder, borrowed=config.tli)
    config = DrafterConfig.read(path, part.facts)
    module = load_drafter(path, part.model, part.facts)
    of_sa = CacheLayer(config.self_attention_num_key_value_heads, config.head_dim)
    of_target = CacheLayer(part.facts.kv_heads, part.facts.head_dim)
    records = CacheLayer(config.cross_attention_num_key_value_heads, config.head_dim) if config.use_ca else None
    return Source(
        kind="moa",
        target=target,
        drafter=drafter,
        facts=part.facts,
        tokenizer=tokenizer,
        body=MoaBody(module),
        spec=BodySpec(config.hidden_size, (of_sa, *[of_target] * config.tli), records),
        shared=module.shared,
        drafter_id=weights_id(path, part.facts),
        config=asdict(config),
        rope_theta=config.rope_theta,
        module=module,
    )


def _independent(target: str, folder: Path, tokenizer: TargetTokenizer, drafter: str) -> Source:
    facts, _ = read_facts(folder)
    loaded = load_model(drafter.removeprefix(INDEPENDENT))
    found = TargetTokenizer.of(loaded.folder).hash
    if found != tokenizer.hash:
        raise UsageError(
            f"the drafter in {loaded.folder} has another tokenizer than the target",
            hint="an independent drafter must share the target's tokenizer",
        )
    shared = SharedWeights.of(loaded.model)
    own = loaded.facts
    layer = CacheLayer(own.kv_heads, own.head_dim)
    config = json.loads(loaded.model.config.to_json_string())
    return Source(
        kind="independent",
        target=target,
        drafter=drafter,
        facts=facts,
        tokenizer=tokenizer,
        body=IndependentBody(BorrowedLayers(backbone_of(loaded.model), own.layers)),
        spec=BodySpec(own.hidden_size, (layer,) * own.layers, None),
        shared=shared,
        drafter_id=own.weights_id,
        config=config,
        rope_theta=own.rope_theta,
        module=None,
    )


def _numpy(weight: Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = weight.detach().float().numpy()
    return array
