"""Speed, calls and bytes of every way of decoding, over every emulated link; all texts are compared.

python -m benchmarks.client_links --json benchmarks/results/client_links.json
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from benchmarks import client_kit, report
from benchmarks.provenance import write_result
from edge_client.settings import ClientSettings
from edge_client.tools.compare import ask_all, rates
from edge_client.tools.emulated_network import PROFILES, LinkProxy
from moa.errors import UsageError, run_cli

SLOWEST = "a call a token"
"""Bound by the round trip alone, so that one pass tells it."""
WAYS: dict[str, dict[str, Any]] = {
    "plain API streaming": {"draft": "none", "sync": "off"},
    SLOWEST: {"draft": "single", "sync": "off"},
    "device": {"draft": "device"},
    "server-drafted stream": {"draft": "server"},
    "auto": {"draft": "auto"},
}


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every way over every link, over the same prompts, one prompt after another."""
    device, _, prompts = client_kit.load(options)
    runs = []
    async with client_kit.address(options) as url:
        parts = urlsplit(url)
        if parts.scheme != "ws" or parts.hostname is None or parts.port is None:
            raise UsageError("the emulated link needs a ws://HOST:PORT address")
        near = ClientSettings(verifier=url, max_new_tokens=options.tokens)
        truth = [a.ids for a in await ask_all(near, device, prompts, draft="single", sync="off")]
        for name in options.links:
            took: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
            for repeat in range(options.repeats):  # interleaved: what slows the machine slows every way
                # A link that comes and goes is met by every way at the same place of its cycle.
                profile = client_kit.rotated(PROFILES[name], repeat / options.repeats)
                for way, how in WAYS.items():
                    if repeat and way == SLOWEST:
                        continue
                    async with LinkProxy(parts.hostname, parts.port, profile) as link:
                        far = ClientSettings(verifier=link.url, max_new_tokens=options.tokens)
                        answers = await ask_all(far, device, prompts, **how)
                    same = sum(a.ids == ids for a, ids in zip(answers, truth, strict=True))
                    took[way].append({"same": same, **rates(answers)})
                    print(f"{name} {way}: {took[way][-1]['tokens_per_second']:.1f} tokens/s", file=sys.stderr)
            runs += [{"link": name, "way": way, **_middle(found)} for way, found in took.items()]
    return {"prompts": len(prompts), "tokens": options.tokens, "client_links": runs}


def _middle(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the repeats; texts are counted."""
    figures = {key: median(run[key] for run in found) for key in found[0] if key != "same"}
    speeds = [round(run["tokens_per_second"], 1) for run in found]
    return {"same": sum(run["same"] for run in found), "repeats": len(found), **figures, "speeds": speeds}


def tables(result: dict[str, Any]) -> str:
    """Tokens a second, calls and kilobytes by link."""
    links = list(dict.fromkeys(run["link"] for run in result["client_links"]))
    ways = list(dict.fromkeys(run["way"] for run in result["client_links"]))
    found = {(run["link"], run["way"]): run for run in result["client_links"]}
    parts = []
    for title, key, form in (
        ("Tokens a second", "tokens_per_second", "{:.1f}"),
        ("Calls per 100 tokens", "calls_per_100", "{:.1f}"),
        ("Milliseconds to the first token", "first_token_ms", "{:.0f}"),
        ("Kilobytes", "kilobytes", "{:.1f}"),
    ):
        rows = [[way, *(form.format(found[link, way][key]) for link in links)] for way in ways]
        parts.append(f"**{title}**\n\n{report.table(['way', *links], rows)}\n")
    same = sum(run["same"] for run in result["client_links"])
    asked = result["prompts"] * sum(run["repeats"] for run in result["client_links"])
    repeats = max(run["repeats"] for run in result["client_links"])
    parts.append(
        f"Medians of {repeats} passes over {result['prompts']} prompts, the ways in turn (`{SLOWEST}`: one pass)."
    )
    parts.append(f"{same} of {asked} texts equal the target's own.")
    return "\n".join(parts)


def main() -> int:
    """Measure, print tables, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    client_kit.add_flags(parser)
    client_kit.add_links(parser)
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="passes (default: %(default)s)")
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    write_result(options.json, result)
    print(tables(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.client_links", main))
