"""How much longer verdicts take while the verifier reads somebody's long prompt."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from benchmarks.report import table
from benchmarks.server.crowd import Speech, crowd, speeches
from benchmarks.server.options import Options
from benchmarks.server_kit import Pair, client, prompt, server
from moa.wire import ClientSession

Figures = dict[str, Any]
_LONG = 8000
_ROOM = 512
"""Tokens of the context that the crowd's own sessions may need."""


async def measure(pair: Pair, options: Options) -> Figures:
    """The same crowd with nobody else there, and while a prompt of 8,000 tokens, or as many as fit, is read."""
    most, room = max(options.clients), str(_LONG + _ROOM)
    flags = ("--slots", str(most + 2), "--max-context-tokens", room, "--max-prompt-tokens", room, *options.flags)
    with server(pair, *flags, threads=options.threads) as process:
        said = await speeches(process.url, most, length=options.prompt, tokens=options.tokens, rate=options.rate)
        await crowd(process.url, said[:1], options.nodes)  # warm
        rows = []
        for clients in sorted({min(options.clients), most}):
            alone: list[float] = []
            for _ in range(options.repeats):
                alone += (await crowd(process.url, said[:clients], options.nodes)).round_ms
            beside, tokens, seconds = await _while_reading(process.url, said[:clients], options.nodes)
            rows.append(
                {
                    "clients": clients,
                    "prompt": tokens,
                    "prompt_seconds": round(seconds, 2),
                    "alone_p95_ms": round(_p95(alone), 2),
                    "beside_p95_ms": round(_p95(beside), 2),
                    "ratio": round(_p95(beside) / _p95(alone), 2),
                    "verdicts": len(beside),
                }
            )
        return {"rows": rows}


async def _while_reading(url: str, said: list[Speech], nodes: int) -> tuple[list[float], int, float]:
    """Round times of a crowd until another client's prompt has been read; its tokens, and how long that took."""
    found: list[float] = []
    async with client(url) as edge:
        ids = prompt(len(said), min(_LONG, edge.welcome.limits.max_context_tokens - _ROOM), edge.welcome.vocab_size)
        session = ClientSession(ids, max_new_tokens=2, ignore_eos=True, records="off")
        began = time.perf_counter()
        await edge.start(session)
        reading = asyncio.create_task(edge.advance(session, [session.log[-1]]))
        while not reading.done():
            run = await crowd(url, said, nodes)
            if not reading.done():  # a crowd that outlasts the prompt counts for the time without it as well
                found += run.round_ms
        await reading
        seconds = time.perf_counter() - began
        await edge.send(session.close())
    return found or run.round_ms, len(ids), seconds


def _p95(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]


def tables(figures: Figures) -> str:
    """95th percentiles of a verdict, alone and beside the prompt."""
    rows = [
        [
            f"{row['clients']} clients",
            f"{row['alone_p95_ms']:.1f}",
            f"{row['beside_p95_ms']:.1f} ({row['ratio']:.2f}x)",
            f"{row['prompt']} tokens in {row['prompt_seconds']:.1f} s",
        ]
        for row in figures["rows"]
    ]
    return table(["p95 of a verdict", "ms alone", "ms beside a prompt", "the prompt"], rows)
