"""Whatever an upstream does, the device writes, nothing wrong is verified, and the turn ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cloud_verifier.settings import Settings
from cloud_verifier.upstream.app import UpstreamVerifier, upstreams_of
from cloud_verifier.upstream.client import Upstreams
from edge_client import Done, EdgeClient, Retract, Token
from moa.errors import MoaError
from tests.verifier.upstream.scripted import Answer, chunk, reset, running, stream, up, whole

SAID = " The upstream says this."
GOOD = stream(chunk(SAID), chunk("", "stop"), "data: [DONE]\n\n")
HTML = "<html><body>Log in to the train's network</body></html>"
ERROR = {"error": {"message": "no"}}
LONG = {"error": {"message": "This model's maximum context length is 10 tokens."}}

BAD: dict[str, Answer] = {
    "wrong key": whole(ERROR, "401 Unauthorized"),
    "forbidden": whole(ERROR, "403 Forbidden"),
    "not there": whole(ERROR, "404 Not Found"),
    "too long": whole(LONG, "400 Bad Request"),
    "refused": whole(ERROR, "400 Bad Request"),
    "rate": whole(ERROR, "429 Too Many Requests", "application/json", "retry-after: 3600"),
    "rate with a date": whole(ERROR, "429 Too", "application/json", "retry-after: Wed, 25 Nov"),
    "failed": whole(ERROR, "500 Internal Server Error"),
    "overloaded, in HTML": whole(HTML, "503 Service Unavailable", "text/html"),
    "redirect of a portal": whole("", "302 Found", "text/html", "location: http://127.0.0.1:9/"),
    "portal": whole(HTML, "200 OK", "text/html"),
    "whole answer": whole(chunk(SAID), "200 OK"),
    "reset in the head": reset,
    "nothing": stream(),
    "only comments": stream(": keep-alive\n\n" * 50),
    "ends at once": stream("data: [DONE]\n\n"),
    "not JSON": stream("data: {oops\n\n"),
    "a list": stream("data: [1, 2]\n\n"),
    "a number as text": stream('data: {"choices": [{"text": 17}]}\n\n'),
    "a text as choices": stream('data: {"choices": "no"}\n\n'),
    "a text as choice": stream('data: {"choices": ["no"]}\n\n'),
    "an error event": stream(ERROR),
    "deep JSON": stream("data: " + "[" * 100_000 + "\n\n"),
    "an endless line": stream("data: " + "x" * 3_000_000),
    "shorter than it says": stream(chunk(SAID), length=10_000),
    "cut in mid-answer": stream(chunk(SAID), 0.01),
    "cut in a character": stream(b'data: {"choices": [{"text": " \xf0\x9f', 0.01),
    "an error in mid-answer": stream(chunk(SAID), ERROR),
    "silent after the head": stream(2.0),
    "silent in mid-answer": stream(chunk(SAID), 2.0),
    "ended by a filter": stream(chunk(SAID), chunk("", "content_filter")),
    "no end mark": stream(chunk(SAID), chunk("", "stop")),
    "HTML as events": stream(HTML),
}
MAY_VERIFY = {
    "shorter than it says",
    "cut in mid-answer",
    "an error in mid-answer",
    "silent in mid-answer",
    "ended by a filter",
    "no end mark",
}
"""Those that say something first: it is the model's."""
MOST = 12
"""Tokens of an answer: two times `SAID`. The device writes each after a pause, while an upstream is
only late."""


@contextlib.asynccontextmanager
async def behind(url: str, **more: Any) -> AsyncIterator[str]:
    """A verifier in front of an upstream; yields its address."""
    settings = Settings(port=0, upstream=(url,), upstream_api="completions", **more)
    async with UpstreamVerifier(settings, upstreams_of(settings)).open() as verifier:
        yield verifier.transport.url


async def answer(address: str, **settings: Any) -> tuple[str, str, Done]:
    """The verified text and all text of an answer, and its end."""
    told: list[tuple[str, str]] = []
    async with EdgeClient(
        verifier=address,
        offline_after=0.05,
        settle_seconds=0.2,
        reconnect_seconds=0.2,
        max_new_tokens=MOST,
        max_offline_tokens=MOST,
        **settings,
    ) as client:
        await up(client)
        async for event in client.generate("What is 17 plus 25?"):
            match event:
                case Token(text=text, status=status):
                    told.append((text, status))
                case Retract(start=start, stop=stop):
                    del told[len(told) - (stop - start) :]
                case Done():
                    verified = "".join(text for text, status in told if status == "verified")
                    return verified, "".join(text for text, _ in told), event
    raise AssertionError("the turn has no end")


@pytest.mark.parametrize("name", sorted(BAD))
async def test_a_bad_upstream(name: str) -> None:
    began = time.monotonic()
    async with running(BAD[name]) as upstream, behind(upstream.url) as address:
        verified, text, done = await answer(address)
        assert upstream.asked
    assert text
    for word in verified.split():  # it may be asked again, and say it again, up to the last token
        assert any(said.startswith(word) for said in SAID.split())
    if name not in MAY_VERIFY:
        assert verified == ""
        assert not done.verified
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("models", "key"),
    [
        (whole(ERROR, "404 Not Found"), ""),
        (whole(HTML, "200 OK", "text/html"), ""),
        (whole({"data": "none"}), ""),
        (whole({"data": []}), ""),
        (whole({"data": [{"id": "one"}, {"id": "two"}]}), ""),
        (whole(ERROR, "401 Unauthorized"), "secret"),
    ],
)
async def test_a_list_of_models_that_names_none(models: Answer, key: str) -> None:
    async with running(GOOD, models) as upstream, behind(upstream.url) as address:
        verified, text, _ = await answer(address)
        assert not upstream.asked
    assert text
    assert verified == ""


async def test_a_device_is_served_while_nobody_has_heard_of_the_upstream_yet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A start without a network: the port opens although the list of models is still awaited."""
    over = asyncio.Event()

    async def silent(request: Any, writer: asyncio.StreamWriter) -> None:
        await over.wait()

    async with running(GOOD, silent) as upstream:
        async with behind(upstream.url):
            assert "does not answer yet" not in caplog.text  # nobody has waited for its time-out
        over.set()


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (whole(ERROR, "401 Unauthorized"), "refuses the key"),
        (whole({"data": [{"id": "a"}, {"id": "b"}]}), "has 2 models: say which"),
        (reset, "closed the connection without an answer"),
    ],
)
async def test_a_device_is_told_why_the_upstream_did_not_answer_at_the_start(
    models: Answer, said: str
) -> None:
    async with running(GOOD, models) as upstream:
        settings = Settings(port=0, upstream=(upstream.url,), upstream_api="completions")
        verifier = UpstreamVerifier(settings, upstreams_of(settings))
        async with verifier.open() as front:
            assert verifier._probing is not None
            await verifier._probing
            async with EdgeClient(verifier=front.transport.url) as device:
                await up(device)
                welcome = device.shared.welcome
                assert welcome is not None
                assert said in " ".join(welcome.notices)


@pytest.mark.parametrize(
    ("models", "level"),
    [
        (whole(ERROR, "401 Unauthorized"), "ERROR"),
        (whole({"data": [{"id": "a"}, {"id": "b"}]}), "ERROR"),
        (reset, "WARNING"),
    ],
)
async def test_what_only_a_person_can_mend_is_an_error_and_no_word_of_waiting(
    models: Answer, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(GOOD, models) as upstream:
        settings = Settings(port=0, upstream=(upstream.url,), upstream_api="completions")
        verifier = UpstreamVerifier(settings, upstreams_of(settings))
        async with verifier.open():
            assert verifier._probing is not None
            await verifier._probing
    (record,) = (one for one in caplog.records if getattr(one, "event", "") == "upstream")
    assert record.levelname == level
    assert ("does not answer yet" in record.getMessage()) == (level == "WARNING")


async def test_a_good_one_is_verified_and_its_key_is_sent_and_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = tmp_path / "key"
    key.write_text("sk-very-secret\n")
    async with (
        running(GOOD) as upstream,
        behind(upstream.url, upstream_key_file=key) as address,
    ):
        verified, text, done = await answer(address)
    assert verified == text
    assert verified.strip() == SAID.strip()
    assert done.verified
    assert {request.headers["authorization"] for request in upstream.asked} == {
        "Bearer sk-very-secret"
    }
    assert "sk-very-secret" not in caplog.text


async def test_the_next_upstream_is_asked_where_one_fails() -> None:
    async with running(BAD["failed"]) as bad, running(GOOD) as good:
        settings = Settings(port=0, upstream=(bad.url, good.url), upstream_api="completions")
        # Time stands still: on a busy machine an answer may take longer than the first pause.
        upstreams = Upstreams(settings.upstream, interface="completions", clock=lambda: 0.0)
        async with UpstreamVerifier(settings, upstreams).open() as verifier:
            for _ in range(3):
                verified, _, done = await answer(verifier.transport.url)
                assert done.verified
                assert verified.strip() == SAID.strip()
    assert len(good.asked) == 3
    assert len(bad.asked) == 1, "it rests"


async def test_an_answer_without_an_end_is_ended_here() -> None:
    """No more than was asked for, whatever the upstream goes on to say."""
    endless = stream(*[chunk(" and on") for _ in range(5000)])
    async with running(endless) as upstream, behind(upstream.url) as address:
        _, text, done = await answer(address)
    assert done.reason == "length"
    assert done.verified
    assert len(text) < 1000


async def test_a_cancelled_answer_ends_the_request_upstream() -> None:
    closed = asyncio.Event()

    async def watched(request: Any, writer: asyncio.StreamWriter) -> None:
        await stream(chunk(" one two three"))(request, writer)
        while not writer.is_closing():
            writer.write(b": still here\n\n")
            try:
                await writer.drain()
            except ConnectionError:
                break
            await asyncio.sleep(0.02)
        closed.set()

    async with running(watched) as upstream, behind(upstream.url) as address:
        async with EdgeClient(verifier=address) as client:
            await client.wait_online(60)
            turn = client.generate("What is 17 plus 25?")
            async for event in turn:
                if isinstance(event, Token) and event.status == "verified":
                    break
            await turn.aclose()
        async with asyncio.timeout(60):
            await closed.wait()


def test_settings_that_contradict_each_other_are_refused() -> None:
    for wrong in (
        {"upstream": ("http://a/v1",), "target": "model"},
        {"upstream_model": "x"},
    ):
        with pytest.raises(MoaError):
            Settings(**wrong)  # type: ignore[arg-type]
