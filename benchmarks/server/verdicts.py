"""Whether a verdict waits for activation records: its latency with and without them, and the order of a prompt's."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.report import table
from benchmarks.server.crowd import crowd, speeches
from benchmarks.server.options import Options
from benchmarks.server_kit import Pair, all_rows, client, percentiles, prompt, server
from moa.wire import ClientSession
from moa.wire.messages import RecordDtype

Figures = dict[str, Any]
_LONG = 500  # prompt tokens
_WAYS: tuple[RecordDtype, ...] = ("off", "int8")


async def measure(pair: Pair, options: Options) -> Figures:
    """The same clients with records off and on, in turns, at the fewest and the most clients; then a long prompt."""
    waits: dict[tuple[int, str], list[float]] = {}
    most = max(options.clients)
    with server(pair, "--slots", str(most + 1), *options.flags, threads=options.threads) as process:
        said = await speeches(process.url, most, length=options.prompt, tokens=options.tokens, rate=options.rate)
        await crowd(process.url, said[:1], options.nodes)  # warm
        for repeat in range(options.repeats):
            for clients in sorted({min(options.clients), most}):
                for dtype in _WAYS:
                    run = await crowd(process.url, said[:clients], options.nodes, dtype)
                    waits.setdefault((clients, dtype), []).extend(run.round_ms)
            print(f"repeat {repeat + 1} of {options.repeats}", file=sys.stderr, flush=True)
        rows = [
            {"clients": clients, "records": dtype, "verdicts": len(found), "client_ms": percentiles(found)}
            for (clients, dtype), found in waits.items()
        ]
        return {"rows": rows, "prompt": await _long_prompt(process.url)}


async def _long_prompt(url: str) -> Figures:
    """In which order the records of a long prompt arrive, beside a client that goes on verifying."""
    async with client(url) as edge:
        session = ClientSession(prompt(0, _LONG, edge.welcome.vocab_size), max_new_tokens=40, ignore_eos=True)
        await edge.start(session)
        while not session.finish:
            await edge.advance(session, [session.log[-1]])
        await all_rows(edge, len(session.log) - 1)
        await edge.send(session.close())
    runs = [(start, count) for _, start, count in edge.rows]
    # A prompt runs in chunks while its records are already on their way: from the row that completed it on, all that
    # was not sent yet comes newest first.
    complete = next(n for n, (start, count) in enumerate(runs) if start < _LONG - 1 <= start + count)
    back = [start for start, _ in runs[complete:] if start < _LONG - 1]
    return {
        "tokens": _LONG,
        "rows": sum(min(start + count, _LONG - 1) - start for start, count in runs if start < _LONG - 1),
        "rows_before_it_was_complete": sum(count for start, count in runs[:complete]),
        "newest_first": back == sorted(back, reverse=True),
    }


def tables(figures: Figures) -> str:
    """Latency by clients and records."""
    rows = [
        [
            f"{row['clients']} clients, records {row['records']}",
            f"{row['verdicts']}",
            *(f"{row['client_ms'][q]:.2f}" for q in ("p50", "p90", "p99")),
        ]
        for row in figures["rows"]
    ]
    one = figures["prompt"]
    order = "newest first" if one["newest_first"] else "NOT newest first"
    return "\n".join(
        [
            table(["", "verdicts", "p50 ms", "p90 ms", "p99 ms"], rows),
            "",
            "From a draft's sending to its verdict's reading, by the client. With records off the verifier neither "
            f"makes nor sends any. Of a prompt of {one['tokens']} tokens, {one['rows']} rows arrived, {order}, "
            f"{one['rows_before_it_was_complete']} of them while the prompt was still running.",
        ]
    )
