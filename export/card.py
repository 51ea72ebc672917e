"""The bundle's README: a model card, generated from its manifest and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from export.atomic_folder import gigabytes
from moa.manifest import Acceptance, Manifest, Offline, Variant


def model_card(manifest: Manifest) -> str:
    """Markdown."""
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
