"""The manifest's entries for a bundle's parts, the files that all variants share, and the card."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from export.atomic_folder import gigabytes
from export.kinds import VariantKind
from export.runner import open_session
from export.source import INDEPENDENT, Source
from export.variants import Made, this_runtime
from moa.bundle import OPSETS
from moa.manifest import Acceptance, Manifest, Offline, StepTime, TokenizerFiles, Variant, Vocabulary

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


def describe(kind: VariantKind, made: Made, folder: Path, *, parity: float, times: Sequence[StepTime] = ()) -> Variant:
    """A variant's entry."""
    session = open_session(made.files[0])
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
        inputs={value.name: tuple(value.shape) for value in session.get_inputs()},
        outputs={value.name: tuple(value.shape) for value in session.get_outputs()},
        parity=float(f"{parity:.2e}") if kind.name == "cpu-fp32" else None,
        agreement=made.agreement,
        step_times=tuple(times),
        notes=made.notes,
    )


def write_shared(source: Source, chosen: NDArray[np.int64] | None, folder: Path) -> tuple[TokenizerFiles, Vocabulary]:
    """Write what all variants share: tokenizer, chat template, and draft vocabulary."""
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
    return tokenizer, Vocabulary(target=source.facts.vocab_size, draft=draft, map=None if chosen is None else _MAP)


def model_card(manifest: Manifest) -> str:
    """The bundle's `README.md`."""
    return "\n".join(_lines(manifest)) + "\n"


def _lines(manifest: Manifest) -> Iterator[str]:
    facts = manifest.target.facts
    yield f"# Drafter for {manifest.target.source}"
    yield ""
    if manifest.records:
        yield "A Mixture-of-Attentions drafter: a small language model that guesses what its target will say, from the"
        yield "text alone or with the target's activations as they trickle in. A verifier that runs the target makes"
        yield "the result exact."
    else:
        yield "A small language model that drafts for a larger one, without its activations."
    yield "Made by `moa-export`; every figure below was measured when it was built, none is typed in by hand."
    yield ""
    yield "| | |"
    yield "|---|---|"
    shape = f"{facts.family}, {facts.layers} layers, hidden size {facts.hidden_size}"
    yield f"| target | {manifest.target.source}: {shape} |"
    yield f"| drafter | {manifest.drafter.source} ({manifest.drafter.kind}), `{manifest.drafter.weights_id[:16]}` |"
    yield f"| tokenizer | `{manifest.tokenizer.hash[:16]}` |"
    yield f"| vocabulary | {manifest.vocabulary.target}, of which {manifest.vocabulary.draft} can be drafted |"
    yield f"| cache layers | {len(manifest.cache)} |"
    if manifest.records:
        width = 2 * manifest.records.kv_heads * manifest.records.head_dim
        yield f"| activation record | {width} numbers a token |"
    yield f"| made | {manifest.created}, {', '.join(f'{k} {v}' for k, v in manifest.producer.items())} |"
    yield ""
    yield "## Variants"
    yield ""
    yield "| variant | runtime | precision | form | opset | size | checked | acceptance length | of fp32 |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, variant in manifest.variants.items():
        yield _row(name, variant)
    yield ""
    for name, variant in manifest.variants.items():
        yield f"* **{name}**: {variant.checked} with {variant.checked_with}. {variant.notes}".rstrip()
    yield ""
    yield from _times(manifest)
    yield from _calibration(manifest)


def _row(name: str, variant: Variant) -> str:
    agreement = variant.agreement
    quality = (
        (f"{agreement.acceptance:.2f}", f"{agreement.acceptance_ratio:.3f}") if agreement else ("not measured", "")
    )
    cells = (name, variant.runtime, variant.precision, variant.form, str(variant.opset), gigabytes(variant.size))
    return "| " + " | ".join((*cells, variant.checked, *quality)) + " |"


def _times(manifest: Manifest) -> Iterator[str]:
    timed = {name: variant.step_times for name, variant in manifest.variants.items() if variant.step_times}
    if not timed:
        return
    columns = [(time.tokens, time.threads) for time in next(iter(timed.values()))]
    yield "## Step time on the machine that built it, ms"
    yield ""
    yield "| variant | " + " | ".join(f"T={tokens}, {threads} thread" for tokens, threads in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, times in timed.items():
        yield f"| {name} | " + " | ".join(f"{time.ms:.2f}" for time in times) + " |"
    yield ""


def _calibration(manifest: Manifest) -> Iterator[str]:
    found = manifest.calibration
    if found is None:
        yield "Acceptance and offline agreement were not measured: no held-out prompts were given."
        return
    yield f"## Measured on {found.prompts} held-out prompts ({found.source}), {found.tokens} tokens"
    yield ""
    yield from _accepted("accepted drafts at least", found.acceptance)
    yield ""
    yield from _alone("after the link was lost, tokens", found.offline)
    if found.cold is not None:
        yield ""
        yield from _alone("asked without a network, tokens", found.cold)


def _accepted(what: str, found: Acceptance) -> Iterator[str]:
    depth = max(len(found.chain), len(found.tree))
    yield f"| {what} | " + " | ".join(map(str, range(1, depth + 1))) + " |"
    yield "|---" * (depth + 1) + "|"
    for name, reached in (("chain", found.chain), ("tree", found.tree)):
        cells = [f"{share:.2f}" for share in reached] + [""] * (depth - len(reached))
        yield f"| {name} | " + " | ".join(cells) + " |"


def _alone(when: str, curve: Offline) -> Iterator[str]:
    yield f"| {when} | " + " | ".join(map(str, curve.lengths)) + " |"
    yield "|---" * (len(curve.lengths) + 1) + "|"
    yield "| agreement with the target | " + " | ".join(f"{share:.2f}" for share in curve.agreement) + " |"
    yield "| text still the target's own | " + " | ".join(f"{share:.2f}" for share in curve.unbroken) + " |"
