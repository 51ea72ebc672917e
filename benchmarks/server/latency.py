"""Delays of a verdict: activation records, and another client's long prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.kit.client import client
from benchmarks.kit.devices import Script, prompt
from benchmarks.kit.figures import listing, percentiles
from benchmarks.kit.progress import steps
from benchmarks.kit.verifier import Pair, verifier
from benchmarks.server.crowd import crowd, scripts_for
from moa.wire.messages import RecordDtype

Figures = dict[str, Any]
_LONG = 8000
"""Tokens of the prompt that others wait beside, or as many as fit."""
_ROOM = 512
"""Tokens of the context that the crowd's own sessions may need."""
_WAYS: tuple[RecordDtype, ...] = ("off", "int8")


async def measure_records(pair: Pair, options: Any) -> Figures:
    """The same clients with records off and on, in turns, at the fewest and the most clients."""
    most = max(options.clients)
    kinds = [(clients, dtype) for clients in sorted({min(options.clients), most}) for dtype in _WAYS]
    waits: dict[tuple[int, str], list[float]] = {kind: [] for kind in kinds}
    with verifier(f"--slots={most + 1}", pair=pair) as running:
        said = await scripts_for(running.url, most, options)
        await crowd(running.url, said[:1])  # warm
        for _ in steps(range(options.repeats), "repeats"):
            for clients, dtype in kinds:
                waits[clients, dtype] += (await crowd(running.url, said[:clients], dtype)).round_ms
        rows = [
            {"clients": clients, "records": dtype, "verdicts": len(found), "client_ms": percentiles(found)}
            for (clients, dtype), found in waits.items()
        ]
    return {"rows": rows}


def record_tables(figures: Figures) -> str:
    """Latency by clients and records."""
    shown = listing(
        figures["rows"],
        {
            "": "{clients} clients, records {records}",
            "verdicts": "{verdicts}",
            **{f"{q} ms": f"{{client_ms[{q}]:.2f}}" for q in ("p50", "p90", "p99")},
        },
    )
    told = "From a draft's sending to its verdict's reading, by the client. With records off the verifier neither makes"
    return f"{shown}\n\n{told} nor sends any."


async def measure_prompt(pair: Pair, options: Any) -> Figures:
    """The same crowd with nobody else there, and while a long prompt is read."""
    most, room = max(options.clients), _LONG + _ROOM
    flags = (f"--slots={most + 2}", f"--max-context-tokens={room}", f"--max-prompt-tokens={room}")
    rows = []
    with verifier(*flags, pair=pair) as running:
        said = await scripts_for(running.url, most, options)
        await crowd(running.url, said[:1])  # warm
        for clients in steps(sorted({min(options.clients), most}), "clients"):
            alone: list[float] = []
            for _ in range(options.repeats):
                alone += (await crowd(running.url, said[:clients])).round_ms
            beside, tokens, seconds = await _while_reading(running.url, said[:clients])
            before, now = percentiles(alone, 95)["p95"], percentiles(beside, 95)["p95"]
            rows.append(
                {
                    "clients": clients,
                    "prompt": tokens,
                    "prompt_seconds": round(seconds, 2),
                    "alone_p95_ms": before,
                    "beside_p95_ms": now,
                    "ratio": round(now / before, 2),
                    "verdicts": len(beside),
                }
            )
    return {"rows": rows}


async def _while_reading(url: str, said: Sequence[Script]) -> tuple[list[float], int, float]:
    """Round times of a crowd until another client's prompt has been read; its tokens, and how long that took."""
    found: list[float] = []
    async with client(url) as edge:
        ids = prompt(len(said), min(_LONG, edge.welcome.limits.max_context_tokens - _ROOM), edge.welcome.vocab_size)
        began = time.perf_counter()
        session = await edge.start(ids, patient=True, max_new_tokens=2, ignore_eos=True, records="off")
        reading = asyncio.create_task(edge.advance(session, [session.log[-1]]))
        while not reading.done():
            run = await crowd(url, said)
            if not reading.done():  # a crowd that outlasts the prompt counts for the time without it as well
                found += run.round_ms
        await reading
        seconds = time.perf_counter() - began
        await edge.send(session.close())
    return found or run.round_ms, len(ids), seconds


def prompt_tables(figures: Figures) -> str:
    """95th percentiles of a verdict, alone and beside the prompt."""
    return listing(
        figures["rows"],
        {
            "p95 of a verdict": "{clients} clients",
            "ms alone": "{alone_p95_ms:.1f}",
            "ms beside a prompt": "{beside_p95_ms:.1f} ({ratio:.2f}x)",
            "the prompt": "{prompt} tokens in {prompt_seconds:.1f} s",
        },
    )
