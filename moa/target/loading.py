"""From a hub id or a folder to a target model in memory, whole or the few tensors that a drafter
shares, or to a one-line error."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from moa.config import TargetFacts, read_config, text_part
from moa.errors import (
    ConfigError,
    MoaError,
    UnsupportedModelError,
    UsageError,
    first_line,
    how_to_install,
)
from moa.gguf.reader import is_gguf
from moa.process.user_folders import expanded
from moa.target import hub
from moa.target.families import FAMILIES, facts_of, refuse_unsupported
from moa.target.gguf_folder import folder_of
from moa.target.identity import (
    WITHIN_OTHERS,
    WeightsHash,
    stored_tensors,
    text_names,
    text_shapes,
    tokenizer_hash,
    weights_id,
)
from moa.target.library import ATTENTION
from moa.target.plain import refuse_unless_plain
from moa.target.tokenizer_files import check_files, hash_in_files, hash_in_folder

_WANTED = ("*.json", "model*.safetensors", "*.jinja", "tokenizer.model")
"""Files that are taken from the hub: no pickles, and no other forms of the same weights."""
Say = Callable[[str], None]
TAKES_PARTS = int(transformers.__version__.partition(".")[0]) >= 5
"""Whether the library finds a language model's tensors in a model that takes more than text."""
QUANTIZED = ("int8",)
"""How weights can be quantized when they are loaded: the decoder's matrices in eight bits, by
torchao; embedding, norms and head stay as they are."""


def _silent(_: str) -> None:
    """Says nothing."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for `Target`, its facts, and the folder that it came from."""

    model: PreTrainedModel
    facts: TargetFacts
    folder: Path


def load_model(
    source: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    quantize: str = "",
) -> LoadedModel:
    """Load a causal language model of a supported family from a hub id, folder or GGUF file, in
    eval mode and without running code from its folder. Its weights are hashed meanwhile, to
    identify them."""
    on_device = checked_device(device)
    folder = locate(source)
    config = read_config(folder)
    with _in_one_line(f"read the config in {folder}"):
        shape = checked_shape(folder)
    weights_hash = WeightsHash(folder)  # it finds missing or damaged files before any is loaded
    try:
        quantization = {}
        if quantize:
            quantization = _quantization(quantize, folder, config, on_device)
        model = _load_weights(folder, config, shape, on_device, dtype, quantization)
        with _in_one_line(f"read the config in {folder}"):
            facts = facts_of(model.config, model.generation_config.eos_token_id)
        facts = dataclasses.replace(
            facts, tokenizer_hash=_hash_tokenizer(folder), weights_id=weights_hash.identity(facts)
        )
    except BaseException:
        weights_hash.cancel()
        raise
    _tie_if_equal(model)
    return LoadedModel(model, facts, folder)


def _load_weights(
    folder: Path,
    config: dict[str, Any],
    shape: PretrainedConfig,
    device: torch.device,
    dtype: torch.dtype,
    quantization: dict[str, Any],
) -> Any:
    """Have the library load a folder's model, in eval mode; a `UsageError` if some of its weights
    are missing. `config` is the folder's own `config.json`, and `shape` what the library makes of
    its language model; `quantization` holds the library's arguments for quantized weights, or
    nothing."""
    with _in_one_line(f"load the model in {folder}"):
        with _without_progress_bar(), without_foreign_warnings():
            _compare_shapes(folder, shape)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=shape,
                **_renamed(config),
                dtype=dtype,
                attn_implementation=ATTENTION,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **quantization,
            )
        model, report = loaded
        if not quantization:  # quantized weights are made on their device
            model.to(device)
    # The library fills a missing tensor with random numbers and only warns.
    if missing := sorted(report["missing_keys"]):
        raise UsageError(
            f"the weights in {folder} lack {len(missing)} tensors, {missing[0]} among them"
        )
    model.eval().requires_grad_(False)
    return model


@contextlib.contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """Turn any error of the library into a `UsageError` that says in one line that it could not do
    `what`: the library raises whatever an odd value in a file happens to run into."""
    try:
        yield
    except MoaError:
        raise
    except Exception as error:
        raise UsageError(f"cannot {what}: {first_line(error)}") from error


_MOST_NUMBERS = 16
"""Times as many numbers as a folder's files hold that its model may have: some files pack several
weights into one."""


def _renamed(config: dict[str, Any]) -> dict[str, Any]:
    """The argument with which the library finds a language model's tensors in a model that takes
    more than text; none for a model of text alone."""
    return {} if text_part(config) is config else {"key_mapping": WITHIN_OTHERS}


def _compare_shapes(folder: Path, config: PretrainedConfig) -> None:
    """Raise a `ValueError` if a folder's weights have other shapes than its config asks for, or if
    the config asks for far more of them. This comes before memory is taken: the library makes the
    whole model first, as large as the config says."""
    with torch.device("meta"):  # shapes without memory
        empty = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    stored = text_shapes(folder)
    for name, wanted in empty.state_dict().items():
        if name in stored and tuple(wanted.shape) != stored[name]:
            raise ValueError(
                f"{name} is {list(stored[name])}, and its config asks for {list(wanted.shape)}"
            )
    wanted_numbers = sum(parameter.numel() for parameter in empty.parameters())
    stored_numbers = sum(math.prod(shape) for shape in stored.values())
    if wanted_numbers > _MOST_NUMBERS * stored_numbers:
        raise ValueError(
            f"its config asks for {wanted_numbers} numbers, and its files hold {stored_numbers}"
        )


@contextlib.contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Load without the progress bar that transformers 5 draws for weights that are on this machine
    already. A download's own bar comes before, and is shown."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _tie_if_equal(model: PreTrainedModel) -> None:
    """Let the LM head share the embedding's matrix where the two are equal: some converters store
    it twice, and it would take memory twice."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if head is None or type(head) is not nn.Linear or head.weight is embedding.weight:
        return  # there is none, it is quantized, or it is shared already
    is_alike = head.weight.shape == embedding.weight.shape and head.bias is None
    if is_alike and torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight
        model.config.tie_word_embeddings = True


def prepare(model: PreTrainedModel) -> TargetFacts:
    """Make a model that is already in memory usable as a target, and return its facts; they are
    without the hashes of weights and tokenizer, which are made of files."""
    refuse_unsupported(model.config.to_dict())
    if model.config.model_type not in FAMILIES:
        refuse_unless_plain(model.config)
    model.set_attn_implementation(ATTENTION)
    model.eval()
    eos = None
    if model.generation_config:
        eos = model.generation_config.eos_token_id
    return facts_of(model.config, eos)


@contextlib.contextmanager
def without_foreign_warnings() -> Iterator[None]:
    """Silence the library's warnings, but not its errors. It warns of any folder with a large
    vocabulary that its tokenizer is wrong, because some of Mistral's were; and what is missing is
    checked here."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's folder, in the fast form that a `tokenizer.json` has."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
        raise UsageError(f"no tokenizer in {folder}: tokenizer.json is missing")
    check_files(folder)
    with _in_one_line(f"load the tokenizer in {folder}"), without_foreign_warnings():
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    if not tokenizer.is_fast:
        raise UnsupportedModelError(
            f"the tokenizer in {folder} has no tokenizer.json form, which the device needs"
        )
    # Whole texts are encoded, whatever the file says: its padding and its truncation are not part
    # of `tokenizer_hash`, so two files that differ in them must not encode differently.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def locate(
    source: str | Path, wanted: Sequence[str] = _WANTED, *, weights: bool = True, say: Say = _silent
) -> Path:
    """Return the folder of a model: `source` itself if it is one, the folder that a GGUF file is
    unpacked to, or for a hub id the copy in the hub's cache, which is downloaded if it is missing.

    `wanted` are patterns of the files to download. Without `weights` a GGUF file's folder may lack
    them, which saves unpacking. `say` is told of what takes long.
    """
    folder = expanded(source)
    if folder.is_dir():
        return folder
    if is_gguf(folder):
        return folder_of(folder, weights=weights, say=say)
    if folder.exists():
        raise UsageError(f"no model at {source}: it is neither a folder nor a GGUF file")
    if isinstance(source, Path):
        raise UsageError(f"no model at {source}: there is no such file or folder")
    return hub.copy_of(source, wanted)


def _quantization(
    kind: str, folder: Path, config: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    """The arguments with which the library quantizes a folder's weights to `kind` as it loads them
    onto the device. An error for another kind than those made here, for weights that are quantized
    already, or where the package for it is missing."""
    if kind not in QUANTIZED:
        raise ConfigError(f"unknown quantization {kind!r}", hint="the only one made here is int8")
    if "quantization_config" in config:
        raise UsageError(
            f"the weights in {folder} are quantized already", hint="leave --quantize out"
        )
    if find_spec("torchao") is None:
        raise UsageError("--quantize needs torchao", hint=how_to_install("quantize"))
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return {
        "quantization_config": TorchAoConfig(Int8WeightOnlyConfig()),
        "device_map": {"": device},
    }


def tokenizer_hash_of(source: str | Path) -> str:
    """The hash of a model's tokenizer, of which nothing else is read; empty where it has none."""
    if is_gguf(source):
        return hash_in_files(source)
    return _hash_tokenizer(locate(source, weights=False))


def _hash_tokenizer(folder: Path) -> str:
    """A hash of the meaning of a folder's tokenizer: two with the same hash encode texts alike.
    Empty where the folder has none, as a model that gets only ids needs none."""
    found = hash_in_folder(folder)
    if not found and (folder / "tokenizer.model").is_file():
        return tokenizer_hash(load_tokenizer(folder).backend_tokenizer.to_str())
    return found


def checked_device(device: str | torch.device) -> torch.device:
    """Return the device of this name, after putting one number onto it to see that it works; a
    `UsageError` where it does not."""
    try:
        found = torch.device(device)
        if found.type == "cuda":
            # cuDNN's attention plans anew for every shape, and lengths grow with every round.
            torch.backends.cuda.enable_cudnn_sdp(False)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"cannot use device {str(device)!r}: {first_line(error)}") from error
    return found


def read_partial_target(source: str | Path, *, borrowed: int = 0) -> LoadedModel:
    """Read of a model only what a drafter shares with it: embedding, head, final norm and the last
    `borrowed` layers; the other layers stay on disk. The small model that is returned cannot be run
    by itself; its facts are those of the whole model."""
    folder = locate(source)
    facts, config = _facts(folder)
    if not 0 <= borrowed <= facts.layers:
        raise UsageError(f"cannot borrow {borrowed} layers of a target that has {facts.layers}")
    with _in_one_line(f"read the config in {folder}"):
        model: Any = AutoModelForCausalLM.from_config(
            _shrunken(config, borrowed), attn_implementation=ATTENTION, dtype=torch.float32
        )
    # The name of each tensor in this small model, and in the target.
    names = {name: _name_in_target(name, facts.layers - borrowed) for name in model.state_dict()}
    embedding = _name_of_module(model, model.get_input_embeddings())
    head = _name_of_module(model, model.get_output_embeddings())
    if facts.tie_embeddings:
        names.pop(f"{head}.weight", None)  # it is not stored: it is the embedding
    found = _read(folder, names.values())
    for name, name_in_target in names.items():
        _set(model, name, nn.Parameter(found.pop(name_in_target).float(), requires_grad=False))
    if facts.tie_embeddings:
        _set(model, f"{head}.weight", model.get_parameter(f"{embedding}.weight"))
    return LoadedModel(model.eval(), facts, folder)


def _name_of_module(model: nn.Module, wanted: nn.Module) -> str:
    """The dotted name of a module within a model that holds it."""
    for name, module in model.named_modules():
        if module is wanted:
            return name
    raise ValueError(f"the model does not hold this {type(wanted).__name__}")


def read_facts(source: str | Path, *, identify: bool = True) -> tuple[TargetFacts, Path]:
    """The facts of a target, and its folder, without loading its weights. To `identify` them every
    byte is read once; otherwise configs and headers alone are."""
    folder = locate(source, weights=False)
    return _facts(folder, identify=identify)[0], folder


def read_shape(source: str | Path) -> tuple[TargetFacts, PretrainedConfig]:
    """The facts of a model without their identity, and the library's own config of it; no weights
    are read."""
    return _facts(locate(source, weights=False), identify=False)


def checked_shape(folder: Path) -> PretrainedConfig:
    """The library's config of the language model in a folder, which may be a part of a model that
    takes pictures or sound, too; an `UnsupportedModelError` unless it can be a target."""
    config = read_config(folder)
    values = text_part(config)
    refuse_unsupported(values)
    if values is not config and not TAKES_PARTS:
        raise UnsupportedModelError(
            f"{config.get('model_type')} takes more than text: its language model is taken out of it"
            " with transformers 5",
            hint="use the text-only checkpoint",
        )
    try:
        shape = AutoConfig.for_model(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnsupportedModelError(
            f"{values.get('model_type')} is no family that is known here: {first_line(error)[:200]}",
            hint=f"known: {', '.join(FAMILIES)}",
        ) from None
    if shape.model_type not in FAMILIES:
        refuse_unsupported(shape.to_dict())  # what its file leaves to the library's defaults
        refuse_unless_plain(shape)
    return shape


def _facts(folder: Path, *, identify: bool = True) -> tuple[TargetFacts, PretrainedConfig]:
    """The dimensions of a folder's language model, and the library's config of it. To `identify`
    its weights, which is a part of the facts, every byte of them is hashed."""
    with _in_one_line(f"read the config in {folder}"):
        config = checked_shape(folder)
        facts = facts_of(config, _end_tokens(folder, config))
    if identify:
        facts = dataclasses.replace(facts, weights_id=weights_id(folder, facts))
    return facts, config


def _shrunken(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """The config of a model with only the last layers and a vocabulary of one, so that unused parts
    cost no memory."""
    values = config.to_dict() | {"num_hidden_layers": layers, "vocab_size": 1}
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        values[name] = None  # the library complains of ids that are not in the vocabulary
    if kinds := values.get("layer_types"):
        values["layer_types"] = kinds[len(kinds) - layers :]
    return type(config).from_dict(values)


def _name_in_target(name: str, skipped: int) -> str:
    """The name that a tensor of the small model, which has only the target's last layers, has in
    the target: its layer 0 is the target's layer `skipped`."""
    before, found, after = name.partition(".layers.")
    if not found:
        return name
    index, _, rest = after.partition(".")
    return f"{before}.layers.{int(index) + skipped}.{rest}"


def _read(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Read these tensors of a folder's language model, and no others, into memory."""
    tensors = stored_tensors(folder)
    stored = text_names(tensors)
    wanted = list(names)
    if missing := sorted(set(wanted) - set(stored)):
        raise UsageError(
            f"the weights in {folder} lack {len(missing)} tensors, {missing[0]} among them"
        )
    found = {}
    for name in wanted:
        with safe_open(tensors[stored[name]].path, framework="pt") as file:
            found[name] = file.get_tensor(stored[name])
    return found


def _set(model: nn.Module, name: str, value: nn.Parameter) -> None:
    """Replace the parameter of this dotted name in a model."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, value)


def _end_tokens(folder: Path, config: PretrainedConfig) -> int | list[int] | None:
    """The tokens that end an answer, as the folder's generation settings say them, or else its
    config: one, several, or None."""
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    return getattr(config, "eos_token_id", None)
