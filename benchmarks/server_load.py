"""How the verifier behaves under load, over real websockets, against a `cloud-verifier serve` in its own process.

    python -m benchmarks.server_load throughput --clients 1 4 16
    python -m benchmarks.server_load all --random 256x8 --json results.json

Drafts are chains whose tokens are right with a stated probability (`--rate`), for it is the verifier that is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shlex
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed

from benchmarks.server_kit import (
    Client,
    Pair,
    ServerProcess,
    client,
    draft,
    folder_of,
    machine,
    percentiles,
    prompt,
    random_pair,
    server,
)
from moa.errors import UsageError, run_cli
from moa.wire import ClientSession
from moa.wire.events import Recovered, Refused
from moa.wire.messages import RecordDtype

Figures = dict[str, Any]
Options = argparse.Namespace


async def _truth(url: str, seed: int, options: Options) -> tuple[list[int], list[int], int]:
    """A prompt, what the target says to it, and the vocabulary's size."""
    async with client(url) as edge:
        vocab = edge.welcome.vocab_size
        ids = prompt(seed, options.prompt, vocab)
        session = ClientSession(list(ids), max_new_tokens=options.tokens, ignore_eos=True, records="off")
        await edge.start(session)
        await edge.stream(session)
        await edge.send(session.close())
        return ids, session.log[len(ids) :], vocab


async def _speak(url: str, seed: int, options: Options, out: dict[str, list[float]]) -> int:
    """One client from prompt to end; what was said must be what the target says."""
    ids, truth, vocab = await _truth(url, seed, options)
    rng = random.Random(seed)
    async with client(url) as edge:
        session = ClientSession(list(ids), max_new_tokens=options.tokens, ignore_eos=True, records=options.records)
        await edge.start(session)
        await edge.advance(session, [session.log[-1]])  # the prompt has run
        out["ready"].append(time.perf_counter())
        while not session.finish:
            chain = draft(
                rng, truth[len(session.log) - len(ids) :], session.log[-1], options.nodes, options.rate, vocab
            )
            sent = time.perf_counter()
            event = await edge.advance(session, chain)
            wall = 1000 * (time.perf_counter() - sent)
            out["round_ms"].append(wall)
            out["forward_ms"].append(event.forward_ms)
            out["queue_ms"].append(event.queue_ms)
            out["overhead_ms"].append(wall - event.forward_ms - event.queue_ms)
            out["tokens"].append(len(event.tokens))
        out["done"].append(time.perf_counter())
        if session.log[len(ids) :] != truth:
            raise RuntimeError(f"client {seed} was told another text than the target's")
        return edge.token_bytes


def _columns() -> dict[str, list[float]]:
    return {n: [] for n in ("ready", "done", "round_ms", "forward_ms", "queue_ms", "overhead_ms", "tokens")}


async def throughput(pair: Pair, options: Options) -> Figures:
    """Verified tokens a second by number of concurrent clients."""
    rows = []
    with server(pair, "--slots", str(2 * max(options.clients)), *options.flags, threads=options.threads) as process:
        for clients in options.clients:
            out = _columns()
            await asyncio.gather(*(_speak(process.url, seed, options, out) for seed in range(clients)))
            seconds = max(out["done"]) - min(out["ready"])
            rows.append(
                {
                    "clients": clients,
                    "verified_tokens_per_second": round(sum(out["tokens"]) / seconds, 1),
                    "tokens_per_round": round(sum(out["tokens"]) / len(out["tokens"]), 2),
                    **{name: percentiles(out[name]) for name in ("round_ms", "forward_ms", "queue_ms", "overhead_ms")},
                }
            )
    first = rows[0]["verified_tokens_per_second"]
    return {"rows": rows, "gain": round(rows[-1]["verified_tokens_per_second"] / first, 2), "exact": True}


async def bytes_per_token(pair: Pair, options: Options) -> Figures:
    """Bytes on the wire per verified token, by precision of the records."""
    figures: Figures = {}
    with server(pair, *options.flags, threads=options.threads) as process:
        ids, truth, vocab = await _truth(process.url, 1, options)
        precisions: tuple[RecordDtype, ...] = ("off", "int4", "int8", "fp16")
        for dtype in precisions:
            async with client(process.url) as edge:
                session = ClientSession(list(ids), max_new_tokens=options.tokens, ignore_eos=True, records=dtype)
                await edge.start(session)
                rng, rounds = random.Random(0), 0
                while not session.finish:
                    rest = truth[len(session.log) - len(ids) :]
                    await edge.advance(session, draft(rng, rest, session.log[-1], options.nodes, options.rate, vocab))
                    rounds += 1
                await _all_rows(edge, len(session.log) - 1 if dtype != "off" else 0)
                contract = edge.welcome.records
                figures[dtype] = {
                    "round_bytes_per_token": round(edge.token_bytes / len(truth), 1),
                    "record_bytes_per_row": round(edge.record_bytes / max(1, sum(n for _, _, n in edge.rows)), 1),
                    "rounds": rounds,
                }
                if contract is not None:
                    figures["record_numbers"] = 2 * contract.heads * contract.head_dim
    return figures


async def _all_rows(edge: Client, count: int) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(10):
            while sum(n for _, _, n in edge.rows) < count:
                await edge.receive()


async def verdicts_and_records(pair: Pair, options: Options) -> Figures:
    """Verdict latency while a prompt's records are being made and sent, against no records at all; and their order."""
    figures: Figures = {}
    with server(pair, *options.flags, threads=options.threads) as process:
        for dtype in ("off", "int8"):
            waits: list[float] = []
            for seed in range(options.repeats):
                async with client(process.url) as edge:
                    ids = prompt(seed, 500, edge.welcome.vocab_size)
                    session = ClientSession(list(ids), max_new_tokens=40, ignore_eos=True, records=dtype)
                    await edge.start(session)
                    await edge.advance(session, [session.log[-1]])
                    while not session.finish:
                        sent = time.perf_counter()
                        await edge.advance(session, [session.log[-1]])
                        waits.append(1000 * (time.perf_counter() - sent))
                    if dtype != "off":
                        await _all_rows(edge, len(session.log) - 1)
                        prompt_rows = [start for _, start, _ in edge.rows if start < 499]
                        figures["prompt_rows"] = sum(n for _, start, n in edge.rows if start < 499)
                        figures["newest_first"] = prompt_rows == sorted(prompt_rows, reverse=True)
                    await edge.send(session.close())
            figures[dtype] = {"verdict_ms": percentiles(waits)}
    return figures


async def sessions(pair: Pair, options: Options) -> Figures:
    """Many sessions opened and dropped: memory, descriptors, slots."""
    times = ("--idle-seconds", "0.01", "--detached-seconds", "1", "--cold-seconds", "1")
    with server(pair, "--slots", "16", *times, *options.flags, threads=options.threads) as process:
        samples: list[tuple[int, int]] = []
        before = process.descriptors()
        done = 0
        while done < options.sessions:
            await asyncio.gather(*(_open_and_drop(process.url, done + i, options) for i in range(8)))
            done += 8
            if done % 200 == 0 or done >= options.sessions:
                samples.append((done, process.memory()))
        half = samples[len(samples) // 2 :]
        slope = (half[-1][1] - half[0][1]) / max(1, half[-1][0] - half[0][0])
        await asyncio.sleep(5)  # the last detached ones go cold, then go
        return {
            "sessions": done,
            "rss_mib": [round(samples[0][1] / 2**20, 1), round(samples[-1][1] / 2**20, 1)],
            "rss_bytes_per_session_second_half": round(slope, 1),
            "descriptors": [before, process.descriptors()],
            **await _held(process),
        }


async def _open_and_drop(url: str, seed: int, options: Options) -> None:
    async with client(url) as edge:
        session = ClientSession(prompt(seed, 16, edge.welcome.vocab_size), max_new_tokens=8, records="int8")
        await edge.start(session)
        if seed % 2:
            await edge.advance(session, [session.log[-1]])
        if seed % 3:
            await edge.send(session.close())
        else:
            edge.connection.transport.abort()  # dropped without a word; the next clients push it out


async def _held(process: ServerProcess) -> Figures:
    """What `/metrics` says is held."""
    host, port = process.url.removeprefix("ws://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    page = (await reader.read()).decode()
    writer.close()
    wanted = ("moa_slots_free", "moa_connections", 'moa_sessions{state="live"}', 'moa_sessions{state="detached"}')
    return {
        name: float(line.split()[-1]) for line in page.splitlines() for name in wanted if line.startswith(name + " ")
    }


async def overload(pair: Pair, options: Options) -> Figures:
    """Ten times more clients than slots and queue: typed busy, bounded memory, and everybody is served in the end."""
    refusals: dict[str, int] = {}
    flags = ("--slots", "8", "--max-queue", "8", "--max-queue-per-principal", "8", "--idle-seconds", "0.2")
    with server(pair, *options.flags, *flags, threads=options.threads) as process:
        before = process.memory()
        started = time.perf_counter()
        await asyncio.gather(*(_insist(process.url, seed, options, refusals) for seed in range(80)))
        return {
            "clients": 80,
            "slots": 8,
            "refusals": refusals,
            "seconds": round(time.perf_counter() - started, 1),
            "rss_mib": [round(before / 2**20, 1), round(process.memory() / 2**20, 1)],
        }


async def _insist(url: str, seed: int, options: Options, refusals: dict[str, int]) -> None:
    async with client(url) as edge:
        session = ClientSession(prompt(seed, 16, edge.welcome.vocab_size), max_new_tokens=8, ignore_eos=True)
        session.open()
        while not session.finish:
            if not session.unsettled:
                session.verify([session.log[-1], 5, 6])
            await edge.send(*session.unsettled)
            event = await edge.event(session)
            if isinstance(event, Refused):
                key = f"{event.error.code}:{event.error.limit}"
                refusals[key] = refusals.get(key, 0) + 1
                await asyncio.sleep(event.retry_after * random.Random(seed).uniform(0.5, 1.5))
        await edge.send(session.close())


async def sigterm(pair: Pair, options: Options) -> Figures:
    """SIGTERM under load: everybody gets a goaway, resumes on another replica, and ends with the same text."""
    with (
        server(pair, *options.flags, threads=options.threads) as first,
        server(pair, *options.flags, threads=options.threads) as second,
    ):
        truths = [await _truth(second.url, seed, options) for seed in range(8)]
        stopping = asyncio.create_task(_later(0.5, first.terminate))
        ends = await asyncio.gather(*(_move(first.url, second.url, truth, options) for truth in truths))
        await stopping
        code = await asyncio.to_thread(first.process.wait, 60)
        return {
            "clients": len(ends),
            "goaway": sum(end["goaway"] for end in ends),
            "moved": sum(end["moved"] for end in ends),
            "identical": sum(end["identical"] for end in ends),
            "exit_code": code,
        }


async def _later(seconds: float, act: Callable[[], None]) -> None:
    await asyncio.sleep(seconds)
    act()


async def _move(first: str, second: str, truth: tuple[list[int], list[int], int], options: Options) -> Figures:
    ids, expected, vocab = truth
    session = ClientSession(list(ids), max_new_tokens=options.tokens, ignore_eos=True)
    rng, goaway, moved = random.Random(0), False, False
    session.open()
    for url in (first, second):
        async with client(url) as edge:
            try:
                await edge.send(*session.recover())
                while not session.finish:
                    event = await edge.event(session)
                    if isinstance(event, Refused):
                        break  # draining: go elsewhere
                    if isinstance(event, Recovered):
                        moved = True
                        await edge.send(*event.resend)
                    if not session.unsettled and not session.finish:
                        rest = expected[len(session.log) - len(ids) :]
                        chain = draft(rng, rest, session.log[-1], options.nodes, options.rate, vocab)
                        await edge.send(session.verify(chain))
                        await asyncio.sleep(options.think)
            except ConnectionClosed:
                with contextlib.suppress(ConnectionClosed):
                    while True:  # what came before the end and was not read yet
                        await edge.event(session)
            goaway |= edge.goaway
    return {"goaway": goaway, "moved": moved, "identical": session.log[len(ids) :] == expected}


SCENARIOS: dict[str, Callable[[Pair, Options], Coroutine[Any, Any, Figures]]] = {
    "throughput": throughput,
    "bytes": bytes_per_token,
    "verdicts": verdicts_and_records,
    "sessions": sessions,
    "overload": overload,
    "sigterm": sigterm,
}


def run(options: Options) -> int:
    """Run what was asked for, and print it as JSON."""
    names = list(SCENARIOS) if options.scenario == "all" else [options.scenario]
    with contextlib.ExitStack() as stack:
        pair = Pair(folder_of(options.target), folder_of(options.drafter))
        if options.random:
            try:
                hidden, layers = map(int, options.random.split("x"))
            except ValueError:
                raise UsageError(f"--random is HIDDENxLAYERS, not {options.random!r}") from None
            pair = stack.enter_context(random_pair(hidden, layers))
        results: Figures = {"target": options.random or folder_of(options.target) or "embedded", **machine()}
        for name in names:
            results[name] = asyncio.run(SCENARIOS[name](pair, options))
    text = json.dumps(results, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    return 0


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="server_load", description=__doc__)
    parser.add_argument("scenario", choices=[*SCENARIOS, "all"])
    parser.add_argument("--target", type=Path)
    parser.add_argument("--drafter", type=Path)
    parser.add_argument("--random", default="", metavar="HIDDENxLAYERS", help="a random target instead")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens")
    parser.add_argument("--nodes", type=int, default=8, help="tokens in a draft")
    parser.add_argument("--rate", type=float, default=0.7, help="probability that a drafted token is right")
    parser.add_argument("--records", default="int8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--think", type=float, default=0.02, help="seconds a client takes between rounds (sigterm)")
    parser.add_argument("--threads", type=int, default=1, help="of the verifier's process")
    parser.add_argument("--flags", type=shlex.split, default=[], help="more flags of cloud-verifier serve, in quotes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    raise SystemExit(run_cli("server_load", lambda: run(options)))


if __name__ == "__main__":
    main()
