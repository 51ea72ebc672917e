"""The facts of a target that the rest depends on, and how a model's `config.json` is read. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moa.errors import UsageError

WEIGHT_DTYPES = ("float32", "bfloat16", "float16")
"""What a target's weights may be held in, by torch's names; a file of llama.cpp's says its own."""


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What the rest of the system needs to know of a target model."""

    family: str
    layers: int
    hidden_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_positions: int
    tie_embeddings: bool
    eos_ids: tuple[int, ...]
    bos_id: int | None = None
    tokenizer_hash: str = ""
    weights_id: str = ""
    uniform_cache: bool = True
    """Whether every layer keeps keys and values of its own, all of one shape. Else a drafter cannot
    attend over the layers of a token, nor borrow any."""

    def check_readable(self) -> None:
        """Raise unless a drafter can read keys and values of all layers side by side."""
        if not self.uniform_cache:
            raise UsageError(
                f"a drafter cannot read the keys and values of {self.family}, whose layers differ",
                hint="train one that reads states (`--states`), or take a sibling as it is",
            )


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the language model in one that takes pictures or sound, too; of any other, the
    config itself."""
    part = config.get("text_config")
    if not isinstance(part, dict) or "model_type" not in part:
        return config
    # Makers leave it to either of the two whether the head is the embedding.
    shared = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
    return shared | part


def read_config(folder: Path, what: str = "model") -> dict[str, Any]:
    """Read a model's `config.json`, without looking at what is in it; a `UsageError` of one line if
    it is missing or no JSON object. `what` names the kind of model in it."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        files = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"name the GGUF file: {', '.join(files[:3])}" if files else ""
        raise UsageError(f"no {what} at {folder}: config.json is missing", hint=hint) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} is not a {what}'s config: it holds no JSON object")
    return config
