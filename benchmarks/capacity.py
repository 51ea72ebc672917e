"""How many readers one verifier holds, by who drafts: the device, the server, or nobody.

python -m benchmarks.capacity --random 1024x8 --json benchmarks/results/capacity.json

A reader reads 10 tokens a second. He asks, and begins to read 0.2 s after the first token is there, or 1.2 s after he
asked, whichever is sooner; token k is in time when it is there k/10 s later. A verifier holds N readers when 95 of 100
of all their first 40 tokens are in time, all of them asking within one second. Prompts have been run before they ask.
The largest N is found by doubling, then by bisection to about a tenth.

Drafts are chains made beforehand, for every place in the text: by the device's own drafter with the records of all
that is verified, or, where a target is random and so has no drafter, right with the probability --rate. The emulated
target is the embedded one with forwards of --step-ms whatever their size, as on an accelerator bound by its memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import client_kit, report
from benchmarks.capacity_readers import SPEED, TOKENS, Text, Trial, Way, trial
from benchmarks.client_kit import Heard
from benchmarks.emulation import verifiers
from benchmarks.provenance import write_result
from benchmarks.server_kit import Pair, client, prompt, random_pair, server
from edge_client.device import Device
from edge_client.drafter.cache import RecordBuffer
from moa.demo import paths
from moa.errors import UsageError, run_cli
from moa.sampling import SamplingSettings
from moa.tree import TreeShape
from moa.wire import ClientSession
from moa.wire.messages import RecordDtype

WAYS: dict[str, tuple[Way, RecordDtype]] = {
    "plain decoding": ("none", "off"),
    "server-drafted": ("server", "int8"),
    "device-drafted": ("device", "int8"),
}
HF = "plain, Hugging Face"
DEPTH = 6
_DRIVER_LAG_MS = 50.0
"""When this process is that late for itself, a failed trial says nothing about the verifier."""
_CONTEXT = 512

Try = Callable[[int], Awaitable[Trial]]


def flags(slots: int) -> list[str]:
    """A verifier for so many short conversations of one principal."""
    many = str(slots + 8)
    names = ("slots", "max-batch-rows", "max-queue", "max-queue-per-principal")
    return [
        *(part for name in names for part in (f"--{name}", many)),
        *("--max-connections-per-principal", many, "--max-sessions-per-principal", many),
        *("--kv-tokens", str((slots + 8) * (_CONTEXT + 64))),
        *("--max-context-tokens", str(_CONTEXT), "--max-prompt-tokens", str(_CONTEXT // 2)),
        *("--max-chain-tokens", "32", "--max-batch-tokens", "8192"),
    ]


async def largest(attempt: Try, start: int, most: int) -> tuple[int, list[Trial]]:
    """The largest number of readers that is held: doubling, then bisection to a tenth."""
    trials: list[Trial] = []

    async def held(readers: int) -> bool:
        trials.append(found := await attempt(readers))
        print(f"  {readers} readers: p95 {found.p95:+.0f} ms, driver lag {found.lag_ms:.0f} ms", file=sys.stderr)
        return found.held

    low, high = 0, start
    while high <= most and await held(high):
        low, high = high, 2 * high
    if high > most:
        return low, trials
    while high - low > max(1, high // 10):
        middle = (low + high) // 2
        if await held(middle):
            low = middle
        else:
            high = middle
    return low, trials


def drafts_of(device: Device, heard: Heard, depth: int) -> list[list[int]]:
    """What the device drafts after each token of an answer, the records of all before being there."""
    drafter = client_kit.fresh_drafter(device, RecordBuffer(client_kit.record_heads(device)))
    assert drafter.records is not None
    drafts: list[list[int]] = [[]]
    shape = TreeShape.chain(depth, min_score=-1e9)
    for done in range(1, min(len(heard.answer), TOKENS + 1)):
        rows = len(heard.prompt) + done - 1
        drafter.records.put(0, heard.keys[:rows], heard.values[:rows])
        steps = drafter.draft([*heard.prompt, *heard.answer[:done]], shape, SamplingSettings())
        while True:
            try:
                next(steps)
            except StopIteration as end:
                drafts.append(end.value.tokens[1:])
                break
    return drafts


async def embedded_texts(url: str, count: int) -> list[Text]:
    """Held-out prompts with answers that are long enough."""
    options = argparse.Namespace(bundle="", per_skill=3, prompts=0)
    device, _, prompts = client_kit.load(options)
    texts: list[Text] = []
    for ids in prompts:
        (heard,) = await client_kit.hear(url, device, [ids], TOKENS + 8)
        if len(heard.answer) > TOKENS + 1:
            texts.append(Text(heard.prompt, heard.answer, drafts_of(device, heard, DEPTH)))
        if len(texts) == count:
            break
    if not texts:
        raise UsageError("no held-out prompt has an answer long enough to read")
    return texts


async def random_texts(url: str, count: int, rate: float) -> list[Text]:
    """Random prompts, the random target's answers, and drafts that are right with a stated probability."""

    async def one(seed: int) -> Text:
        async with client(url) as edge:
            vocab = edge.welcome.vocab_size
            # Shorter than what two sessions share, and no two of one length.
            ids = prompt(seed, 8 + seed % 7, vocab)
            session = ClientSession(list(ids), max_new_tokens=TOKENS + 8, ignore_eos=True, records="off")
            await edge.start(session)
            await edge.stream(session, speculate=False)
            truth = session.log[len(ids) :]
            await edge.send(session.close())
        rng = random.Random(seed)
        return Text(ids, truth, [_guess(rng, truth[done:], rate, vocab) for done in range(len(truth))])

    return [await one(seed) for seed in range(count)]


def _guess(rng: random.Random, rest: Sequence[int], rate: float, vocab: int) -> list[int]:
    chain = []
    for right in rest[:DEPTH]:
        chain.append(right if rng.random() < rate else (right + 1) % vocab)
    return chain


@contextlib.contextmanager
def targets(options: argparse.Namespace) -> Iterator[list[tuple[str, Callable[[], Any], bool]]]:
    """Name, how to start its verifier, and whether it is random, of each target asked for."""
    with contextlib.ExitStack() as stack:
        found: list[tuple[str, Callable[[], Any], bool]] = []
        slots = options.most
        if not options.skip_embedded:
            found.append(("embedded, 7M", lambda: _served(Pair(), slots, options), False))
        if options.step_ms:
            name = f"emulated, {options.step_ms:g} ms a forward"
            found.append((name, lambda: _emulated(options.step_ms, slots), False))
        if options.random:
            try:
                hidden, layers = map(int, options.random.split("x"))
            except ValueError:
                raise UsageError(f"--random is HIDDENxLAYERS, not {options.random!r}") from None
            pair = stack.enter_context(random_pair(hidden, layers))
            found.append((f"random, {options.random}", lambda: _served(pair, slots, options), True))
        yield found


@contextlib.contextmanager
def _served(pair: Pair, slots: int, options: argparse.Namespace) -> Iterator[str]:
    with server(pair, *flags(slots), *options.flags, threads=options.threads) as process:
        yield process.url


@contextlib.contextmanager
def _emulated(step_ms: float, slots: int) -> Iterator[str]:
    with verifiers(step_ms, slots=slots) as running:
        yield running.urls[0]


async def measure_target(
    name: str, url: str, texts: Sequence[Text], ways: Sequence[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Every way on one target."""
    runs = []
    for way in ways:
        kind, records = WAYS[way]
        print(f"{name}, {way}", file=sys.stderr)
        began = time.perf_counter()

        async def attempt(readers: int, kind: Way = kind, records: RecordDtype = records) -> Trial:
            return await trial(url, texts, readers, kind, records=records, think=options.think_ms / 1000)

        await attempt(min(2, options.start))  # warm
        users, trials = await largest(attempt, options.start, options.most)
        runs.append(_row(name, way, users, trials, time.perf_counter() - began))
    return runs


def _row(target: str, way: str, users: int, trials: Sequence[Trial], seconds: float) -> dict[str, Any]:
    limit = min((one for one in trials if not one.held), key=lambda one: one.readers, default=None)
    return {
        "target": target,
        "way": way,
        "users": users,
        "at_least": limit is None,
        "driver_bound": limit is not None and limit.lag_ms > _DRIVER_LAG_MS,
        "trials": [
            {"readers": one.readers, "p95_late_ms": round(one.p95, 1), "driver_lag_ms": round(one.lag_ms, 1)}
            for one in trials
        ],
        "seconds": round(seconds, 1),
    }


def hugging_face(texts: Sequence[Text], options: argparse.Namespace) -> dict[str, Any]:
    """Its continuous batching, in a process of its own; what it said when it does not run."""
    said = json.dumps([{"ids": text.ids, "truth": text.truth} for text in texts])
    command = [sys.executable, "-m", "benchmarks.capacity_hf", str(paths().target)]
    command += [f"--start={options.start}", f"--most={options.most}", f"--threads={options.threads}"]
    done = subprocess.run(
        command, input=said, capture_output=True, text=True, timeout=600, check=False, cwd=Path(__file__).parents[1]
    )
    print(done.stderr.strip()[-2000:], file=sys.stderr)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message"}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every way on every target, and Hugging Face on the embedded one."""
    runs: list[dict[str, Any]] = []
    other: dict[str, Any] = {}
    with targets(options) as found:
        for name, start, is_random in found:
            with start() as url:

                async def of_target(name: str = name, url: str = url, is_random: bool = is_random) -> list[Text]:
                    count = options.texts
                    texts = await (random_texts(url, count, options.rate) if is_random else embedded_texts(url, count))
                    # A random drafter is never right, so a server that drafts with it shows nothing.
                    ways = [way for way in WAYS if not (is_random and WAYS[way][0] == "server")]
                    runs.extend(await measure_target(name, url, texts, ways, options))
                    return texts

                texts = asyncio.run(of_target())
            if name.startswith("embedded") and not options.skip_hugging_face:
                other = hugging_face(texts, options)
                if "users" in other:
                    most = all(one["p95_late_ms"] <= 0 for one in other["trials"])
                    runs.append({"target": name, "way": HF, "at_least": most, **other})
    return {
        "reading_speed": SPEED,
        "tokens": TOKENS,
        "rate": options.rate,
        "think_ms": options.think_ms,
        "threads": options.threads,
        "hugging_face": other,
        "capacity": runs,
    }


def tables(result: Mapping[str, Any]) -> str:
    """Readers by way and target."""
    runs = result["capacity"]
    names = list(dict.fromkeys(run["target"] for run in runs))
    ways = list(dict.fromkeys(run["way"] for run in runs))
    found = {(run["target"], run["way"]): run for run in runs}
    rows = []
    for way in ways:
        cells = []
        for name in names:
            run, plain = found.get((name, way)), found.get((name, "plain decoding"))
            if run is None:
                cells.append("-")
                continue
            mark = (">= " if run.get("at_least") else "") + str(run["users"]) + ("*" if run.get("driver_bound") else "")
            cells.append(mark + (f" ({run['users'] / plain['users']:.2f}x)" if plain and plain["users"] else ""))
        rows.append([way, *cells])
    parts = [report.table([f"readers at {result['reading_speed']:g} tokens/s", *names], rows), ""]
    if any(run.get("driver_bound") for run in runs):
        parts.append("\\* the readers themselves, not the verifier, were late here: the true figure is higher.\n")
    if "failed" in result["hugging_face"]:
        parts.append(f"Hugging Face continuous batching did not run: {result['hugging_face']['failed']}\n")
    elif "note" in result["hugging_face"]:
        parts.append(f"{result['hugging_face']['note']}\n")
    parts.append(
        f"95 of 100 of the first {result['tokens']} tokens in time; verifier and readers share this machine; every "
        f"token compared with the target's own. A device waits {result['think_ms']:g} ms between rounds, for link and "
        f"drafting. Drafts on a random target are right with probability {result['rate']:g}, by assumption."
    )
    return "\n".join(parts)


def main() -> int:
    """Measure, print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", default="", metavar="HIDDENxLAYERS", help="a random target as well")
    parser.add_argument("--step-ms", type=float, default=120.0, metavar="MS", help="of the emulated target; 0: none")
    parser.add_argument("--skip-embedded", action="store_true", help="leave out the embedded target")
    parser.add_argument("--skip-hugging-face", action="store_true")
    parser.add_argument("--rate", type=float, default=0.85, help="of right drafts on a random target (default: 0.85)")
    parser.add_argument("--think-ms", type=float, default=60.0, help="of a device between rounds (default: 60)")
    parser.add_argument("--start", type=int, default=16, metavar="N", help="readers of the first trial (default: 16)")
    parser.add_argument("--most", type=int, default=1024, metavar="N", help="readers at most (default: 1024)")
    parser.add_argument("--texts", type=int, default=12, help="different conversations (default: 12)")
    parser.add_argument("--threads", type=int, default=1, help="of the verifier's process (default: 1)")
    parser.add_argument("--flags", type=str.split, default=[], help="more flags of cloud-verifier serve, in quotes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with its provenance")
    options = parser.parse_args()
    if not 1 <= options.start <= options.most or options.texts < 1:
        raise UsageError("--start, --most and --texts must be at least 1, --start at most --most")
    result = measure(options)
    write_result(options.json, result)
    print(tables(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.capacity", main))
