"""What operators and devices are told of an upstream: health, metrics, the model, the budget and the
upstream's own count of tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client import CollectorRegistry

from cloud_verifier.settings import Settings
from cloud_verifier.upstream import app, client, engine, watch
from cloud_verifier.upstream.app import UpstreamVerifier, upstreams_of
from cloud_verifier.upstream.client import Upstreams
from cloud_verifier.upstream.contract import Continuation, Piece, UpstreamError, Usage
from cloud_verifier.upstream.engine import Pace
from cloud_verifier.upstream.figures import Figures
from cloud_verifier.upstream.spending import Prices, Spending
from edge_client import Done, EdgeClient
from edge_client.cli.doctor import examine
from edge_client.cli.serve import tell_of_the_verifier
from edge_client.link import plain_get
from edge_client.serve.answerer import EdgeAnswerer
from edge_client.serve.endpoint import endpoint
from edge_client.serve.settings import ServeSettings
from edge_client.settings import ClientSettings
from moa.errors import UsageError
from moa.process.listening import Port
from moa.sampling import SamplingSettings
from moa.wire.messages import Progress, ServerMessage
from tests.verifier.upstream.scripted import (
    MODELS,
    Answer,
    Request,
    Upstream,
    chunk,
    end_of,
    reset,
    running,
    stream,
    up,
    whole,
)
from tests.verifier.upstream.test_spending import Clock

TEXT = " The upstream says this."
USAGE = {"prompt_tokens": 333, "completion_tokens": 44}
TELLS = stream(chunk(TEXT), chunk("", "stop"), {"choices": [], "usage": USAGE}, "data: [DONE]\n\n")
TELLS_NOT = stream(chunk(TEXT), chunk("", "stop"), "data: [DONE]\n\n")
ERROR = {"error": {"message": "overloaded"}}
BUSY = whole(ERROR, "503 Service Unavailable")
ASKED = Continuation(ids=[1], text="a", sampling=SamplingSettings(), most=8)
QUESTION: Any = {"messages": [{"role": "user", "content": "What is 17 plus 25?"}]}


class Switched:
    """Answers as it is told at the moment."""

    def __init__(self, answer: Answer) -> None:
        self.now = answer

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        await self.now(request, writer)


@contextlib.asynccontextmanager
async def behind(*upstreams: Upstream, **more: Any) -> AsyncIterator[UpstreamVerifier]:
    """A verifier in front of these."""
    settings = Settings(
        port=0,
        upstream=tuple(upstream.url for upstream in upstreams),
        upstream_api="completions",
        **more,
    )
    async with UpstreamVerifier(settings, upstreams_of(settings)).open() as verifier:
        yield verifier


@contextlib.asynccontextmanager
async def served(device: EdgeClient) -> AsyncIterator[httpx.AsyncClient]:
    """The endpoint of a device, asked over HTTP."""
    async with (
        endpoint(device, ServeSettings(), "", Port("127.0.0.1", 0)) as address,
        httpx.AsyncClient(base_url=address, timeout=60) as http,
    ):
        yield http


@contextlib.asynccontextmanager
async def online(answer: Answer) -> AsyncIterator[tuple[Upstream, EdgeClient, httpx.AsyncClient]]:
    """An upstream, a device that has reached it through a verifier, and the device's endpoint."""
    async with (
        running(answer) as upstream,
        behind(upstream) as verifier,
        EdgeClient(verifier=verifier.transport.url) as device,
        served(device) as http,
    ):
        await device.wait_online(60)
        yield upstream, device, http


def page_of(verifier: UpstreamVerifier) -> str:
    """Its metrics."""
    return verifier.metrics.page().decode()


async def status_of(verifier: UpstreamVerifier, path: str) -> int:
    """What a health check of it says."""
    url = verifier.transport.url.replace("ws://", "http://")
    async with httpx.AsyncClient() as http:
        return (await http.get(f"{url}{path}")).status_code


async def until(verifier: UpstreamVerifier, status: int) -> None:
    """Wait for its readiness to be so."""
    async with asyncio.timeout(60):
        while await status_of(verifier, "/health/ready") != status:
            await asyncio.sleep(0.02)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the product looks at every few seconds is looked at at once."""
    for name in ("_FIRST_PAUSE", "_STALE_SECONDS", "_STEP_SECONDS"):
        monkeypatch.setattr(watch, name, 0.02)


@pytest.mark.usefixtures("soon")
async def test_a_verifier_is_ready_only_while_an_upstream_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    models = Switched(whole(MODELS))
    async with running(TELLS, models) as upstream, behind(upstream) as verifier:
        await until(verifier, 200)
        models.now = BUSY
        await until(verifier, 503)
        assert await status_of(verifier, "/health/live") == 200
        assert f'moa_upstream_answers{{upstream="{upstream.url}"}} 0.0' in page_of(verifier)
        models.now = whole(MODELS)
        await until(verifier, 200)
        assert f'moa_upstream_answers{{upstream="{upstream.url}"}} 1.0' in page_of(verifier)
    told = [r for r in caplog.records if getattr(r, "event", "").startswith("upstream_")]
    assert [record.levelname for record in told] == ["WARNING", "INFO"]


@pytest.mark.parametrize("where", ["verifier", "device", "doctor"])
async def test_the_first_health_check_looks_at_an_upstream_that_nobody_has_asked_lately(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle one told its models at the start, and would have been called ready until the next
    question."""
    models = Switched(whole(MODELS))
    async with (
        running(TELLS, models) as upstream,
        behind(upstream) as verifier,
        EdgeClient(verifier=verifier.transport.url) as device,
        served(device) as http,
    ):
        await device.wait_online(60)
        assert (await http.get("/health/ready")).status_code == 200
        models.now = reset
        monkeypatch.setattr(watch, "_STALE_SECONDS", 0.0)
        if where == "verifier":
            assert await status_of(verifier, "/health/ready") == 503
        elif where == "device":
            told = await http.get("/health/ready")
            assert told.status_code == 503
            assert "upstream" in told.json()["detail"]
            assert (await http.get("/moa/status")).json()["link"] == "offline"
        else:
            settings = ClientSettings(verifier=verifier.transport.url)
            checks = {check.name: check async for check in examine(settings)}
            assert checks["upstream"].state == "failed"
        models.now = whole(MODELS)
        assert await status_of(verifier, "/health/ready") == 200


async def test_a_health_check_waits_a_moment_for_a_silent_upstream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def silent(request: Request, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    models = Switched(whole(MODELS))
    async with running(TELLS, models) as upstream, behind(upstream) as verifier:
        await until(verifier, 200)
        models.now = silent
        monkeypatch.setattr(watch, "_STALE_SECONDS", 0.0)
        monkeypatch.setattr(watch, "_CHECK_SECONDS", 0.05)
        assert await status_of(verifier, "/health/ready") == 200, "nothing else is known yet"


async def test_an_upstream_that_takes_the_question_and_says_nothing_is_not_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first check called one ready that had hung since it was last heard."""
    monkeypatch.setattr(watch, "_CHECK_SECONDS", 0.05)
    now = 100.0
    answers = asyncio.Event()
    heard_at = 0.0

    async def look() -> None:
        nonlocal heard_at
        await answers.wait()
        heard_at = now

    upstreams: Any = SimpleNamespace(
        away="", look=look, look_seconds=0.01, silent_for=lambda now: now - heard_at
    )
    watched = watch.Watch(upstreams, running=lambda: 0, clock=lambda: now)
    watching = asyncio.create_task(watched.run())
    await asyncio.sleep(0)
    now += 10.0
    await watched.look_if_old()
    assert watched.unready() == "", "it has just been asked"
    now += 0.5
    assert watched.unready() == "the upstream says nothing"
    upstreams.look_seconds = 1.0
    assert watched.unready() == "", "it takes as long elsewhere, or on a busy machine"
    now += 2.0
    assert watched.unready() == "the upstream says nothing"
    answers.set()
    await watched.look_if_old()
    assert watched.unready() == ""
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_doctor_asks_for_no_records_of_an_engine_of_others() -> None:
    async with running(TELLS) as upstream, behind(upstream) as verifier:
        settings = ClientSettings(verifier=verifier.transport.url)
        checks = {check.name: check async for check in examine(settings)}
    assert checks["verifier"].state == "ok"
    assert checks["upstream"].finding.startswith("big tells its models there")
    assert "records" not in checks


@pytest.mark.parametrize("way", ["a path", "a proxy"])
async def test_a_verifier_that_is_reached_over_others_is_not_asked_past_them(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "a proxy":
        monkeypatch.setenv("http_proxy", "http://proxy.example:1")
        monkeypatch.setenv("no_proxy", "")
    url = {"a path": "ws://127.0.0.1:9/verifier", "a proxy": "ws://verifier.example"}[way]
    link: Any = SimpleNamespace(
        endpoint=SimpleNamespace(url=url),
        welcome=SimpleNamespace(features=["behind"]),
    )

    async def never(*_: Any) -> Any:
        raise AssertionError("it was asked")

    monkeypatch.setattr(plain_get, "plain_get", never)
    assert await plain_get.why_unready(link) == ""


async def test_a_device_is_served_although_its_verifier_is_not_ready() -> None:
    """Else it would count as offline, and could not be told why."""
    async with (
        running(BUSY, BUSY) as upstream,
        behind(upstream) as verifier,
        EdgeClient(verifier=verifier.transport.url) as device,
    ):
        assert await status_of(verifier, "/health/ready") == 503
        await up(device)
        assert device.link is not None
        assert "overloaded" in device.link.behind.away


async def test_a_device_is_told_when_its_engine_is_away_for_another_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that was killed in mid-answer has broken it off; half a minute later the reason is
    that nothing listens there."""
    monkeypatch.setattr(watch, "_FIRST_PAUSE", 0.01)
    models = Switched(BUSY)
    async with (
        running(BUSY, models) as upstream,
        behind(upstream) as verifier,
        EdgeClient(verifier=verifier.transport.url) as device,
    ):
        await up(device)
        assert device.link is not None
        assert "overloaded" in device.link.behind.away
        models.now = reset
        async with asyncio.timeout(60):
            while "closed the connection" not in device.link.behind.away:
                await asyncio.sleep(0.01)


async def test_a_stream_does_not_call_a_link_online_whose_upstream_is_away() -> None:
    asked = QUESTION | {"stream": True, "max_tokens": 4, "moa": {"mode": "provisional"}}
    async with (
        running(BUSY, BUSY) as upstream,
        behind(upstream) as verifier,
        EdgeClient(verifier=verifier.transport.url) as device,
        served(device) as http,
    ):
        await up(device)
        whole_answer = await http.post("/v1/chat/completions", json=asked)
        assert whole_answer.headers["x-moa-link"] == "offline"
        told = []
        for line in whole_answer.text.splitlines():
            if line.startswith("data: {"):
                told.append(json.loads(line.removeprefix("data: ")).get("moa", {}))
        links = [news for news in told if "link" in news]
        assert [news["link"] for news in links] == ["offline"]
        assert "overloaded" in links[0]["detail"]
        assert not [news for news in told if "overloaded" in news.get("notice", "")], "said once"


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        (BUSY, "overloaded"),
        (reset, "the upstream closed the connection"),
        (whole(ERROR, "401 Unauthorized"), "the upstream refuses the key"),
    ],
)
async def test_the_error_of_mode_hold_says_why(trouble: Answer, why: str, streams: bool) -> None:
    asked = QUESTION | {"stream": streams, "max_tokens": 4}
    asked |= {"moa": {"mode": "hold", "patience": 0.1}}
    async with online(trouble) as (_, _, http):
        answer = await http.post("/v1/chat/completions", json=asked)
        text = answer.text
        if streams:
            text = next(line for line in text.splitlines() if '"error"' in line)
            text = text.removeprefix("data: ")
    error = json.loads(text)["error"]
    assert error["code"] == "not_verified"
    assert why in error["message"]
    assert why in error["moa"]["why"]
    assert "limits count" not in error["message"], "nobody sees where the text ends"
    if not streams:  # which has its status already
        may_mend = "the key" not in why
        assert ("retry-after" in answer.headers) == may_mend
        assert answer.headers.get("x-should-retry") == (None if may_mend else "false")


@pytest.mark.parametrize(
    ("text", "fails", "outcome"),
    [
        (True, False, "answered"),
        (True, True, "failed"),
        (False, True, "failed"),
        (False, False, "broken_off"),
    ],
)
def test_an_answer_that_breaks_off_has_failed_and_one_that_is_not_wanted_has_not(
    text: bool, fails: bool, outcome: str
) -> None:
    registry = CollectorRegistry()
    asked = Continuation(ids=[1], text="", sampling=SamplingSettings(), most=1)
    request = Figures(registry).request("a", asked, now=0.0)
    if text:
        request.took(Piece(text="x"), now=1.0)
    if fails:
        request.failed(later=True)
    request.end(None)
    labels = {"upstream": "a", "outcome": outcome}
    assert registry.get_sample_value("moa_upstream_requests_total", labels) == 1


async def test_what_each_upstream_was_asked_is_counted() -> None:
    """The first fails and the second answers. It refuses a field, and is asked without."""
    no_field = whole({"error": {"message": "unknown field stream_options"}}, "400 Bad Request")

    async def picky(request: Request, writer: asyncio.StreamWriter) -> None:
        await (no_field if "stream_options" in request.body else TELLS)(request, writer)

    async with (
        running(BUSY) as first,
        running(picky) as second,
        behind(first, second) as verifier,
        EdgeClient(verifier=verifier.transport.url) as device,
    ):
        async for _ in device.generate("What is 17 plus 25?"):
            pass
        page = page_of(verifier)
    for line in (
        f'requests_total{{outcome="failed",upstream="{first.url}"}} 1.0',
        f'requests_total{{outcome="answered",upstream="{first.url}"}} 0.0',
        f'requests_total{{outcome="answered",upstream="{second.url}"}} 1.0',
        f'failovers_total{{upstream="{first.url}"}} 1.0',
        f'failovers_total{{upstream="{second.url}"}} 0.0',
        f'retries_total{{upstream="{second.url}"}} 1.0',
        f'tokens_total{{kind="read",upstream="{second.url}"}} 333.0',
        f'tokens_total{{kind="written",upstream="{second.url}"}} 44.0',
        f'first_seconds_count{{upstream="{second.url}"}} 1.0',
        f'answers{{upstream="{first.url}"}} 0.0',
    ):
        assert f"moa_upstream_{line}" in page
    assert 'model="big"' in page


async def test_tokens_that_an_upstream_does_not_tell_are_counted_by_the_devices_tokenizer() -> None:
    async with (
        running(TELLS_NOT) as upstream,
        behind(upstream) as verifier,
        EdgeClient(verifier=verifier.transport.url) as device,
    ):
        async for _ in device.generate("What is 17 plus 25?"):
            pass
        page = page_of(verifier)
        text = len(device.device.codec.plain(TEXT))
        prompt = len(device.encode("What is 17 plus 25?"))
    assert f'tokens_total{{kind="written",upstream="{upstream.url}"}} {text:.1f}' in page
    assert f'tokens_total{{kind="read",upstream="{upstream.url}"}} {prompt:.1f}' in page


async def test_a_list_of_models_proves_that_an_engine_is_back_but_not_that_it_answers_again() -> (
    None
):
    """An engine that was started again has it, and so has a service that is overloaded."""
    clock = Clock()
    now = Switched(BUSY)
    async with running(now) as upstream:
        upstreams = Upstreams([upstream.url], interface="completions", clock=clock)
        for answer, is_back_at_once in ((reset, True), (BUSY, False)):
            now.now = answer
            clock.now += 60
            with pytest.raises(UpstreamError):
                async for _ in upstreams.go_on(ASKED):
                    pass
            assert upstreams.away
            await upstreams.look()
            assert (upstreams.away == "") == is_back_at_once
        clock.now += 10
        await upstreams.look()
        assert upstreams.away == ""
        await upstreams.close()


async def test_a_service_that_asks_to_wait_does_not_count_as_back_before() -> None:
    """It has its list of models all the time, and devices would be told that it answers."""
    clock = Clock()
    asks_to_wait = whole(ERROR, "429 Too Many", "application/json", "retry-after: 60")
    async with running(asks_to_wait) as upstream:
        upstreams = Upstreams([upstream.url], interface="completions", clock=clock)
        with pytest.raises(UpstreamError):
            async for _ in upstreams.go_on(ASKED):
                pass
        for seconds, is_back in ((20, False), (39, False), (1, True)):
            clock.now += seconds
            await upstreams.look()
            assert (upstreams.away == "") == is_back
        await upstreams.close()


async def test_an_upstream_that_is_back_is_asked_at_once_where_nothing_answered_before() -> None:
    """Its pause was for nothing: it grows up to ten seconds while devices ask in an outage. Whoever
    asks has it looked at, once a second."""
    now = Switched(reset)
    models = Switched(reset)
    clock = Clock()
    async with running(now, models) as upstream:
        upstreams = Upstreams([upstream.url], interface="completions", clock=clock)
        for _ in range(3):
            with pytest.raises(UpstreamError):
                async for _ in upstreams.go_on(ASKED):
                    pass
        now.now, models.now = TELLS, whole(MODELS)
        with pytest.raises(
            UpstreamError, match=r"the upstream closed the connection|is not reached"
        ):
            async for _ in upstreams.go_on(ASKED):  # it was looked at in this second
                pass
        clock.now += 1.0
        texts = [piece.text async for piece in upstreams.go_on(ASKED)]
        await upstreams.close()
    assert "".join(texts) == TEXT


async def test_an_upstream_that_takes_a_request_is_looked_at_though_it_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the device would write in its place until the next look, ten seconds later."""
    monkeypatch.setattr(watch, "_FIRST_PAUSE", 600.0)
    over = asyncio.Event()
    models = Switched(reset)

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        await over.wait()
        await TELLS(request, writer)

    async with (
        running(answer, models) as upstream,
        behind(upstream) as verifier,
        EdgeClient(verifier=verifier.transport.url, offline_after=300.0) as device,
    ):
        await up(device)
        assert verifier.upstreams.away
        models.now = whole(MODELS)
        # It is asked for its models once, as nothing is known of it; then it is silent.
        asking = asyncio.create_task(end_of(device))
        async with asyncio.timeout(60):
            while not upstream.asked:
                await asyncio.sleep(0.01)
            while verifier.upstreams.away:
                await asyncio.sleep(0.01)
        over.set()
        done, _ = await asking
    assert done.verified


def looked_at(read: asyncio.Event, later: Answer) -> Answer:
    """A list of models, which is told once; later looks are answered so. The prompt is `read` by the
    fourth of them."""
    looks = 0

    async def models(request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal looks
        looks += 1
        if looks == 4:
            read.set()
        await (whole(MODELS) if looks == 1 else later)(request, writer)

    return models


@pytest.mark.parametrize("begins", [True, False])
async def test_a_prompt_that_takes_minutes_to_read_is_read_once(
    begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is silent meanwhile, from the request on or from an event without text on, and
    tells its models. Asked again it would begin anew."""
    monkeypatch.setattr(client, "_SILENT_SECONDS", 0.02)
    read = asyncio.Event()
    models = looked_at(read, whole(MODELS))

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        if not begins:
            await read.wait()
            await TELLS(request, writer)
            return
        await stream(chunk(""))(request, writer)
        await read.wait()
        for event in (chunk(TEXT), chunk("", "stop")):
            writer.write(f"data: {json.dumps(event)}\n\n".encode())
        await writer.drain()

    async with running(answer, models) as upstream:
        upstreams = Upstreams([upstream.url], interface="completions")
        texts = [piece.text async for piece in upstreams.go_on(ASKED)]
        await upstreams.close()
    assert "".join(texts) == TEXT
    assert len(upstream.asked) == 1


async def test_an_engine_that_is_too_busy_for_one_look_is_left_to_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was heard not long ago: time stands still here."""
    monkeypatch.setattr(client, "_SILENT_SECONDS", 0.02)
    read = asyncio.Event()
    models = looked_at(read, BUSY)

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        await read.wait()
        await TELLS(request, writer)

    async with running(answer, models) as upstream:
        upstreams = Upstreams([upstream.url], interface="completions", clock=lambda: 7.0)
        await upstreams.probe()
        texts = [piece.text async for piece in upstreams.go_on(ASKED)]
        await upstreams.close()
    assert "".join(texts) == TEXT
    assert len(upstream.asked) == 1


async def test_an_upstream_that_fails_before_its_first_text_has_not_answered() -> None:
    """Though it had begun to tell of something else, such as who speaks: the next one is asked."""
    begins = stream(chunk(""), ERROR)
    registry = CollectorRegistry()
    async with running(begins) as first, running(TELLS) as second:
        upstreams = Upstreams([first.url, second.url], interface="completions")
        upstreams.figures = Figures(registry)
        texts = [piece.text async for piece in upstreams.go_on(ASKED)]
        await upstreams.close()
    assert "".join(texts) == TEXT
    asked = {"upstream": first.url, "outcome": "failed"}
    assert registry.get_sample_value("moa_upstream_requests_total", asked) == 1
    began = registry.get_sample_value("moa_upstream_first_seconds_count", {"upstream": first.url})
    assert not began


async def test_an_engine_that_refuses_another_request_is_left_to_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It tells its models. After a refusal that is no sign that it answers, but that it lives."""
    monkeypatch.setattr(client, "_SILENT_SECONDS", 0.02)
    looks = 0
    begun = asyncio.Event()
    read = asyncio.Event()

    async def models(request: Request, writer: asyncio.StreamWriter) -> None:
        nonlocal looks
        looks += bool(upstreams.away)
        if looks == 3:
            read.set()
        await whole(MODELS)(request, writer)

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        if begun.is_set():
            await BUSY(request, writer)
            return
        begun.set()
        await read.wait()
        await TELLS(request, writer)

    async def text_of() -> str:
        return "".join([piece.text async for piece in upstreams.go_on(ASKED)])

    async with running(answer, models) as upstream:
        upstreams = Upstreams([upstream.url], interface="completions")
        await upstreams.probe()
        reading = asyncio.create_task(text_of())
        await begun.wait()
        with pytest.raises(UpstreamError, match="overloaded"):
            await text_of()
        async with asyncio.timeout(60):
            assert await reading == TEXT
        await upstreams.close()


@pytest.mark.parametrize("begins", [True, False])
async def test_an_engine_that_falls_silent_is_given_up(
    begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mid-answer; and before it, where it does not tell its models any more."""
    monkeypatch.setattr(client, "_SILENT_SECONDS", 0.02)
    over = asyncio.Event()
    models = Switched(whole(MODELS))

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        if begins:
            await stream(chunk(TEXT))(request, writer)
        else:
            models.now = BUSY
        await over.wait()

    async with running(answer, models) as upstream:
        upstreams = Upstreams([upstream.url], interface="completions")
        with pytest.raises(UpstreamError, match="the upstream is silent"):
            async for _ in upstreams.go_on(ASKED):
                pass
        await upstreams.close()
        over.set()


async def test_an_engine_that_was_slow_to_begin_may_be_silent_for_as_long_in_mid_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reads the prompt of somebody else meanwhile."""
    monkeypatch.setattr(client, "_SILENT_SECONDS", 0.02)
    clock = Clock()

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        clock.now += 300.0
        await stream(chunk(TEXT), 0.2, chunk("", "stop"))(request, writer)

    async with running(answer) as upstream:
        upstreams = Upstreams([upstream.url], interface="completions", clock=clock)
        texts = [piece.text async for piece in upstreams.go_on(ASKED)]
        await upstreams.close()
    assert "".join(texts) == TEXT


@pytest.mark.parametrize("lives", [True, False])
async def test_an_engine_that_reads_is_at_work_and_one_that_is_gone_is_not(lives: bool) -> None:
    """Both are silent. For one that tells its models a device waits: in an answer that is kept its
    own text would stand in that one's place."""
    question = "What is 17 plus 25?" * 60  # a slow engine may read it for half a minute
    over = asyncio.Event()
    models = Switched(whole(MODELS))

    async def silent(request: Request, writer: asyncio.StreamWriter) -> None:
        await over.wait()

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        if not lives:
            models.now = silent
        await over.wait()
        await TELLS(request, writer)

    async def until(happened: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not happened():
                await asyncio.sleep(0.01)

    async with (
        running(answer, models) as upstream,
        behind(upstream) as verifier,
        EdgeClient(verifier=verifier.transport.url, offline_after=300.0) as device,
    ):
        await device.wait_online(60)
        assert device.link is not None
        deliver = device.link.deliver
        signs: list[ServerMessage] = []

        def delivered(arrived: float, message: ServerMessage, size: int) -> None:
            if isinstance(message, Progress):
                signs.append(message)
            deliver(arrived, message, size)

        device.link.deliver = delivered  # type: ignore[method-assign]

        async def ask() -> str:
            text = ""
            async for event in device.generate(question):
                text = event.text if isinstance(event, Done) else text
            return text

        asking = asyncio.create_task(ask())
        await until(lambda: bool(upstream.asked))
        if lives:
            looked = verifier.upstreams.silent_for
            await until(lambda: len(signs) >= 4 and looked(time.monotonic()) < 1)
        else:
            await until(lambda: not verifier.works())
            told = len(signs)
            await until(lambda: bool(verifier.upstreams.away))
            assert len(signs) <= told + 1  # one may have been under way
        over.set()
        models.now = whole(MODELS)
        assert await asking == TEXT


def test_a_prompt_that_was_long_to_read_is_no_slow_forward() -> None:
    """Devices expect the next token within a few forwards, and the next answer by its prompt."""
    pace = Pace()
    assert pace.took(15.0, prompt=1000) == (pytest.approx(13.95), 0.05)
    assert pace.took(0.02, prompt=0) == (0.0, 0.02)
    reading, forward = pace.took(0.8, prompt=30)  # a service that takes its time for any prompt
    assert reading / 30 * 4000 < 1
    assert forward < 0.05
    for _ in range(50):
        reading, forward = pace.took(0.8, prompt=30)
    assert reading == 0


# ---- the budget


def test_a_budget_is_told_of_when_it_is_nearly_and_when_it_is_all_used_up() -> None:
    clock = Clock()
    told: list[float] = []
    spending = Spending(Prices(read=1.0, budget=1.0), clock, told.append)
    spending.request(750_000)
    assert told == []
    request = spending.request(62_500)
    assert told == [0.8125]
    request.told(Usage(read=0))  # counted too high: below the line, and over it again
    spending.request(62_500)
    assert told == [0.8125]
    spending.request(250_000)
    assert told == [0.8125, 1.0625]
    spending.request(250_000)
    assert len(told) == 2
    clock.now += 25 * 3600
    spending.request(125_000)
    spending.request(2_000_000)
    assert told == [0.8125, 1.0625, 2.125]


async def test_the_log_and_the_metrics_say_how_much_of_a_budget_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    prices = {"upstream_price_in": 1000.0, "upstream_price_out": 1000.0, "upstream_budget": 0.44}
    async with (
        running(TELLS) as upstream,
        behind(upstream, **prices) as verifier,
        EdgeClient(verifier=verifier.transport.url) as device,
    ):
        assert "moa_upstream_budget 0.44" in page_of(verifier)
        for _ in range(2):
            async for _ in device.generate("What is 17 plus 25?"):
                pass
        page = page_of(verifier)
    told = [r for r in caplog.records if getattr(r, "event", "") == "budget"]
    assert [record.levelname for record in told] == ["INFO", "WARNING", "ERROR"]
    assert "is 0.44" in told[0].getMessage()
    assert "is spent" in told[2].getMessage()
    (spent,) = (line for line in page.splitlines() if line.startswith("moa_upstream_spent "))
    assert float(spent.split()[1]) >= 0.44


async def test_while_a_budget_is_spent_nothing_is_ready_or_online(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "_BUDGET_SECONDS", 0.02)
    prices = {"upstream_price_in": 1.0, "upstream_price_out": 1.0, "upstream_budget": 0.0002}
    async with (
        running(TELLS) as upstream,
        behind(upstream, **prices) as verifier,
        EdgeClient(verifier=verifier.transport.url) as device,
        served(device) as http,
    ):
        await device.wait_online(60)
        assert (await http.get("/health/ready")).status_code == 200
        done, _ = await end_of(device)
        assert done.verified
        assert done.text == TEXT
        assert await status_of(verifier, "/health/ready") == 503
        told = await http.get("/health/ready")
        status = (await http.get("/moa/status")).json()
        assert told.status_code == 503
        spent = "the upstream's budget of 0.0002 for 24 hours is spent"
        assert told.json()["detail"] == status["detail"] == spent
        assert status["link"] == "offline"
        _, said = await end_of(device)
        assert f"{spent} (0.00038): more from 24.0 hours on" in said
        settings = ClientSettings(verifier=verifier.transport.url)
        checks = {check.name: check async for check in examine(settings)}
        assert (checks["upstream"].state, checks["upstream"].finding) == ("failed", spent)
        assert "budget" in checks["upstream"].advice
        tomorrow = time.monotonic() + 24 * 3600
        monkeypatch.setattr(verifier._spending, "_clock", lambda: tomorrow)
        await until(verifier, 200)
        await device.wait_online(60)


# ---- at the device


@pytest.mark.usefixtures("soon")
async def test_a_device_tells_when_what_is_behind_its_verifier_comes_and_goes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    models = Switched(whole(MODELS))
    async with (
        running(TELLS, models) as upstream,
        behind(upstream) as verifier,
        EdgeClient(verifier=verifier.transport.url) as device,
        served(device) as http,
    ):
        telling = asyncio.create_task(tell_of_the_verifier(device, 0.01))
        said = ""

        async def seen(words: str) -> None:
            nonlocal said
            async with asyncio.timeout(60):
                while words not in said:
                    said += capsys.readouterr().err
                    await status_of(verifier, "/health/ready")  # somebody wants to know
                    await asyncio.sleep(0.01)
            said = ""

        await seen("online: text is verified by")
        assert (await http.get("/health/ready")).status_code == 200
        assert (await http.get("/moa/status")).json()["link"] == "online"
        models.now = BUSY
        await seen("overloaded")
        ready = await http.get("/health/ready")
        assert (ready.status_code, "overloaded" in ready.json()["detail"]) == (503, True)
        assert (await http.get("/health")).status_code == 200  # it answers all the same
        assert (await http.get("/health/live")).status_code == 200
        status = (await http.get("/moa/status")).json()
        assert status["link"] == "offline"
        assert "overloaded" in status["detail"]
        models.now = whole(MODELS)
        await seen("online: text is verified by")
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def test_a_device_in_front_of_an_upstream_shows_its_model_and_its_metrics() -> None:
    async with (
        running(TELLS) as upstream,
        EdgeClient(upstream=upstream.url, upstream_api="completions") as device,
        served(device) as http,
    ):
        await device.wait_online(60)
        (model,) = (await http.get("/v1/models")).json()["data"]
        assert model["id"] == "big"
        for name in ("big", EdgeAnswerer(device).bundles_model.rpartition("/")[2]):
            answer = await http.post("/v1/chat/completions", json=QUESTION | {"model": name})
            assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "big"
        page = (await http.get("/metrics")).text
    assert (
        f'moa_upstream_requests_total{{outcome="answered",upstream="{upstream.url}"}} 2.0' in page
    )
    assert "moa_api_requests_total" in page


async def test_a_prompt_beyond_the_toys_context_says_whose_that_is() -> None:
    """A reader would take it for the upstream's."""
    long = "word " * 4000
    asked: Any = {"messages": [{"role": "user", "content": long}]}
    async with (
        running(TELLS) as upstream,
        EdgeClient(upstream=upstream.url, upstream_api="completions") as device,
        served(device) as http,
    ):
        answer = await http.post("/v1/chat/completions", json=asked)
        assert answer.status_code == 400
        error = answer.json()["error"]
        with pytest.raises(UsageError) as refused:
            async for _ in device.generate(long, raw=True):
                pass
        assert "not the upstream's: --bundle" in refused.value.line()
        await device.wait_online(60)
        done, _ = await end_of(device)
    assert error["code"] == "context_length_exceeded"
    assert "the device's model, here the embedded toy" in error["message"]
    assert done.stats["tokens_per_forward"] is None, "it tells of no forwards"


async def test_a_program_names_the_upstreams_model_as_the_upstream_does() -> None:
    models = whole({"data": [{"id": "/models/big.gguf"}]})
    async with (
        running(TELLS, models) as upstream,
        EdgeClient(
            upstream=upstream.url, upstream_api="completions", upstream_model="big.gguf"
        ) as device,
        served(device) as http,
    ):
        await device.wait_online(60)
        for name, status in (("/models/big.gguf", 200), ("big.gguf", 200), ("small", 404)):
            answer = await http.post("/v1/chat/completions", json=QUESTION | {"model": name})
            assert answer.status_code == status, answer.text
    assert {asked.body["model"] for asked in upstream.asked} == {"/models/big.gguf"}


async def test_while_nobody_knows_the_upstreams_model_any_name_is_answered() -> None:
    """A device that starts in an outage is asked by programs for the model that they know."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and nobody listens
        nobody = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        async with (
            EdgeClient(upstream=nobody, upstream_api="completions") as device,
            served(device) as http,
        ):
            answer = await http.post("/v1/chat/completions", json=QUESTION | {"model": "big.gguf"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("streams", [False, True])
async def test_usage_is_what_the_upstream_has_counted(streams: bool) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
    async with online(TELLS) as (upstream, _, http):
        answer = await http.post("/v1/chat/completions", json=QUESTION | more)
    assert upstream.asked[0].body["stream_options"] == {"include_usage": True}
    assert '"prompt_tokens":333,"completion_tokens":44,"total_tokens":377' in answer.text


async def test_usage_of_an_answer_that_was_cut_is_counted_by_the_device() -> None:
    """A request that broke off has told nothing, so the upstream's count of the rest is none of the
    answer."""
    cut = stream(chunk(" The upstream"), 0.01)

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        begins = not request.body["prompt"].endswith(" The upstream")
        rest = stream(
            chunk(" says this."),
            chunk("", "stop"),
            {"choices": [], "usage": USAGE},
            "data: [DONE]\n\n",
        )
        await (cut if begins else rest)(request, writer)

    async with online(answer) as (upstream, device, http):
        answered = await http.post(
            "/v1/chat/completions", json=QUESTION | {"moa": {"patience": 60.0}}
        )
        prompt = len(device.encode(QUESTION["messages"]))
    body = answered.json()
    assert body["choices"][0]["message"]["content"] == TEXT
    assert len(upstream.asked) == 2
    assert body["usage"]["prompt_tokens"] == prompt


async def test_an_answer_of_the_longest_length_does_not_wait_for_an_upstream_that_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tokenizer needs fewer tokens than the device's: it would write for long, and its count
    comes only then."""
    monkeypatch.setattr(engine, "_USAGE_SECONDS", 600.0)
    monkeypatch.setattr(client, "_SILENT_SECONDS", 600.0)
    longer = stream(chunk(" a" * 40), 0.01, chunk(" and on"), 600.0)
    asked = QUESTION | {"max_tokens": 8, "moa": {"patience": 600.0}}
    async with asyncio.timeout(120), online(longer) as (_, _, http):
        answer = await http.post("/v1/chat/completions", json=asked, timeout=600)
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith(" a a a")
    assert answer.json()["usage"]["completion_tokens"] == 8


async def test_tokens_come_without_a_call_from_another_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine runs in the event loop: to wake that by its socket would cost each token two calls
    of the system."""
    async with online(TELLS) as (_, device, _):
        loop = asyncio.get_running_loop()
        from_threads: list[str] = []
        call = loop.call_soon_threadsafe

        def noted(callback: Any, *arguments: Any, **more: Any) -> Any:
            from_threads.append(getattr(callback, "__qualname__", ""))
            return call(callback, *arguments, **more)

        monkeypatch.setattr(loop, "call_soon_threadsafe", noted)
        done, _ = await end_of(device)
    assert done.verified
    assert "Service.take" not in from_threads


async def test_an_answer_of_the_longest_length_has_the_upstreams_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends by the device's own count of tokens, before the upstream says that it has ended."""
    monkeypatch.setattr(engine, "_USAGE_SECONDS", 60.0)  # this machine may be busy
    long = stream(
        chunk(" a" * 40),
        0.01,
        chunk("", "length"),
        {"choices": [], "usage": USAGE},
        "data: [DONE]\n\n",
    )
    async with online(long) as (_, _, http):
        answer = await http.post("/v1/chat/completions", json=QUESTION | {"max_tokens": 8})
    assert answer.json()["usage"]["completion_tokens"] == 44
