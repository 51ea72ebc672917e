"""Who keeps the event loop busy waits, and nobody else does."""

from __future__ import annotations

import asyncio
import time

import httpx2 as httpx
import pytest

from moa.api import fairness
from moa.api.access import ANONYMOUS
from moa.api.errors import ApiError
from moa.api.fairness import Accounts, Fairness, charged
from tests.api.scripted import PATIENCE, browser, chat, endpoint, says, served
from tests.torture.raw import Raw


def test_an_account_is_forgotten_when_it_is_full_again() -> None:
    accounts = Accounts(rate=1.0, burst=1.0)
    accounts.of("busy", 0.0).spend(1e9)
    for number in range(2 * fairness._MOST_ACCOUNTS):
        accounts.of(str(number), 0.0)
    assert len(accounts) <= fairness._MOST_ACCOUNTS
    assert accounts.of("busy", 10.0).wait(0, 10.0) > 1e8


class Clock:
    """Stands in for the module `time`: processor time passes when work says so."""

    now = processor = 0.0

    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.processor


async def test_a_key_waits_for_what_it_took_and_for_refusals_and_no_other_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    fair = Fairness()
    monkeypatch.setattr(fairness, "time", clock)

    async def work(seconds: float) -> str:
        for _ in range(2):
            clock.processor += seconds / 2
            await asyncio.sleep(0)
        return "done"

    async def request(key: str, seconds: float) -> float:
        """How long the key would wait for its next one."""
        async with fair.turn(key):
            assert await asyncio.create_task(charged(work(seconds))) == "done"
        return fair._keys.of(key, clock.now).wait(0, clock.now)

    assert await request("greedy", fairness._BURST_SECONDS) == 0
    assert await request("greedy", 0.4) == pytest.approx(0.4 / fairness._SHARE)
    assert await request("honest", 0.01) == 0
    clock.now += 0.4 / fairness._SHARE
    assert await request("greedy", 10.0) == pytest.approx(10.0 / fairness._SHARE)
    monkeypatch.setattr(fairness, "_LONGEST_WAIT", 0.05)
    began = time.monotonic()
    with pytest.raises(ApiError) as refused:
        await request("greedy", 0.0)
    assert time.monotonic() - began > 0.04, "asking again at once wins nothing"
    assert (refused.value.status, refused.value.code) == (429, "busy")
    assert await request(ANONYMOUS, 100.0) == 0, "without keys nobody shares the endpoint"
    for _ in range(
        round(fairness._BURST_SECONDS / fairness._REFUSAL_SECONDS) + 1
    ):  # it costs more than it took
        assert await request("wrong", 0.0) < 1e-9
        with pytest.raises(ApiError):
            async with fair.turn("wrong"):
                raise ApiError(400, "no")
    assert fair._keys.of("wrong", clock.now).wait(0, clock.now) == pytest.approx(
        0.02 / fairness._SHARE
    )
    fair._others = lambda principal: principal == "beside"
    assert await request("beside", 0.4) == pytest.approx(
        (0.4 * fairness._BESIDE_OTHERS - 1) / fairness._SHARE
    )


async def test_work_that_is_charged_is_cancelled_and_raises_as_before() -> None:
    fair = Fairness()
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            ended.append(True)
            raise

    async with fair.turn("key"):
        task = asyncio.create_task(charged(work()))
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await charged(asyncio.sleep(3600))


@pytest.mark.parametrize("head", ["Host: a\r\nHost: b", "Host: [::1:"], ids=["no HTTP", "no host"])
async def test_refusals_of_a_stranger_come_late_and_a_request_beside_them_does_not(
    head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fairness, "_REFUSALS_PER_SECOND", 5.0)
    monkeypatch.setattr(fairness, "_MOST_HELD", 4)

    async def refused(address: str) -> bytes:
        raw = await Raw.connect(int(address.rpartition(":")[2]))
        await raw.pour(f"GET /v1/models HTTP/1.1\r\n{head}\r\nConnection: close\r\n\r\n".encode())
        try:
            return await raw.reader.read(-1)
        except ConnectionError:
            return b""
        finally:
            await raw.gone()

    async with (
        served(says("x")) as (_, address),
        browser(address) as client,
        asyncio.timeout(PATIENCE),
    ):
        assert all([await refused(address) for _ in range(5)])
        began = time.monotonic()
        flood = [asyncio.create_task(refused(address)) for _ in range(12)]
        assert (await client.post("/v1/chat/completions", json=chat())).status_code == 200
        answers = await asyncio.gather(*flood)
        assert time.monotonic() - began > 0.15
    assert b"" in answers, "what is too much is cut"
    assert any(b"HTTP/1.1 40" in answer for answer in answers)


async def test_another_server_answers_a_refusal_that_we_would_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As under Ray: nobody but our own server can cut the connection of a request."""
    monkeypatch.setattr(fairness, "_REFUSALS_PER_SECOND", 1.0)
    monkeypatch.setattr(fairness, "_MOST_HELD", 0)
    async with endpoint(says("x")) as (_, _, app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            assert {(await client.get("/nothing")).status_code for _ in range(4)} == {404}
