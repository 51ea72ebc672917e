"""A bundle's card, its `README.md`: what its manifest says, for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from export.atomic_folder import gigabytes
from moa.manifest import Manifest, Variant


def model_card(manifest: Manifest) -> str:
    """The bundle's `README.md`."""
    return "\n".join(_lines(manifest)) + "\n"


def _lines(manifest: Manifest) -> Iterator[str]:
    facts = manifest.target.facts
    yield f"# Drafter for {manifest.target.source}"
    yield ""
    if manifest.records:
        yield "A drafter: a small language model that guesses what its target will say, from the"
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
        yield f"| activation record | {manifest.records.numbers} numbers a token |"
    yield f"| made | {manifest.created}, {', '.join(f'{k} {v}' for k, v in manifest.producer.items())} |"
    yield ""
    yield "## Variants"
    yield ""
    columns = (
        "runtime",
        "precision",
        "form",
        "opset",
        "size",
        "checked",
        "acceptance length",
        "of fp32",
    )
    yield from _table(
        ("variant", *columns), [_row(name, variant) for name, variant in manifest.variants.items()]
    )
    yield ""
    for name, variant in manifest.variants.items():
        yield f"* **{name}**: {variant.checked} with {variant.checked_with}. {variant.notes}".rstrip()
    yield ""
    yield from _times(manifest)
    yield from _calibration(manifest)


def _table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    for number, cells in enumerate((header, *rows)):
        yield f"| {' | '.join(map(str, cells))} |"
        if number == 0:
            yield "|---" * len(cells) + "|"


def _row(name: str, variant: Variant) -> list[object]:
    found = variant.agreement
    quality = (
        [f"{found.acceptance:.2f}", f"{found.acceptance_ratio:.3f}"]
        if found
        else ["not measured", ""]
    )
    size = gigabytes(variant.size)
    return [
        name,
        variant.runtime,
        variant.precision,
        variant.form,
        variant.opset,
        size,
        variant.checked,
        *quality,
    ]


def _times(manifest: Manifest) -> Iterator[str]:
    timed = {
        name: variant.step_times
        for name, variant in manifest.variants.items()
        if variant.step_times
    }
    if not timed:
        return
    columns = [f"T={time.tokens}, {time.threads} thread" for time in next(iter(timed.values()))]
    yield "## Step time on the machine that built it, ms"
    yield ""
    yield from _table(
        ("variant", *columns),
        [(name, *_shown(t.ms for t in times)) for name, times in timed.items()],
    )
    yield ""


def _calibration(manifest: Manifest) -> Iterator[str]:
    found = manifest.calibration
    if found is None:
        yield "Acceptance and offline agreement were not measured: no held-out prompts were given."
        return
    yield f"## Measured on {found.prompts} held-out prompts ({found.source}), {found.tokens} tokens"
    yield ""
    chain = _shown(found.acceptance.chain)
    tree = _shown(found.acceptance.tree)
    yield from _table(
        ("accepted drafts at least", *range(1, len(tree) + 1)), (("chain", *chain), ("tree", *tree))
    )
    for when, curve in (
        ("after the link was lost", found.offline),
        ("asked without a network", found.cold),
    ):
        if curve is not None:
            agreement = _shown(curve.agreement)
            unbroken = _shown(curve.unbroken)
            yield ""
            yield from _table(
                (f"{when}, tokens", *curve.lengths),
                (
                    ("agreement with the target", *agreement),
                    ("text still the target's own", *unbroken),
                ),
            )


def _shown(figures: Iterable[float]) -> list[str]:
    return [f"{figure:.2f}" for figure in figures]
