"""`edge-client inspect`: the contents of a bundle."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import msgspec
from rich.table import Table

from edge_client.cli import options
from edge_client.device import embedded_bundle
from edge_client.screen.views import make_console
from moa.bundle import Bundle
from moa.graph.load import dynamic_variants
from moa.manifest import Calibration
from moa.safe_text import safe_line


def add(command: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    command.description = "Show what a bundle holds."
    command.add_argument("--json", action="store_true", help="print the manifest as JSON")
    options.add_connection(command)


def run(arguments: argparse.Namespace) -> int:
    """Print what the bundle holds: target, drafter, tokenizer, variants, and how well its drafter
    writes alone."""
    settings = options.settings_from(arguments)
    bundle = Bundle.open(settings.bundle or embedded_bundle())
    manifest = bundle.manifest
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(manifest), indent=2).decode())
        return 0
    console = make_console()
    for line in _facts(bundle):
        console.print(safe_line(line))
    console.print(_variants(bundle))
    if manifest.calibration is not None:
        for line in _agreement_alone(manifest.calibration):
            console.print(safe_line(line))
    return 0


def _facts(bundle: Bundle) -> Iterator[str]:
    """Yield what the bundle was made from, a line each."""
    manifest = bundle.manifest
    target = manifest.target
    facts = target.facts
    drafter = manifest.drafter
    vocabulary = manifest.vocabulary
    yield f"bundle    {bundle.folder}"
    yield f"target    {target.source}: {facts.family}, {facts.layers} layers, hidden {facts.hidden_size}"
    yield f"drafter   {drafter.kind} from {drafter.source}, weights {drafter.weights_id[:12]}"
    yield f"tokenizer {manifest.tokenizer.hash[:12]}, {vocabulary.draft} of {vocabulary.target} tokens"
    if manifest.records is not None:
        yield f"records   {manifest.records.numbers} numbers a token"


def _variants(bundle: Bundle) -> Table:
    """Returns a table of the forms in which the bundle has its drafter."""
    manifest = bundle.manifest
    table = Table("variant", "precision", "MB", "runtime", "runs here", "agreement")
    here = dynamic_variants(bundle)
    for name, variant in sorted(manifest.variants.items()):
        agreement = f"{variant.agreement.top1_same:.3f}" if variant.agreement else ""
        default = " (default)" if name == manifest.default_variant else ""
        runs = "yes" if name in here else "no"
        size = f"{variant.size / 1e6:.1f}"
        cells = (name + default, variant.precision, size, variant.runtime, runs, agreement)
        table.add_row(*map(safe_line, cells))
    return table


def _agreement_alone(calibration: Calibration) -> Iterator[str]:
    """Yield how often the drafter agrees with the target where it writes alone, by the length of
    that text: after the link was cut, and from the start."""
    curves = {"after cut": calibration.offline, "cold": calibration.cold}
    for name, curve in curves.items():
        if curve is not None:
            pairs = zip(curve.lengths, curve.agreement, strict=True)
            shares = ", ".join(f"{share:.2f} up to {length}" for length, share in pairs)
            yield f"{name:9} {shares}"
