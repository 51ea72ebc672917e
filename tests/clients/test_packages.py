"""Clients that others wrote, unchanged: whole and streamed answers, stop texts, seeds, usage, errors, cancelling."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import MODEL, PATIENCE, Device

langchain = pytest.importorskip("langchain_openai", reason="needs `make clients`")
pytestmark = pytest.mark.filterwarnings("default")
QUESTION = "What is 17 + 25 - 9?"


def client(name: str) -> Any:
    """The package, or a test that is skipped."""
    return pytest.importorskip(name, reason="needs `make clients`")


def test_langchain(device: Device) -> None:
    made = langchain.ChatOpenAI
    how: dict[str, Any] = {"base_url": f"{device.address}/v1", "api_key": "any", "timeout": PATIENCE, "max_retries": 0}
    chat = made(model=MODEL, temperature=0, seed=3, stream_usage=True, **how)
    whole = chat.invoke(QUESTION)
    parts = list(chat.stream(QUESTION))
    assert "".join(part.content for part in parts) == whole.content != ""
    assert whole.usage_metadata["total_tokens"] > 0
    assert whole.response_metadata["finish_reason"] == "stop"
    assert "33" not in chat.bind(stop=["33"]).invoke(QUESTION).content
    sampled = made(model=MODEL, temperature=1.2, seed=5, **how)
    assert sampled.invoke(QUESTION).content == sampled.invoke(QUESTION).content
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
    assert "".join(one["token"] for one in scored) == whole.content
    with pytest.raises(client("openai").NotFoundError):
        made(model="other", **how).invoke(QUESTION)
    stream = chat.stream("Count from 1 to 60.")
    next(stream)
    stream.close()


def test_litellm(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch prices
    litellm = client("litellm")
    how: dict[str, Any] = {"api_base": f"{device.address}/v1", "api_key": "any", "max_retries": 0, "timeout": PATIENCE}
    how |= {"messages": [{"role": "user", "content": QUESTION}]}
    whole = litellm.completion(model=f"openai/{MODEL}", seed=3, **how)
    stream = litellm.completion(model=f"openai/{MODEL}", stream=True, **how)
    assert "".join(part.choices[0].delta.content or "" for part in stream) == whole.choices[0].message.content != ""
    assert whole.usage.total_tokens > 0
    assert "33" not in litellm.completion(model=f"openai/{MODEL}", stop="33", **how).choices[0].message.content
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/other", **how)


def test_llm(device: Device, tmp_path: Path) -> None:
    client("llm")
    known = f"- model_id: moa\n  model_name: {MODEL}\n  api_base: {device.address}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(known)
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "any"}
    told = [
        subprocess.run(
            [sys.executable, "-m", "llm", "-m", "moa", QUESTION, *more],
            env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True,
        ).stdout
        for more in ([], ["--no-stream"], ["-o", "temperature", "0", "-o", "seed", "3"])
    ]  # fmt: skip
    assert told[0].strip() == told[1].strip() == told[2].strip() != ""


def test_curl(device: Device) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("needs curl")
    body = json.dumps({"model": MODEL, "stream": True, "messages": [{"role": "user", "content": QUESTION}]})
    told = subprocess.run(
        [curl, "-sN", "--noproxy", "*", f"{device.address}/v1/chat/completions", "--json", body],
        capture_output=True, text=True, timeout=PATIENCE, check=True,
    ).stdout  # fmt: skip
    assert told.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"stop"' in told
