"""The manifest's entries for a bundle's parts, and the files that all variants share."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from export.kinds import VariantKind
from export.runner import open_session
from export.source import INDEPENDENT, Source
from export.variants import Made
from moa.bundle import OPSETS
from moa.manifest import Agreement, StepTime, TokenizerFiles, Variant, Vocabulary

_TOOLS = ("moa-edge", "torch", "transformers", "onnx", "onnxscript", "onnxruntime", "optimum", "optimum-onnx", "numpy")
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
    """A hub id as it is; of a folder only its name, to keep local paths private."""
    prefix = INDEPENDENT if source.startswith(INDEPENDENT) else ""
    rest = source.removeprefix(prefix)
    folder = Path(rest).expanduser()
    return prefix + (folder.resolve().name if folder.exists() else rest)


def this_runtime() -> str:
    """The runtime on which a dynamic form is run at build time."""
    return f"onnxruntime {onnxruntime.__version__}, CPUExecutionProvider, {platform.system()} {platform.machine()}"


def describe(
    kind: VariantKind,
    made: Made,
    folder: Path,
    *,
    parity: float,
    agreement: Agreement | None,
    times: Sequence[StepTime] = (),
) -> Variant:
    """A variant's entry."""
    inputs, outputs = _signature(made.files[0])
    return Variant(
        model=made.files[0].relative_to(folder).as_posix(),
        files=tuple(file.relative_to(folder).as_posix() for file in made.files),
        runtime=kind.runtime,
        precision=made.precision,
        form=kind.form,
        opset=kind.opset,
        min_onnxruntime=OPSETS[kind.opset],
        size=sum(file.stat().st_size for file in made.files),
        checked=made.checked,
        checked_with=made.checked_with or this_runtime(),
        inputs=inputs,
        outputs=outputs,
        parity=float(f"{parity:.2e}") if kind.name == "cpu-fp32" else None,
        agreement=agreement,
        step_times=tuple(times),
        notes=made.notes,
    )


@dataclass(frozen=True)
class SharedParts:
    """What all variants share."""

    tokenizer: TokenizerFiles
    vocabulary: Vocabulary


def write_shared(source: Source, chosen: NDArray[np.int64] | None, folder: Path) -> SharedParts:
    """Write tokenizer, chat template, and draft vocabulary."""
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
    draft = source.facts.vocab_size if chosen is None else len(chosen)
    vocabulary = Vocabulary(target=source.facts.vocab_size, draft=draft, map=None if chosen is None else _MAP)
    return SharedParts(tokenizer, vocabulary)


def _signature(model: Path) -> tuple[dict[str, tuple[int | str, ...]], dict[str, tuple[int | str, ...]]]:
    if model.suffix == ".onnx":
        graph = onnx.load(model, load_external_data=False).graph
        sides = [
            {v.name: tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim) for v in values}
            for values in (graph.input, graph.output)
        ]
        return sides[0], sides[1]
    session = open_session(model)
    return (
        {v.name: tuple(v.shape) for v in session.get_inputs()},
        {v.name: tuple(v.shape) for v in session.get_outputs()},
    )
