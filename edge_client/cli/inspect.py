"""`edge-client inspect`: the contents of a bundle."""

from __future__ import annotations

import argparse

import msgspec
from rich.table import Table

from edge_client.cli import options
from edge_client.device import embedded_bundle
from edge_client.screen.views import make_console
from moa.bundle import Bundle
from moa.graph.load import dynamic_variants
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

    def say(line: str) -> None:
        console.print(safe_line(line))

    facts = manifest.target.facts
    say(f"bundle    {bundle.folder}")
    say(
        f"target    {manifest.target.source}: {facts.family}, {facts.layers} layers, hidden {facts.hidden_size}"
    )
    say(
        f"drafter   {manifest.drafter.kind} from {manifest.drafter.source}, weights {manifest.drafter.weights_id[:12]}"
    )
    say(
        f"tokenizer {manifest.tokenizer.hash[:12]}, {manifest.vocabulary.draft} of {manifest.vocabulary.target} tokens"
    )
    if manifest.records is not None:
        say(f"records   {manifest.records.numbers} numbers a token")
    table = Table("variant", "precision", "MB", "runtime", "runs here", "agreement")
    here = dynamic_variants(bundle)
    for name, variant in sorted(manifest.variants.items()):
        agreement = f"{variant.agreement.top1_same:.3f}" if variant.agreement else ""
        default = " (default)" if name == manifest.default_variant else ""
        runs = "yes" if name in here else "no"
        size = f"{variant.size / 1e6:.1f}"
        cells = (name + default, variant.precision, size, variant.runtime, runs, agreement)
        table.add_row(*map(safe_line, cells))
    console.print(table)
    if manifest.calibration is not None:
        for name, curve in (
            ("after cut", manifest.calibration.offline),
            ("cold", manifest.calibration.cold),
        ):
            if curve is not None:
                pairs = zip(curve.lengths, curve.agreement, strict=True)
                say(
                    f"{name:9} "
                    + ", ".join(f"{share:.2f} up to {length}" for length, share in pairs)
                )
    return 0
