"""`edge-client list`: the bundles on this device."""

from __future__ import annotations

import argparse

from rich.table import Table

from edge_client.bundles.store import EMBEDDED, installed, locate
from edge_client.cli import options
from edge_client.device import embedded_bundle
from edge_client.screen.views import make_console
from moa.bundle import Bundle
from moa.errors import BundleError
from moa.safe_text import safe_line


def add(command: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    command.description = "The bundles that are here; * marks the one in use."
    command.add_argument("--json", action="store_true", help="print them as JSON")
    options.add_config(command)


def run(arguments: argparse.Namespace) -> int:
    """Print the bundles on this device, with a mark at the one in use."""
    in_use = options.settings_from(arguments).bundle
    found: list[tuple[str, Bundle | BundleError]] = [
        (EMBEDDED, Bundle.open(embedded_bundle())),
        *installed(),
    ]
    rows = [
        {"name": name, "in_use": locate(name) == in_use, **_about(bundle)} for name, bundle in found
    ]
    if arguments.json:
        options.print_json(rows)
        return 0
    table = Table("", "name", "target", "MB", "variants")
    for row in rows:
        cells = (row["name"], row["target"], f"{row['megabytes']:.1f}", row["variants"])
        table.add_row("*" if row["in_use"] else "", *(safe_line(str(cell)) for cell in cells))
    make_console().print(table)
    return 0


def _about(bundle: Bundle | BundleError) -> dict[str, str | float]:
    """Returns the table's cells for one bundle; for one that cannot be opened, the error in place
    of its target."""
    if isinstance(bundle, BundleError):
        return {"target": bundle.line(), "megabytes": 0.0, "variants": ""}
    manifest = bundle.manifest
    size = sum(entry.size for entry in manifest.files.values()) / 1e6
    return {
        "target": manifest.target.source,
        "megabytes": size,
        "variants": ", ".join(sorted(manifest.variants)),
    }
