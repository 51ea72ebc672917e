"""An emulated link in front of a service: `python -m benchmarks.kit.link --to ws://127.0.0.1:8765
--profile 4g`."""

from __future__ import annotations

import argparse
import asyncio
import sys

from benchmarks.kit.lab import link_to
from edge_client.tools.emulated_network import PROFILES
from moa.errors import run_cli


async def serve(url: str, profile: str) -> None:
    """Carry connections until interrupted."""
    async with link_to(url, PROFILES[profile]) as link:
        print(f"{link.url} -> {url} as {profile}", flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--to", required=True, metavar="ws://HOST:PORT", help="the service behind the link"
    )
    parser.add_argument("--profile", choices=sorted(PROFILES), default="4g")
    options = parser.parse_args()
    asyncio.run(serve(options.to, options.profile))


if __name__ == "__main__":
    sys.exit(run_cli("benchmarks.kit.link", main))
