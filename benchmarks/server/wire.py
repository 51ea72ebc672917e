"""Bytes on the wire per verified token, by precision of the records, and what raw keys and values would be."""

from __future__ import annotations

from typing import Any

from benchmarks.report import table
from benchmarks.server.crowd import speeches
from benchmarks.server.options import Options
from benchmarks.server_kit import Pair, all_rows, client, server
from moa.demo import paths
from moa.model.partial_target import read_facts
from moa.wire import ClientSession
from moa.wire.messages import RecordDtype

Figures = dict[str, Any]
_PRECISIONS: tuple[RecordDtype, ...] = ("off", "int4", "int8", "fp16")


async def measure(pair: Pair, options: Options) -> Figures:
    """One conversation for each precision, with every record of it waited for."""
    facts, _ = read_facts(pair.target or paths().target)
    figures: Figures = {
        "draft_tokens": options.nodes,
        "raw_kv_bytes": 2 * facts.layers * facts.kv_heads * facts.head_dim * 2,
        "raw_kv": f"{facts.layers} layers x 2 x {facts.kv_heads} heads x {facts.head_dim} numbers of 2 bytes",
        "rows": [],
    }
    with server(pair, *options.flags, threads=options.threads) as process:
        (said,) = await speeches(process.url, 1, length=options.prompt, tokens=options.tokens, rate=options.rate)
        for dtype in _PRECISIONS:
            async with client(process.url) as edge:
                session = ClientSession(list(said.ids), max_new_tokens=options.tokens, ignore_eos=True, records=dtype)
                await edge.start(session)
                begun, rounds = edge.token_bytes, 0
                while not session.finish:
                    done = len(session.log) - len(said.ids)
                    await edge.advance(session, [session.log[-1], *said.guesses[done : done + options.nodes - 1]])
                    rounds += 1
                await all_rows(edge, len(session.log) - 1 if dtype != "off" else 0)
                row = edge.record_bytes / max(1, sum(count for _, _, count in edge.rows))
                rounds_bytes = (edge.token_bytes - begun) / options.tokens
                figures["rows"].append(
                    {
                        "records": dtype,
                        "rounds": rounds,
                        "round_bytes_per_token": round(rounds_bytes, 1),
                        "record_bytes_per_row": round(row, 1),
                        "bytes_per_token": round(rounds_bytes + row, 1),
                    }
                )
    return figures


def tables(figures: Figures) -> str:
    """Bytes by precision."""
    raw = figures["raw_kv_bytes"]
    rows = [
        [
            row["records"],
            f"{row['round_bytes_per_token']:.0f}",
            f"{row['record_bytes_per_row']:.0f}",
            f"**{row['bytes_per_token']:.0f}**",
            f"{raw / row['record_bytes_per_row']:.1f}x" if row["records"] != "off" else "",
        ]
        for row in figures["rows"]
    ]
    rows.append(["raw keys and values, all layers, fp16", "", f"{raw}", "", "1.0x"])
    header = ["records", "rounds, up and down", "records", "in all", "records against raw"]
    return "\n".join(
        [
            f"Bytes per verified token, chains of {figures['draft_tokens']}, with message and record headers, "
            "without websocket and TCP headers. A token's record is counted once, with the token; a prompt costs its "
            "records too.",
            "",
            table(header, rows),
            "",
            f"Raw is computed: {figures['raw_kv']}.",
        ]
    )
