"""An endpoint that has one of OpenAI's routes alone, as gateways and small servers: `auto` finds out
which, and where none is of use that is said wherever somebody looks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import Any

import pytest

from cloud_verifier.settings import Settings
from cloud_verifier.upstream.app import UpstreamVerifier, upstreams_of
from cloud_verifier.upstream.client import Upstreams
from cloud_verifier.upstream.contract import Continuation, NoRouteError, UpstreamError
from edge_client import EdgeClient
from edge_client.cli.doctor import examine
from edge_client.cli.serve import tell_of_the_verifier
from edge_client.serve.answerer import EdgeAnswerer
from edge_client.settings import ClientSettings
from moa.sampling import SamplingSettings
from moa.wire.messages import ChatMessage
from tests.verifier.upstream.scripted import Request, chunk, running, stream, up, whole
from tests.verifier.upstream.test_telling import QUESTION, served

TEXT = " The upstream says this."
ASKED = Continuation(
    ids=[1],
    text="a",
    sampling=SamplingSettings(),
    most=8,
    messages=[ChatMessage(role="user", content="a")],
)


async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
    """A chat, or a completion, as it was asked for."""
    said: list[dict[str, Any]] = [chunk(TEXT), chunk("", "stop")]
    if "messages" in request.body:
        said = [{"choices": [{"index": 0, "delta": {"content": TEXT}, "finish_reason": None}]}]
        said += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
    await stream(*said, "data: [DONE]\n\n")(request, writer)


@pytest.mark.parametrize(
    ("routes", "asked_at"),
    [
        (("completions", "chat/completions"), "chat/completions"),
        (("chat/completions",), "chat/completions"),
        (("completions",), "completions"),
    ],
)
async def test_auto_takes_chats_where_there_are_any_and_completions_elsewhere(
    routes: Collection[str], asked_at: str
) -> None:
    """Of a chat an endpoint makes its own model's prompt: as text it got the device's."""
    async with running(answer) as upstream:
        upstream.routes = routes
        async with EdgeClient(upstream=upstream.url) as device, served(device) as http:
            await device.wait_online(60)
            said = (await http.post("/v1/chat/completions", json=QUESTION)).json()
            ready = await http.get("/health/ready")
        assert [request.path for request in upstream.asked] == [f"/v1/{asked_at}"]
        assert len(upstream.missed) <= 1, "it is asked once which routes there are"
    assert said["choices"][0]["moa"]["verified"] is True
    assert said["choices"][0]["message"]["content"].strip() == TEXT.strip()
    assert ready.status_code == 200


@pytest.mark.parametrize(
    ("interface", "routes", "spoken"),
    [
        ("auto", ("completions", "chat/completions"), "chat"),
        ("auto", ("completions",), "completions"),
        ("chat-whole", ("chat/completions",), "chat-whole"),
    ],
)
async def test_an_operator_reads_how_an_upstream_is_asked(
    interface: Any, routes: Collection[str], spoken: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of `auto` neither the log nor the metrics said what it had become."""
    caplog.set_level(logging.INFO, "cloud_verifier")
    async with running(answer) as upstream:
        upstream.routes = routes
        settings = Settings(port=0, upstream=(upstream.url,), upstream_api=interface)
        verifier = UpstreamVerifier(settings, upstreams_of(settings))
        before = verifier.metrics.page().decode()
        async with verifier.open():
            assert verifier._probing is not None
            await verifier._probing
            page = verifier.metrics.page().decode()
    assert f'decoder="{interface}"' in before
    assert f'decoder="{spoken}"' in page
    said = [vars(one).get("upstream_api") for one in caplog.records]
    assert [one for one in said if one] == [spoken]


async def test_auto_takes_completions_where_the_first_request_finds_no_chats() -> None:
    """A server that answers a request without a prompt with nothing of use."""

    async def late(request: Request, writer: asyncio.StreamWriter) -> None:
        if not request.path.endswith("/chat/completions"):
            await answer(request, writer)
        else:
            await whole({"detail": "Not Found"}, "404 Not Found")(request, writer)

    async with running(late) as upstream:
        upstreams = Upstreams([upstream.url])
        text = "".join([piece.text async for piece in upstreams.go_on(ASKED)])
        assert not upstreams.away
        again = "".join([piece.text async for piece in upstreams.go_on(ASKED)])
        await upstreams.close()
    assert text == again == TEXT
    paths = [request.path for request in upstream.asked]
    assert paths == ["/v1/chat/completions", *2 * ["/v1/completions"]]


@pytest.mark.parametrize(
    ("interface", "routes", "said"),
    [
        ("auto", (), "the upstream has neither /chat/completions nor /completions"),
        (
            "completions",
            ("chat/completions",),
            "no route /v1/completions (pass --upstream-api chat",
        ),
        ("chat", ("completions",), "/v1/chat/completions (pass --upstream-api completions"),
    ],
)
async def test_where_nothing_works_the_status_the_health_and_doctor_say_so(
    interface: str, routes: Collection[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(answer) as upstream:
        upstream.routes = routes
        async with (
            EdgeClient(upstream=upstream.url, upstream_api=interface) as device,
            served(device) as http,
        ):
            await up(device)
            telling = asyncio.create_task(tell_of_the_verifier(device, 0.01))
            text = ""
            async with asyncio.timeout(60):
                while "its own" not in text and "device's own" not in text:
                    text += capsys.readouterr().err
                    await asyncio.sleep(0.01)
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            status = EdgeAnswerer(device, "big").status()
            ready = await http.get("/health/ready")
        settings = ClientSettings(upstream=upstream.url, upstream_api=interface)
        checks = {check.name: check async for check in examine(settings)}
    assert said in text
    assert status["link"] == "offline"
    assert said in status["detail"]
    assert ready.status_code == 503
    assert said in ready.text
    assert checks["upstream"].state == "failed"
    assert said in checks["upstream"].finding


async def test_a_key_that_is_refused_is_known_before_the_first_request() -> None:
    """Some services tell their models to everybody."""
    async with running(answer) as upstream:
        upstream.unlocked = False
        upstreams = Upstreams([upstream.url])
        with pytest.raises(UpstreamError, match="refuses the key"):
            await upstreams.probe()
        assert "MOA_UPSTREAM_KEY" in upstreams.away
        await upstreams.close()


@pytest.mark.parametrize("status", ["404 Not Found", "401 Unauthorized"])
async def test_one_that_refuses_every_request_is_away_though_it_tells_its_models(
    status: str,
) -> None:
    async with running(whole({"detail": "no"}, status)) as upstream:
        upstreams = Upstreams([upstream.url], interface="completions")
        await upstreams.probe()
        assert not upstreams.away
        with pytest.raises(Exception, match="the upstream") as refused:
            await anext(upstreams.go_on(ASKED))
        assert isinstance(refused.value, NoRouteError) is status.startswith("404")
        assert upstreams.away == refused.value.line()  # type: ignore[attr-defined]
        await upstreams.look()
        assert upstreams.away
        upstream.answer = answer
        async for _ in upstreams.go_on(ASKED):
            pass
        assert not upstreams.away
        await upstreams.close()
