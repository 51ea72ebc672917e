"""Bytes on the wire per verified token, by precision of the records, and what raw keys and values
would be."""

from __future__ import annotations

from typing import Any

from benchmarks.kit.figures import table
from benchmarks.server.crowd import scripts_for
from moa.demo import paths
from moa.target.loading import read_facts
from moa.wire.messages import RecordDtype
from testing.client import client
from testing.verifier import Pair, verifier

Figures = dict[str, Any]
_PRECISIONS: tuple[RecordDtype, ...] = ("off", "int4", "int8", "fp16")


async def measure(pair: Pair, options: Any) -> Figures:
    """One conversation for each precision, with every record of it waited for."""
    facts, _ = read_facts(pair.target or paths().target)
    rows = []
    with verifier(pair=pair) as running:
        (said,) = await scripts_for(running.url, 1, options)
        for dtype in _PRECISIONS if pair.has_records else _PRECISIONS[:1]:
            async with client(running.url) as edge:
                session = await edge.start(
                    said.ids, max_new_tokens=options.tokens, ignore_eos=True, records=dtype
                )
                begun = edge.token_bytes
                rounds = 0
                while not session.finish:
                    done = len(session.log) - len(said.ids)
                    await edge.guess(session, [session.log[-1], *said.drafts[done]])
                    rounds += 1
                await edge.rows_come(len(session.log) - 1 if dtype != "off" else 0)
            row = edge.record_bytes / max(1, sum(message.rows for message in edge.rows))
            around = (edge.token_bytes - begun) / options.tokens
            rows.append(
                {
                    "records": dtype,
                    "rounds": rounds,
                    "round_bytes_per_token": round(around, 1),
                    "record_bytes_per_row": round(row, 1),
                    "bytes_per_token": round(around + row, 1),
                }
            )
    return {
        "draft_tokens": options.nodes,
        "raw_kv_bytes": 2 * facts.layers * facts.kv_heads * facts.head_dim * 2,
        "raw_kv": f"{facts.layers} layers x 2 x {facts.kv_heads} heads x {facts.head_dim} numbers of 2 bytes",
        "rows": rows,
    }


def tables(figures: Figures) -> str:
    """Bytes by precision."""
    raw = figures["raw_kv_bytes"]
    rows = [
        [
            row["records"],
            "{round_bytes_per_token:.0f}".format(**row),
            "{record_bytes_per_row:.0f}".format(**row),
            "**{bytes_per_token:.0f}**".format(**row),
            f"{raw / row['record_bytes_per_row']:.1f}x" if row["records"] != "off" else "",
        ]
        for row in figures["rows"]
    ]
    rows.append(["raw keys and values, all layers, fp16", "", f"{raw}", "", "1.0x"])
    shown = table(
        ["records", "rounds, up and down", "records", "in all", "records against raw"], rows
    )
    return (
        f"Bytes per verified token, chains of {figures['draft_tokens']}, with message and record headers, without "
        "websocket and TCP headers. A token's record is counted once, with the token; a prompt costs its records too."
        f"\n\n{shown}\n\nRaw is computed: {figures['raw_kv']}."
    )
