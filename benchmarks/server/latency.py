"""Delays of a verdict: activation records, and another client's long prompt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Any

from benchmarks.kit.figures import listing, percentiles
from benchmarks.kit.progress import steps
from benchmarks.server.crowd import crowd, scripts_for
from moa.wire import FEATURES
from moa.wire.messages import RecordDtype
from testing.client import client
from testing.devices import Round, Script, prompt
from testing.verifier import Pair, verifier

Figures = dict[str, Any]
_ROOM = 512
"""Tokens of the context that the crowd's own sessions may need."""
_HANG = 900.0
"""Seconds after which a prompt that is not read counts as a hang."""


def _ways(pair: Pair) -> tuple[RecordDtype, ...]:
    """With records off and on, if there are any."""
    return ("off", "int8") if pair.has_records else ("off",)


async def measure_records(pair: Pair, options: Any) -> Figures:
    """The same clients with records off and on, in turns, at the fewest and the most clients."""
    most = max(options.clients)
    kinds = [
        (clients, dtype)
        for clients in sorted({min(options.clients), most})
        for dtype in _ways(pair)
    ]
    waits: dict[tuple[int, str], list[float]] = {kind: [] for kind in kinds}
    with verifier(f"--slots={most + 1}", pair=pair) as running:
        said = await scripts_for(running.url, most, options)
        await crowd(running.url, said[:1])  # warm
        for _ in steps(range(options.repeats), "repeats"):
            for clients, dtype in kinds:
                waits[clients, dtype] += (await crowd(running.url, said[:clients], dtype)).round_ms
        rows = [
            {
                "clients": clients,
                "records": dtype,
                "verdicts": len(found),
                "client_ms": percentiles(found),
            }
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
    """The same crowd while another client's long prompt is read, with and without records for it,
    and with nobody else there, in turn."""
    most = max(options.clients)
    room = options.long + _ROOM
    flags = (f"--slots={most + 2}", f"--max-context-tokens={room}", f"--max-prompt-tokens={room}")
    kinds = [
        (clients, dtype)
        for clients in sorted({min(options.clients), most})
        for dtype in _ways(pair)
    ]
    alone: dict[tuple[int, str], list[list[float]]] = {kind: [] for kind in kinds}
    beside: dict[tuple[int, str], list[list[float]]] = {kind: [] for kind in kinds}
    took: dict[tuple[int, str], list[float]] = {kind: [] for kind in kinds}
    with verifier(*flags, pair=pair) as running:
        said = await scripts_for(running.url, most, options)
        await crowd(running.url, said[:1])  # warm
        tokens, by_itself, _ = await _while_reading(running.url, [], options.long, most, "off")
        for number, (_, (clients, dtype)) in enumerate(
            steps(product(range(options.repeats), kinds), "prompts")
        ):
            group = said[:clients]
            seed = most + 1 + number
            _, seconds, found = await _while_reading(running.url, group, options.long, seed, dtype)
            quiet: list[float] = []
            while len(quiet) < len(found):
                quiet += (await crowd(running.url, group)).round_ms
            took[clients, dtype].append(seconds)
            beside[clients, dtype].append(found)
            alone[clients, dtype].append(quiet)
    return {
        "prompt": tokens,
        "prompt_seconds": round(by_itself, 2),
        "rows": [
            {
                "clients": clients,
                "records": dtype,
                "prompt_seconds": round(median(took[clients, dtype]), 2),
            }
            | _compared(alone[clients, dtype], beside[clients, dtype])
            for clients, dtype in kinds
        ],
    }


def _compared(alone: Sequence[Sequence[float]], beside: Sequence[Sequence[float]]) -> Figures:
    """Percentiles of all, and the median of the ratios of neighbours."""
    shares = (50, 95)
    ratios = {
        f"p{share}": [
            percentiles(now, share)[f"p{share}"] / percentiles(before, share)[f"p{share}"]
            for before, now in zip(alone, beside, strict=True)
            if before and now
        ]
        for share in shares
    }
    return {
        "alone_ms": percentiles([ms for found in alone for ms in found], *shares),
        "beside_ms": percentiles([ms for found in beside for ms in found], *shares),
        "ratio": {name: round(median(found or [0.0]), 2) for name, found in ratios.items()},
        "ratios": {name: [round(ratio, 2) for ratio in found] for name, found in ratios.items()},
        "verdicts": sum(map(len, beside)),
    }


def long_prompt(wanted: int, context: int) -> int:
    """Tokens of the long prompt for a verifier of this context: as many as are wanted, or as fit
    beside `_ROOM`. A context that is hardly larger than that gives half of itself."""
    return min(wanted, max(context - _ROOM, context // 2))


async def _while_reading(
    url: str, said: Sequence[Script], length: int, seed: int, records: RecordDtype
) -> tuple[int, float, list[float]]:
    """Tokens of another client's prompt, how long it took to read it, and a crowd's round times in
    that time."""
    heard: list[Round] = []
    features = FEATURES if records != "off" else FEATURES - {"records"}
    async with client(url, patience=_HANG, features=sorted(features)) as edge:
        fits = long_prompt(length, edge.welcome.limits.max_context_tokens)
        ids = prompt(seed, fits, edge.welcome.vocab_size)
        began = time.perf_counter()
        session = await edge.start(
            ids, patient=True, max_new_tokens=2, ignore_eos=True, records=records
        )

        async def read() -> float:
            await edge.advance(session, [session.log[-1]])
            return time.perf_counter()

        reading = asyncio.create_task(read())
        while said and not reading.done():
            heard += (await crowd(url, said)).heard
        ended = await reading
        await edge.send(session.close())
    return (
        len(ids),
        ended - began,
        [1000 * (one.read - one.sent) for one in heard if one.read <= ended],
    )


def prompt_tables(figures: Figures) -> str:
    """Percentiles of a verdict, alone and beside the prompt."""
    shown = listing(
        figures["rows"],
        {
            "": "{clients} clients, records of the prompt {records}",
            "verdicts": "{verdicts}",
            **{f"{q} ms alone": f"{{alone_ms[{q}]:.1f}}" for q in ("p50", "p95")},
            **{
                f"{q} ms beside": f"{{beside_ms[{q}]:.1f}} ({{ratio[{q}]:.2f}}x)"
                for q in ("p50", "p95")
            },
            "the prompt took": "{prompt_seconds:.1f} s",
        },
    )
    told = (
        "From a draft's sending to its verdict's reading, by the client; "
        "ratios are the medians of neighbours' ratios."
    )
    return (
        f"{shown}\n\n{told} With nobody else there the prompt of {figures['prompt']} tokens takes "
        f"{figures['prompt_seconds']:.1f} s."
    )
