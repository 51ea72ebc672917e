"""`edge-client page`: the device as a web app."""

from __future__ import annotations

import argparse
from pathlib import Path

from edge_client.bundles.store import locate
from edge_client.cli.options import say
from edge_client.device import embedded_bundle


def add(command: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    command.description = (
        "Write a folder of static files: the chat page, with a bundle and what runs it in a browser. Any web server "
        "can serve it. It gets three packages with npm."
    )
    command.add_argument("out", type=Path, help="the folder; one of an earlier call is replaced")
    command.add_argument(
        "--bundle", default="", metavar="NAME_OR_DIR", help="default: the embedded one"
    )
    command.add_argument(
        "--variant", default="", metavar="NAME", help="default: web, or else cpu-int8"
    )
    command.add_argument(
        "--verifier",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="the endpoint of `cloud-verifier serve --openai`: https://HOST:PORT, or / where it "
        "serves the page itself; several times: the user chooses in the settings; without one the "
        "page only writes alone",
    )
    command.add_argument(
        "--packages", type=Path, metavar="DIR", help="the packages' archives, without npm"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the web app, and print its size."""
    from edge_client.tools.web_app import WebAppSettings, build_web_app

    bundle = locate(arguments.bundle)
    settings = WebAppSettings(
        out=arguments.out,
        bundle=Path(bundle) if bundle else embedded_bundle(),
        demo=not bundle,
        variant=arguments.variant,
        verifiers=tuple(arguments.verifier),
        packages=arguments.packages,
    )
    size = build_web_app(settings, say)
    say(f"{arguments.out} is the app: {size / 1e6:.1f} MB for a first visit, none for the next")
    return 0
