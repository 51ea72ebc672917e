"""The table of engines asks each one once, however often it is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.device import upstreams
from benchmarks.device.upstreams import Engine, Options, Rows


async def test_a_kept_row_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def through(engine: Engine, options: Options) -> dict[str, Any]:
        asked.append(engine.api)
        return {"engine": engine.name, "api": engine.api, "same": options.cuts}

    monkeypatch.setattr(upstreams, "through", through)
    kept = str(tmp_path / "rows.jsonl")
    first = Engine("vLLM", "http://127.0.0.1:8000/v1", "vllm", "")
    second = Engine("vLLM", "http://127.0.0.1:8000/v1", "chat-vllm", "")
    await Rows(Options(kept=kept)).add(first)

    rows = Rows(Options(kept=kept))
    await rows.add(first)
    await rows.add(second)
    assert asked == ["vllm", "chat-vllm"]
    assert [row["api"] for row in rows.found] == asked

    await Rows(Options(kept=kept, tokens=32)).add(first)
    assert asked == ["vllm", "chat-vllm", "vllm"]  # longer answers are another row
