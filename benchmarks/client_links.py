"""Speed, calls and bytes of every way of decoding, over every emulated link; all texts are compared.

python -m benchmarks.client_links --json benchmarks/results/client_links.json
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any
from urllib.parse import urlsplit

from benchmarks import client_kit, report
from benchmarks.provenance import write_result
from edge_client.compare import ask_all, rates
from edge_client.link import PROFILES, LinkProxy
from edge_client.settings import ClientSettings
from moa.errors import UsageError, run_cli

LINKS = ("wifi", "5g", "4g", "4g-weak", "bursty")
WAYS: dict[str, dict[str, Any]] = {
    "plain API streaming": {"draft": "none", "sync": "off"},
    "a call a token": {"draft": "single", "sync": "off"},
    "device, waiting idly": {"draft": "device", "ahead": False},
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
        for name in options.links.split(","):
            async with LinkProxy(parts.hostname, parts.port, PROFILES[name]) as link:
                far = ClientSettings(verifier=link.url, max_new_tokens=options.tokens)
                for way, how in WAYS.items():
                    answers = await ask_all(far, device, prompts, **how)
                    same = sum(a.ids == ids for a, ids in zip(answers, truth, strict=True))
                    runs.append({"link": name, "way": way, "same": same, **rates(answers)})
                    print(f"{name} {way}: {runs[-1]['tokens_per_second']:.1f} tokens/s", file=sys.stderr)
    return {"prompts": len(prompts), "tokens": options.tokens, "client_links": runs}


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
    parts.append(f"{same} of {len(result['client_links']) * result['prompts']} texts equal the target's own.")
    return "\n".join(parts)


def main() -> int:
    """Measure, print tables, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    client_kit.add_flags(parser)
    parser.add_argument("--links", default=",".join(LINKS), help="comma-separated (default: %(default)s)")
    options = parser.parse_args()
    if unknown := [name for name in options.links.split(",") if name not in PROFILES]:
        raise UsageError(f"unknown link {unknown[0]!r}", hint=f"known: {', '.join(PROFILES)}")
    result = asyncio.run(measure(options))
    write_result(options.json, result)
    print(tables(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.client_links", main))
