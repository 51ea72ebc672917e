"""The verifier as an OpenAI-compatible endpoint: the target's own text, many at once, and no sessions left behind."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import re
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import httpx2 as httpx
import openai
import pytest
import pytest_asyncio
import torch

from cloud_verifier.app import Verifier
from cloud_verifier.openai.answerer import Tokenizer
from cloud_verifier.openai.endpoint import endpoint, model_name
from cloud_verifier.serving.auth import Authenticator
from cloud_verifier.settings import Settings
from edge_client.device import Device
from edge_client.serve.app import model_name as edge_model_name
from moa.process.listening import Port
from tests.api.large import LARGE, large_request
from tests.api.scripted import check_that_the_loop_turns
from tests.edge.serve.pair import embedded, served
from tests.verifier.kit import PATIENCE, generate

SETTINGS = Settings(port=0, openai="0", slots=4, device="cpu", dtype="float32")
QUESTION = [{"role": "user", "content": "What is 17 + 25 - 9?"}]
MODEL = "target"
pytestmark = pytest.mark.asyncio(loop_scope="module")
Both = tuple[Verifier, openai.AsyncOpenAI]


@contextlib.asynccontextmanager
async def running(settings: Settings = SETTINGS) -> AsyncIterator[Both]:
    """A verifier with its endpoint, and a client of it."""
    tokenizer, auth = embedded().target.tokenizer, Authenticator()
    async with (
        Verifier(served(settings), settings, auth).running() as verifier,
        endpoint(
            verifier, port=Port("127.0.0.1", 0), tokenizer=tokenizer, settings=settings, principals=auth.principal
        ) as address,
        openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0, timeout=3 * PATIENCE) as client,
    ):
        yield verifier, client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def both() -> AsyncIterator[Both]:
    """A verifier and a client that all tests share. Each test leaves it without sessions."""
    async with running() as pair:
        yield pair


@cache
def truth(count: int) -> str:
    """The target's own greedy answer."""
    target = embedded().target
    ids = target.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    return str(target.tokenizer.decode(generate(target.model, ids, count), skip_special_tokens=True))


async def test_the_text_is_the_targets_own(both: Both) -> None:
    verifier, client = both
    answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=40)  # type: ignore[call-overload]
    assert answer.choices[0].message.content == truth(40).split("<|")[0]
    assert answer.usage.completion_tokens <= 40
    assert not list(verifier.service.table)


async def test_variables_reach_the_chat_template() -> None:
    tokenizer = copy.copy(embedded().target.tokenizer)
    tokenizer.chat_template = "{{ messages[0].role }}{{ ' thinks' if enable_thinking is not defined }}"
    assert Tokenizer(tokenizer).chat(QUESTION, {}) == "user thinks"
    assert Tokenizer(tokenizer).chat(QUESTION, {"enable_thinking": False}) == "user"


async def test_many_at_once_and_streamed(both: Both) -> None:
    _, client = both

    async def one() -> str:
        stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=30, stream=True)  # type: ignore[call-overload]
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert set(await asyncio.gather(*(one() for _ in range(10)))) == {truth(30)}  # more than there are slots


async def test_a_prediction_changes_the_work_and_not_the_text(both: Both) -> None:
    _, client = both
    text = truth(40)
    wrong = text.replace("37", "38", 1)
    for said, accepted in [(text, True), (wrong, True), ("Nothing of the kind at all.", False)]:
        answer = await client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,  # type: ignore[arg-type]
            max_tokens=40,
            prediction={"type": "content", "content": said},
        )
        assert answer.choices[0].message.content == text
        details = answer.usage and answer.usage.completion_tokens_details
        assert details is not None
        assert ((details.accepted_prediction_tokens or 0) > 10) == accepted


async def test_no_more_of_a_prediction_is_verified_than_the_answer_may_have(both: Both) -> None:
    _, client = both
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,  # type: ignore[arg-type]
        max_tokens=4,
        prediction={"type": "content", "content": truth(40)},
    )
    details = answer.usage and answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (3, 0)


async def test_log_probabilities_are_the_models_own(both: Both) -> None:
    _, client = both
    how: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    answer = (await client.chat.completions.create(**how, seed=3, temperature=1.5)).choices[0]
    target = embedded().target
    ids = target.tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    said = target.tokenizer(answer.message.content, add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        rows = target.model(torch.tensor([[*ids, *said]])).logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
    told = answer.logprobs.content
    assert "".join(one.token for one in told) == answer.message.content
    assert [one.logprob for one in told] == pytest.approx(
        [float(row[id]) for row, id in zip(rows, said, strict=True)], abs=1e-3
    )
    best = [[other.logprob for other in one.top_logprobs] for one in told]
    assert best == [pytest.approx(row.topk(2).values.tolist(), abs=1e-3) for row in rows]


async def test_a_stop_text_and_a_seed(both: Both) -> None:
    _, client = both
    answer = await client.chat.completions.create(model=MODEL, messages=QUESTION, stop="42")  # type: ignore[call-overload]
    assert (answer.choices[0].finish_reason, "42" in answer.choices[0].message.content) == ("stop", False)
    sampled = [
        await client.chat.completions.create(model=MODEL, messages=QUESTION, seed=5, temperature=1, max_tokens=20)  # type: ignore[call-overload]
        for _ in range(2)
    ]
    assert sampled[0].choices[0].message.content == sampled[1].choices[0].message.content


async def test_a_client_that_hangs_up_leaves_no_session(both: Both) -> None:
    verifier, client = both
    stream = await client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,  # type: ignore[arg-type]
        stream=True,
        max_tokens=900,
        extra_body={"ignore_eos": True},
    )
    await anext(aiter(stream))
    await stream.close()
    async with asyncio.timeout(PATIENCE):
        while list(verifier.service.table) or verifier.service.connections:
            await asyncio.sleep(0.01)


async def test_a_drain_waits_for_the_answers_that_run(both: Both) -> None:
    verifier, client = both
    stream = await client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=30, stream=True)  # type: ignore[call-overload]
    first = await anext(aiter(stream))
    verifier.service.drain("the test", 1.0)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    verifier.service.draining = False
    assert (first.choices[0].delta.content or "") + text == truth(30)


@pytest.mark.parametrize("failures", [1, 1000])
async def test_an_answer_ends_when_its_session_does(both: Both, failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier, client = both
    ask: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 20}
    left, real = failures, verifier.engine.target.forward

    def forward(rows: Any) -> Any:
        nonlocal left
        if left and verifier.service.connections:
            left -= 1
            raise RuntimeError("a kernel failed")
        return real(rows)

    monkeypatch.setattr(verifier.engine.target, "forward", forward)
    async with asyncio.timeout(PATIENCE):
        if failures == 1:
            answer = await client.chat.completions.create(**ask)
            assert answer.choices[0].message.content == truth(20)
        else:
            with pytest.raises(openai.InternalServerError) as refused:
                await client.chat.completions.create(**ask)
            assert refused.value.status_code == 503
    assert left < failures
    left = 0
    assert (await client.chat.completions.create(**ask)).choices[0].message.content == truth(20)
    assert not list(verifier.service.table)


async def test_limits_are_named(both: Both) -> None:
    _, client = both
    how: Any = {"model": MODEL, "messages": QUESTION}
    answer = await client.chat.completions.create(**how, max_tokens=100_000, stop=["4"])
    assert answer.choices[0].finish_reason == "stop"
    for wrong, code in [
        ({"stop": "x" * 129}, None),
        ({"max_tokens": 3, "messages": [{"role": "user", "content": "a " * 9000}]}, "context_length_exceeded"),
    ]:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**how | wrong)
        assert refused.value.code == code


async def test_a_schema_that_cannot_be_followed_is_refused_before_a_stream_begins(both: Both) -> None:
    schema = {"properties": {"a": {"not": {"type": "null"}}}}
    given: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="#/properties/a: Unimplemented keys") as refused:
            await both[1].chat.completions.create(model=MODEL, messages=QUESTION, response_format=given, stream=stream)  # type: ignore[call-overload]
        assert refused.value.code == "invalid_grammar"


async def test_what_does_not_fit_is_refused(both: Both) -> None:
    verifier, client = both
    for prompt in ("word " * 9000, [10**6]):
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model=MODEL, prompt=prompt)  # type: ignore[arg-type]
    assert not list(verifier.service.table)


async def test_the_operators_page_reads_the_metrics(both: Both) -> None:
    _, client = both
    await client.completions.create(model=MODEL, prompt="a", max_tokens=3)
    base = str(client.base_url).removesuffix("/v1/")
    async with httpx.AsyncClient(base_url=base, trust_env=False) as browser:
        page = await browser.get("/ui")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for path in re.findall(r'(?:href|src)="([^"]+)"', page.text):
            assert (await browser.get(f"/{path}")).status_code == 200
        metrics = (await browser.get("/metrics")).text
        script = (await browser.get("/ui/ui.js")).text

    offered = {line.split("{")[0].split(" ")[0] for line in metrics.splitlines() if not line.startswith("#")}
    declared = {line.split(" ")[2] for line in metrics.splitlines() if line.startswith("# TYPE")}
    for name in set(re.findall(r'"(moa_\w+)"', script)):
        assert name in offered | declared, name


async def test_both_ends_give_the_embedded_target_one_name() -> None:
    source = Device.load().bundle.manifest.target.source
    assert model_name(Settings()) == edge_model_name(source) == MODEL


@pytest.mark.parametrize("name", LARGE)
async def test_no_request_keeps_others_from_the_event_loop(both: Both, name: str) -> None:
    _, api = both
    await check_that_the_loop_turns(str(api.base_url).removesuffix("/v1/"), large_request(MODEL, name))
