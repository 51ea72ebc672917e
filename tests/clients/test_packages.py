"""Clients that others wrote, unchanged: whole and streamed answers, stop texts, seeds, usage,
errors, cancelling; and an outage of the verifier, from which no user may see an error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from testing.verifier import Emulated, verifier
from tests.clients.conftest import MODEL, PATIENCE, Device, online

langchain = pytest.importorskip("langchain_openai", reason="needs `make clients`")
pytestmark = pytest.mark.filterwarnings("default")
QUESTION = "What is 17 + 25 - 9?"
LONG = "Count from 1 to 60."
CARRY = "What is 58 + 67 - 39?"
"""The device alone answers this wrongly."""


def client(name: str) -> Any:
    """The package, or a test that is skipped."""
    return pytest.importorskip(name, reason="needs `make clients`")


def tell_llm(address: str, folder: Path) -> None:
    """Write the file by which `llm` knows a model that is not its own."""
    known = f"- model_id: moa\n  model_name: {MODEL}\n  api_base: {address}/v1\n"
    (folder / "extra-openai-models.yaml").write_text(known)


def test_langchain(device: Device) -> None:
    made = langchain.ChatOpenAI
    how: dict[str, Any] = {
        "base_url": f"{device.address}/v1",
        "api_key": "any",
        "timeout": PATIENCE,
        "max_retries": 0,
    }
    chat = made(model=MODEL, temperature=0, seed=3, stream_usage=True, **how)
    whole = chat.invoke(QUESTION)
    parts = list(chat.stream(QUESTION))
    assert "".join(part.content for part in parts) == whole.content != ""
    assert whole.usage_metadata["total_tokens"] > 0
    assert whole.response_metadata["finish_reason"] == "stop"
    assert "33" not in chat.bind(stop=["33"]).invoke(QUESTION).content
    sampled = made(model=MODEL, temperature=1.2, seed=5, **how)
    assert sampled.invoke(QUESTION).content == sampled.invoke(QUESTION).content
    scored = (
        chat.bind(logprobs=True, top_logprobs=2)
        .invoke(QUESTION)
        .response_metadata["logprobs"]["content"]
    )
    assert "".join(one["token"] for one in scored) == whole.content
    with pytest.raises(client("openai").NotFoundError):
        made(model="other", **how).invoke(QUESTION)
    stream = chat.stream(LONG)
    next(stream)
    stream.close()


def test_litellm(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch prices
    litellm = client("litellm")
    how: dict[str, Any] = {
        "api_base": f"{device.address}/v1",
        "api_key": "any",
        "max_retries": 0,
        "timeout": PATIENCE,
    }
    how |= {"messages": [{"role": "user", "content": QUESTION}]}
    whole = litellm.completion(model=f"openai/{MODEL}", seed=3, **how)
    stream = litellm.completion(model=f"openai/{MODEL}", stream=True, **how)
    assert (
        "".join(part.choices[0].delta.content or "" for part in stream)
        == whole.choices[0].message.content
        != ""
    )
    assert whole.usage.total_tokens > 0
    assert (
        "33"
        not in litellm.completion(model=f"openai/{MODEL}", stop="33", **how)
        .choices[0]
        .message.content
    )
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(model="openai/other", **how)


def test_llm(device: Device, tmp_path: Path) -> None:
    client("llm")
    tell_llm(device.address, tmp_path)
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "any"}
    told = [
        subprocess.run(
            [sys.executable, "-m", "llm", "-m", "moa", QUESTION, *more],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        ).stdout
        for more in ([], ["--no-stream"], ["-o", "temperature", "0", "-o", "seed", "3"])
    ]
    assert told[0].strip() == told[1].strip() == told[2].strip() != ""


def test_curl(device: Device) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("needs curl")
    body = json.dumps(
        {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": QUESTION}]}
    )
    told = subprocess.run(
        [curl, "-sN", "--noproxy", "*", f"{device.address}/v1/chat/completions", "--json", body],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    ).stdout
    assert told.endswith("data: [DONE]\n\n")
    assert '"finish_reason":"stop"' in told


# ---- an outage, seen through each client with its default settings


def ask_openai(address: str, question: str, *, stream: bool) -> str:
    """The answer's text, as for the others below."""
    with client("openai").OpenAI(base_url=f"{address}/v1", api_key="any") as api:
        messages = [{"role": "user", "content": question}]
        answer = api.chat.completions.create(model=MODEL, messages=messages, stream=stream)
        if not stream:
            return str(answer.choices[0].message.content)
        return "".join(choice.delta.content or "" for chunk in answer for choice in chunk.choices)


def ask_langchain(address: str, question: str, *, stream: bool) -> str:
    chat = langchain.ChatOpenAI(model=MODEL, base_url=f"{address}/v1", api_key="any")
    return "".join(
        part.content for part in (chat.stream(question) if stream else [chat.invoke(question)])
    )


def ask_litellm(address: str, question: str, *, stream: bool) -> str:
    how = {
        "model": f"openai/{MODEL}",
        "messages": [{"role": "user", "content": question}],
        "stream": stream,
    }
    answer = client("litellm").completion(**how, api_base=f"{address}/v1", api_key="any")
    if not stream:
        return str(answer.choices[0].message.content)
    return "".join(part.choices[0].delta.content or "" for part in answer)


def ask_llm(_: str, question: str, *, stream: bool) -> str:
    return "".join(client("llm").get_model("moa").prompt(question, stream=stream))


PACKAGES = {
    "openai": ask_openai,
    "langchain_openai": ask_langchain,
    "litellm": ask_litellm,
    "llm": ask_llm,
}


@pytest.mark.parametrize("package", PACKAGES)
def test_an_outage_is_no_error_and_no_answer_takes_5_seconds(
    package: str, apart: tuple[Device, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, port = apart
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch prices
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    tell_llm(device.address, tmp_path)
    client(package)  # neither imports nor plugins are part of an answer
    if package == "llm":
        client("llm").get_model("moa")
    seconds: dict[str, float] = {}

    def begin(situation: str, question: str = CARRY) -> list[Future[str]]:
        """A whole answer and a streamed one, at once."""

        def one(stream: bool) -> str:
            began = time.monotonic()
            text = PACKAGES[package](device.address, question, stream=stream)
            seconds[f"{situation}, {'streamed' if stream else 'whole'}"] = round(
                time.monotonic() - began, 2
            )
            return text

        return [threads.submit(one, stream) for stream in (False, True)]

    def texts(begun: list[Future[str]]) -> list[str]:
        return [one.result(PATIENCE) for one in begun]

    with ThreadPoolExecutor(2) as threads:
        assert all(texts(begin("down from the start")))
        with verifier(
            "--port", port, emulated=Emulated(step_ms=100), threads=1
        ) as running:  # slow enough to be killed
            device.until(online)
            verified = texts(begin("up"))
            assert verified[0] == verified[1] != ""
            before = device.until(lambda status: status["running"] == 0)
            begun = begin("killed in mid-answer", LONG)
            killed = device.until(
                lambda status: status["running"] == 2 and status["tokens"] > before["tokens"] + 8
            )
            running.process.kill()
            running.process.wait(PATIENCE)
            assert all(texts(begun))
        assert device.until(lambda status: not online(status))["tokens"] > killed["tokens"]
        with verifier("--port", port, threads=1):
            device.until(online)
            assert texts(begin("back again")) == verified
    print(seconds)  # `pytest -rP` shows them
    assert max(seconds.values()) < 5
