"""The manifest's entries for a bundle's parts; the files that all variants share are written for
theirs."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from export.kinds import VariantKind
from export.source import Source
from export.variants import Made, this_runtime
from moa.bundle import OLDEST_WITH_LINEAR_ATTENTION, OPSETS
from moa.drafters.registry import PREFIX
from moa.graph.step import open_session
from moa.manifest import StepTime, TokenizerFiles, Variant, Vocabulary
from moa.process.user_folders import expanded

_TOOLS = (
    "moa-edge",
    "torch",
    "transformers",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "optimum",
    "optimum-onnx",
    "numpy",
)
_MAP = "shared/draft_to_target.npy"


def tool_versions() -> dict[str, str]:
    """Versions of the tools that built it."""
    found = {"python": platform.python_version()}
    for name in _TOOLS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def public_name(source: str) -> str:
    """What a bundle says of where a model came from: a hub id as it is, of a folder only its name, to
    keep local paths private."""
    prefix = PREFIX if source.startswith(PREFIX) else ""
    name = source.removeprefix(prefix)
    folder = expanded(name)
    if folder.exists():
        name = folder.resolve().name
    return prefix + name


def _oldest_runtime(kind: VariantKind, session: Any, model: Path) -> str:
    """The oldest onnxruntime that runs a graph: by its opset, or by the one operator that needs a
    newer runtime, which graphs with running states may have."""
    if any(value.name.startswith("past_state_") for value in session.get_inputs()):
        nodes = onnx.load(model, load_external_data=False).graph.node
        if any(node.op_type == "LinearAttention" for node in nodes):
            return OLDEST_WITH_LINEAR_ATTENTION
    return OPSETS[kind.opset]


def describe(
    kind: VariantKind, made: Made, folder: Path, *, parity: float, times: Sequence[StepTime] = ()
) -> Variant:
    """Returns a variant's entry of the manifest. `folder` is the bundle's; `parity` is the largest
    error against torch, which only the float32 variant is said to have; `times` are steps timed
    here."""
    session = open_session(made.files[0])
    return Variant(
        model=made.files[0].relative_to(folder).as_posix(),
        files=tuple(file.relative_to(folder).as_posix() for file in made.files),
        runtime=kind.runtime,
        precision=made.precision,
        form=kind.form,
        opset=kind.opset,
        min_onnxruntime=_oldest_runtime(kind, session, made.files[0]),
        size=sum(file.stat().st_size for file in made.files),
        checked=made.checked,
        checked_with=made.checked_with or this_runtime(),
        inputs={value.name: tuple(value.shape) for value in session.get_inputs()},
        outputs={value.name: tuple(value.shape) for value in session.get_outputs()},
        parity=float(f"{parity:.2e}") if kind.name == "cpu-fp32" else None,
        agreement=made.agreement,
        step_times=tuple(times),
        notes=made.notes,
    )


def write_shared(
    source: Source, chosen: NDArray[np.int64] | None, folder: Path
) -> tuple[TokenizerFiles, Vocabulary]:
    """Write what all variants share into the bundle's folder: tokenizer, chat template, and the
    target's ids `chosen` that can be drafted (None: all). Returns the manifest's entries for
    them."""
    shared = folder / "shared"
    shared.mkdir()
    (shared / "tokenizer.json").write_bytes(source.tokenizer.json)
    template = source.tokenizer.chat_template
    if template:
        (shared / "chat_template.jinja").write_text(template, encoding="utf-8")
    if chosen is not None:
        np.save(folder / _MAP, chosen, allow_pickle=False)
    tokenizer = TokenizerFiles(
        hash=source.tokenizer.hash,
        file="shared/tokenizer.json",
        chat_template="shared/chat_template.jinja" if template else None,
        bos_id=source.facts.bos_id,
        eos_ids=source.facts.eos_ids,
        special_tokens=source.tokenizer.special_tokens,
    )
    whole = source.facts.vocab_size
    if chosen is None:
        return tokenizer, Vocabulary(target=whole, draft=whole, map=None)
    return tokenizer, Vocabulary(target=whole, draft=len(chosen), map=_MAP)
