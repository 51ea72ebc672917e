"""Run the link emulator in front of a service: `python -m benchmarks.link --to 127.0.0.1:8765 --profile 4g`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from edge_client.tools.emulated_network import PROFILES, LinkProxy, Profile, read_trace
from moa.errors import UsageError, run_cli


async def serve(host: str, port: int, profile: Profile) -> None:
    """Carry connections until interrupted."""
    async with LinkProxy(host, port, profile) as link:
        print(f"{link.url} -> {host}:{port} as {profile.name}", flush=True)
        await asyncio.Event().wait()


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", required=True, metavar="HOST:PORT", help="the service behind the link")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="4g")
    parser.add_argument("--trace", type=Path, help="replay a recorded link (CSV) instead of a profile")
    options = parser.parse_args()

    def run() -> None:
        host, _, port = options.to.rpartition(":")
        if not host or not port.isdecimal():
            raise UsageError(f"--to must be HOST:PORT, not {options.to!r}")
        profile = read_trace(options.trace) if options.trace else PROFILES[options.profile]
        asyncio.run(serve(host, int(port), profile))

    return run_cli("benchmarks.link", run)


if __name__ == "__main__":
    sys.exit(main())
