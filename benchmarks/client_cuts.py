"""Cut the link at random bytes, over and over, and compare every text with the target's own: nothing lost or doubled.

python -m benchmarks.client_cuts --cuts 200 --json benchmarks/results/client_cuts.json
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from typing import Any
from urllib.parse import urlsplit

from benchmarks import client_kit
from benchmarks.provenance import write_result
from edge_client.client import EdgeClient
from edge_client.compare import ask, ask_all
from edge_client.controller import Draft
from edge_client.link import PROFILES, LinkProxy
from edge_client.settings import ClientSettings
from moa.errors import MoaError, run_cli

_SOON: dict[str, Any] = {
    "answer_floor_seconds": 0.15,
    "first_answer_seconds": 1.0,
    "reconnect_seconds": 0.05,
    "settle_seconds": 60.0,
}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Answer prompts until the link was cut so often; greedy and sampled, device- and server-drafted in turn."""
    device, _, prompts = client_kit.load(options)
    rng = random.Random(options.seed)
    cuts = answers = different = unverified = offline = retracted = 0
    async with client_kit.address(options) as url:
        parts = urlsplit(url)
        async with LinkProxy(parts.hostname or "", parts.port or 0, PROFILES[options.link]) as link:
            while cuts < options.cuts:
                ids = prompts[answers % len(prompts)]
                draft: Draft = "server" if answers % 2 else "device"
                how: dict[str, Any] = {"max_new_tokens": options.tokens}
                if answers % 4 > 1:
                    how |= {"temperature": 0.8, "top_p": 0.95, "seed": answers}
                (truth,) = await ask_all(ClientSettings(verifier=url), device, [ids], draft="single", sync="off", **how)
                settings = ClientSettings(verifier=link.url, draft=draft, **how, **_SOON)
                async with EdgeClient(settings, device=device) as client:
                    cutting = asyncio.create_task(_keep_cutting(link, rng, options.most_bytes))
                    answer = await ask(client, ids)
                    cutting.cancel()
                    await asyncio.gather(cutting, return_exceptions=True)
                    assert client.link is not None
                    cuts += max(0, client.link.generation - 1)
                answers += 1
                different += answer.ids != truth.ids
                unverified += not answer.verified
                offline += answer.stats["offline_tokens"]
                retracted += answer.stats["retracted"]
                print(f"{cuts} cuts, {answers} answers, {different} different", file=sys.stderr)
    return {
        "client_cuts": cuts,
        "answers": answers,
        "different": different,
        "not_verified": unverified,
        "offline_tokens": offline,
        "retracted_tokens": retracted,
    }


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
    parser.add_argument("--most-bytes", type=int, default=4000, help="a connection is cut within so many bytes")
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    write_result(options.json, result)
    print(
        f"{result['client_cuts']} cuts in {result['answers']} answers: {result['different']} texts differ from the "
        f"target's own, {result['not_verified']} not wholly verified; {result['offline_tokens']} tokens were written "
        f"offline, {result['retracted_tokens']} of them withdrawn"
    )
    if result["different"]:
        raise MoaError("a text differs from the target's own")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.client_cuts", main))
