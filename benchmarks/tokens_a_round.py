"""Tokens won a round by drafting on the device over loopback, for several bundles beside their drafters: held-out code.

python -m benchmarks.tokens_a_round embedded=BUNDLE=DRAFTER borrowed=BUNDLE=DRAFTER --pieces 32
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.prompts import code_prompts, encode
from benchmarks.provenance import write_result
from edge_client.device import Device
from edge_client.link.local import LocalVerifier
from edge_client.settings import ClientSettings
from edge_client.tools.compare import ask_all
from edge_client.turn.controller import Controller, Plan
from moa.demo import paths
from moa.errors import UsageError, run_cli
from moa.model.loading import load_tokenizer, locate
from moa.tree import TreeShape


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every bundle with a verifier of its own; the text of the first one, decoded plainly, is the truth."""
    tokenizer = load_tokenizer(locate(options.target))
    pieces = [encode(tokenizer, example) for example in code_prompts(options.pieces)]
    truth: list[list[int]] = []
    runs = []
    for name, bundle, drafter in options.bundles:
        flags = [f"--target={options.target}", f"--drafter={drafter}", "--slots=4"]
        device = Device.load(bundle, variant=options.variant, threads=1)
        async with LocalVerifier(flags).running() as url:
            settings = ClientSettings(verifier=url, max_new_tokens=options.tokens)
            if not truth:
                truth = [a.ids for a in await ask_all(settings, device, pieces, draft="none", sync="off")]
            # What is compared is drafters: how deep a draft is worth its time depends on the machine.
            plan = Plan("device", TreeShape.chain(options.depth))
            with mock.patch.object(Controller, "plan", return_value=plan):
                answers = await ask_all(settings, device, pieces, draft="device")
        won = [len(a.ids) / max(1, a.stats["rounds"]) for a in answers]
        runs.append(
            {
                "name": name,
                "same": sum(a.ids == ids for a, ids in zip(answers, truth, strict=True)),
                "pieces": len(pieces),
                "tokens_a_round": sum(len(a.ids) for a in answers) / sum(a.stats["rounds"] for a in answers),
                "standard_error": statistics.stdev(won) / len(won) ** 0.5,
            }
        )
        print(runs[-1], file=sys.stderr)
    return {"tokens": options.tokens, "depth": options.depth, "variant": options.variant, "runs": runs}


def _named(text: str) -> tuple[str, str, str]:
    parts = text.split("=")
    if len(parts) != 3:
        raise UsageError(f"{text!r} is not NAME=BUNDLE=DRAFTER")
    return parts[0], parts[1], parts[2]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", type=_named, metavar="NAME=BUNDLE=DRAFTER")
    parser.add_argument("--target", default=str(paths().target), metavar="DIR")
    parser.add_argument("--variant", default="cpu-int8")
    parser.add_argument("--pieces", type=int, default=32, help="held-out functions, without their ends")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=6, help="of every draft, a chain")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    for run in result["runs"]:
        print(f"{run['name']}: {run['tokens_a_round']:.2f} +- {run['standard_error']:.2f} tokens a round, "
              f"{run['same']} of {run['pieces']} texts the target's own")  # fmt: skip
    if options.json:
        write_result(options.json, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.tokens_a_round", main))
