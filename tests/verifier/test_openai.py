"""The verifier as an OpenAI-compatible endpoint: the target's own text, many at once, and no more
sessions left behind than are to rest."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
import pytest_asyncio
import torch
from prometheus_client import Gauge

from cloud_verifier.app import Verifier
from cloud_verifier.cli import main
from cloud_verifier.logs import log
from cloud_verifier.openai.answerer import Tokenizer, VerifierAnswerer, _Exchange, _Predicted
from cloud_verifier.openai.endpoint import endpoint
from cloud_verifier.serving.auth import Authenticator
from cloud_verifier.sessions.slots import SlotShares
from cloud_verifier.settings import Settings
from edge_client.device import Device
from edge_client.serve.endpoint import model_name as edge_model_name
from moa.chat import template
from moa.errors import UsageError
from moa.process.listening import Port
from moa.target.identity import short_id
from moa.version import running_version
from moa.wire import ClientSession, Limits
from moa.wire.events import Advanced, Ready
from moa.wire.messages import ClientMessage, Error, Opened
from tests.api.large import LARGE, large_request
from tests.api.scripted import check_that_the_loop_turns
from tests.edge.serve.pair import embedded, served
from tests.verifier.kit import PATIENCE, generate, held_forward, principals, until

SETTINGS = Settings(port=0, openai="0", slots=4, device="cpu", dtype="float32")
QUESTION = [{"role": "user", "content": "What is 17 + 25 - 9?"}]
MODEL = "target"
DRAINING = "draining", ""
pytestmark = pytest.mark.asyncio(loop_scope="module")
Both = tuple[Verifier, openai.AsyncOpenAI]


@contextlib.asynccontextmanager
async def running(
    settings: Settings = SETTINGS, auth: Authenticator | None = None
) -> AsyncIterator[Both]:
    """A verifier with its endpoint, and a client of it."""
    tokenizer = embedded().target.tokenizer
    auth = auth or Authenticator()
    async with (
        Verifier(served(settings), settings, auth).running() as verifier,
        endpoint(
            verifier,
            port=Port("127.0.0.1", 0),
            tokenizer=tokenizer,
            settings=settings,
            auth=auth,
        ) as address,
        openai.AsyncOpenAI(
            base_url=f"{address}/v1", api_key="any", max_retries=0, timeout=3 * PATIENCE
        ) as client,
    ):
        yield verifier, client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both() -> AsyncIterator[Both]:
    """A verifier and a client that all tests share. Each test leaves it with resting sessions
    alone."""
    async with running() as pair:
        yield pair


@cache
def truth(count: int) -> str:
    """The target's own greedy answer."""
    target = embedded().target
    ids = target.tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=False
    )
    return str(
        target.tokenizer.decode(generate(target.model, ids, count), skip_special_tokens=True)
    )


@contextlib.contextmanager
def draining(verifier: Verifier) -> Iterator[None]:
    """The verifier drains while the body runs, and serves again behind it."""
    verifier.service.drain("the test", PATIENCE)
    try:
        yield
    finally:
        verifier.service.draining = False


def all_rest(verifier: Verifier) -> bool:
    """Whether nobody is connected, and no session runs: those that are left rest."""
    sessions = list(verifier.service.table)
    rest = all(session.outbox is None and session.at_rest for session in sessions)
    return rest and not verifier.service.connections


def refusals(verifier: Verifier, code: str, limit: str) -> float:
    """How many requests the service has refused for this reason."""
    named = {"code": code, "limit": limit}
    return verifier.metrics.registry.get_sample_value("moa_refusals_total", named) or 0.0


def without_place(verifier: Verifier) -> float:
    """How many answers wait for a slot."""
    registry = verifier.metrics.registry
    return registry.get_sample_value("moa_api_waiting_answers", {"limit": "slots"}) or 0.0


async def said(client: openai.AsyncOpenAI, **how: Any) -> Any:
    """The answer to the question."""
    return await client.chat.completions.create(**({"model": MODEL, "messages": QUESTION} | how))


async def text_of(stream: Any) -> str:
    """All that a stream brings."""
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def test_a_key_that_is_revoked_ends_its_answers_and_no_others(tmp_path: Path) -> None:
    auth, alice, bob = principals(tmp_path, "alice", "bob")
    file = tmp_path / "tokens"
    prompt = embedded().target.tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=False
    )
    async with running(auth=auth) as (verifier, client):
        hers = client.with_options(api_key=alice)
        his = client.with_options(api_key=bob)
        await said(hers, messages=[{"role": "user", "content": "before " * 20}], max_tokens=2)
        await until(lambda: all_rest(verifier))
        assert [session.principal for session in verifier.service.table] == ["alice"]
        with held_forward(verifier, behind=len(prompt)) as (entered, release):
            stream = await said(hers, max_tokens=24, stream=True)
            whole = asyncio.create_task(said(hers, max_tokens=24))
            his_stream = await said(his, max_tokens=24, stream=True)
            assert await asyncio.to_thread(entered.wait, PATIENCE)
            with pytest.raises(SystemExit):
                main(["token", "revoke", str(file), "alice"])
            with pytest.raises(openai.AuthenticationError, match="a valid api key is needed"):
                await said(hers, max_tokens=4)
            with pytest.raises(openai.APIError, match="revoked while this was answered") as told:
                await text_of(stream)
            assert told.value.code == "invalid_api_key"
            with pytest.raises(openai.AuthenticationError, match="revoked while this was answered"):
                await whole
            release.set()
            assert await text_of(his_stream) == truth(24)
        await until(lambda: all_rest(verifier))
        # Of alice nothing is left, of what had no connection any more neither.
        assert [session.principal for session in verifier.service.table] == ["bob"]


async def test_variables_reach_the_chat_template() -> None:
    tokenizer = copy.copy(embedded().target.tokenizer)
    tokenizer.chat_template = (
        "{{ messages[0].role }}{{ ' thinks' if enable_thinking is not defined }}"
    )
    assert Tokenizer(tokenizer).chat(QUESTION, {}) == "user thinks"
    assert Tokenizer(tokenizer).chat(QUESTION, {"enable_thinking": False}) == "user"


async def test_a_targets_template_cannot_hold_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever publishes a model writes its template; it runs in a process that is ended."""
    monkeypatch.setattr(template, "_RENDER_SECONDS", 1.0)
    tokenizer = copy.copy(embedded().target.tokenizer)
    loop = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    tokenizer.chat_template = "{% if messages[0].content == 'loop' %}" + loop + "{% endif %}fine"
    ours = Tokenizer(tokenizer)
    assert ours.chat([{"role": "user", "content": "hi"}], {}) == "fine"
    mine = time.process_time()
    with pytest.raises(UsageError, match="takes over"):
        ours.chat([{"role": "user", "content": "loop"}], {})
    assert time.process_time() - mine < 0.5, "another process has worked"
    assert ours.chat([{"role": "user", "content": "hi"}], {}) == "fine"


async def test_a_target_with_two_templates_has_the_one_for_tools_asked() -> None:
    tokenizer = copy.copy(embedded().target.tokenizer)
    tokenizer.chat_template = {"default": "plain", "tool_use": "with {{ tools[0].name }}"}
    ours = Tokenizer(tokenizer)
    assert ours.chat(QUESTION, {}) == "plain"
    assert ours.chat(QUESTION, {"tools": [{"name": "look"}]}) == "with look"


async def test_many_at_once_and_streamed_are_told_the_targets_own_text(both: Both) -> None:
    _, client = both
    streams = [
        said(client, max_tokens=30, stream=True) for _ in range(10)
    ]  # more than there are slots
    assert set(await asyncio.gather(*map(text_of, await asyncio.gather(*streams)))) == {truth(30)}


async def test_a_prediction_changes_the_work_and_not_the_text(both: Both) -> None:
    text = truth(40)
    wrong = text.replace("37", "38", 1)
    for predicted, most, accepted in [
        (text, 40, range(11, 41)),
        (wrong, 40, range(11, 41)),
        ("Nothing of the kind at all.", 40, range(11)),
        (text, 4, [3]),  # no more of it is verified than the answer may have
    ]:
        answer = await said(
            both[1], max_tokens=most, prediction={"type": "content", "content": predicted}
        )
        assert answer.choices[0].message.content == truth(most)
        details = answer.usage.completion_tokens_details
        assert (details.accepted_prediction_tokens or 0) in accepted
        assert most == 40 or not details.rejected_prediction_tokens


async def test_usage_tells_how_many_forwards_brought_the_answer(both: Both) -> None:
    forwards = []
    for predicted in ("", truth(40)):
        prediction: Any = {"prediction": {"type": "content", "content": predicted}}
        answer = await said(both[1], max_tokens=40, **(prediction if predicted else {}))
        told = answer.usage.model_extra["moa"]
        assert told["forward_tokens"] == answer.usage.completion_tokens
        assert 0 < told["forwards"] <= told["forward_tokens"]
        forwards.append(told["forwards"])
    assert forwards[1] < forwards[0], "a right prediction is read, not written"


async def test_log_probabilities_are_the_models_own(both: Both) -> None:
    how: Any = {"max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    answer = (await said(both[1], **how, seed=3, temperature=1.5)).choices[0]
    target = embedded().target
    ids = target.tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=False
    )
    words = target.tokenizer(answer.message.content, add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        rows = (
            target.model(torch.tensor([[*ids, *words]]))
            .logits[0, len(ids) - 1 : -1]
            .float()
            .log_softmax(-1)
        )
    told = answer.logprobs.content
    assert "".join(one.token for one in told) == answer.message.content
    assert [one.logprob for one in told] == pytest.approx(
        [float(row[id]) for row, id in zip(rows, words, strict=True)], abs=1e-3
    )
    best = [[other.logprob for other in one.top_logprobs] for one in told]
    assert best == [pytest.approx(row.topk(2).values.tolist(), abs=1e-3) for row in rows]


async def test_a_stop_text_and_a_seed(both: Both) -> None:
    answer = (await said(both[1], stop="42")).choices[0]
    assert (answer.finish_reason, "42" in answer.message.content) == ("stop", False)
    sampled = [await said(both[1], seed=5, temperature=1, max_tokens=20) for _ in range(2)]
    assert sampled[0].choices[0].message.content == sampled[1].choices[0].message.content


def shared_tokens(verifier: Verifier) -> float:
    """Tokens of prompts that were shared instead of run."""
    name = "moa_shared_prefix_tokens_total"
    return verifier.metrics.registry.get_sample_value(name) or 0.0


async def test_a_chats_next_question_runs_only_what_is_new() -> None:
    """The whole chat was read anew with each question. Another one between two of them, such as for
    a title, takes nothing from that."""
    settings = replace(SETTINGS, slots=16)
    title = "Reply with a title of this chat and nothing else, in four words at the very most."
    chat: list[Any] = [{"role": "system", "content": "You work out sums. " * 4}, *QUESTION]
    async with running(settings) as (verifier, client):

        async def ask(messages: Any) -> tuple[str, float, int]:
            before = shared_tokens(verifier)
            told = await said(client, messages=messages, max_tokens=20)
            await until(lambda: all_rest(verifier))
            shared = shared_tokens(verifier) - before
            return told.choices[0].message.content, shared, told.usage.prompt_tokens

        answer, shared, length = await ask(chat)
        assert not shared
        for _ in range(2):
            _, shared, _ = await ask([{"role": "user", "content": title}])
            chat += [{"role": "assistant", "content": answer}, QUESTION[0]]
            answer, shared, longer = await ask(chat)
            assert length - 4 <= shared < longer
            length = longer
            assert len(verifier.service.table) <= 2
        fresh = [{"role": "system", "content": "Another."}, *chat[1:]]
        async with running(settings) as (_, other):
            told = await said(other, messages=chat, max_tokens=20)
            assert told.choices[0].message.content == answer
        await ask(fresh)
        assert len(verifier.service.table) <= 2


@pytest.mark.parametrize("most", [1, 2, 4])
async def test_resting_sessions_of_many_programs_leave_room_for_one_that_asks(most: int) -> None:
    """Whoever needs a slot takes that of one that rests."""
    settings = replace(SETTINGS, slots=8 * most)
    async with running(settings) as (verifier, client):
        for number in range(4):
            await said(
                client, messages=[{"role": "user", "content": f"{number} " * 20}], max_tokens=2
            )
            await until(lambda: all_rest(verifier))
        assert len(verifier.service.table) == most


async def test_answers_at_the_same_time_leave_no_more_resting_sessions_than_others() -> None:
    async with running(replace(SETTINGS, slots=16)) as (verifier, client):
        await asyncio.gather(
            *(
                said(client, messages=[{"role": "user", "content": f"{n} " * 20}], max_tokens=2)
                for n in range(8)
            )
        )
        await until(lambda: all_rest(verifier))
        assert len(verifier.service.table) == 2


class _Answering:
    """A line to a service that answers each request in turn like this; then it says no more."""

    def __init__(self, answers: list[list[Error | Opened]], look: Callable[[], float]) -> None:
        self._answers = deque(answers)
        self._look = look
        self._said: asyncio.Queue[Error | Opened] = asyncio.Queue()
        self.seen: list[float] = []
        """What `look` has returned at each request, and when nothing more was to be heard."""
        self.quiet = asyncio.Event()

    def put(self, message: ClientMessage) -> None:
        self.seen.append(self._look())
        for answer in self._answers.popleft():
            self._said.put_nowait(answer)

    async def get(self) -> Error | Opened:
        if not self._answers and self._said.empty():
            self.seen.append(self._look())
            self.quiet.set()
        return await self._said.get()


async def test_an_answer_whose_session_was_taken_up_waits_for_no_place_any_more() -> None:
    """It reads its prompt then, which may take minutes, and nobody need add slots for that."""
    prompt = list(range(4, 24))
    session = ClientSession(prompt, max_new_tokens=4)
    opened = Opened(session.id, len(prompt))
    gone = Error("unknown_session", "gone", session.id, 1)
    busy = Error("busy", "all slots are busy", session.id, retry_after_ms=1, limit="slots")
    gauge = Gauge("waiting", "", ["limit"], registry=None)
    line: Any = _Answering(
        # The session is opened and asked for a stream, opened again, and again.
        [[opened], [gone], [busy], [], [opened], []],
        lambda: sum(sample.value for one in gauge.collect() for sample in one.samples),
    )
    exchange = _Exchange(session, line, _Predicted(session, (), Limits()), gauge)
    line.put(session.open())
    await exchange.next(Ready)
    exchange.ask()
    waiting = asyncio.create_task(exchange.next(Advanced))
    async with asyncio.timeout(PATIENCE):
        await line.quiet.wait()
    waiting.cancel()
    assert line.seen == [0, 0, 0, 0, 1, 1, 0]


async def test_a_client_that_hangs_up_leaves_no_running_session(both: Both) -> None:
    verifier, client = both
    stream = await said(client, stream=True, max_tokens=900, extra_body={"ignore_eos": True})
    await anext(stream)
    await stream.close()
    del stream
    gc.collect()  # the client's generators end here, not on the model's thread in a later test
    await until(lambda: all_rest(verifier))


async def test_a_drain_waits_for_the_answers_that_run(both: Both) -> None:
    verifier, client = both
    stream = await said(client, max_tokens=30, stream=True)
    first = ""
    while not first:  # its one round has begun
        first = (await anext(stream)).choices[0].delta.content or ""
    with draining(verifier):
        assert first + await text_of(stream) == truth(30)


async def test_a_drain_waits_for_an_answer_that_waits_for_its_rate() -> None:
    """Between two rounds nothing of it ran, and it was cut as if it had ended."""
    prompt = embedded().target.tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=False
    )
    limits = replace(SETTINGS.limits, max_tokens_per_second=50.0, max_burst_tokens=len(prompt))
    async with running(replace(SETTINGS, limits=limits)) as (verifier, client):
        service = verifier.service
        now = service.clock()
        service.clock = lambda: now
        stream = await said(client, max_tokens=150, stream=True, extra_body={"ignore_eos": True})
        reading = asyncio.create_task(text_of(stream))
        registry = verifier.metrics.registry
        waiting = {"limit": "max_tokens_per_second"}
        await until(lambda: registry.get_sample_value("moa_api_waiting_answers", waiting) == 1)
        drained = asyncio.create_task(verifier.drain())
        await until(lambda: service.draining)
        assert not service.idle
        while not reading.done():
            now += 10.0
            await asyncio.wait({reading}, timeout=0.05)
        assert (await reading).startswith(truth(30))
        await drained


async def test_a_drain_refuses_new_answers_and_ends_those_without_a_place_at_once(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, client = both
    # Who is refused a place would ask again long after this test.
    monkeypatch.setattr(SlotShares, "appointment", lambda *_: 10 * PATIENCE)
    prompt = embedded().target.tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=False
    )
    async with asyncio.timeout(PATIENCE):
        with held_forward(verifier, behind=len(prompt)) as (entered, release):
            runs = await said(client, max_tokens=24, stream=True)
            first = ""
            while not first:
                first = (await anext(runs)).choices[0].delta.content or ""
            assert await asyncio.to_thread(entered.wait, PATIENCE)
            drained = refusals(verifier, *DRAINING)
            # With the one that asks for a whole answer, two more than there are slots left.
            crowd = range(SETTINGS.slots)  # one slot is taken
            waiting = [asyncio.create_task(said(client, max_tokens=24, stream=True)) for _ in crowd]
            whole = asyncio.create_task(said(client, max_tokens=24))
            await until(lambda: without_place(verifier) == 2)
            assert not refusals(verifier, "busy", "slots"), "nobody is turned away"
            with draining(verifier):
                has_place = [one for one in waiting if one.done()]
                has_none = [one for one in waiting if not one.done()]
                assert len(has_none) == 1, "its response has not begun"
                asked: list[Any] = [whole, *has_none, said(client, max_tokens=24)]
                for answer in (*asked, said(client, max_tokens=24, stream=True)):
                    with pytest.raises(openai.InternalServerError) as refused:
                        await answer
                    assert (refused.value.status_code, refused.value.code) == (
                        503,
                        "server_stopping",
                    )
                    assert int(refused.value.response.headers["retry-after"]) > 0
                assert refusals(verifier, *DRAINING) == drained, "nothing is asked of the engine"
                assert not without_place(verifier)
                release.set()
                assert first + await text_of(runs) == truth(24)
                for stream in has_place:
                    assert await text_of(await stream) == truth(24)
    await until(lambda: all_rest(verifier))


async def test_a_process_that_drains_lives_and_is_not_ready(both: Both) -> None:
    """Who supervises it would end it in the middle of its answers."""
    verifier, client = both
    base = str(client.base_url).removesuffix("/v1/")
    async with httpx.AsyncClient(base_url=base, trust_env=False) as browser:
        paths = ("/health/live", "/health/ready")
        found = [(await browser.get(path)).status_code for path in paths]
        with draining(verifier):
            found += [(await browser.get(path)).status_code for path in paths]
    assert found == [200, 200, 200, 503]


async def test_an_answer_that_a_drain_overtakes_ends_at_its_first_refusal(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, client = both
    before = refusals(verifier, *DRAINING)
    real = VerifierAnswerer.admit

    async def admit(self: Any, *asked: Any) -> None:
        await real(self, *asked)
        verifier.service.draining = True

    monkeypatch.setattr(VerifierAnswerer, "admit", admit)
    try:
        with pytest.raises(openai.InternalServerError, match="this server stops") as ended:
            await said(client, max_tokens=24, stream=True)
    finally:
        verifier.service.draining = False
    assert ended.value.code == "server_stopping"
    assert refusals(verifier, *DRAINING) == before + 1


async def test_the_log_has_the_address_of_whoever_asks(
    both: Both, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "propagate", True)
    caplog.set_level("INFO", "cloud_verifier")
    _, client = both
    await said(client, max_tokens=2)
    peers = {vars(one)["peer"] for one in caplog.records if getattr(one, "peer", "")}
    (peer,) = peers
    host, _, port = peer.rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0


async def test_a_wrong_or_revoked_key_is_logged_with_its_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "propagate", True)
    auth, alice, _ = principals(tmp_path, "alice", "bob")
    async with running(auth=auth) as (verifier, client):
        with pytest.raises(SystemExit):
            main(["token", "revoke", str(tmp_path / "tokens"), "alice"])
        for key in ("wrong", alice):
            with pytest.raises(openai.AuthenticationError):
                await said(client.with_options(api_key=key), max_tokens=4)
        page = verifier.metrics.page().decode()
    assert 'moa_unauthorized_total{kind="unknown",port="openai"} 2.0' in page
    assert 'moa_unauthorized_total{kind="unknown",port="verifier"} 0.0' in page
    logged = [one for one in caplog.records if one.getMessage().startswith("unauthorized")]
    assert len(logged) == 2
    for one in logged:
        # The name of the logger has its lines bounded by address.
        fields = vars(one)
        assert (one.name, one.levelname) == ("cloud_verifier", "WARNING")
        assert (fields["event"], fields["port"]) == ("unauthorized", "openai")
        assert re.fullmatch(r"127\.0\.0\.1:\d+", fields["peer"])


async def test_a_key_at_its_limit_of_connections_keeps_no_other_out(tmp_path: Path) -> None:
    auth, alice, bob = principals(tmp_path, "alice", "bob")
    settings = replace(SETTINGS, limits=replace(SETTINGS.limits, max_connections_per_principal=1))
    prompt = embedded().target.tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=False
    )
    async with running(settings, auth) as (verifier, client), asyncio.timeout(PATIENCE):
        hers = client.with_options(api_key=alice)
        with held_forward(verifier, behind=len(prompt)) as (entered, release):
            stream = await said(hers, max_tokens=24, stream=True)
            assert await asyncio.to_thread(entered.wait, PATIENCE)
            with pytest.raises(openai.RateLimitError, match="1 question of this key is under way"):
                await said(hers, max_tokens=4)
            his = asyncio.create_task(said(client.with_options(api_key=bob), max_tokens=4))
            await until(lambda: len(verifier.service.connections) == 2)
            release.set()
            assert (await his).choices[0].message.content == truth(4)
            assert await text_of(stream) == truth(24)


@pytest.mark.parametrize("failures", [1, 1000])
async def test_an_answer_ends_when_its_session_does(
    both: Both, failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier, client = both
    left = failures
    real = verifier.engine.target.forward

    def forward(rows: Any) -> Any:
        nonlocal left
        if left and verifier.service.connections:
            left -= 1
            raise RuntimeError("a kernel failed")
        return real(rows)

    monkeypatch.setattr(verifier.engine.target, "forward", forward)
    async with asyncio.timeout(PATIENCE):
        if failures == 1:
            answer = await said(client, max_tokens=20)
            assert answer.choices[0].message.content == truth(20)
        else:
            with pytest.raises(openai.InternalServerError) as refused:
                await said(client, max_tokens=20)
            assert refused.value.status_code == 503
    assert left < failures
    left = 0
    assert (await said(client, max_tokens=20)).choices[0].message.content == truth(20)
    assert all_rest(verifier)


async def test_limits_are_named(both: Both) -> None:
    verifier, client = both
    assert (await said(client, max_tokens=100_000, stop=["4"])).choices[0].finish_reason == "stop"
    schema = {"properties": {"a": {"not": {"type": "null"}}}}
    cannot: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    unknown = "#/properties/a: Unimplemented keys"
    for wrong, code, why in [
        ({"stop": "x" * 129}, None, None),
        ({"messages": [{"role": "user", "content": "a " * 9000}]}, "context_length_exceeded", None),
        *(
            ({"response_format": cannot, "stream": stream}, "invalid_grammar", unknown)
            for stream in (False, True)
        ),
    ]:
        with pytest.raises(openai.BadRequestError, match=why) as refused:
            await said(client, **wrong)  # type: ignore[arg-type]
        assert refused.value.code == code
    for prompt in ("word " * 9000, [10**6]):
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model=MODEL, prompt=prompt)  # type: ignore[arg-type]
    assert all_rest(verifier)


async def test_a_prompt_is_refused_by_the_limit_that_it_exceeds() -> None:
    limits = replace(SETTINGS.limits, max_prompt_tokens=40)
    long = [{"role": "user", "content": "one two three " * 20}]
    why = r"the prompt has \d+ tokens, and a prompt has 40 tokens at most \(max_prompt_tokens\)"
    async with running(replace(SETTINGS, limits=limits)) as (_, client):
        with pytest.raises(openai.BadRequestError, match=why) as refused:
            await said(client, messages=long)
    assert refused.value.code == "context_length_exceeded"


async def test_the_operators_page_reads_the_metrics(both: Both) -> None:
    verifier, client = both
    await client.completions.create(model=MODEL, prompt="a", max_tokens=3)
    base = str(client.base_url).removesuffix("/v1/")
    async with httpx.AsyncClient(base_url=base, trust_env=False) as browser:
        page = await browser.get("/ui")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for path in re.findall(r'(?:href|src)="([^"]+)"', page.text):
            assert (await browser.get(f"/{path}")).status_code == 200
        metrics = (await browser.get("/metrics")).text
        script = (await browser.get("/ui/ui.js")).text

    offered = {
        line.split("{")[0].split(" ")[0]
        for line in metrics.splitlines()
        if not line.startswith("#")
    }
    declared = {line.split(" ")[2] for line in metrics.splitlines() if line.startswith("# TYPE")}
    for name in set(re.findall(r'"((?:moa|process)_\w+)"', script)):
        assert name in offered | declared, name
    (served,) = (line for line in metrics.splitlines() if line.startswith("moa_info{"))
    assert f'model="{MODEL}"' in served
    assert f'version="{running_version()}"' in served
    assert f'computes="{short_id(verifier.service.facts.computes)}"' in served
    assert 'computes=""' not in served


async def test_both_ends_give_the_embedded_target_one_name() -> None:
    source = Device.load().bundle.manifest.target.source
    assert Settings().served_name == edge_model_name(source) == MODEL


@pytest.mark.parametrize("name", LARGE)
async def test_no_request_keeps_others_from_the_event_loop(both: Both, name: str) -> None:
    _, api = both
    await check_that_the_loop_turns(
        str(api.base_url).removesuffix("/v1/"), large_request(MODEL, name)
    )
