"""Cut the link at random bytes, over and over, and compare every text with the target's own: nothing lost or doubled.

python -m benchmarks.client_cuts --cuts 200 --json benchmarks/results/client_cuts.json
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import sys
from collections import Counter
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from benchmarks import client_kit
from benchmarks.client_truth import Truth, read
from benchmarks.provenance import write_result
from edge_client.client import EdgeClient
from edge_client.settings import ClientSettings
from edge_client.tools.emulated_network import PROFILES, LinkProxy
from edge_client.turn.controller import WhoDrafts
from moa.errors import MoaError, run_cli
from moa.sampling import SamplingSettings

_SOON: dict[str, Any] = {
    "offline_after": 0.15,
    "reconnect_seconds": 0.05,
    "settle_seconds": 60.0,
}


_FIGURES = ("client_cuts", "answers", "sampled", "different", "ties", "not_verified")
_COUNTED = {"tokens": "tokens", "offline_tokens": "offline_tokens", "retracted_tokens": "retracted"}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Answer prompts until the links were cut so often; greedy and sampled, device- and server-drafted in turn."""
    device, _, prompts = client_kit.load(options)
    truth = Truth(options.target, eos_ids=device.codec.eos_ids, tokens=options.tokens)
    figures: Counter[str] = Counter()
    numbers = count()
    async with client_kit.address(options) as url:

        async def keep_asking() -> None:
            while figures["client_cuts"] < options.cuts:
                await ask(next(numbers))

        async def ask(number: int) -> None:
            """One conversation over a link of its own: a cut should be its own too."""
            ids, rng = prompts[number % len(prompts)], random.Random(f"{options.seed} {number}")
            draft: WhoDrafts = "server" if number % 2 else "device"
            sampling = (
                SamplingSettings(temperature=0.8, top_p=0.95, seed=number) if number % 4 > 1 else SamplingSettings()
            )
            parts = urlsplit(url)
            settings = ClientSettings(
                draft=draft, max_new_tokens=options.tokens, **dataclasses.asdict(sampling), **_SOON
            )
            async with (
                LinkProxy(parts.hostname or "", parts.port or 0, PROFILES[options.link], seed=number) as link,
                EdgeClient(settings, verifier=link.url, device=device) as client,
            ):
                cutting = asyncio.create_task(_keep_cutting(link, rng, options.most_bytes))
                said = await read(client, ids)
                cutting.cancel()
                await asyncio.gather(cutting, return_exceptions=True)
                assert client.link is not None
                figures["client_cuts"] += max(0, client.link.connections - 1)
            assert said.done is not None
            figures["answers"] += 1
            figures["sampled"] += not sampling.greedy
            figures["ties"] += (outcome := truth.judge(ids, sampling, said.tokens)) == "tie"
            figures["different"] += outcome == "different"
            figures["not_verified"] += not all(said.verified)
            for name, stat in _COUNTED.items():
                figures[name] += said.done.stats[stat]
            print(f"{figures['client_cuts']} cuts, {figures['answers']} answers, {outcome}", file=sys.stderr)

        await asyncio.gather(*(keep_asking() for _ in range(options.at_once)))
    return {name: figures[name] for name in (*_FIGURES, *_COUNTED)}


async def _keep_cutting(link: LinkProxy, rng: random.Random, most: int) -> None:
    """Cut nearly every connection somewhere in what it carries."""
    seen = 0
    while True:
        if link.connections > seen:
            seen = link.connections
            if rng.random() < 0.85:
                link.cut_after(rng.randrange(100, most), rng.choice(["up", "down"]))
        await asyncio.sleep(0.002)


def main() -> int:
    """Measure; exit code 1 when a text differed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    client_kit.add_flags(parser)
    parser.add_argument("--cuts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--link", choices=sorted(PROFILES), default="loopback")
    parser.add_argument("--most-bytes", type=int, default=1500, help="a connection is cut within so many bytes")
    parser.add_argument("--at-once", type=int, default=8, metavar="N", help="conversations (default: %(default)s)")
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    write_result(options.json, result)
    print(
        f"{result['client_cuts']} cuts of the link at random bytes in {result['answers']} answers ({result['tokens']} "
        f"tokens; {result['sampled']} of the answers sampled, half of all drafted by the server), policy `rewind`: "
        f"{result['different']} texts differ from the target's own, {result['ties']} part at a numerical tie, "
        f"{result['not_verified']} are not wholly verified; no token was told twice or left out. "
        f"{result['offline_tokens']} tokens were written offline, {result['retracted_tokens']} of them withdrawn."
    )
    if result["different"] or result["not_verified"]:
        raise MoaError("a text is not the target's own")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.client_cuts", main))
