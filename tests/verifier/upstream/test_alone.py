"""Where the device answers alone although the link is up, every mode says why, and so does the
terminal."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from edge_client import EdgeClient
from tests.verifier.upstream.scripted import chunk, running, stream, whole
from tests.verifier.upstream.test_telling import QUESTION, served

REFUSES = whole({"error": {"message": "flagged"}}, "403 Forbidden")
WHY = "the upstream refuses this request: flagged"
GOOD = stream(chunk(" The upstream says this."), chunk("", "stop"), "data: [DONE]\n\n")


def last_of(page: str) -> dict[str, Any]:
    """The last event of a stream that has a choice or a response."""
    events = [
        json.loads(line.removeprefix("data: "))
        for line in page.splitlines()
        if line.startswith("data: {")
    ]
    return next(one for one in reversed(events) if one.get("choices") or "response" in one)


async def test_an_answer_that_the_device_wrote_alone_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "moa.edge")
    async with (
        running(REFUSES) as upstream,
        EdgeClient(upstream=upstream.url, upstream_api="completions") as device,
        served(device) as http,
    ):
        await device.wait_online(60)
        body = QUESTION | {"max_tokens": 4}
        whole_answer = (await http.post("/v1/chat/completions", json=body)).json()
        chunks = await http.post("/v1/chat/completions", json=body | {"stream": True})
        asked = {"input": "What is 17 plus 25?", "max_output_tokens": 4}
        response = (await http.post("/v1/responses", json=asked)).json()
        events = await http.post("/v1/responses", json=asked | {"stream": True})
        status = (await http.get("/moa/status")).json()
    assert status["link"] == "online"
    assert WHY in whole_answer["choices"][0]["moa"]["why"]
    assert WHY in last_of(chunks.text)["choices"][0]["moa"]["why"]
    assert WHY in response["moa"]["why"]
    assert WHY in last_of(events.text)["response"]["moa"]["why"]
    lines = [record.getMessage() for record in caplog.records if record.name == "moa.edge"]
    assert len(lines) == 1, "one line of a kind in ten seconds"
    assert lines[0].startswith("an answer is this device's own")
    assert WHY in lines[0]


async def test_a_verified_answer_has_no_such_reason() -> None:
    async with (
        running(GOOD) as upstream,
        EdgeClient(upstream=upstream.url, upstream_api="completions") as device,
        served(device) as http,
    ):
        await device.wait_online(60)
        said = (await http.post("/v1/chat/completions", json=QUESTION)).json()
    assert said["choices"][0]["moa"] == {"reason": "eos", "verified": True}


async def test_without_a_verifier_that_is_the_reason() -> None:
    async with EdgeClient() as device, served(device) as http:
        said = (await http.post("/v1/chat/completions", json=QUESTION | {"max_tokens": 4})).json()
    assert said["choices"][0]["moa"]["why"] == "there is no verifier"


async def test_an_answer_that_ends_at_this_device_s_context_says_whose_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "moa.edge")
    long = stream(chunk(" word" * 3000), chunk("", "stop"), "data: [DONE]\n\n")
    async with (
        running(long) as upstream,
        EdgeClient(upstream=upstream.url, upstream_api="completions") as device,
        served(device) as http,
    ):
        await device.wait_online(60)
        context = device.shared.max_context
        full = (await http.post("/v1/chat/completions", json=QUESTION)).json()
        chunks = await http.post("/v1/chat/completions", json=QUESTION | {"stream": True})
        short = (await http.post("/v1/chat/completions", json=QUESTION | {"max_tokens": 4})).json()
        status = (await http.get("/moa/status")).json()
    marks = full["choices"][0]["moa"]
    assert full["usage"]["total_tokens"] == context
    assert (marks["reason"], marks["verified"]) == ("context", True)
    assert "this device's context" in marks["why"]
    assert "--bundle" in marks["why"]
    assert last_of(chunks.text)["choices"][0]["moa"]["why"] == marks["why"]
    assert "the embedded toy" in short["choices"][0]["moa"]["why"]
    lines = [record.getMessage() for record in caplog.records if record.name == "moa.edge"]
    assert lines == [f"an answer was cut: {marks['why']}"], "not of a limit that was asked for"
    assert f"{context:,} tokens, online too" in status["toy"][0]
