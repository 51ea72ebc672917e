"""A GGUF file as a folder that everything else reads: config, tokenizer and chat template, and the
weights as bfloat16.

The folder is made once, in the user's cache, under a name that follows from the file's content. All
but the weights takes a second; a bundle's target needs no more.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from moa.errors import UnsupportedModelError, UsageError
from moa.gguf.reader import GgufHead, StoredBlocks, read_head
from moa.gguf.tokenizer import GgufTokenizer, tokenizer_of
from moa.gguf.weights import rows_of
from moa.process.user_folders import cache_folder
from moa.target.identity import SHAPES, SOURCE_ID, file_id, kept_file_id

WEIGHTS = "model.safetensors"
_FORMAT = 1
"""The number of the folders' format: another one makes them anew."""
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_FREE = 2**28
"""Bytes of disk that stay free."""
_TELL_SECONDS = 5.0
"""Between two remarks on how much is unpacked."""
Say = Callable[[str], None]

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
"""llama.cpp's names of families, and transformers'."""
_ROTATIONS = "rope_freqs.weight"
_HEAD = "output.weight"
_EMBEDDING = "token_embd.weight"
_COMPARED_ROWS = 64
"""Rows of head and embedding by which it is told whether the two are one matrix."""
_SAME = 0.9
"""The cosine above which they are: four bits and six of the same numbers have more than 0.99, and
unrelated matrices about 0."""
# How Llama 3.1 and its successors stretch their rotation. A file has the resulting table, and not
# these numbers.
_LLAMA3_CONTEXT = 8192
"""Tokens of the context with which wavelengths are compared."""
_LLAMA3_LOW = 1.0
"""Wavelengths in the context up to which a rotation is stretched by the whole factor."""
_LLAMA3_HIGH = 4.0
"""Wavelengths in the context from which on a rotation is not stretched."""


@dataclass(frozen=True)
class GgufModel:
    """A model in one file, or in several shards."""

    heads: tuple[GgufHead, ...]

    @classmethod
    def read(cls, path: Path) -> GgufModel:
        """Read a model's heads; `path` is the file, or any of the shards."""
        return cls(tuple(read_head(shard) for shard in _shards(path)))

    @property
    def head(self) -> GgufHead:
        """The head with the metadata."""
        return self.heads[0]

    @property
    def tensors(self) -> Iterator[tuple[Path, StoredBlocks]]:
        """All tensors, each with the file that it is in."""
        for head in self.heads:
            for tensor in head.tensors:
                yield head.path, tensor

    @property
    def names(self) -> set[str]:
        """The tensors' names."""
        return {tensor.name for _, tensor in self.tensors}

    @property
    def stored_bytes(self) -> int:
        """Bytes of the weights as they are stored, in all shards."""
        return sum(tensor.size for _, tensor in self.tensors)

    @property
    def bfloat16_bytes(self) -> int:
        """Bytes that the weights take when they are unpacked."""
        return sum(2 * math.prod(tensor.shape) for _, tensor in self.tensors)

    @property
    def repeated_weights(self) -> int:
        """Weights of an LM head that is the embedding, stored a second time, as converters do with
        tied matrices: mostly in another precision, so some rows of the two are compared."""
        found = {tensor.name: (path, tensor) for path, tensor in self.tensors}
        if not {_HEAD, _EMBEDDING} <= found.keys():
            return 0
        head = found[_HEAD][1]
        is_matrix = len(head.shape) == 2 and 0 not in head.shape
        if not is_matrix or head.shape != found[_EMBEDDING][1].shape:
            return 0
        try:
            first, second = (_first_rows(*found[name]) for name in (_HEAD, _EMBEDDING))
        except UnsupportedModelError:
            return 0  # llama.cpp may read such a type; nobody knows here
        with np.errstate(all="ignore"):  # a damaged file has any numbers
            sizes = float(np.linalg.norm(first)) * float(np.linalg.norm(second))
            is_same = float(np.vdot(first, second)) > _SAME * sizes
        return math.prod(head.shape) if is_same else 0

    @property
    def identity(self) -> str:
        """A hash that follows from every byte of all files."""
        return _joined(file_id(head.path) for head in self.heads)


def _first_rows(path: Path, tensor: StoredBlocks) -> NDArray[np.float32]:
    """The first rows of a matrix, as many as are compared; no others are read."""
    width, rows = tensor.shape
    count = min(rows, _COMPARED_ROWS)
    size = tensor.size // rows * count
    return next(rows_of(path, replace(tensor, shape=(width, count), size=size)))


def folder_of(path: Path, *, weights: bool, say: Say = lambda _: None) -> Path:
    """Return the folder in the user's cache that stands for a GGUF file, a model's folder as every
    other part reads it, and make it if it is not there. Without `weights` the large file with them
    may be missing: all but them takes a second. `say` is told when they are unpacked, which takes
    long."""
    made = _made_before(path)
    if made is not None and (not weights or (made / WEIGHTS).is_file()):
        return made
    model = GgufModel.read(path)
    config = config_of(model)
    identity = model.identity
    folder = _folder_named(path, identity)
    if not (folder / SOURCE_ID).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _describe(model, config, folder)
        # Written last: a folder that has it is complete, but for the weights.
        _put(folder / SOURCE_ID, identity.encode())
    if weights and not (folder / WEIGHTS).is_file():
        needed = model.bfloat16_bytes
        _check_disk(path, folder, needed)
        say(f"unpacking {path.name} once: {needed / 1e9:.1f} GB into {folder}")
        _write_weights(model, config, folder / WEIGHTS, partial(_tell_share, path.name, say=say))
    return folder


def _made_before(path: Path) -> Path | None:
    """The folder of a model whose files are known not to have changed since it was made; None if
    that is not known. Their heads, in which the whole vocabulary is, need not be read then."""
    identities: list[str] = []
    for shard in _shards(path):
        identity = kept_file_id(shard) if shard.is_file() else None
        if identity is None:
            return None
        identities.append(identity)
    folder = _folder_named(path, _joined(identities))
    return folder if (folder / SOURCE_ID).is_file() else None


def _joined(identities: Iterable[str]) -> str:
    """The identity of a model, by those of its files."""
    digest = hashlib.sha256(f"gguf {_FORMAT}".encode())
    for identity in identities:
        digest.update(identity.encode())
    return digest.hexdigest()


def _folder_named(path: Path, identity: str) -> Path:
    """The folder in the user's cache for a model of this identity."""
    return cache_folder("models") / f"{path.stem[:60]}-{identity[:12]}"


def _check_disk(path: Path, folder: Path, needed: int) -> None:
    """A `UsageError` unless the disk of `folder` has room for `needed` bytes, and some to spare."""
    free = shutil.disk_usage(folder).free
    if needed + _FREE > free:
        raise UsageError(
            f"{path.name} takes {needed / 1e9:.1f} GB unpacked, and {folder} has {free / 1e9:.1f}",
            hint="set XDG_CACHE_HOME to a folder on another disk",
        )


def config_of(model: GgufModel) -> dict[str, Any]:
    """Return the content of a `config.json` for a GGUF file, from its metadata; an error for a
    model that is not read from GGUF, or a damaged file."""
    head = model.head
    family = _family_of(head)
    sizes = _sizes(head)
    config: dict[str, Any] = {
        "model_type": family,
        "architectures": [_ARCHITECTURES[family]],
        "vocab_size": len(head.array("tokenizer.ggml.tokens", str)),
        **sizes,
        "rms_norm_eps": head.real("{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": head.real("{arch}.rope.freq_base", 10000.0),
        # Without an LM head of its own a model's head is its embedding.
        "tie_word_embeddings": "output.weight" not in model.names,
        # The precision in which `_Tensor` unpacks matrices, whatever the file stores them in.
        "torch_dtype": "bfloat16",
        "bos_token_id": _token(head, "bos"),
        "eos_token_id": _token(head, "eos"),
        "pad_token_id": _token(head, "padding"),
    }
    config |= _linear_rotation(head)
    if family == "llama":
        # The other families' code says which projections have a bias; Llama's asks the config.
        config |= {"attention_bias": "blk.0.attn_q.bias" in model.names, "mlp_bias": False}
        config |= _llama3_rotation(model, config)
    if family.startswith("gemma"):
        config |= _gemma(head, config)
    return config


def _family_of(head: GgufHead) -> str:
    """The family of a file's model, as transformers names it; an error for one that is not read
    from GGUF."""
    family = _FAMILIES.get(head.architecture)
    if family is None:
        raise UnsupportedModelError(
            f"{head.path}: models of the kind {head.architecture!r} are not read from GGUF",
            hint=f"take the model's folder, or a file of {', '.join(_FAMILIES)}",
        )
    return family


def _sizes(head: GgufHead) -> dict[str, Any]:
    """The entries of a `config.json` for the sizes of a model; an error where the file is
    damaged."""
    heads = head.number("{arch}.attention.head_count")
    hidden = head.number("{arch}.embedding_length")
    if not 0 < heads <= hidden:
        raise UsageError(f"{head.path} is damaged: {heads} heads in a width of {hidden}")
    return {
        "hidden_size": hidden,
        "intermediate_size": head.number("{arch}.feed_forward_length"),
        "num_hidden_layers": head.number("{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": head.number("{arch}.attention.head_count_kv", heads),
        "head_dim": head.number("{arch}.attention.key_length", hidden // heads),
        "max_position_embeddings": head.number("{arch}.context_length"),
    }


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def _linear_rotation(head: GgufHead) -> dict[str, Any]:
    """The entry of a `config.json` for rotary positions that are divided by a factor; none where a
    file does not scale them."""
    key = "{arch}.rope.scaling.type"
    if not head.has(key) or head.text(key) == "none":
        return {}
    kind = head.text(key)
    if kind != "linear":
        raise UnsupportedModelError(
            f"{head.path}: a rotation scaled by {kind!r} is not read from GGUF",
            hint="take the model's folder",
        )
    factor = head.real("{arch}.rope.scaling.factor")
    return {"rope_scaling": {"rope_type": "linear", "factor": factor}}


def _gemma(head: GgufHead, config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a Gemma model's `config.json` for its sliding windows, the caps of its scores
    and their scale. GGUF files do not say some of these: they follow from the family and its
    size."""
    layers = config["num_hidden_layers"]
    is_gemma3 = config["model_type"] == "gemma3_text"
    # Every sixth layer of Gemma 3, and every second of Gemma 2, sees all tokens, the others a
    # window.
    every = 6 if is_gemma3 else 2
    kinds = ["sliding_attention"] * layers
    kinds[every - 1 :: every] = ["full_attention"] * (layers // every)
    # The largest model of each generation, 27B, is the only one whose scale is not its heads' width.
    # A file does not say it; the number of layers tells the model.
    layers_of_27b = 62 if is_gemma3 else 46
    scale = config["head_dim"]
    if layers == layers_of_27b:
        scale = config["hidden_size"] // config["num_attention_heads"]
    found: dict[str, Any] = {
        "sliding_window": head.number("{arch}.attention.sliding_window"),
        "layer_types": kinds,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scale,
    }
    if is_gemma3:
        return found | {"rope_local_base_freq": 10000.0}
    return found | {
        "attn_logit_softcapping": head.real("{arch}.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": head.real("{arch}.final_logit_softcapping", 30.0),
    }


def _llama3_rotation(model: GgufModel, config: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a Llama model's `config.json` for rotary frequencies that are scaled for long
    texts; none where a file does not scale them. A GGUF file has only a table of the resulting
    factors, and a config the numbers that they are made from: those of Llama 3 are tried, and
    another table is refused."""
    tables = [(path, tensor) for path, tensor in model.tensors if tensor.name == _ROTATIONS]
    if not tables:
        return {}
    path, tensor = tables[0]
    table = np.concatenate(list(rows_of(path, tensor))).ravel()
    factor = float(table.max())  # that of the longest wavelengths
    expected = _llama3_table(config["head_dim"], config["rope_theta"], factor)
    if table.shape != expected.shape or not np.allclose(table, expected, rtol=1e-3):
        raise UnsupportedModelError(
            f"{model.head.path}: its table of rotations is not that of Llama 3",
            hint="take the model's folder",
        )
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }
    return {"rope_scaling": scaling}


def _llama3_table(head_dim: int, rope_theta: float, factor: float) -> NDArray[np.float64]:
    """By what Llama 3 divides the rotary frequency of each pair of a head's numbers: long
    wavelengths by the whole factor, short ones by nothing, those between by something between."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    wavelengths = 2 * np.pi * rope_theta**exponents
    wavelengths_in_context = _LLAMA3_CONTEXT / wavelengths
    # From 0, where a frequency is divided by the whole factor, to 1, where it stays.
    kept = (wavelengths_in_context - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    kept = kept.clip(0, 1)
    table: NDArray[np.float64] = 1 / ((1 - kept) / factor + kept)
    return table


def _token(head: GgufHead, use: str) -> int | None:
    """The id of the special token for a use (`bos`, `eos`, `eot`, ...); None if the file names none."""
    key = f"tokenizer.ggml.{use}_token_id"
    return head.number(key) if head.has(key) else None


def _describe(model: GgufModel, config: Mapping[str, Any], folder: Path) -> None:
    """Write everything of a GGUF file's folder but the weights: its configs, its tokenizer and chat
    template, and the shapes of the weights."""
    head = model.head
    tokenizer = tokenizer_of(head)
    settings = _tokenizer_settings(tokenizer, config["max_position_embeddings"])
    generation = {"eos_token_id": _end_tokens(head), "bos_token_id": config["bos_token_id"]}
    _put(folder / "config.json", json.dumps(config, indent=2).encode())
    _put(folder / "generation_config.json", json.dumps(generation, indent=2).encode())
    _put(folder / "tokenizer_config.json", json.dumps(settings, indent=2).encode())
    shapes = {tensor.name: tensor.shape for tensor in _renamed(model, config)}
    _put(folder / SHAPES, json.dumps(shapes).encode())
    _put(folder / "tokenizer.json", tokenizer.json.encode())
    if tokenizer.chat_template:
        _put(folder / "chat_template.jinja", tokenizer.chat_template.encode())


def _end_tokens(head: GgufHead) -> list[int]:
    """The ids of the tokens that end a text, a turn or a message, each once."""
    ids: list[int] = []
    for use in ("eos", "eot", "eom"):
        token = _token(head, use)
        if token is not None and token not in ids:
            ids.append(token)
    return ids


def _tokenizer_settings(tokenizer: GgufTokenizer, longest: int) -> dict[str, Any]:
    """The content of a `tokenizer_config.json`. `longest` is the most tokens of a text."""
    special_tokens = {
        "bos_token": tokenizer.begin,
        "eos_token": tokenizer.end,
        "pad_token": tokenizer.padding,
        "unk_token": tokenizer.unknown,
    }
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
    }
    for name, text in special_tokens.items():
        if text is not None:
            settings[name] = text
    return settings


# ---- weights


Change = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""Turns the numbers of a tensor into others."""


@dataclass(frozen=True)
class _Tensor:
    """One of the folder's tensors, and where it comes from."""

    name: str
    path: Path
    stored: StoredBlocks
    change: Change | None
    """What turns the file's numbers into transformers', where the two differ."""
    dtype: str
    """As safetensors names it: `F32` or `BF16`."""

    @property
    def shape(self) -> list[int]:
        """The shape as torch has it; a file has it the other way round."""
        return list(reversed(self.stored.shape))

    @property
    def nbytes(self) -> int:
        """Its size in the folder."""
        itemsize = 4 if self.dtype == "F32" else 2
        return itemsize * math.prod(self.shape)


def _tell_share(name: str, share: float, seconds: float, *, say: Say) -> None:
    """Say how much of a file is unpacked after so many seconds, and how long the rest may take."""
    left = seconds * (1 - share) / share
    say(f"unpacking {name}: {share:.0%}, about {left:.0f} s left")


def _write_weights(
    model: GgufModel,
    config: Mapping[str, Any],
    path: Path,
    tell: Callable[[float, float], None] = lambda share, seconds: None,
) -> None:
    """Unpack the weights of a model into a safetensors file, some rows at a time: no tensor is held
    whole. A write that fails leaves no file behind. Every few seconds `tell` gets the share that is
    written, and the seconds that this took."""
    tensors = list(_renamed(model, config))
    header = _safetensors_header(tensors)
    total = sum(tensor.nbytes for tensor in tensors)
    written = 0
    started = told_at = time.monotonic()
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(header)
            for tensor in tensors:
                for part in _parts_of(tensor):
                    written += file.write(part)
                now = time.monotonic()
                if now - told_at >= _TELL_SECONDS and written < total:
                    told_at = now
                    tell(written / total, now - started)
        unfinished.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        unfinished.unlink(missing_ok=True)


def _safetensors_header(tensors: Sequence[_Tensor]) -> bytes:
    """The bytes with which a safetensors file begins: the length of the header in 8 bytes, and the
    header, JSON with the type, shape and place of each tensor. The tensors follow without gaps."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [start, stop],
        }
        start = stop
    content = json.dumps(entries).encode()
    content += b" " * (-len(content) % 8)  # the tensors must begin at a multiple of 8
    return len(content).to_bytes(8, "little") + content


def _parts_of(tensor: _Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor as the folder has it, some rows at a time."""
    parts = rows_of(tensor.path, tensor.stored)
    if tensor.change is not None:
        # A change may move rows, so it needs all of them; the matrices that have one are not large.
        whole = np.concatenate(list(parts))
        parts = iter([tensor.change(whole)])
    for rows in parts:
        if tensor.dtype == "F32":
            yield np.ascontiguousarray(rows).data
        else:
            # numpy has no bfloat16: its bits travel as 16-bit integers.
            yield torch.from_numpy(rows).to(torch.bfloat16).view(torch.int16).numpy().data


def _renamed(model: GgufModel, config: Mapping[str, Any]) -> Iterator[_Tensor]:
    """Yield the tensors of a GGUF model as the folder is to have them: each under transformers'
    name, with the function that changes its numbers where llama.cpp stores them otherwise."""
    is_gemma = config["model_type"].startswith("gemma")
    for path, stored in model.tensors:
        if stored.name == _ROTATIONS:
            continue  # the config's `rope_scaling` says it (`_llama3_rotation`)
        part, _, leaf = stored.name.rpartition(".")
        name = _name(part, _GEMMA_NAMES if is_gemma else _LAYER_NAMES)
        if name is None or leaf not in ("weight", "bias"):
            raise UnsupportedModelError(
                f"{path}: tensor {stored.name} has no place in a {config['model_type']} model",
                hint="take the model's folder",
            )
        dtype = "F32" if len(stored.shape) == 1 else "BF16"
        yield _Tensor(f"{name}.{leaf}", path, stored, _change_of(name, config), dtype)


def _change_of(name: str, config: Mapping[str, Any]) -> Change | None:
    """What turns the numbers of a file's tensor, which transformers has under this name, into
    transformers' numbers; None where the two are the same."""
    if config["model_type"].startswith("gemma") and "norm" in name:
        return _less_one
    if config["model_type"] != "llama":
        return None
    if name.endswith("q_proj"):
        return partial(_halves_apart, heads=config["num_attention_heads"])
    if name.endswith("k_proj"):
        return partial(_halves_apart, heads=config["num_key_value_heads"])
    return None


def _name(part: str, layer_names: Mapping[str, str]) -> str | None:
    """transformers' name of a part of a model, `blk.0.attn_q` for example, which a weight and a bias
    share; None for a part that it does not have."""
    if not part.startswith("blk."):
        return _NAMES.get(part)
    layer, _, rest = part.removeprefix("blk.").partition(".")
    own = layer_names.get(rest)
    if own is None:
        return None
    return f"model.layers.{layer}.{own}"


def _less_one(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Gemma multiplies by one more than its norms' weights; files have the sum."""
    return weight - 1


def _halves_apart(weight: NDArray[np.float32], *, heads: int) -> NDArray[np.float32]:
    """Move the rows of a query or key matrix: in files of Llama the two rows of a head that are
    rotated together are side by side, and transformers has them half a head apart."""
    if weight.shape[0] == 1:  # a bias, which is one row
        return _halves_apart(weight.T, heads=heads).T
    rows, width = weight.shape
    if heads < 1 or rows % (2 * heads):
        raise UsageError(f"a matrix of {rows} rows does not divide into {heads} heads")
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, width)


def _shards(path: Path) -> Sequence[Path]:
    """All files of the model of which this is one, in order: itself, unless its name says that it is
    one of several (`name-00001-of-00003.gguf`)."""
    shard = _SHARD.fullmatch(path.name)
    if shard is None:
        return [path]
    name, _, count = shard.groups()
    paths = []
    for number in range(1, int(count) + 1):
        paths.append(path.with_name(f"{name}-{number:05}-of-{count}.gguf"))
    missing = [shard.name for shard in paths if not shard.is_file()]
    if missing:
        raise UsageError(f"{len(missing)} of {len(paths)} shards are missing: {missing[0]}")
    return paths


def _put(path: Path, content: bytes) -> None:
    """Write a file whole, or not at all."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.replace(path)
