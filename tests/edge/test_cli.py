"""The commands as a user calls them, in a fresh process where that matters."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from edge_client.cli import main, options, serve
from edge_client.cli.chat import _welcome
from edge_client.cli.generate import JsonAnswer, _tell_unverified, not_verified
from edge_client.cli.serve import _serve, _WithPeer, tell_of_the_verifier
from edge_client.client import EdgeClient
from edge_client.device import embedded_bundle
from edge_client.events import Link, Prompt, Token
from edge_client.link.mailbox import Mailbox
from edge_client.screen.pipe import how_much_verified
from edge_client.screen.words import whose_tokens
from edge_client.serve import endpoint
from edge_client.serve.settings import ServeSettings
from edge_client.settings import ClientSettings
from moa.bundle import GOLDEN, Bundle, sha256, write_golden, write_manifest
from moa.cli import working
from moa.errors import LinkError, MoaError, RemoteError
from moa.grammar.spec import Grammar
from moa.manifest import FileEntry
from moa.process.listening import Port
from moa.wire import Code, encode
from moa.wire.messages import Error
from tests.edge import kit
from tests.edge.link.test_websocket import stranger
from tests.edge.test_offline_check import slow_verifier
from tests.torture.tls import certificate
from tests.verifier import kit as verifier_kit

FRESH = "from edge_client.cli import main; main()"
_BLOCKED = f"""
import sys
sys.modules |= dict.fromkeys(("torch", "transformers", "optimum", "onnx", "safetensors"))
{FRESH}
"""


def run(
    *arguments: Any, program: str = "", input: bytes = b"", environment: Any = None, **how: Any
) -> Any:
    """Call the command; in a fresh process if there is a `program` or something to say about how."""
    own = {"XDG_CONFIG_HOME": str(kit.pair()), "NO_COLOR": "1", **(environment or {})}
    others = [name for name in os.environ if name.startswith("MOA_EDGE_")]
    if program or how:
        clean = {name: value for name, value in os.environ.items() if name not in others}
        how = {"input": input, "capture_output": True, "timeout": 300} | how
        return subprocess.run(
            [sys.executable, "-c", program or FRESH, *arguments],
            env=clean | own,
            check=False,
            **how,
        )
    with tempfile.TemporaryFile("w+") as stdin, pytest.MonkeyPatch.context() as patch:
        stdin.buffer.write(input)
        stdin.seek(0)
        for name in others:
            patch.delenv(name)
        for name, value in own.items():
            patch.setenv(name, value)
        out, err = (
            io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)
        )
        for name, stream in (("stdin", stdin), ("stdout", out), ("stderr", err)):
            patch.setattr(sys, name, stream)
        with pytest.raises(SystemExit) as end:
            main([os.fsdecode(word) for word in arguments])
        return subprocess.CompletedProcess(
            arguments, end.value.code, out.buffer.getvalue(), err.buffer.getvalue()
        )  # type: ignore[attr-defined, arg-type]


def offline(*arguments: Any, **how: Any) -> Any:
    bundle = str(kit.pair() / "bundle")
    return run(
        "generate",
        "--raw",
        "--offline",
        "--max-new-tokens",
        "5",
        "--bundle",
        bundle,
        *arguments,
        **how,
    )


def test_it_runs_where_there_is_no_torch() -> None:
    result = offline("--json", "hello", program=_BLOCKED)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["status"] == ["provisional"] * 5
    assert len(report["token_ids"]) == 5
    assert report["verified"] is False
    assert report["reason"] == "length"


def test_text_goes_to_a_pipe_and_remarks_do_not() -> None:
    result = offline("hello")
    assert result.returncode == 0
    assert json.loads(offline("--json", "hello").stdout)["text"] == result.stdout.decode()[:-1]
    assert b"nothing of this was verified" in result.stderr
    assert offline("-", input=b"hello\n").stdout == result.stdout, (
        "the prompt may come from standard input"
    )
    failed = offline("--require-verified", "--quiet", "hello")
    assert (failed.returncode, failed.stdout) == (1, result.stdout)
    assert failed.stderr == (
        b"edge-client: error: nothing of this was verified by the target (--require-verified)\n"
    )
    quiet = offline("--quiet", "hello", "--temperature", "1")
    assert (quiet.returncode, quiet.stderr) == (0, b"")
    assert quiet.stdout


_AT_A_TERMINAL = f"import sys; sys.stderr.isatty = lambda: True; {FRESH}"


def test_a_reader_is_told_once_that_the_model_is_the_embedded_toy() -> None:
    words = ("generate", "--offline", "--max-new-tokens", "5", "What is 17 + 25?")
    told = run(*words, program=_AT_A_TERMINAL)
    assert told.returncode == 0
    assert told.stderr.count(b"this is the embedded toy model") == 1
    assert b"moa-edge up TARGET --device-model MODEL" in told.stderr
    assert b"toy" not in told.stdout
    for silent in (
        run(*words, "--quiet", program=_AT_A_TERMINAL),
        run(*words, "--bundle", str(kit.pair() / "bundle"), program=_AT_A_TERMINAL),
        run(*words),  # a script
    ):
        assert silent.returncode == 0
        assert b"toy" not in silent.stderr


@pytest.mark.parametrize("bundle", ["", "mine"])
async def test_a_chat_says_once_that_its_model_is_the_embedded_toy(bundle: str) -> None:
    screen = io.StringIO()
    async with EdgeClient(offline=True) as device:
        device.settings = replace(device.settings, bundle=bundle)
        await _welcome(device, Console(file=screen, width=200))
    assert screen.getvalue().count("this is the embedded toy model") == (0 if bundle else 1)


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_chat_does_not_wait_for_a_verifier_that_has_refused_it(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`not online yet` was said of a target with another tokenizer."""
    why = LinkError("the target here has another tokenizer")
    screen = io.StringIO()
    async with EdgeClient(verifier="ws://127.0.0.1:9") as device:
        assert device.link is not None

        async def refused(_: float) -> None:
            raise why

        monkeypatch.setattr(device, "wait_online", refused)
        monkeypatch.setattr(device.link.dialling, "refused", why if is_refused else None)
        await _welcome(device, Console(file=screen, width=200))
    assert ("not online, this device answers alone: the target" in screen.getvalue()) is is_refused
    assert ("not online yet" in screen.getvalue()) is not is_refused


def test_an_answer_without_its_verifier_is_no_error_unless_it_has_to_be_verified() -> None:
    words = ["generate", "--raw", "hello", "--bundle", str(kit.pair() / "bundle")]
    words += ["--max-new-tokens", "5", "--settle-seconds", "0", "--offline-after", "0.05"]
    alone = run(*words, "--verifier", "ws://127.0.0.1:9")
    closing = alone.stderr.decode().splitlines()[-1]
    assert alone.returncode == 0
    assert re.fullmatch(
        "edge-client: nothing of this was verified by the target: ws://127.0.0.1:9 "
        "(could not be reached|did not answer in time); --require-verified makes this an error",
        closing,
    )
    unnamed = run(*words)
    assert unnamed.returncode == 0
    assert b"no verifier was named (--verifier ws://HOST:PORT" in unnamed.stderr
    needed = run(*words, "--verifier", "ws://127.0.0.1:9", "--require-verified")
    assert (needed.returncode, needed.stdout) == (1, alone.stdout)
    assert (
        needed.stderr.decode()
        .splitlines()[-1]
        .startswith(
            "edge-client: error: nothing of this was verified by the target: ws://127.0.0.1:9 "
        )
    )
    assert needed.stderr.count(b"nothing of this") == 1
    for form in ("--quiet", "--json", "--jsonl"):
        silent = run(*words, "--verifier", "ws://127.0.0.1:9", form)
        assert (silent.returncode, silent.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("states", "why"),
    [
        (["offline"], "nothing of this was verified by the target: ws://x:1 could not be reached"),
        (
            ["connecting"],
            "nothing of this was verified by the target: ws://x:1 did not answer in time",
        ),
        (["late"], "nothing of this was verified by the target: ws://x:1 did not answer in time"),
        # It has come in mid-answer, and reads what it missed: the text is not of that.
        (
            ["offline", "late"],
            "nothing of this was verified by the target: ws://x:1 could not be reached",
        ),
        (
            [Link(state="offline", detail="the upstream is not reached"), "late"],
            "nothing of this was verified by the target: the upstream is not reached",
        ),
        (
            ["offline", Link(state="late", detail="all 4 slots are busy")],
            "nothing of this was verified by the target: all 4 slots are busy",
        ),
        (
            ["online", "offline"],
            'only what stands before "b" was verified by the target:'
            " the connection to ws://x:1 was lost",
        ),
        (
            ["online", Link(state="offline", detail="the upstream is not reached")],
            'only what stands before "b" was verified by the target: the upstream is not reached',
        ),
        (
            [Link(state="offline", detail="cannot reach ws://x:1: nothing listens there")],
            "nothing of this was verified by the target: ws://x:1 could not be reached",
        ),
    ],
)
def test_why_an_answer_is_not_verified_is_said_by_the_state_of_the_link(
    states: list[Any], why: str
) -> None:
    answer = JsonAnswer()
    answer.take(Prompt(ids=[1]))
    if states[0] == "online":
        answer.take(Token(position=1, id=2, text="a", status="verified"))
    answer.take(Token(position=len(answer.ids) + 1, id=3, text="b", status="provisional"))
    for state in states:
        answer.take(state if isinstance(state, Link) else Link(state=state))
    assert not_verified(answer, ClientSettings(verifier="ws://x:1")) == why


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([("One", "provisional")], "nothing of this"),
        (
            [("One", "verified"), (" two.\nAnd", "provisional")],
            'only what stands before "two. And"',
        ),
        (
            [("One", "verified"), (f" {'long ' * 9}", "provisional")],
            f'only what stands before "{("long " * 9)[:39]}…"',
        ),
        # A device that may keep what it has written: the target goes on behind it.
        (
            [("One", "verified"), (" two", "provisional"), (" three", "verified")],
            "not all of this",
        ),
        ([("One", "provisional"), (" two", "verified")], "not all of this"),
    ],
)
def test_a_reader_is_told_up_to_which_place_an_answer_is_verified(
    tokens: list[tuple[str, Any]], says: str
) -> None:
    answer = JsonAnswer()
    answer.take(Prompt(ids=[1]))
    for position, (text, status) in enumerate(tokens, 1):
        answer.take(Token(position=position, id=2, text=text, status=status))
    assert how_much_verified(answer) == says


@pytest.mark.parametrize("remarks", [True, False])
def test_a_refusal_in_mid_answer_says_too_what_is_not_verified(
    remarks: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token that was revoked: the error spoke of it, and nothing of the text on the screen."""
    answer = JsonAnswer()
    answer.take(Prompt(ids=[1]))
    answer.take(Token(position=1, id=2, text="One", status="verified"))
    answer.take(Token(position=2, id=3, text=" two", status="provisional"))
    answer.take(Link(state="refused", detail="the verifier refused the token (HTTP 401)"))
    with pytest.raises(MoaError, match="refused the token") as caught:
        _tell_unverified(
            answer, ClientSettings(verifier="ws://x:1"), is_error=False, remarks=remarks
        )
    assert caught.value.exit_code == 1
    line = 'edge-client: only what stands before "two" was verified by the target\n'
    assert capsys.readouterr().err == (line if remarks else "")
    report = answer.report()
    assert report["refused"] == "the verifier refused the token (HTTP 401)"
    assert report["verified_characters"] == len("One")
    assert report["status"] == ["verified", "provisional"]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_where_a_limit_cuts_an_upstream_s_answer_it_is_said_whose_tokens_it_counts(
    command: str,
) -> None:
    words = [command, "--upstream", "http://127.0.0.1:9/v1", "--max-new-tokens", "3"]
    cut = run(*words, input=b"hello\n")
    line = b"edge-client: limits count tokens of the device's model, here the embedded toy"
    assert cut.stderr.count(line) == 1
    assert b"limits count" not in cut.stdout
    assert not whose_tokens("eos", "", beside_an_engine=True), "nothing was cut"
    assert not whose_tokens("length", "mine/bundle", beside_an_engine=True), (
        "perhaps they are its own"
    )
    assert not whose_tokens("length", "", beside_an_engine=False), "the toy's target has the same"
    assert not whose_tokens("context", "", beside_an_engine=False)
    assert "--bundle" not in whose_tokens("context", "mine/bundle", beside_an_engine=True)


def test_words_files_and_what_is_piped_in_are_one_prompt(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a file\n")
    joined = json.loads(
        offline("--json", "the words", "-f", str(tmp_path / "a.txt"), input=b"piped\n").stdout
    )
    assert joined["prompt_ids"] == kit.device().codec.encode("the words\n\na file\n\npiped")
    alone = json.loads(offline("--json", "-f", str(tmp_path / "a.txt")).stdout)
    assert alone["prompt_ids"] == kit.device().codec.encode("a file")


def test_events_as_lines() -> None:
    result = offline("--jsonl", "hello")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    story = [event["event"] for event in events if event["event"] not in ("notice", "link")]
    assert story == ["prompt", *["token"] * 5, "done"]
    assert result.stderr == b""


def test_a_process_that_is_told_to_end_writes_what_it_has() -> None:
    words = [
        "generate",
        "hi",
        "--offline",
        "--jsonl",
        "--max-new-tokens",
        "100000",
        "--max-offline-tokens",
        "0",
    ]
    program = [sys.executable, "-c", FRESH, *words, "--ignore-eos"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert any(b'"token"' in line for line in iter(process.stdout.readline, b""))
        process.terminate()
        rest, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    done = json.loads(rest.splitlines()[-1])
    assert (done["event"], done["reason"], done["verified"]) == ("done", "cancelled", False)
    assert done["text"]
    assert b"Traceback" not in said


def test_a_mistake_in_a_chat_that_is_piped_in_is_told_and_the_rest_goes_on() -> None:
    result = run("chat", "--offline", input=b"/nonsense\n/help\n")
    assert result.returncode == 2
    assert b"there is no /nonsense" in result.stdout + result.stderr
    assert b"/quit" in result.stdout + result.stderr
    assert run("chat", "--offline", input=b"/help\n").returncode == 0


def test_sampling_draws_a_seed_and_says_it() -> None:
    first = offline("hello", "--temperature", "2")
    (seed,) = re.findall(rb"--seed (\d+) gives the same text", first.stderr)
    assert offline("hello", "--temperature", "2", "--seed", seed.decode()).stdout == first.stdout
    assert b"seed" not in offline("hello", "--temperature", "2", "--seed", "3").stderr
    assert b"seed" not in offline("hello").stderr, "greedy text has none"
    assert (
        len(
            {
                json.loads(offline("hello", "--json", "--temperature", "2").stdout)["seed"]
                for _ in range(2)
            }
        )
        == 2
    )


@pytest.mark.parametrize(
    ("arguments", "how", "what"),
    [
        (["generate", "--bundle", "/nowhere", "hello"], {}, b"(`moa-export setup` makes one"),
        (["generate", "--raw", "  "], {}, b"the prompt is empty"),
        (["generate", "--raw", "-"], {"input": b"\xff\xfe\x00binary"}, b"(make text of it first)"),
        (["generate", "--raw", "-"], {"input": b""}, b"the prompt is empty"),
        (["generate", "--raw", b"a\xff"], {}, b"the prompt is not text"),
        (["generate", "--raw", "--logprobs", "3", "hello"], {}, b"add --json or --jsonl"),
        (["generate", "--raw", "x" * 600], {}, b"the context holds"),
        (["generate", "hello", "--temperature", "-1"], {}, b"temperature must be"),
        (
            ["generate", "hello", "--verifier", "example.org:8765"],
            {},
            b"did you mean ws://example.org:8765?",
        ),
        (
            ["serve", "--verifier", "http://example.org:80/"],
            {},
            b"did you mean ws://example.org:80? It is like ws://HOST:PORT",
        ),
        (["generate", "hello", "--draft", "nobody"], {}, b"draft must be one of"),
        (["generate", "hello", "--variant", "npu"], {}, b"no variant 'npu'"),
        (["generate", "hello", "--config", "/nowhere.toml"], {}, b"no config file"),
        (["chat"], {}, b"no chat template"),
        (["audit", "--raw", "hello"], {}, b"needs the target"),
        (["bench"], {}, b"needs the target"),
        (["bench", "--upstream", "http://x", "--link", "4g"], {}, b"--link is the link"),
        (
            ["bench", "--link", "4g", "--verifier", "ws://127.0.0.1:9"],
            {},
            b"cannot reach ws://127.0.0.1:9: nothing listens there",
        ),
        (["demo", "--upstream", "http://x"], {}, b"takes no --upstream"),
        (["bench", "--ways", "magic", "--verifier", "ws://127.0.0.1:9"], {}, b"unknown way"),
        (["audit", "--raw", "hello", "--verifier", "ws://127.0.0.1:9"], {}, b"cannot reach"),
        (["generate", "--raw", "--system", "Be brief.", "hello"], {}, b"--system needs a chat"),
        (["generate", "-f", "/nowhere.txt"], {}, b"cannot read /nowhere.txt"),
        (["generate", "--raw", "-"], {"input": b"x" * (2**22 + 1)}, b"too long"),
        (["generate", "hello", "--verifier", "ws://127.0.0.1:65536"], {}, b"no verifier address"),
    ],
)
def test_a_mistake_is_one_clear_line(arguments: Sequence[Any], how: Any, what: bytes) -> None:
    environment = {"MOA_EDGE_BUNDLE": str(kit.pair() / "bundle"), "MOA_EDGE_CONNECT_SECONDS": "1"}
    result = run(*arguments, environment=environment, **how)
    assert result.returncode in (1, 2)
    assert what in result.stderr
    assert result.stderr.count(b"\n") == 1, result.stderr
    assert result.stderr.startswith(b"edge-client: error: ")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_does_not_lose_the_answer() -> None:
    expected = offline("hello").stdout
    for form in ([], ["--json"]):
        with open("/dev/full", "wb") as full:
            result = offline(
                "hello", *form, stdout=full, stderr=subprocess.PIPE, capture_output=False
            )
        assert result.returncode == 1
        assert b"could not be written: No space left" in result.stderr
        saved = (
            json.loads(result.stderr.splitlines()[0])["text"].encode() if form else result.stderr
        )
        assert expected.strip() in saved


def test_an_answer_that_outgrows_the_context_says_so() -> None:
    result = offline(
        "hello", "--max-new-tokens", "2000", "--max-offline-tokens", "0", "--ignore-eos"
    )
    assert result.returncode == 0
    assert b"the context is full" in result.stderr


async def test_a_verifier_that_refuses_is_one_clear_line() -> None:
    async with stranger(encode(Error(code=Code.TARGET, message="not with you"))) as url:
        for form in ([], ["--quiet"]):
            await refused(
                ["--verifier", url, *form],
                b"not with you",
                b"the bundle that was made for this target",
            )


@pytest.mark.parametrize("who", ["refuses the token", "has a wrong certificate"])
async def test_the_exit_code_tells_a_refusal_from_a_verifier_that_was_not_heard(
    who: str, tmp_path: Path
) -> None:
    """As docs/edge-client.md says: a login page of a network shows a wrong certificate, too."""
    auth, token = verifier_kit.principals(tmp_path, "alice")
    settings = verifier_kit.SETTINGS
    if who == "has a wrong certificate":
        chain, key = certificate(tmp_path)
        settings = replace(settings, tls_cert=chain, tls_key=key)
    else:
        token = "wrong"
    async with verifier_kit.verifier(settings, auth=auth) as running:
        url = running.transport.url.replace("127.0.0.1", "localhost")
        words = ["generate", "--raw", "hello", "--bundle", str(kit.pair() / "bundle")]
        words += ["--verifier", url, "--token", token, "--max-new-tokens", "3"]
        words += ["--settle-seconds", "0"]
        done = await asyncio.to_thread(run, *words, program=FRESH)
    assert done.stdout.strip(), "the device answers all the same"
    last = done.stderr.decode().splitlines()[-1]
    if who == "refuses the token":
        assert done.returncode == 1
        assert "the verifier refused the token" in last
    else:
        assert done.returncode == 0
        assert "certificate is not trusted" in last


async def test_a_chat_in_a_pipe_that_the_verifier_refuses_is_no_success_either() -> None:
    async with stranger(encode(Error(code=Code.VERSION, message="not with you"))) as url:
        result = await asyncio.to_thread(
            run, "chat", "--verifier", url, input=b"hello\n", program=FRESH
        )
    assert result.returncode == 1
    assert result.stdout.strip(), "the device answers all the same"
    assert result.stderr.splitlines()[-1].startswith(
        b"edge-client: error: the verifier refuses: not with you"
    )


@contextlib.asynccontextmanager
async def told_of(client: EdgeClient, look_seconds: float = 0.01) -> AsyncIterator[None]:
    telling = asyncio.create_task(tell_of_the_verifier(client, look_seconds))
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def seen(capsys: pytest.CaptureFixture[str], words: str) -> str:
    """What is told until these words are."""
    text = ""
    async with asyncio.timeout(120):
        while words not in text:
            text += capsys.readouterr().err
            await asyncio.sleep(0.01)
    return text


def without_times(log: str) -> list[str]:
    """The lines of an endpoint's log, of which each begins with the time."""
    lines = log.splitlines()
    stamp = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ")
    assert all(stamp.match(line) for line in lines), lines
    return [stamp.sub("", line, count=1) for line in lines]


async def test_an_endpoint_that_the_verifier_refuses_says_so_at_the_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with (
        stranger(encode(Error(code=Code.VERSION, message="not with you"))) as url,
        EdgeClient(verifier=url, device=kit.device()) as client,
        told_of(client),
    ):
        assert "refused: not with you" in await seen(capsys, "none of it is verified")
    async with EdgeClient(device=kit.device()) as client:
        await tell_of_the_verifier(client)
    assert without_times(capsys.readouterr().err) == [
        "no verifier",
        "all text is this device's own, and none of it is verified",
    ]


async def test_an_endpoint_says_when_its_verifier_comes_and_goes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    port = Port("127.0.0.1", 0)  # it refuses connections until a verifier listens
    url = f"ws://127.0.0.1:{port.number}"
    how: Any = {"connect_seconds": 1.0, "reconnect_seconds": 0.05}
    async with EdgeClient(verifier=url, **how) as client, told_of(client):
        await seen(capsys, "no verifier now: cannot reach")
        async with slow_verifier(port, 0.0):
            await seen(capsys, f"online: text is verified by {url}")
            assert client.link is not None
            client.link.cut_off(cut=True)
            told = await seen(capsys, "none of it is verified")
            assert "no verifier now: disconnected on purpose" in told
            client.link.cut_off(cut=False)
            await seen(capsys, f"online: text is verified by {url}")
        await seen(capsys, "no verifier now: ")


def link_that_is_up() -> SimpleNamespace:
    endpoint = SimpleNamespace(name="ws://x", upstream="")
    return SimpleNamespace(up=True, endpoint=endpoint, away="", unanswered="")


def client_with(link: SimpleNamespace, wait_online: Any) -> Any:
    return SimpleNamespace(link=link, wait_online=wait_online)


async def look() -> None:
    """Time in which an endpoint that makes no pauses looks for its verifier."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_verifier_that_is_back_between_two_looks_is_told_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each wait for the verifier ends without it, and it comes in the pause that follows."""
    link = link_that_is_up()

    async def wait_online(seconds: float | None) -> None:
        if not link.up:
            asyncio.get_running_loop().call_soon(setattr, link, "up", True)
            raise LinkError("it is away")

    async with told_of(client_with(link, wait_online), 0.0):
        for _ in range(2):
            await look()
            link.up = False
        await look()
    online = ["online: text is verified by ws://x"]
    away = [
        "no verifier now: it is away",
        "until it is there, all text is this device's own, and none of it is verified",
    ]
    assert without_times(capsys.readouterr().err) == online + 2 * (away + online)


async def test_a_verifier_whose_engine_is_away_is_not_said_to_be_away_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    link = link_that_is_up()
    link.away = "the upstream broke off its answer"

    async def wait_online(seconds: float | None) -> None:
        pass

    async with told_of(client_with(link, wait_online), 0.0):
        await look()
    assert without_times(capsys.readouterr().err) == [
        "offline: the upstream broke off its answer",
        "until it is there, all text is this device's own, and none of it is verified",
    ]


async def test_an_endpoint_says_soon_after_its_start_that_nobody_is_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing was said for ten seconds."""
    waits = []

    async def wait_online(seconds: float | None) -> None:
        waits.append(seconds)
        raise LinkError("nobody listens")

    link = link_that_is_up()
    link.up = False
    async with told_of(client_with(link, wait_online), 0.0):
        await look()
    assert waits[:2] == [2.0, None]
    assert "no verifier now: nobody listens" in capsys.readouterr().err


async def test_an_outage_that_ends_before_the_usual_wait_is_told_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    link = link_that_is_up()

    async def wait_online(seconds: float | None) -> None:
        """Who waits as long as usual finds the verifier back, who waits for a moment does not."""
        if not link.up and seconds is not None:
            raise LinkError(f"no welcome within {seconds:.0f} s")
        link.up = True

    async with told_of(client_with(link, wait_online), 0.0):
        await look()
        link.up = False
        await look()
    assert without_times(capsys.readouterr().err) == [
        "online: text is verified by ws://x",
        "no verifier now: no welcome within 0 s",
        "until it is there, all text is this device's own, and none of it is verified",
        "online: text is verified by ws://x",
    ]


async def test_a_verifier_that_refuses_is_asked_ever_less_often(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a revoked token it was asked once a second for ever."""
    pauses: list[float] = []

    async def until_up(_: Any, seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    async def wait_online(seconds: float | None) -> None:
        if len(pauses) < 12:
            raise RemoteError("unauthorized", "the token is refused", hint="give another one")
        link.up = True

    monkeypatch.setattr(serve, "until_up", until_up)
    link = link_that_is_up()
    link.up = False
    telling = asyncio.create_task(tell_of_the_verifier(client_with(link, wait_online)))
    try:
        told = await seen(capsys, "online: text is verified by ws://x")
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
    assert 0.5 <= pauses[0] <= 1.0
    assert 30.0 <= pauses[-1] <= 60.0
    assert without_times(told) == [
        "refused: the token is refused (give another one)",
        "until that is changed, all text is this device's own, and none of it is verified",
        "online: text is verified by ws://x",
    ]


async def test_a_verifier_that_refused_and_is_back_by_a_turn_is_told_of_at_once() -> None:
    boxes: list[Mailbox] = []

    @contextlib.contextmanager
    def mailbox() -> Iterator[Mailbox]:
        boxes.append(Mailbox())
        yield boxes[-1]

    link: Any = SimpleNamespace(up=False, mailbox=mailbox)
    waiting = asyncio.create_task(serve.until_up(link, 3600.0))
    await look()
    boxes[0].news.set()  # such as another refusal
    await look()
    assert not waiting.done()
    link.up = True
    boxes[0].news.set()
    async with asyncio.timeout(120):
        await waiting
    link.up = False
    async with asyncio.timeout(120):
        await serve.until_up(link, 0.0)


def test_an_endpoint_that_is_told_to_end_says_so_and_nothing_more() -> None:
    """Its looks at the verifier ended with a traceback of asyncio's; later it said nothing at all,
    while it may take seconds."""
    program = [
        sys.executable,
        "-c",
        FRESH,
        "serve",
        "--port",
        "0",
        "--verifier",
        "ws://127.0.0.1:9",
    ]
    with subprocess.Popen(program, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert any(b"Ctrl-C ends" in line for line in iter(process.stderr.readline, b""))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0
    assert said.splitlines()[-2:] == [b"ending ...", b"ended"]
    assert b"Traceback" not in said
    assert b"exception" not in said


def test_an_endpoints_log_has_times() -> None:
    """What a library or the API logs, too: of an answer that could not be checked, for example."""
    program = """
import sys
from edge_client.cli import serve
async def _serve(*_):
    import logging
    logging.getLogger("moa.api").warning("an answer could not be checked")
serve._serve = _serve
from edge_client.cli import main
main(["serve"])
"""
    told = run(program=program)
    assert without_times(told.stderr.decode()) == ["an answer could not be checked"]


async def test_more_tokens_than_the_verifier_writes_are_those_that_it_does_and_it_is_said() -> None:
    words = ["generate", "--raw", "hello", "--bundle", str(kit.pair() / "bundle")]
    async with kit.verifier(verifier_kit.limited(max_new_tokens=8)) as running:
        flags = ["--verifier", running.transport.url, "--max-new-tokens", "9999", "--jsonl"]
        told = await asyncio.to_thread(run, *words, *flags, program=FRESH)
    assert told.returncode == 0, told.stderr
    done = json.loads(told.stdout.splitlines()[-1])
    assert (done["reason"], done["verified"], done["stats"]["tokens"]) == ("length", True, 8)


async def test_an_audit_compares_with_the_target_alone() -> None:
    words = [
        "audit",
        "--raw",
        "hello",
        "--max-new-tokens",
        "8",
        "--bundle",
        str(kit.pair() / "bundle"),
    ]
    async with kit.verifier() as running:
        told = await asyncio.to_thread(
            run, *words, "--verifier", running.transport.url, program=FRESH
        )
    assert told.returncode == 0, told.stderr
    assert b"target alone  8 tokens in 8 forwards\nverified      each token is" in told.stdout
    assert told.stdout.endswith(b"\nidentical     yes\n")


async def refused(flags: list[str], *what: bytes) -> None:
    words = ["generate", "--raw", "hello", "--bundle", str(kit.pair() / "bundle"), *flags]
    result = await asyncio.to_thread(run, *words, program=FRESH)
    assert result.returncode == 1, "a script shall not take it for verified"
    assert result.stdout, "the device answers all the same"
    last = result.stderr.splitlines()[-1]
    assert last.startswith(b"edge-client: error: the verifier refuses: "), result.stderr
    assert all(words in last for words in what), result.stderr


def test_an_answer_does_not_wait_for_what_only_a_screen_needs() -> None:
    program = "import sys, edge_client.cli.generate as g; print(sorted({'rich', 'jinja2', 'torch'} & set(sys.modules)))"
    assert run(program=program).stdout == b"[]\n"


def test_doctor_and_inspect() -> None:
    commands = (["doctor", "--json"], ["inspect", "--json"], ["inspect"])
    told = [run(*command, "--bundle", str(kit.pair() / "bundle")) for command in commands]
    assert [one.returncode for one in told] == [0, 0, 0]
    checks = {check["name"]: check["state"] for check in json.loads(told[0].stdout)}
    assert checks["bundle"] == checks["drafter"] == checks["arithmetic"] == "ok"
    assert checks["verifier"] == "warning"
    assert all(b"cpu-fp32" in inspected.stdout for inspected in told[1:])


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_doctor_without_a_folder_is_a_mistake_and_with_a_bad_one_a_finding(
    form: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "bundle.zip"
    file.write_bytes(b"PK")
    model = tmp_path / "small.gguf"
    model.touch()
    for place, why in (
        (file, "it is a file"),
        (model, "it is a model"),
        (tmp_path / "nowhere", "there is no such folder"),
    ):
        told = run("doctor", "--bundle", str(place), *form)
        assert (told.returncode, told.stdout) == (2, b"")
        line = f"edge-client: error: no bundle at {place}: {why} ("
        assert told.stderr.decode().startswith(line)
        assert told.stderr.count(b"\n") == 1
    empty = run("doctor", "--bundle", str(tmp_path), *form)
    assert (empty.returncode, empty.stderr) == (1, b"")
    assert b"manifest.json is missing" in empty.stdout


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_doctor_of_a_variant_that_is_not_there_is_a_mistake(
    form: list[str], tmp_path: Path
) -> None:
    told = run("doctor", "--variant", "npu", *form)
    assert (told.returncode, told.stdout) == (2, b"")
    known = "this bundle has no variant 'npu' (it has cpu-int4, web)"
    assert told.stderr.decode() == f"edge-client: error: {known}\n"
    empty = run("doctor", "--bundle", str(tmp_path), "--variant", "npu", *form)
    assert (empty.returncode, empty.stderr) == (1, b""), "the bundle's own fault is a finding"


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize("flag", ["--verifier", "--upstream"])
def test_doctor_of_an_address_that_cannot_be_is_a_mistake(flag: str, form: list[str]) -> None:
    """Of an upstream it was a finding, behind a list of others, and the exit code was 1."""
    told = run("doctor", flag, "ftp://x", *form)
    assert (told.returncode, told.stdout) == (2, b"")
    assert told.stderr.startswith(b"edge-client: error: 'ftp://x' is no ")


def test_doctor_advises_only_where_something_is_wrong() -> None:
    checks = json.loads(run("doctor", "--json").stdout)
    assert {check["state"] for check in checks} >= {"ok"}
    assert not [check for check in checks if check["state"] == "ok" and check["advice"]]


def test_doctor_says_that_an_upstream_is_away() -> None:
    told = run("doctor", "--upstream", "http://127.0.0.1:9/v1", "--json")
    assert told.returncode == 1
    states = {check["name"]: check["state"] for check in json.loads(told.stdout)}
    assert states["upstream"] == "failed"
    assert "verifier" not in states, "what answers is a part of this program"


@pytest.mark.parametrize("golden", [b"garbage", b"wrong inputs"])
def test_doctor_says_of_bad_golden_vectors_what_is_wrong(golden: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(embedded_bundle(), folder)
    bundle = Bundle.open(folder)
    if golden == b"garbage":
        (folder / GOLDEN).write_bytes(golden)
    else:
        cases = [replace(case, inputs={"ids": case.inputs["ids"]}) for case in bundle.golden()]
        write_golden(folder / GOLDEN, cases)
    entry = FileEntry(sha256=sha256(folder / GOLDEN), size=(folder / GOLDEN).stat().st_size)
    write_manifest(
        folder,
        msgspec.structs.replace(bundle.manifest, files=bundle.manifest.files | {GOLDEN: entry}),
    )
    checks = {
        check["name"]: check
        for check in json.loads(run("doctor", "--bundle", str(folder), "--json").stdout)
    }
    assert checks["arithmetic"]["state"] == "failed"
    assert "expected results cannot be computed" in checks["arithmetic"]["finding"]


def test_doctor_finds_a_bad_authority_like_any_other_fault() -> None:
    flags = (
        "--verifier",
        "wss://127.0.0.1:9",
        "--tls-ca",
        "/nowhere.pem",
        "--bundle",
        str(kit.pair() / "bundle"),
    )
    result = run("doctor", *flags)
    assert result.returncode == 1
    assert b"failed  verifier   cannot use /nowhere.pem as a certificate authority" in result.stdout
    assert result.stdout.startswith(b"ok      bundle")
    assert result.stderr == b""


def test_that_a_port_is_taken_is_said_before_anything_is_loaded() -> None:
    with Port("127.0.0.1", 0) as theirs:
        theirs.listen(1)
        said = run("serve", "--port", str(theirs.number), "--bundle", "no/such/bundle", "--offline")
    assert (said.returncode, said.stdout) == (2, b"")
    assert said.stderr.decode().startswith(
        f"edge-client: error: cannot listen on 127.0.0.1:{theirs.number}"
    )


def test_an_answer_fits_the_schema_of_the_command_line(tmp_path: Path) -> None:
    schema = tmp_path / "schema"
    words = ["generate", "--offline", "-q", "--json-schema", str(schema), "What is 17 plus 25?"]
    schema.write_text('{"enum": ["as the schema has it"]}')
    told = run(*words)
    assert json.loads(told.stdout) == "as the schema has it", told.stderr
    unusable = json.dumps({"properties": {"a": {"not": {}}}})
    for content, line in (
        (unusable, f"the schema in {schema} cannot be used: json_schema at #/properties/a: Unimpl"),
        ("[]", f"{schema} is not a JSON schema"),
        ("{", f"{schema} is not a JSON schema"),
        ('"' + "x" * 70_000 + '"', f"{schema} is too large"),
    ):
        schema.write_text(content)
        told = run(*words)
        assert told.returncode == 2
        assert told.stderr.decode().startswith(f"edge-client: error: {line}")


def test_a_terminal_is_told_that_a_schema_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first one takes seconds, for the whole vocabulary is read for it."""
    told = threading.Event()
    monkeypatch.setattr(working, "_TERMINAL_SECONDS", 0.001)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "flush", told.set)
    compiles: Any = SimpleNamespace(grammars=SimpleNamespace(compile=lambda _: told.wait(60)))
    options.check_schema(Grammar.of_schema({}), Path("schema"), compiles)
    assert "reading the schema (0 s)" in capsys.readouterr().err


async def test_a_terminal_is_told_what_takes_long_and_a_file_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(working, "_TERMINAL_SECONDS", 0.001)
    settings = ClientSettings(bundle=str(kit.pair() / "bundle"))
    capsys.readouterr()  # who makes the pair may be the first to ask for it
    async with options.opened(settings):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    async with options.opened(settings):
        pass
    told = capsys.readouterr().err
    # One line, written again and again, and then taken away.
    clear = re.escape(working.CLEAR)
    assert re.fullmatch(rf"({clear}loading the drafter \(\d+ s\)){{2,}}{clear}", told), told


async def test_a_terminal_is_told_what_the_start_of_the_endpoint_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a large bundle it was silent for half a minute."""
    monkeypatch.setattr(working, "_TERMINAL_SECONDS", 0.001)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    settings = ClientSettings(offline=True, bundle=str(kit.pair() / "bundle"))
    serving = asyncio.create_task(_serve(settings, ServeSettings(port=0), endpoint))
    said = ""
    async with asyncio.timeout(60):
        while "chat page and API at" not in said:
            await asyncio.sleep(0)
            said += capsys.readouterr().err
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert "loading the drafter (0 s)" in said


async def test_a_full_disk_under_its_lines_ends_no_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[str] = []

    class Full:
        """Standard error on a full disk."""

        def write(self, text: str) -> int:
            """Take no text."""
            written.append(text)
            raise OSError(errno.ENOSPC, "No space left on device")

        def flush(self) -> None:
            """Nothing waits to be written."""

        def isatty(self) -> bool:
            """It is a file."""
            return False

    monkeypatch.setattr(sys, "stderr", Full())
    nobody = SimpleNamespace(link=None)
    await tell_of_the_verifier(nobody)  # type: ignore[arg-type]
    assert len(written) == 2, "each of its lines was tried"


def test_a_line_of_the_log_says_who_it_is_about() -> None:
    """Which program sent what is no request was found by `ss` alone."""
    written = _WithPeer("%(message)s")
    about = {"msg": "refused with 400", "peer": "127.0.0.1:4567"}
    assert written.format(logging.makeLogRecord(about)) == "refused with 400 [127.0.0.1:4567]"
    assert written.format(logging.makeLogRecord({"msg": "drained"})) == "drained"
