"""What is compared with the plain way is the same text."""

from __future__ import annotations

from benchmarks.device.upstream_overhead import Options, measure, tables


async def test_both_ways_ask_for_the_same_text() -> None:
    options = Options(first_ms=1.0, token_ms=1.0, answers=1, streams=2, stream_tokens=24, repeats=1)
    result = await measure(options)
    assert result["characters"]["ours"] == result["characters"]["plain"] > 0
    assert "| ours |" in tables(result)
