"""Many conversations at once over one device and one connection: exact, how fair, and what each takes of memory.

python -m benchmarks.client_many --conversations 16 --json benchmarks/results/client_many.json
"""

from __future__ import annotations

import argparse
import asyncio
import tracemalloc
from time import perf_counter
from typing import Any

from benchmarks import client_kit, report
from benchmarks.provenance import write_result
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.settings import ClientSettings
from edge_client.tools.compare import ask, ask_all
from moa.errors import run_cli


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Conversations that begin together; each answers as many prompts as it can until all have answered theirs."""
    device, _, prompts = client_kit.load(options)
    many = options.conversations
    prompts = [prompts[i % len(prompts)] for i in range(many)]
    async with client_kit.address(options) as url:
        settings = ClientSettings(verifier=url, max_new_tokens=options.tokens, ignore_eos=True, offline_after=60.0)
        truth = [a.ids for a in await ask_all(settings, device, prompts, draft="single", sync="off")]
        runs = []
        for draft in ("device", "server"):
            async with EdgeClient(settings, device=device, draft=draft) as client:
                await client.wait_online()
                began = perf_counter()
                answers = await asyncio.gather(*(ask(client, ids) for ids in prompts))
                seconds = perf_counter() - began
            speeds = sorted(len(a.ids) / a.stats["seconds"] for a in answers)
            runs.append(
                {
                    "draft": draft,
                    "same": sum(a.ids == ids for a, ids in zip(answers, truth, strict=True)),
                    "tokens_per_second": sum(len(a.ids) for a in answers) / seconds,
                    "slowest": speeds[0],
                    "fastest": speeds[-1],
                    "slowest_of_median": speeds[0] / speeds[len(speeds) // 2],
                }
            )
    return {
        "conversations": many,
        "tokens": options.tokens,
        "bytes_each": await _memory(device, options),
        "client_many": runs,
    }


async def _memory(device: Device, options: argparse.Namespace) -> int:
    """What one more conversation allocates on the device, for an answer of so many tokens, written alone."""
    async with EdgeClient(device=device, offline=True, max_new_tokens=options.tokens, max_offline_tokens=0) as client:
        kept = [client.conversation()]  # the first loads what all share
        await ask(kept[0], list(range(8, 40)))
        tracemalloc.start()
        for start in range(4):
            kept.append(client.conversation())
            await ask(kept[-1], list(range(8 + start, 40 + start)))
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return taken // 4


def tables(result: dict[str, Any]) -> str:
    """As Markdown."""
    rows = [
        [
            run["draft"],
            f"{run['same']} of {result['conversations']}",
            f"{run['tokens_per_second']:.0f}",
            f"{run['slowest']:.1f} / {run['fastest']:.1f}",
            f"{run['slowest_of_median']:.0%}",
        ]
        for run in result["client_many"]
    ]
    head = ["drafted by", "texts the target's own", "tokens/s in all", "slowest / fastest", "slowest of the median"]
    megabytes = result["bytes_each"] / 1e6
    return f"{report.table(head, rows)}\n\nA conversation takes {megabytes:.2f} MB of the device's memory.\n"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    client_kit.add_flags(parser)
    parser.add_argument("--conversations", type=int, default=16)
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    write_result(options.json, result)
    print(tables(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.client_many", main))
