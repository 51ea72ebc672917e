"""Penalties and biases are not passed on: of an answer that goes on in another request an engine
would count the new part alone, and the ids of a bias are those of the device's tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from cloud_verifier.settings import Settings
from cloud_verifier.upstream.app import UpstreamVerifier, upstreams_of
from edge_client import EdgeClient
from edge_client.settings import ClientSettings
from moa.errors import ConfigError
from tests.verifier.upstream.scripted import chunk, end_of, running, stream
from tests.verifier.upstream.test_telling import QUESTION, served

GOOD = stream(chunk(" The upstream says this."), chunk("", "stop"), "data: [DONE]\n\n")
ASKED: dict[str, Any] = {
    "frequency_penalty": 0.1,
    "presence_penalty": -0.1,
    "logit_bias": {"17": 1},
}


@pytest.mark.parametrize("stream_it", [False, True])
@pytest.mark.parametrize("name", sorted(ASKED))
async def test_a_request_with_penalties_is_refused_by_name(name: str, stream_it: bool) -> None:
    async with (
        running(GOOD) as upstream,
        EdgeClient(upstream=upstream.url) as device,
        served(device) as http,
    ):
        await device.wait_online(60)
        body = QUESTION | {name: ASKED[name], "stream": stream_it}
        answer = await http.post("/v1/chat/completions", json=body)
        assert not upstream.asked
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == name
    assert error["code"] == "unsupported_parameter"
    assert error["message"].startswith(f"{name} is not passed on to an upstream")


async def test_it_is_refused_while_the_upstream_is_away_too() -> None:
    async with EdgeClient(upstream="http://127.0.0.1:9/v1") as device, served(device) as http:
        answer = await http.post("/v1/chat/completions", json=QUESTION | ASKED)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "frequency_penalty"


async def test_penalties_that_add_nothing_are_taken() -> None:
    async with (
        running(GOOD) as upstream,
        EdgeClient(upstream=upstream.url) as device,
        served(device) as http,
    ):
        nothing = {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}}
        answer = await http.post("/v1/chat/completions", json=QUESTION | nothing)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["moa"]["verified"] is True


async def test_a_verifier_in_front_of_an_upstream_is_asked_for_none_either() -> None:
    async with running(GOOD) as upstream:
        settings = Settings(port=0, upstream=(upstream.url,), upstream_api="completions")
        async with UpstreamVerifier(settings, upstreams_of(settings)).open() as verifier:
            url = verifier.transport.url
            async with EdgeClient(verifier=url) as device, served(device) as http:
                await device.wait_online(60)
                answer = await http.post("/v1/chat/completions", json=QUESTION | ASKED)
            async with EdgeClient(verifier=url, presence_penalty=0.5) as device:
                done, said = await end_of(device)
        assert not upstream.asked
    assert answer.status_code == 400
    assert not done.verified
    assert "presence_penalty and logit_bias are not passed on to an upstream" in said


def test_a_device_of_an_upstream_has_none_among_its_settings() -> None:
    with pytest.raises(ConfigError, match=r"^presence_penalty is not passed on to an upstream"):
        ClientSettings(upstream="gpu:8000", presence_penalty=0.5)
    with pytest.raises(ConfigError, match=r"^logit_bias is not passed on to an upstream"):
        ClientSettings(upstream="gpu:8000", logit_bias=((1, 1.0),))
    assert ClientSettings(verifier="local", presence_penalty=0.5).presence_penalty == 0.5
