"""The paper's third experiment: cut the link after m tokens, and see whether the finished answer is right.

python -m benchmarks.client_offline --per-skill 4 --json benchmarks/results/client_offline.json

MoA goes on with the records of what was verified; `without records` is the same drafter that never got any; an
independent drafter's bundle may be given; an API client stops where the link does.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import client_kit, report
from benchmarks.client_kit import Heard
from benchmarks.provenance import write_result
from edge_client.device import Device
from edge_client.drafter.onnx import OnnxDrafter, run
from moa.demo.skills import Example, is_right
from moa.errors import run_cli
from moa.sampling import SamplingSettings

CUTS = (0, 4, 8, 16, 32, 64)

Finish = Callable[[Heard, int], list[int]]


def alone(device: Device, tokens: int, *, records: bool) -> Finish:
    """The device goes on from the first m tokens."""

    def finish(heard: Heard, cut: int) -> list[int]:
        drafter = client_kit.fresh_drafter(device, None)
        if records and drafter.records is not None:
            rows = len(heard.prompt) + cut - 1
            drafter.records.put(0, heard.keys[:rows], heard.values[:rows])
        return _go_on(drafter, device, heard, cut, tokens)

    return finish


def _go_on(drafter: OnnxDrafter, device: Device, heard: Heard, cut: int, tokens: int) -> list[int]:
    ids = [*heard.prompt, *heard.answer[:cut]]
    while len(ids) - len(heard.prompt) < tokens and ids[-1] not in device.codec.eos_ids:
        ids.append(run(drafter.guess(ids, SamplingSettings())))
    return ids[len(heard.prompt) :]


def measure(
    finishers: dict[str, Finish], device: Device, examples: Sequence[Example], heard: Sequence[Heard]
) -> list[dict[str, Any]]:
    """Right answers by way and cut; answers that were over before the cut count as they are."""
    runs = []
    for name, finish in finishers.items():
        for cut in CUTS:
            right = same = 0
            for example, one in zip(examples, heard, strict=True):
                over = len(one.answer) <= cut
                answer = one.answer if over else finish(one, cut)
                right += is_right(example, device.codec.decode(answer).strip())
                same += answer == one.answer
            runs.append({"way": name, "cut": cut, "right": right, "same": same, "asked": len(heard)})
    return runs


async def _heard(options: argparse.Namespace) -> tuple[Device, list[Example], list[Heard]]:
    device, examples, prompts = client_kit.load(options)
    async with client_kit.address(options) as url:
        return device, examples, await client_kit.hear(url, device, prompts, options.tokens)


def main() -> int:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    client_kit.add_flags(parser)
    parser.add_argument("--independent", metavar="DIR", help="bundle of an independent drafter for the same target")
    options = parser.parse_args()
    device, examples, heard = asyncio.run(_heard(options))
    finishers = {
        "target": lambda one, _: one.answer,
        "MoA": alone(device, options.tokens, records=True),
        "MoA without records": alone(device, options.tokens, records=False),
        "API client (stops)": lambda one, cut: one.answer[:cut],
    }
    if options.independent:
        finishers["independent"] = alone(Device.load(options.independent), options.tokens, records=False)
    runs = measure(finishers, device, examples, heard)
    write_result(options.json, {"client_offline": runs})
    found = {(run["way"], run["cut"]): run for run in runs}
    rows = [[way, *(f"{found[way, cut]['right'] / len(heard):.1%}" for cut in CUTS)] for way in finishers]
    print(report.table(["cut after m tokens", *map(str, CUTS)], rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.client_offline", main))
