"""The routes, over a scripted answerer: shapes, statuses, streams, disconnects, and resumed
streams."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from moa.api import app
from moa.api.access import Access, ApiKeys
from moa.api.answer import AnswerEvent, Began, Cut, LinkNews, Piece, Reading, Scored
from moa.api.app import Api, ApiLimits
from moa.api.connections import serving
from moa.errors import CapacityError, LinkError, RemoteError, UsageError
from moa.process.listening import Port
from tests.api.scripted import (
    MODEL,
    PATIENCE,
    Scripted,
    browser,
    chat,
    ended,
    heartbeat,
    post_from_a_thread,
    says,
    served,
    talk,
)


def data_of(stream: str) -> list[Any]:
    """The events of a stream; the last is the end mark."""
    return [
        line.removeprefix("data: ")
        if line.endswith("[DONE]")
        else json.loads(line.removeprefix("data: "))
        for line in stream.splitlines()
        if line.startswith("data: ")
    ]


CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"


def texts_of(stream: str) -> tuple[str, str]:
    """The reasoning and the answer of a streamed chat with one choice, with what was cut taken
    back."""
    reasoning = answer = ""
    for chunk in data_of(stream)[:-1]:
        for choice in chunk["choices"]:
            marks = choice.get("moa", {})
            delta = choice["delta"]
            reasoning = reasoning[: marks.get("reasoning_cut")] + delta.get("reasoning_content", "")
            answer = answer[: marks.get("cut")] + delta.get("content", "")
            assert marks.get("verified", 0) <= len(answer)
    return reasoning, answer


async def test_a_chat_answer_whole_and_as_a_stream() -> None:
    async with talk(says("Hel", "lo")) as (answerer, client):
        answer = (await client.post(CHAT, json=chat("secret"))).json()
        reply = await client.post(
            CHAT, json=chat(stream=True, stream_options={"include_usage": True})
        )
        page = (await client.get("/metrics")).text
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Hello",
        "refusal": None,
    }
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 2)
    assert answerer.asks[0].question.messages == [{"role": "user", "content": "secret"}]
    assert answerer.asks[0].mode == "keep"
    assert reply.headers["content-type"] == "text/event-stream"
    *chunks, usage, done = data_of(reply.text)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert texts_of(reply.text) == ("", "Hello")
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 5)
    assert "id:" not in reply.text
    assert 'moa_api_requests_total{route="/v1/chat/completions",status="200"} 2.0' in page
    assert "moa_api_running_answers 0.0" in page
    assert "secret" not in page
    assert "Hel" not in page


@pytest.mark.parametrize(
    "script",
    [
        says("<th", "ink>\nhm", "m</thi", "nk>\n\n4", "2"),
        [Began(thinking=True), *says("hm", "m</think>\n\n", "42")[1:]],
        [
            Began(),
            Piece("<think>\nhxx</think>4", verified=False),
            Cut(9),
            Piece("mm</think>42"),
            ended("<think>\nhmm</think>42"),
        ],
    ],
    ids=["in pieces", "opened by the template", "corrected"],
)
async def test_thinking_is_told_apart_from_the_answer(script: list[AnswerEvent]) -> None:
    async with talk(script) as (_, client):
        message = (await client.post(CHAT, json=chat())).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hmm", "42")
        how = {"stream": True, "moa": {"mode": "provisional"}}
        assert texts_of((await client.post(CHAT, json=chat(**how))).text) == ("hmm", "42")
        plain = await client.post(CHAT, json=chat(**how, reasoning_format="none"))
        assert texts_of(plain.text) == ("", script[-1].text)  # type: ignore[union-attr]


async def test_variables_for_the_template_are_passed_on_and_bounded() -> None:
    given = {"enable_thinking": False, "reasoning_effort": "low", "budget": 3}
    async with talk(says("4")) as (answerer, client):
        for path, body in ((CHAT, chat()), (RESPONSES, {"input": "hi"})):
            assert (
                await client.post(path, json=body | {"chat_template_kwargs": given})
            ).status_code == 200
        assert [ask.question.template for ask in answerer.asks] == [given, given]
        for wrong in (
            {"messages": "x"},
            {"chat_template": "{{ 1 }}"},
            {"bos_token": "x"},
            {"a b": 1},
            {"x": [1]},
            {"x": "y" * 257},
            {f"x{n}": n for n in range(17)},
        ):
            reply = await client.post(CHAT, json=chat(chat_template_kwargs=wrong))
            assert reply.status_code == 400
            assert "chat_template_kwargs" in reply.json()["error"]["param"], reply.text
        reply = await client.post(
            "/v1/completions", json={"prompt": "x", "chat_template_kwargs": given}
        )
        assert reply.json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    "asked", [{"audio": {}}, {"audio": {"voice": "alloy"}}, {"modalities": ["text", "audio"]}]
)
async def test_speech_is_refused_by_name_with_its_defaults_too(asked: dict[str, Any]) -> None:
    async with talk(says("x")) as (_, client):
        error = (await client.post(CHAT, json=chat(**asked))).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", next(iter(asked)))


async def test_several_choices_have_seeds_of_their_own() -> None:
    async with talk(lambda ask: says(f"seed {ask.seed}")) as (_, client):
        answer = (await client.post(CHAT, json=chat(n=3, seed=7))).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == [
        "seed 7",
        "seed 8",
        "seed 9",
    ]
    assert answer["usage"]["completion_tokens"] == 3


async def test_completions_take_texts_and_ids() -> None:
    async with talk(lambda ask: says(str(ask.question.text or ask.question.ids))) as (_, client):
        for prompt, texts in (
            ("a", ["a"]),
            (["a", "b"], ["a", "b"]),
            ([1, 2], ["(1, 2)"]),
            ([[1], [2]], ["(1,)", "(2,)"]),
        ):
            answer = (
                await client.post("/v1/completions", json={"model": MODEL, "prompt": prompt})
            ).json()
            assert [choice["text"] for choice in answer["choices"]] == texts


async def test_provisional_text_is_marked_and_retracted() -> None:
    script = [
        Began(),
        Piece("ab"),
        LinkNews("offline"),
        Piece("cd", False),
        Cut(3),
        Piece("x"),
        ended("abcx"),
    ]
    async with talk(script) as (_, client):
        reply = await client.post(CHAT, json=chat(stream=True, moa={"mode": "provisional"}))
    chunks = data_of(reply.text)[:-1]
    marks = [choice.get("moa") for chunk in chunks for choice in chunk["choices"]]
    assert texts_of(reply.text) == ("", "abcx")
    assert {"verified": 2} in marks
    assert {"verified": 2, "cut": 3} in marks
    assert [chunk["moa"]["link"] for chunk in chunks if not chunk["choices"]] == ["offline"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat(temperature=3), "temperature"),
        (chat(temperature="hot"), "temperature"),
        (chat(top_p=0), "top_p"),
        (chat(n=0), "n"),
        (chat(n=99), "n"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(max_tokens=-2), "max_tokens"),
        (chat(frequency_penalty=2.5), "frequency_penalty"),
        (chat(logit_bias={"a": 2}), "logit_bias"),
        (chat(logit_bias={"7": 101}), "logit_bias"),
        (chat(logit_bias={"7": 1, "07": 1}), "logit_bias"),
        (chat(stop=["é" * 65]), "stop"),
        (chat(tools=[{"type": "function"}], tool_choice="required"), "tools[0]"),
        (chat(tool_choice="required"), "tool_choice"),
        (chat(tools=[{"type": "function", "function": {"name": "f g"}}]), "tools[0].function.name"),
        (chat(functions=[{"name": "f"}], function_call={"name": "f"}), "function_call"),
        (chat(response_format={"type": "xml"}), "response_format"),
        (chat(response_format={"type": "json_schema", "json_schema": {}}), "response_format"),
        (chat(moa={"mode": "guess"}), "moa.mode"),
        (chat(moa={"typo": 1}), "moa"),
        ({"model": MODEL, "messages": []}, "messages"),
        ({"model": MODEL, "messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        (
            {"model": MODEL, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
        ),
        ({"model": MODEL, "messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"model": MODEL, "messages": [{"role": "system", "content": None}]},
            "messages[0].content",
        ),
        ({"model": MODEL}, None),
        ([], None),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content",
        ),
        ({"input": "hi", "tool_choice": "required"}, "tool_choice"),
        ({"input": "hi", "conversation": "conv_1"}, "conversation"),
        ({"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "hi", "background": True}, "background"),
    ],
)
async def test_a_wrong_request_is_refused_by_name(body: Any, param: str | None) -> None:
    async with talk(says("x")) as (answerer, client):
        reply = await client.post(RESPONSES if "input" in body else CHAT, json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"]
    assert not answerer.asks


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (UsageError("the prompt has 9 tokens"), 400, None),
        (LinkError("no route"), 503, "verifier_unavailable"),
        (CapacityError("full"), 429, "busy"),
        (RemoteError("busy", "too many", retry_after=2.5), 429, "busy"),
        (RemoteError("limit", "too long"), 400, "context_length_exceeded"),
    ],
)
async def test_errors_from_inside_have_their_status_and_are_the_last_event_of_a_stream(
    error: Exception, status: int, code: str | None
) -> None:
    begun: list[AnswerEvent] = []

    def refuse(ask: Any) -> Any:
        yield from begun
        raise error

    async with talk(refuse) as (_, client):
        for stream in (False, True):
            reply = await client.post(CHAT, json=chat(stream=stream))
            assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
            assert ("retry-after" in reply.headers) == (status in (429, 503))
        begun += [Began(), Piece("a")]
        *_, last, done = data_of((await client.post(CHAT, json=chat(stream=True))).text)
    assert (last["error"]["code"], done) == (code, "[DONE]")


@pytest.mark.parametrize("stream", [True, False])
async def test_who_is_turned_away_in_mid_answer_is_counted_and_logged_once(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A verifier's own answer waits for a slot behind its beginning: the response is a 200 then."""

    def refuse(ask: Any) -> Any:
        yield Began()
        raise RemoteError("busy", "all 4 slots are busy", limit="slots", retry_after=1.0)

    async with talk(refuse) as (_, client):
        reply = await client.post(CHAT, json=chat(stream=stream))
        assert reply.status_code == (200 if stream else 429)
        page = (await client.get("/metrics")).text
    assert 'moa_api_refusals_total{code="busy",limit="slots"} 1.0' in page
    (line,) = [one for one in caplog.records if "429" in one.message and one.levelname == "WARNING"]
    assert line.message == "refused with 429: POST /v1/chat/completions (busy, limit slots)"


@pytest.mark.parametrize(
    ("method", "path", "kind", "body", "status"),
    [
        ("GET", "/nothing", "", b"", 404),
        ("GET", "/v1/chat/completions", "", b"", 405),
        ("POST", "/v1/chat/completions", "text/plain", b"{}", 415),
        ("POST", "/v1/chat/completions", "application/json", b"{", 400),
        ("POST", "/v1/chat/completions", "application/json", b"\xff", 400),
        ("POST", "/v1/chat/completions", "application/json", b"[" * 100_000, 400),
        (
            "POST",
            "/v1/chat/completions",
            "application/json",
            json.dumps(chat(model="other")).encode(),
            404,
        ),
        ("POST", "/v1/chat/completions", "application/json", b"x" * 3_000_000, 413),
        ("GET", "/v1/streams/none", "", b"", 404),
        *((method, "/v1/responses/none", "", b"", 404) for method in ("GET", "DELETE")),
        ("GET", "/v1/models/none", "", b"", 404),
    ],
)
async def test_refusals_have_the_shape_of_an_error(
    method: str, path: str, kind: str, body: bytes, status: int
) -> None:
    async with talk(says("x")) as (_, client):
        reply = await client.request(
            method, path, content=body, headers={"Content-Type": kind} if kind else {}
        )
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_keys_guard_everything_but_health_and_other_websites_are_refused_before_all() -> None:
    async with served(says("x"), keys=["right"]) as (answerer, address):
        async with browser(address) as client:
            assert (await client.get("/health")).status_code == 200
            for path in ("/v1/models", "/metrics", "/moa/status", "/v1/streams/x"):
                reply = await client.get(path)
                assert (reply.status_code, reply.json()["error"]["code"]) == (
                    401,
                    "invalid_api_key",
                )
        async with browser(address, Authorization="Bearer right") as client:
            assert (await client.get("/v1/models")).json()["data"][0]["id"] == MODEL
            reply = await client.post(CHAT, json=chat(), headers={"Origin": "https://evil.example"})
    assert reply.status_code == 403
    assert "access-control-allow-origin" not in reply.headers
    assert not answerer.asks


async def test_a_website_that_is_let_in_is_told_why_it_is_refused() -> None:
    """A browser hides an answer without these headers: a wrong key looked like no network."""
    site = "https://app.example"
    answerer = Scripted(lambda ask: says("x"))
    access = Access(ApiKeys(["right"]), origins=[site])
    async with (
        Api(answerer, access).running() as api,
        serving(api.app(origins=[site]), Port("127.0.0.1", 0)) as address,
        browser(address, Origin=site) as client,
    ):
        for path, status in (("/v1/models", 401), ("/v1/streams/x", 401), ("/nowhere", 404)):
            reply = await client.get(path)
            assert reply.status_code == status
            assert reply.headers["access-control-allow-origin"] == site
        elsewhere = await client.get("/v1/models", headers={"Origin": "https://evil.example"})
    assert elsewhere.status_code == 403
    assert "access-control-allow-origin" not in elsewhere.headers


def _dispatched(lines: Iterable[str]) -> Iterator[str]:
    """The data of each event, as OpenAI's package takes them: an empty line ends an event, too, if
    there is nothing but the number of an earlier one."""
    number = ""
    data: list[str] = []
    for line in lines:
        if line.startswith("id: "):
            number = line
        elif line.startswith("data: "):
            data.append(line.removeprefix("data: "))
        elif not line and (data or number):
            yield "\n".join(data)
            data = []


async def test_a_sign_of_life_between_numbered_events_is_no_event_of_openais_package() -> None:
    """The sign comes each second, for a client that hears nothing goes on elsewhere; the package ended
    with an error about JSON at the first one."""
    for_ever = asyncio.Event()
    ask = chat(stream=True, moa={"mode": "provisional", "resumable": True})
    text = Piece("Hello")
    async with talk(lambda _: [Began(), text, for_ever]) as (_, client):  # noqa: SIM117
        async with asyncio.timeout(PATIENCE), client.stream("POST", CHAT, json=ask) as reply:
            seen = ""
            async for piece in reply.aiter_text():
                seen += piece
                if ": still here\n" in seen:
                    break
    events = list(_dispatched(seen.split("\n")[:-1]))
    assert "Hello" in "".join(events)
    assert all(json.loads(event) for event in events)


async def test_memory_is_given_back_after_a_large_request(monkeypatch: pytest.MonkeyPatch) -> None:
    given = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(app, "_TRIM_SECONDS", 0.02)
    monkeypatch.setattr(app, "give_back_free_memory", lambda: loop.call_soon_threadsafe(given.set))
    async with talk(says("x")) as (_, client):
        await client.post(CHAT, json=chat())
        await asyncio.sleep(0.1)
        assert not given.is_set()
        await client.post(CHAT, json=chat(user="x" * 2**17))
        async with asyncio.timeout(PATIENCE):
            await given.wait()


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, chat()), (CHAT, chat(stream=True)), (RESPONSES, {"input": "hi", "stream": True})],
)
async def test_a_client_that_hangs_up_ends_its_answer_at_once(
    path: str, body: dict[str, Any], begun: bool
) -> None:
    script = [*([Began(), Piece("a")] if begun else []), asyncio.Event()]
    async with talk(lambda ask: script) as (answerer, client):
        asked = asyncio.create_task(client.post(path, json=body))
        async with asyncio.timeout(PATIENCE):
            await answerer.waits.wait()
            asked.cancel()
            await answerer.closed.wait()


async def test_too_many_answers_are_refused_and_places_come_back() -> None:
    go = asyncio.Event()
    script = [Began(), go, *says("x")[1:]]
    limits = ApiLimits(max_running=2)
    async with talk(lambda ask: script, limits=limits) as (_, client):
        held = asyncio.create_task(client.post(CHAT, json=chat(n=2)))
        async with asyncio.timeout(PATIENCE):
            while (await client.get("/moa/status")).json()["running"] < 2:
                await asyncio.sleep(0)
        assert (await client.post(CHAT, json=chat())).status_code == 429
        go.set()
        assert (await held).status_code == 200
        assert (await client.post(CHAT, json=chat())).status_code == 200


@pytest.mark.parametrize(
    "limits",
    [
        ApiLimits(max_running=5, max_running_of_one=2, running_of_one_limit="keys"),
        ApiLimits(max_running=2, running_of_one_limit="keys"),  # all places are hers
    ],
)
async def test_a_key_with_many_answers_keeps_no_other_out(
    limits: ApiLimits, caplog: pytest.LogCaptureFixture
) -> None:
    go = asyncio.Event()
    script = [Began(), go, *says("x")[1:]]
    async with (
        served(lambda ask: script, keys=["hers", "his"], limits=limits) as (_, address),
        browser(address, Authorization="Bearer hers") as she,
        browser(address, Authorization="Bearer his") as he,
        asyncio.timeout(PATIENCE),
    ):

        async def running() -> int:
            return int((await she.get("/moa/status")).json()["running"])

        held = [asyncio.create_task(she.post(CHAT, json=chat())) for _ in range(2)]
        while await running() < 2:
            await asyncio.sleep(0)
        refused = await she.post(CHAT, json=chat())
        assert refused.status_code == 429
        said = refused.json()["error"]["message"]
        assert said == (
            "2 questions of this key are under way, as many as it may have at once (keys):"
            " ask again when one has been answered"
        )
        # Else the operator sees nothing of who was turned away, nor why.
        page = (await she.get("/metrics")).text
        assert 'moa_api_refusals_total{code="busy",limit="keys"} 1.0' in page
        (line,) = [one for one in caplog.records if "429" in one.message]
        assert line.message == "refused with 429: POST /v1/chat/completions (busy, limit keys)"
        assert vars(line)["limit"] == "keys"
        assert vars(line)["principal"], "whose key it was"
        assert (await she.get("/props")).json()["total_slots"] == 2
        his = asyncio.create_task(he.post(CHAT, json=chat()))
        while await running() < 3:
            await asyncio.sleep(0)
        go.set()
        assert [reply.status_code for reply in await asyncio.gather(his, *held)] == [200] * 3


async def test_questions_that_are_refused_while_others_are_read_are_told_of_those() -> None:
    begun, go = asyncio.Event(), asyncio.Event()
    limits = ApiLimits(max_running=1)
    async with talk(says("x"), limits=limits) as (answerer, client), asyncio.timeout(PATIENCE):
        real = answerer.encode

        async def encode(ask: Any) -> Any:
            begun.set()
            await go.wait()
            return await real(ask)

        answerer.encode = encode
        asked = asyncio.create_task(client.post(CHAT, json=chat()))
        await begun.wait()
        refused = await client.post(CHAT, json=chat())
        assert refused.status_code == 429
        assert refused.json()["error"]["message"] == (
            "1 question is under way, as many as there may be at once (most_answers):"
            " ask again when one has been answered"
        )
        go.set()
        assert (await asked).status_code == 200


# ---- resumable streams


async def test_a_resumable_stream_goes_on_without_its_client_and_is_taken_up_from_anywhere() -> (
    None
):
    go = asyncio.Event()
    script = [Began(), Piece("a"), go, Piece("b"), ended("ab")]
    async with served(lambda ask: script, keys=["me", "other"]) as (answerer, address):
        async with browser(address, Authorization="Bearer me") as client:
            body = chat(stream=True, moa={"resumable": True})
            async with client.stream("POST", CHAT, json=body) as reply:
                id = reply.headers["x-request-id"]
                lines = []
                async for line in reply.aiter_lines():
                    lines.append(line)
                    if '"a"' in line:
                        break  # the client is gone
            assert f"id: {id}/2" in lines
            go.set()
            async with asyncio.timeout(PATIENCE):
                await answerer.closed.wait()
            rest = await client.get(f"/v1/streams/{id}", headers={"Last-Event-ID": f"{id}/2"})
            everything = await client.get(f"/v1/streams/{id}")
            assert (
                await client.get(f"/v1/streams/{id}", headers={"Last-Event-ID": "x/2"})
            ).status_code == 400
        async with browser(address, Authorization="Bearer other") as stranger:
            assert (await stranger.get(f"/v1/streams/{id}")).status_code == 404
            assert (await stranger.delete(f"/v1/streams/{id}")).status_code == 404
    text = "".join(
        c["choices"][0]["delta"].get("content", "") for c in data_of(everything.text)[:-1]
    )
    assert text == "ab"
    assert everything.text.endswith(rest.text)
    assert len(data_of(rest.text)) == len(data_of(everything.text)) - 2


async def test_a_resumable_stream_is_stopped_by_its_id() -> None:
    script = [Began(), Piece("a"), asyncio.Event()]
    async with talk(lambda ask: script) as (answerer, client):
        body = chat(stream=True, moa={"resumable": True})
        async with client.stream("POST", CHAT, json=body) as reply:
            id = reply.headers["x-request-id"]
            assert (await client.delete(f"/v1/streams/{id}")).status_code == 204
            async with asyncio.timeout(PATIENCE):
                await answerer.closed.wait()
                async for _ in reply.aiter_lines():
                    pass  # it ends
        assert (await client.get(f"/v1/streams/{id}")).status_code == 404


async def test_what_is_kept_to_check_an_answer_again_is_counted_and_bounded() -> None:
    limits = ApiLimits(keep_bytes=2**20)
    async with talk(says("ok", verified=False), limits=limits) as (_, client):

        async def kept_after(text: str = "hi", **fields: Any) -> float:
            how = {"stream": True, "moa": {"mode": "provisional", "resumable": True}}
            assert (await client.post(CHAT, json=chat(text, **how, **fields))).status_code == 200
            (line,) = re.findall(
                r"^moa_api_kept_stream_bytes (.*)$",
                (await client.get("/metrics")).text,
                re.MULTILINE,
            )
            return float(line)

        assert (
            0 < await kept_after(prediction={"type": "content", "content": "z" * 300_000}) < 20_000
        )
        described = {"name": "f", "description": "y" * 300_000}
        assert await kept_after(tools=[{"type": "function", "function": described}]) > 300_000
        for _ in range(12):
            assert 200_000 < await kept_after("w" * 200_000) <= 1.05 * 2**20


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
async def test_log_probabilities_of_many_tokens_do_not_block(path: str) -> None:
    entry = Scored("token", -1.0, tuple((f"other {number}", -2.0) for number in range(20)))
    script = [
        Began(),
        *(Piece("token", logprobs=(entry,)) for _ in range(4096)),
        ended("token" * 4096, tokens=4096),
    ]
    asked = (
        {"logprobs": True, "top_logprobs": 20, "n": 4}
        if path.startswith("chat")
        else {"top_logprobs": 20}
    )
    asked |= (
        chat()
        if path.startswith("chat")
        else {"input": "hi", "include": ["message.output_text.logprobs"]}
    )
    async with served(lambda ask: script) as (_, address), heartbeat() as beat:
        reply = await post_from_a_thread(address, f"/v1/{path}", json={"model": MODEL} | asked)
    assert reply.text.count('"top_logprobs":[') == (4 if path.startswith("chat") else 1) * 4096
    assert beat.longest < beat.limit


async def test_a_question_does_not_wait_for_the_grammar_of_another_with_its_key() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string"}}}
    async with talk(says("plain")) as (answerer, client):
        slow = asyncio.create_task(
            client.post("/v1/chat/completions", json=chat(response_format=form))
        )
        await answerer.compiles.wait()
        plain = await client.post("/v1/chat/completions", json=chat())
        assert plain.json()["choices"][0]["message"]["content"] == "plain"
        assert not slow.done()
        answerer.compiled.set()
        assert (await slow).status_code == 200


async def test_what_apps_send_by_default_is_taken() -> None:
    """LM Studio's samples, sliders of chat apps, llama.cpp's clients."""
    async with talk(says("x")) as (answerer, client):
        sent = chat(
            max_tokens=-1, frequency_penalty=0.5, presence_penalty=-1, logit_bias={"7": -100}
        )
        assert (await client.post(CHAT, json=sent)).status_code == 200
        assert (await client.post(CHAT, json=chat(logit_bias={}))).status_code == 200
        body = {"input": "hi", "presence_penalty": 0.25}
        response = (await client.post(RESPONSES, json=body)).json()
        await client.post("/v1/completions", json={"prompt": "x", "max_tokens": -1})
        await client.post("/v1/completions", json={"prompt": "x"})
    first, plain, third, *completions = answerer.asks
    assert first.max_tokens is plain.max_tokens is None
    assert (first.frequency_penalty, first.presence_penalty) == (0.5, -1.0)
    assert first.logit_bias == ((7, -100.0),)
    assert plain.logit_bias is None
    assert third.presence_penalty == response["presence_penalty"] == 0.25
    assert [ask.max_tokens for ask in completions] == [None, 16]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"model": MODEL}, "messages is missing"),
        ({"model": MODEL, "messages": []}, "messages must not be empty"),
        ({"model": MODEL, "messages": [{"content": "x"}]}, "role is missing in messages[0]"),
        (chat(n=0), "n must be at least 1"),
        (chat(temperature=3), "temperature must be at most 2.0"),
        (chat(temperature="hot"), "temperature must be a number, not a text"),
        (chat(stream=1), "stream must be true or false, not a whole number"),
        (chat(stop=["a"] * 9), "stop must have at most 8 items"),
        (
            chat(moa={"mode": "guess"}),
            "moa.mode cannot be 'guess': choose hold, provisional or keep",
        ),
        (chat(moa={"typo": 1}), "moa has no field typo"),
        ([], "the body must be an object, not a list"),
    ],
)
async def test_what_is_wrong_is_said_in_words(body: Any, words: str) -> None:
    async with talk(says("x")) as (_, client):
        error = (await client.post(CHAT, json=body)).json()["error"]
    assert error["message"] == words


async def test_the_tokenizer_and_the_limits_can_be_asked_for() -> None:
    async with talk(says("x")) as (_, client):

        async def post(path: str, body: Any) -> Any:
            reply = await client.post(path, json=body)
            return reply.status_code, reply.json()

        limit = {"max_model_len": 64}
        assert await post("/tokenize", {"content": "abc"}) == (
            200,
            {"tokens": [97, 98, 99], "count": 3, **limit},
        )
        assert (await post("/tokenize", {"prompt": "a"}))[1]["tokens"] == [1, 97]
        assert (await post("/tokenize", {"prompt": "a", "add_special_tokens": False}))[1][
            "tokens"
        ] == [97]
        assert (await post("/tokenize", {}))[0] == 400
        messages = [{"role": "system", "content": "b"}, {"role": "user", "content": "a"}]
        status, told = await post("/tokenize", {"messages": messages})
        assert (status, told) == (200, {"tokens": [98, 97], "count": 2, **limit})
        wrongs: list[dict[str, Any]] = [
            {"messages": [{"role": "user", "content": "a" * 5000}]},
            {"messages": messages, "add_generation_prompt": False},
            {"messages": messages, "chat_template_kwargs": {"messages": "x"}},
            {"messages": []},
        ]
        for wrong in wrongs:
            assert (await post("/tokenize", wrong))[0] == 400, wrong
        assert (await post("/tokenize", {"content": "a" * 5000}))[0] == 400
        assert (await post("/detokenize", {"tokens": [97, 98]}))[1]["content"] == "ab"
        assert (await post("/detokenize", {"tokens": [500]}))[0] == 400
        props = (await client.get("/props")).json()
        assert props["default_generation_settings"]["n_ctx"] == 64
        status, refused = await post("/v1/embeddings", {"input": "x", "model": MODEL})
        assert (status, refused["error"]["code"]) == (404, "unsupported_route")
        assert "embedding model beside it" in refused["error"]["message"]


async def test_the_model_has_other_names_where_it_is_told_so() -> None:
    for names, status in ((("gpt-4o",), 200), (("*",), 200), ((), 404)):
        async with talk(says("x"), also_called=names) as (_, client):
            reply = await client.post(CHAT, json=chat(model="gpt-4o"))
            assert reply.status_code == status


async def test_who_asks_for_an_unknown_model_is_told_every_name_that_there_is() -> None:
    def more_names() -> list[str]:
        return ["Qwen/coder", "coder", MODEL]

    async with talk(says("x"), also_called=("gpt-4o", "coder"), more_names=more_names) as (
        _,
        client,
    ):
        refused = await client.post(CHAT, json=chat(model="gpt-5"))
        assert refused.status_code == 404
        assert refused.json()["error"]["message"] == (
            f"the model 'gpt-5' does not exist here; there is {MODEL!r},"
            " also called 'gpt-4o', 'coder', 'Qwen/coder'"
        )
        assert (await client.post(CHAT, json=chat(model="Qwen/coder"))).status_code == 200
    async with talk(says("x"), more_names=lambda: ["*"]) as (_, client):
        assert (await client.post(CHAT, json=chat(model="gpt-5"))).status_code == 200
    async with talk(says("x")) as (_, client):
        refused = await client.post(CHAT, json=chat(model="gpt-5"))
        assert refused.json()["error"]["message"].endswith(f"; there is {MODEL!r}")


async def test_a_stream_shows_that_the_prompt_is_being_read() -> None:
    by_device = Reading(5, 9, "device")
    story = [Began(), Reading(0, 2060), Reading(512, 2060), by_device, *says("x")[1:]]
    async with talk(story) as (_, client):
        reply = await client.post(CHAT, json=chat(stream=True))
        first, second, _ = [line for line in reply.text.splitlines() if line.startswith(":")]
        assert first == ": waiting for an answer to a prompt of 2060 tokens"
        assert second == ": reading the prompt: 512 of 2060 tokens"
        marked = await client.post(CHAT, json=chat(stream=True, moa={"mode": "provisional"}))
        assert '"moa":{"reading":[512,2060]}' in marked.text
        assert '"moa":{"reading":[5,9],"by":"device"}' in marked.text
        kept = await client.post(CHAT, json=chat(stream=True, moa={"resumable": True}))
        assert "reading" not in kept.text


async def test_a_key_that_may_not_measure_is_told_its_own_totals() -> None:
    operators: list[str] = []
    async with served(
        says("a", "b"), keys=["one", "two"], may_measure=lambda name: name in operators
    ) as (_, address):
        async with browser(address, Authorization="Bearer one") as client:
            await client.post("/v1/chat/completions", json=chat())
            assert (await client.get("/moa/status")).json()["tokens"] == 2
            assert (await client.get("/metrics")).status_code == 403
        async with browser(address, Authorization="Bearer two") as client:
            status = (await client.get("/moa/status")).json()
            assert (status["tokens"], status["calls"], status["running"]) == (0, 0, 0)
            operators.append(ApiKeys(["two"])(["Bearer two"]) or "")
            assert (await client.get("/moa/status")).json()["tokens"] == 2
            assert "moa_api_tokens" in (await client.get("/metrics")).text


async def test_who_leaves_out_v1_is_told_where_the_routes_are() -> None:
    async with served(says("x")) as (_, address), browser(address) as client:
        forgotten = (await client.post("/chat/completions", json=chat())).json()
        other = (await client.get("/v1/nothing")).json()
    assert forgotten["error"]["message"].endswith(": OpenAI's routes are below /v1")
    assert other["error"]["message"] == "there is nothing at /v1/nothing"
