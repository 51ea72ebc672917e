"""A bundle's card, its `README.md`: what its manifest says, for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from export.atomic_folder import gigabytes
from moa.manifest import Manifest, Offline, Variant


def model_card(manifest: Manifest) -> str:
    """The bundle's `README.md`."""
    return "\n".join(_lines(manifest)) + "\n"


def _lines(manifest: Manifest) -> Iterator[str]:
    """Yield the card's lines: what the bundle is, its variants, step times and calibration."""
    yield f"# Drafter for {manifest.target.source}"
    yield ""
    yield from _introduction(manifest)
    yield ""
    yield from _facts(manifest)
    yield ""
    yield "## Variants"
    yield ""
    yield from _variants(manifest)
    yield ""
    yield from _times(manifest)
    yield from _calibration(manifest)


def _introduction(manifest: Manifest) -> Iterator[str]:
    """Yield what a drafter is, and where the card's figures come from."""
    if manifest.records:
        yield "A drafter: a small language model that guesses what its target will say, from the"
        yield "text alone or with the target's activations as they trickle in. A verifier that runs the target makes"
        yield "the result exact."
    else:
        yield "A small language model that drafts for a larger one, without its activations."
    yield "Made by `moa-export`; every figure below was measured when it was built, none is typed in by hand."


def _facts(manifest: Manifest) -> Iterator[str]:
    """Yield the table of what the bundle was made of."""
    facts = manifest.target.facts
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
    tools = ", ".join(f"{name} {version}" for name, version in manifest.producer.items())
    yield f"| made | {manifest.created}, {tools} |"


def _variants(manifest: Manifest) -> Iterator[str]:
    """Yield the table of variants, and how each was checked."""
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


def _table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """The lines of a table."""
    yield _table_line(header)
    yield "|---" * len(header) + "|"
    for cells in rows:
        yield _table_line(cells)


def _table_line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def _row(name: str, variant: Variant) -> list[object]:
    """Returns the cells of the table's row for a variant."""
    agreement = variant.agreement
    quality = ["not measured", ""]
    if agreement:
        quality = [f"{agreement.acceptance:.2f}", f"{agreement.acceptance_ratio:.3f}"]
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
    """Yield the table of step times, for the variants whose steps were timed."""
    timed = [
        (name, variant.step_times)
        for name, variant in manifest.variants.items()
        if variant.step_times
    ]
    if not timed:
        return
    _, first_times = timed[0]
    columns = [f"T={time.tokens}, {time.threads} thread" for time in first_times]
    rows = [(name, *_shown(time.ms for time in times)) for name, times in timed]
    yield "## Step time on the machine that built it, ms"
    yield ""
    yield from _table(("variant", *columns), rows)
    yield ""


def _calibration(manifest: Manifest) -> Iterator[str]:
    """Yield what was measured on held-out prompts: acceptance by depth, and offline text by its
    length."""
    measured = manifest.calibration
    if measured is None:
        yield "Acceptance and offline agreement were not measured: no held-out prompts were given."
        return
    yield (
        f"## Measured on {measured.prompts} held-out prompts ({measured.source}),"
        f" {measured.tokens} tokens"
    )
    yield ""
    chain = _shown(measured.acceptance.chain)
    tree = _shown(measured.acceptance.tree)
    depths = range(1, len(tree) + 1)
    yield from _table(("accepted drafts at least", *depths), (("chain", *chain), ("tree", *tree)))
    yield from _offline("after the link was lost", measured.offline)
    if measured.cold is not None:
        yield from _offline("asked without a network", measured.cold)


def _offline(when: str, curve: Offline) -> Iterator[str]:
    """The quality of offline text by its length."""
    agreement = ("agreement with the target", *_shown(curve.agreement))
    unbroken = ("text still the target's own", *_shown(curve.unbroken))
    yield ""
    yield from _table((f"{when}, tokens", *curve.lengths), (agreement, unbroken))


def _shown(figures: Iterable[float]) -> list[str]:
    """Figures with two places."""
    return [f"{figure:.2f}" for figure in figures]
