"""Every text equals the target's own: over every link, whoever drafts, whatever becomes of the records.

Held-out prompts are answered greedily and sampled over every emulated link; who drafts and how records are synced
changes from prompt to prompt so that every combination occurs. Many conversations run at once.

python -m benchmarks.client_exact --json benchmarks/results/client_exact.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from benchmarks import client_kit, report
from benchmarks.client_truth import StrictReader, Truth, read
from benchmarks.provenance import write_result
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.drafter.cache import RecordBuffer
from edge_client.drafter.graph import Heads
from edge_client.settings import ClientSettings
from edge_client.tools.emulated_network import PROFILES, LinkProxy
from moa.demo.skills import SKILLS
from moa.errors import MoaError, run_cli
from moa.sampling import SamplingSettings

DRAFTS = ("device", "server", "auto")
SYNCS = ("off", "int8", "int4", "late")
"""How records come: not at all, nearly as they are, coarse, or `_LATE_SECONDS` after they have arrived."""
SAMPLINGS = ("greedy", "sampled")
_LATE_SECONDS = 0.5
_PATIENCE: dict[str, Any] = {
    # Dozens of conversations share two cores here: answers are slower than over any real link, and not lost.
    "offline_after": 20.0,
    "settle_seconds": 60.0,
    "reconnect_seconds": 0.5,
}


class LateBuffer(RecordBuffer):
    """Records that the drafter sees only a while after they have arrived."""

    def __init__(self, heads: Heads) -> None:
        super().__init__(heads)
        self._waiting: deque[tuple[float, int, NDArray[np.float32], NDArray[np.float32]]] = deque()

    def put(self, start: int, keys: NDArray[np.float32], values: NDArray[np.float32]) -> None:
        """Take records in, later."""
        self._waiting.append((time.perf_counter() + _LATE_SECONDS, start, keys, values))

    def truncate(self, length: int) -> None:
        """Forget the records of positions from `length` on, those that wait as well."""
        super().truncate(length)
        self._waiting = deque(
            (due, at, k[: length - at], v[: length - at]) for due, at, k, v in self._waiting if at < length
        )

    def feeds(self) -> dict[str, NDArray[np.float32]]:
        """The graph's record inputs, with what is due by now."""
        while self._waiting and self._waiting[0][0] <= time.perf_counter():
            _, start, keys, values = self._waiting.popleft()
            super().put(start, keys, values)
        return super().feeds()


@dataclass(frozen=True)
class Case:
    """One answer to be had."""

    link: str
    draft: str
    sync: str
    sampling: str
    prompt: int

    @property
    def settings(self) -> SamplingSettings:
        """How its tokens are chosen."""
        if self.sampling == "greedy":
            return SamplingSettings()
        return SamplingSettings(temperature=0.8, top_p=0.95, seed=self.prompt)


def cases(links: Sequence[str], prompts: int) -> list[Case]:
    """Every prompt greedy and sampled over every link; the ways take turns, with another offset each time."""
    ways = list(product(DRAFTS, SYNCS))
    found = []
    for row, (link, sampling) in enumerate(product(links, SAMPLINGS)):
        for prompt in range(prompts):
            draft, sync = ways[(prompt + 5 * row) % len(ways)]
            found.append(Case(link, draft, sync, sampling, prompt))
    random.Random(0).shuffle(found)
    return found


async def answer(device: Device, case: Case, url: str, ids: Sequence[int], tokens: int) -> StrictReader:
    """One conversation of its own, over a connection of its own."""
    heads = client_kit.record_heads(device)
    buffer = LateBuffer(heads) if case.sync == "late" else RecordBuffer(heads)
    settings = ClientSettings(
        verifier=url,
        draft=case.draft,  # type: ignore[arg-type]
        sync="int8" if case.sync == "late" else case.sync,  # type: ignore[arg-type]
        max_new_tokens=tokens,
        **dataclasses.asdict(case.settings),
        **_PATIENCE,
    )
    own = client_kit.with_drafter(device, lambda: client_kit.fresh_drafter(device, buffer))
    async with EdgeClient(settings, device=own) as client:
        return await read(client, ids)


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All cases, many at once."""
    device, _, prompts = client_kit.load(options)
    todo = cases(options.links, len(prompts))
    truth = Truth(options.target, eos_ids=device.codec.eos_ids, tokens=options.tokens)
    outcomes: Counter[tuple[Case, str]] = Counter()
    figures: Counter[str] = Counter()
    for number, case in enumerate(todo):  # beforehand: the conversations should not wait for it
        truth.answer(prompts[case.prompt], case.settings)
        if number % 200 == 0:
            print(f"target-only decoding, {number} of {len(todo)}", file=sys.stderr)
    gate = asyncio.Semaphore(options.at_once)
    async with contextlib.AsyncExitStack() as stack:
        parts = urlsplit(await stack.enter_async_context(client_kit.address(options, slots=options.at_once)))
        proxies = {
            name: await stack.enter_async_context(LinkProxy(parts.hostname or "", parts.port or 0, PROFILES[name]))
            for name in options.links
        }

        async def run(case: Case) -> None:
            async with gate:
                ids = prompts[case.prompt]
                said = await answer(device, case, proxies[case.link].url, ids, options.tokens)
            outcome = truth.judge(ids, case.settings, said.tokens) if all(said.verified) else "unverified"
            outcomes[case, outcome] += 1
            assert said.done is not None
            for name in ("tokens", "calls", "offline_tokens", "retracted", "resumes", "record_rows"):
                figures[name] += said.done.stats[name]
            if outcome != "same":
                print(f"{outcome}: {case}", file=sys.stderr)
            if outcomes.total() % 50 == 0:
                print(f"{outcomes.total()} of {len(todo)} answers", file=sys.stderr)

        await asyncio.gather(*(run(case) for case in todo))
    combinations: dict[tuple[str, ...], Counter[str]] = {}
    for (case, outcome), count in outcomes.items():
        key = case.link, case.draft, case.sync, case.sampling
        combinations.setdefault(key, Counter())[outcome] += count
    names = ("link", "draft", "sync", "sampling")
    runs = [
        dict(zip(names, key, strict=True)) | {"outcomes": dict(counts)} for key, counts in sorted(combinations.items())
    ]
    return {
        "prompts": len(prompts),
        "tokens": options.tokens,
        "at_once": options.at_once,
        "answers": outcomes.total(),
        "totals": {name: sum(n for (_, o), n in outcomes.items() if o == name) for name in ("same", "tie")},
        "figures": dict(figures),
        "client_exact": runs,
    }


def tables(result: Mapping[str, Any]) -> str:
    """Answers by combination: how many there were, and how many of them were the target's own where not all."""
    found = {(r["link"], r["draft"], r["sync"], r["sampling"]): r["outcomes"] for r in result["client_exact"]}
    columns = list(product(SYNCS, SAMPLINGS))
    rows = []
    for link in dict.fromkeys(run["link"] for run in result["client_exact"]):
        for draft in DRAFTS:
            cells = []
            for sync, sampling in columns:
                outcomes = found.get((link, draft, sync, sampling), {})
                same, asked = outcomes.get("same", 0), sum(outcomes.values())
                cells.append(str(same) if same == asked else f"{same} of {asked}")
            rows.append([f"{link}, {draft}", *cells])
    header = ["link, who drafts", *(f"{sync} {sampling}" for sync, sampling in columns)]
    totals, figures = result["totals"], result["figures"]
    told = (
        f"{totals['same']} of {result['answers']} answers ({figures['tokens']} tokens) are the target's own to the "
        f"last id, {totals['tie']} part at a numerical tie; {result['prompts']} prompts, every one greedy and sampled "
        f"over every link, {result['at_once']} conversations at once. {figures['offline_tokens']} tokens were written "
        f"offline or while an answer was late, {figures['retracted']} of them withdrawn; {figures['resumes']} sessions "
        "were resumed."
    )
    title = "Answers equal to target-only decoding, by link, who drafts, records and sampling"
    return f"{title}\n\n{report.table(header, rows)}\n\n{told}"


def main() -> int:
    """Measure, print the table, write the result; an error when a text differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    client_kit.add_flags(parser)
    parser.set_defaults(per_skill=-(-100 // len(SKILLS)), prompts=100, tokens=48)
    client_kit.add_links(parser, PROFILES)
    parser.add_argument("--at-once", type=int, default=32, metavar="N", help="conversations (default: %(default)s)")
    options = parser.parse_args()
    result = asyncio.run(measure(options))
    write_result(options.json, result)
    print(tables(result))
    if result["totals"]["same"] + result["totals"]["tie"] != result["answers"]:
        raise MoaError("a text differs from the target's own")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.client_exact", main))
