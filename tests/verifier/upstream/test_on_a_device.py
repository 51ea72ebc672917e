"""`--upstream` on a device: what is shown is the endpoint's, not that of the process in between."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cloud_verifier.settings import Settings
from cloud_verifier.upstream.app import UpstreamVerifier, upstreams_of
from cloud_verifier.upstream.client import Upstreams
from cloud_verifier.upstream.contract import UpstreamError
from edge_client import EdgeClient, ask
from edge_client.cli import main, options
from edge_client.cli.audit import _audit
from edge_client.cli.chat import _welcome
from edge_client.cli.doctor import examine
from edge_client.cli.generate import JsonAnswer, not_verified
from edge_client.cli.serve import tell_of_the_verifier
from edge_client.client import local_flags
from edge_client.device import Device
from edge_client.events import Link, Prompt, Token
from edge_client.link.local import local_verifier
from edge_client.screen.pipe import refused
from edge_client.serve.answerer import EdgeAnswerer
from edge_client.settings import ClientSettings
from moa.cli.command_line import CommandParser
from moa.errors import MoaError, UsageError
from tests.verifier.upstream.scripted import Request, chunk, end_of, reset, running, stream, whole

BUSY = "the upstream cannot answer now: too many requests"
GOOD = stream(chunk(" The upstream says this."), chunk("", "stop"), "data: [DONE]\n\n")


async def test_the_endpoint_is_named_and_no_round_trip_within_this_program_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with (
        running(GOOD) as upstream,
        EdgeClient(
            upstream=upstream.url, upstream_model="big", upstream_api="completions"
        ) as device,
    ):
        await device.wait_online(60)
        telling = asyncio.create_task(tell_of_the_verifier(device, 0.01))
        text = ""
        async with asyncio.timeout(60):
            while "\n" not in text:
                text += capsys.readouterr().err
                await asyncio.sleep(0.01)
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        assert text.endswith(f" online: text is verified by big at {upstream.url}\n")
        assert text.count("\n") == 1
        done, _ = await end_of(device)
        status = EdgeAnswerer(device, "big").status()
    assert done.verified
    assert done.stats["calls"]
    assert done.stats["rtt_ms"] is None
    assert status["link"] == "online"
    assert status["verifier"] == f"big at {upstream.url}"
    assert status["rtt_ms"] is None
    assert status["upstream"] is True


async def test_doctor_says_of_an_upstream_that_it_answers_and_nothing_of_the_process_between() -> (
    None
):
    async with running(GOOD) as upstream:
        settings = ClientSettings(upstream=upstream.url, upstream_api="completions")
        checks = {check.name: check async for check in examine(settings)}
    assert checks["upstream"].state == "ok"
    assert (
        checks["upstream"].finding == f"{upstream.url} tells its models (it was asked nothing else)"
    )
    assert not {"verifier", "tokenizer", "records"} & set(checks)


def test_an_answer_that_is_not_verified_is_so_for_want_of_the_endpoint() -> None:
    answer = JsonAnswer()
    answer.take(Prompt(ids=[1]))
    answer.take(Token(position=1, id=3, text="b", status="provisional"))
    answer.take(Link(state="late"))
    line = not_verified(answer, ClientSettings(upstream="gpu:8000"))
    assert line.endswith("the upstream did not answer in time")
    for said in (Link(state="online"), Link(state="offline", detail=f"{BUSY} (HTTP 429)")):
        answer.take(said)
    line = not_verified(answer, ClientSettings(upstream="gpu:8000"))
    assert line.endswith(f"verified by the target: {BUSY} (HTTP 429)"), "no connection was lost"


def test_who_verifies_is_called_by_what_is_behind() -> None:
    assert ClientSettings(upstream="gpu:8000").who_verifies == "the upstream"
    assert ClientSettings(verifier="local").who_verifies == "the verifier"
    error = refused("no such model", ClientSettings(upstream="gpu:8000").who_verifies)
    assert str(error) == "the upstream refuses: no such model"
    error = refused("the upstream has no such model", "the upstream")
    assert str(error) == "the upstream has no such model"


@pytest.mark.usefixtures("short_pauses")
async def test_an_upstream_that_ends_every_stream_early_is_what_is_told() -> None:
    links: list[Link] = []
    empty = stream(chunk(""), "data: [DONE]\n\n")
    async with (
        running(empty) as upstream,
        EdgeClient(upstream=upstream.url, upstream_model="big", max_new_tokens=4) as device,
    ):
        await device.wait_online(60)
        async for event in device.generate("What is 17 plus 25?", settle_seconds=60.0):
            if isinstance(event, Link):
                links.append(event)
    why = "the upstream has ended its answers again and again without a new word"
    assert links[-1] == Link(state="refused", detail=why, for_now=True)
    assert str(refused(why, "the upstream")) == why


async def test_what_the_endpoint_refuses_is_said_once() -> None:
    refusal = whole({"error": {"message": "no such key"}}, "401 Unauthorized")
    async with running(refusal, refusal) as upstream:
        words = ["generate", "hi", "--upstream", upstream.url, "--max-new-tokens", "4"]
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", "from edge_client.cli import main; main()", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    told = done.stderr
    assert told.count("no such key") == 1
    assert "error: the upstream refuses the key: no such key" in told
    assert "upstream_away" not in told


async def test_an_address_where_nothing_ever_answered_is_doubted() -> None:
    async with running(GOOD, reset) as upstream:
        upstreams = Upstreams([upstream.url])
        with pytest.raises(UpstreamError) as away:
            await upstreams.probe()
        assert away.value.hint == f"is {upstreams.addresses[0]} its address?"
        assert away.value.hint in upstreams.away
        upstream.models = None
        await upstreams.probe()
        upstream.models = reset
        await upstreams.look()
        assert "closed the connection without an answer" in upstreams.away
        assert "its address" not in upstreams.away
        await upstreams.close()


async def test_who_has_an_endpoint_hears_of_no_verifier() -> None:
    settings = ClientSettings(upstream="gpu:8000", upstream_model="big")
    assert options.what_takes_long(settings) == "connecting to big at gpu:8000"
    assert "a verifier" in options.what_takes_long(ClientSettings(verifier="local"))
    with pytest.raises(UsageError, match=r"^cannot connect to ftp://x: ") as failed:
        async with local_verifier("--upstream=ftp://x", needs=(), upstream="ftp://x"):
            pass
    assert "verifier" not in str(failed.value)
    with pytest.raises(UsageError, match="--upstream needs no_such_package") as missing:
        async with local_verifier(needs=("no_such_package",), upstream="ftp://x"):
            pass
    assert "verifier" not in missing.value.line()


def test_an_empty_file_is_no_key_and_not_no_key(tmp_path: Path) -> None:
    """The upstream was asked without a key, and refused."""
    key = tmp_path / "key"
    key.write_text("\n")
    key.chmod(0o600)
    settings = Settings(port=0, upstream=("http://127.0.0.1:9/v1",), upstream_key_file=key)
    with pytest.raises(UsageError, match=f"there is no key in {key}"):
        upstreams_of(settings)
    with pytest.raises(UsageError, match="there is no key in"):
        ask("hi", upstream="http://127.0.0.1:9/v1", upstream_key_file=str(key))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"upstream_api": "chats"}, "unknown interface 'chats' of an upstream .*chat-whole"),
        ({"upstream_key_file": "/nowhere/key"}, "cannot read the upstream's key: .*/nowhere/key"),
    ],
)
def test_what_the_user_can_correct_is_no_failure_of_the_network(
    how: dict[str, Any], said: str
) -> None:
    """A program that tries again after a `LinkError` would have done so for ever."""
    with pytest.raises(UsageError, match=said):
        ask("hi", upstream="http://127.0.0.1:9/v1", **how)


async def test_the_chat_says_that_the_device_has_the_toy() -> None:
    async with running(GOOD) as upstream, EdgeClient(upstream=upstream.url) as device:
        console = Console(file=io.StringIO(), width=200)
        await _welcome(device, console)
        assert "the embedded toy" in console.file.getvalue()  # type: ignore[attr-defined]
        about = EdgeAnswerer(device, "big").status()
        assert not about["demo"], "the page shows the upstream's name"
        assert "the embedded toy" in about["toy"][0]
        device.settings = dataclasses.replace(device.settings, bundle="mine")
        console = Console(file=io.StringIO(), width=200)
        await _welcome(device, console)
        assert "the embedded toy" not in console.file.getvalue()  # type: ignore[attr-defined]
        assert not EdgeAnswerer(device, "big").status()["toy"]


async def test_the_toy_beside_a_verifier_of_an_engine_limits_texts_and_is_not_the_target() -> None:
    """`moa-edge up` was named, which is of no use there."""
    async with running(GOOD) as upstream:
        settings = Settings(port=0, upstream=(upstream.url,), upstream_api="completions")
        async with (
            UpstreamVerifier(settings, upstreams_of(settings)).open() as verifier,
            EdgeClient(verifier=verifier.transport.url) as device,
        ):
            console = Console(file=io.StringIO(), width=300)
            await _welcome(device, console)
            (remark,) = EdgeAnswerer(device).status()["toy"]
            context = device.shared.max_context
            assert "the embedded toy" in device.shared.whose_context
    assert f"its context of {context:,} tokens" in remark
    assert "moa-edge up" not in remark
    assert remark in console.file.getvalue()  # type: ignore[attr-defined]


async def test_generate_goes_by_what_stands_behind_the_verifier() -> None:
    """It named the toy and `moa-edge up`, and did not say whose tokens a limit counts."""
    program = (
        "import sys; sys.stderr.isatty = lambda: True; from edge_client.cli import main; main()"
    )
    async with running(GOOD) as upstream:
        settings = Settings(port=0, upstream=(upstream.url,), upstream_api="completions")
        async with UpstreamVerifier(settings, upstreams_of(settings)).open() as verifier:
            words = ("generate", "hello", "--max-new-tokens", "3")
            where = ("--verifier", verifier.transport.url)
            asked = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-c", program, *words, *where],
                capture_output=True,
                check=True,
                timeout=120,
            )
    assert b"moa-edge up" not in asked.stderr
    assert b"limits count tokens of the device's model" in asked.stderr


async def test_bench_measures_the_upstream(capsys: pytest.CaptureFixture[str]) -> None:
    async with running(GOOD) as upstream:
        words = ["bench", "--upstream", upstream.url, "--upstream-api", "completions", "--json"]
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(main, words)
        assert ended.value.code == 0
        asked = [request.body["prompt"] for request in upstream.asked]
    ways = json.loads(capsys.readouterr().out)["ways"]
    assert list(ways) == ["none", "device", "auto"]
    for figures in ways.values():
        assert figures["same"]
        assert figures["kilobytes"] is None
    assert len(asked) == 1 + 3 * 4
    assert "What is 17 plus 25?" in asked[0]


async def test_bench_tells_that_an_upstream_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    """And not the speed of this device's own text."""
    async with running(reset, reset) as upstream:
        words = ["bench", "--upstream", upstream.url, "--settle-seconds", "0.2"]
        with pytest.raises(SystemExit) as ended:
            await asyncio.to_thread(main, words)
    assert ended.value.code == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "error: the upstream closed the connection without an answer" in told.err


def parser() -> CommandParser:
    made = CommandParser(prog="edge-client")
    options.add_connection(made)
    return made


def test_a_second_upstream_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["--upstream", "http://a", "--upstream", "http://b"])
    assert ended.value.code == 2
    assert "--upstream: may be given once here: several are for `cloud-verifier serve`" in (
        capsys.readouterr().err
    )
    assert parser().parse_args(["--upstream", "http://a"]).upstream == "http://a"


def test_the_file_of_a_key_is_passed_on_and_said_to_be_open_to_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_text("sk-very-secret")
    words = parser().parse_args(["--upstream", "gpu:8000", "--upstream-key-file", str(key)])
    key.chmod(0o604)
    settings = options.settings_from(words)
    assert f"every user of this machine can read {key}" in capsys.readouterr().err
    key.chmod(0o600)
    options.settings_from(words)
    assert capsys.readouterr().err == ""
    flags, _ = local_flags(settings, Device.of(settings))
    assert f"--upstream-key-file={key}" in flags
    with pytest.raises(UsageError, match="needs --upstream"):
        ClientSettings(upstream_key_file=str(key))


def piece(text: str, reason: str | None = None) -> dict[str, Any]:
    """A chunk of a chat."""
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}


async def test_an_audit_asks_a_chat_endpoint_by_its_messages_and_compares_nothing_else() -> None:
    """It compared the device's own answer with itself, and called that identical."""
    done = "data: [DONE]\n\n"
    # Each in pieces of its own: other tokens of the same text.
    answers = itertools.cycle(
        [
            stream(piece(" The upstream"), piece(" says this.", "stop"), done),
            stream(piece(" The up"), piece("stream sa"), piece("ys this.", "stop"), done),
        ]
    )

    async def said(request: Request, writer: asyncio.StreamWriter) -> None:
        await next(answers)(request, writer)

    async with running(said) as upstream:
        settings = ClientSettings(upstream=upstream.url, upstream_api="chat")
        audit = await _audit(settings, "What is 17 plus 25?", raw=False)
    assert audit.at is None
    assert audit.drafted.text.strip() == audit.alone.text.strip() == "The upstream says this."
    questions = [request.body["messages"] for request in upstream.asked]
    assert len(questions) >= 2
    assert all(question[-1]["content"] == "What is 17 plus 25?" for question in questions)

    async with running(whole({"error": {"message": "out of memory"}}, "500 Oh no")) as upstream:
        settings = ClientSettings(upstream=upstream.url, upstream_api="chat")
        with pytest.raises(MoaError, match=r"not verified: .*out of memory"):
            await _audit(settings, "What is 17 plus 25?", raw=False)
