"""`moa-edge up`: one command starts everything, Ctrl-C and even SIGKILL end all of it; a bundle is made
once; mistakes are one line."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from packaging.requirements import Requirement

from edge_client.device import embedded_bundle
from moa import demo
from moa.bundle import MANIFEST
from moa.cli import up as up_command
from moa.cli.installed import LLAMA_CPP, PACKAGES
from moa.cli.moa_edge import main as moa_edge
from moa.errors import UsageError
from testing.tiny import save_tiny
from tests.edge.test_screen import on_screen

SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
EMBEDDED = embedded_bundle()
_HEAD_OF_NOTHING = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)
"""A GGUF file of no metadata and no tensors."""
_PROGRAM = "from moa.cli.moa_edge import main; main()"


@contextmanager
def up(*words: str, cache: Path) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    environment.pop("DISPLAY", None)
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, "up", *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def places(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.stderr and process.stderr.read()
    found: dict[str, Any] = json.loads(line)
    return found


def listens(address: str) -> bool:
    parts = urlsplit(address)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=5).close()
    except OSError:
        return False
    return True


def until_gone(*addresses: str) -> None:
    until = time.monotonic() + 120
    while any(map(listens, addresses)):
        assert time.monotonic() < until, "a child outlives its parent"
        time.sleep(0.1)


def test_one_port_for_both_is_refused_before_the_bundle_is_made(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was said after three and a half minutes."""
    with pytest.raises(SystemExit) as ended:
        moa_edge(["up", "--port", "9103", "--verifier-port", "9103", "--dry-run"])
    assert ended.value.code == 2
    assert "--port and --verifier-port are both 9103" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--port", "--verifier-port"])
def test_a_port_that_cannot_be_had_is_refused_before_anything_is_made(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        for wrong, said in (
            (
                number,
                f"cannot listen on 127.0.0.1:{number}: Address already in use ({flag} N takes",
            ),
            ("99999", f"{flag} 99999: a port is a number from 0 to 65535"),
        ):
            # Folders that are no models: what is looked at later would be refused, too.
            models = (str(Path(__file__).parent), "--device-model", str(Path(__file__).parents[1]))
            with pytest.raises(SystemExit) as ended:
                moa_edge(["up", *models, flag, wrong, "--dry-run"])
            assert ended.value.code == 2
            assert said in capsys.readouterr().err


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_embedded_pair_answers_and_all_of_it_ends(end: signal.Signals, tmp_path: Path) -> None:
    """With SIGINT the next test ends it."""
    words = ("--port", "0", "--verifier-port", "0", "--json", "--no-browser")
    with up(*words, cache=tmp_path) as process:
        found = places(process)
        assert listens(found["verifier"])
        body = {"model": "target", "messages": [{"role": "user", "content": "What is 17 + 25?"}]}
        request = urllib.request.Request(
            f"{found['api']}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            said = json.load(answer)["choices"][0]["message"]["content"]
        assert "42" in said
        process.send_signal(end)
        assert process.wait(timeout=120) == (-end if end == signal.SIGKILL else 0)
        assert process.stderr is not None
        assert process.stderr.read().count("this is the embedded toy model") == 1
    until_gone(found["page"], found["verifier"])


def test_a_killed_verifier_is_started_again_and_an_answer_goes_on(tmp_path: Path) -> None:
    """The device writes on alone, and what it wrote is corrected when the verifier is back."""
    words = ("--port", "0", "--verifier-port", "0", "--json", "--no-browser")
    with up(*words, cache=tmp_path) as process:
        found = places(process)
        with streamed(found["api"]) as pieces:
            expected, verified = followed("", pieces)
        assert verified
        # So that it is killed in the middle of an answer however fast it is.
        os.kill(child_of(process, b"cloud_verifier"), signal.SIGSTOP)
        with streamed(found["api"]) as pieces:
            first = next(piece for piece in pieces if text_of(piece))
            killed = child_of(process, b"cloud_verifier")
            os.kill(killed, signal.SIGKILL)
            text, verified = followed(text_of(first), pieces)
        assert verified
        assert text == expected
        assert child_of(process, b"cloud_verifier") != killed
        assert listens(found["verifier"])
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0
        assert "the verifier was killed by signal 9 (out of memory?): the device goes on" in errors
        assert "the verifier is back after" in errors
    until_gone(found["page"], found["verifier"])


@contextmanager
def streamed(api: str) -> Iterator[Iterator[dict[str, Any]]]:
    body = {
        "model": "target",
        "messages": [{"role": "user", "content": "What is 17 + 25 - 9?"}],
        "moa": {"mode": "provisional", "patience": 300},
        "stream": True,
    }
    request = urllib.request.Request(
        f"{api}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        lines = (line.removeprefix(b"data: ") for line in response if line.startswith(b"data: {"))
        yield map(json.loads, lines)


def text_of(piece: dict[str, Any]) -> str:
    choices = piece["choices"]
    return (choices[0]["delta"].get("content") or "") if choices else ""


def followed(text: str, pieces: Iterator[dict[str, Any]]) -> tuple[str, bool]:
    """The text after these pieces of a stream, and whether all of it was verified."""
    verified = False
    for piece in pieces:
        for choice in piece["choices"]:
            marks = choice.get("moa", {})
            text = text[: marks.get("cut")] + text_of(piece)
            verified = marks.get("all_verified", verified)
    return text, verified


def test_a_bundle_that_is_there_is_taken_and_nothing_is_made(tmp_path: Path) -> None:
    target = str(demo.paths().target)
    words = (target, "--bundle", str(EMBEDDED), "--port", "0", "--json", "--no-browser")
    with up(*words, "--dry-run", cache=tmp_path / "cache") as process:
        said, _ = process.communicate(timeout=120)
        plan = json.loads(said)
        assert plan["bundle"] == str(EMBEDDED)
        assert plan["made"]
        assert 0 < plan["memory"]["at_start_mb"] <= plan["memory"]["at_most_mb"]
        assert "the verifier takes" in " ".join(plan["lines"]), "what the verifier takes is told"
    with up(*words, cache=tmp_path / "cache") as process:
        found = places(process)
        assert found["bundle"] == str(EMBEDDED)
        assert listens(found["verifier"])
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0
    assert not list((tmp_path / "cache").rglob("manifest.json"))


@pytest.mark.parametrize("dry", [True, False])
def test_a_bundle_for_another_tokenizer_is_refused_before_anything_is_loaded(
    dry: bool, tmp_path: Path
) -> None:
    """It was found after the target was loaded, and `up` went on."""
    target = str(save_tiny("qwen2", tmp_path / "target", **SMALL))
    words = (target, "--bundle", str(EMBEDDED), "--no-browser", *(["--dry-run"] if dry else []))
    with up(*words, cache=tmp_path / "cache") as process:
        said, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert said == ""
    last = errors.splitlines()[-1]
    assert last.startswith(f"moa-edge up: error: the bundle {EMBEDDED} was made for ")
    assert f"{target} has another tokenizer" in last
    assert "--device-model" in last, "what to do"
    assert "loading the target" not in errors


def test_a_dead_endpoint_ends_the_rest_with_an_error(tmp_path: Path) -> None:
    words = ("--port", "0", "--verifier-port", "0", "--json", "--no-browser")
    with up(*words, cache=tmp_path) as process:
        found = places(process)
        os.kill(child_of(process, b"edge_client"), signal.SIGSEGV)
        assert process.wait(timeout=120) == 1
        assert process.stderr is not None
        said = process.stderr.read()
        assert "error: the endpoint was killed by signal 11 (SIGSEGV)" in said
    until_gone(found["verifier"])


def child_of(process: subprocess.Popen[str], name: bytes) -> int:
    return next(
        child
        for child in children(process.pid)
        if name in Path(f"/proc/{child}/cmdline").read_bytes()
    )


def children(parent: int) -> list[int]:
    tasks = Path(f"/proc/{parent}/task/{parent}/children")
    if not tasks.exists():
        pytest.skip("this system does not list a process's children")
    return list(map(int, tasks.read_text().split()))


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("/nowhere",), 2, "TARGET and --device-model belong together"),
        (("--bundle", "/nowhere"), 2, "TARGET and --device-model belong together"),
        ((str(EMBEDDED), "--bundle", "/nowhere"), 2, "no bundle at /nowhere"),
        (
            (str(EMBEDDED), "--device-model", str(EMBEDDED)),
            2,
            f"is a bundle, not a model (--bundle {EMBEDDED})",
        ),
        (
            ("some/model", "--device-model", "some/model"),
            2,
            "--device-model some/model is the target itself (a smaller model of its family",
        ),
        (
            ("some/model", "--device-model", "other/model", "--bundle", str(EMBEDDED)),
            2,
            "--device-model and --bundle are two ways to name the device's model",
        ),
        (("/nowhere", "--device-model", "/there"), 2, "TARGET: no such file or folder: /nowhere"),
        (("toy/model", "--device-model", "./there"), 2, "--device-model: no such file or folder"),
        (("some/model", "--device-model", "other/model"), 2, "the hub cannot be reached"),
    ],
)
def test_mistakes_are_one_line(
    words: tuple[str, ...], code: int, says: str, tmp_path: Path
) -> None:
    with up(*words, cache=tmp_path) as process:
        _, errors = process.communicate(timeout=300)
    assert process.returncode == code
    assert says in errors.splitlines()[-1]
    assert "Traceback" not in errors


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_what_a_program_says_has_a_line_of_its_own_on_a_terminal(tmp_path: Path) -> None:
    """The line that changes is there meanwhile."""
    ours, theirs = os.openpty()
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "TERM": "xterm", "COLUMNS": "200"}
    (tmp_path / "broken.gguf").write_bytes(_HEAD_OF_NOTHING)
    (tmp_path / "small.gguf").write_bytes(_HEAD_OF_NOTHING)
    model = str(tmp_path / "broken.gguf")
    small = str(tmp_path / "small.gguf")
    command = [sys.executable, "-c", _PROGRAM, "up", model, "--device-model", small]
    sent = b""
    with subprocess.Popen(command, env=environment, stderr=theirs):
        os.close(theirs)
        # At the end of the process a pseudo-terminal has either nothing more or an error.
        with suppress(OSError):
            while piece := os.read(ours, 4096):
                sent += piece
        os.close(ours)
    rows = ["".join(letter for letter, _ in row) for row in on_screen(sent.decode())]
    assert rows[0].startswith(f"moa-edge up: error: {model} does not say"), rows
    assert "reading what the files say of broken.gguf and small.gguf (0 s)" in sent.decode()
    _, _, after = sent.partition(b" does not say")
    assert b"\x1b" not in after, "a line that changes, below the error"


def test_all_that_is_missing_is_named_at_once_with_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("onnx", "onnxscript", "starlette"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)  # llama.cpp's
    monkeypatch.setattr("moa.llama.library.find_library", lambda _: None)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(_HEAD_OF_NOTHING)
    model = str(tmp_path / "a.gguf")
    small = str(tmp_path / "b.gguf")

    def missing(**given: Any) -> str:
        options = {"target": model, "device_model": small, "bundle": "", "dry_run": False} | given
        with pytest.raises(UsageError) as caught:
            asyncio.run(up_command._up(argparse.Namespace(**options)))
        return caught.value.line()

    install = "in the checkout: pip install '.[{}]' -c constraints.txt"
    assert missing() == (
        "starlette, onnx, onnxscript and llama.cpp are not installed"
        f" ({install.format('serve,export,gguf')})"
    )
    assert missing(dry_run=True).endswith(f"({install.format('export,gguf')})")
    alone = f"starlette is not installed ({install.format('serve')})"
    assert missing(target="", device_model="") == alone


def test_every_extra_brings_the_packages_that_are_looked_for() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    for extra, packages in PACKAGES.items():
        texts = project["optional-dependencies"][extra]
        if extra == "export":  # with what another extra brings
            texts = [*texts, *project["optional-dependencies"]["train"]]
        brought = {Requirement(text).name.replace("-", "_") for text in texts}
        assert set(packages) - {LLAMA_CPP} <= brought


def test_the_line_that_changes_says_nothing_that_is_no_longer_true() -> None:
    status = up_command._StatusLine(None)
    up_command._take("moa-export: variant cpu-int4", status)
    assert status.doing == "variant cpu-int4"
    up_command._take("moa-export: /a/bundle is done after 3 s", status)
    assert status.doing == "ending"
    assert up_command._time_left(90.4) == "about 90 s left"
    assert up_command._time_left(-20) == "longer than expected: the machine is busy"


_COUNTS = """
import sys, time
def main():
    line = "comparing the graph with torch: step 3 of 5 (40%, 31 s, about 70 s left)"
    print("moa-export:", line, file=sys.stderr, flush=True)
    time.sleep(1000)
"""


def built_by(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this program make bundles, in place of ours."""
    (tmp_path / "builder.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(up_command, "_BUILD", "builder:main")


class Shown:
    """A terminal's line that changes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, line: object) -> None:
        self.lines.append(str(line))


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
@pytest.mark.parametrize("has_terminal", [True, False])
async def test_how_far_the_program_is_that_makes_the_bundle_is_passed_on(
    has_terminal: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was never said how far it was, and the time was estimated once, before it began."""
    built_by(_COUNTS, tmp_path, monkeypatch)
    shown: Any = Shown()
    line = up_command._StatusLine(shown if has_terminal else None)
    monkeypatch.setattr(up_command, "_status", lambda _: nullcontext(line))
    options = argparse.Namespace(target="t", device_model="d")
    plan = {"bundle": str(tmp_path / "bundle"), "made": False, "seconds": 3.0}
    making = asyncio.create_task(up_command._build(options, plan))
    said = ""
    count = "comparing the graph with torch: step 3 of 5"
    async with asyncio.timeout(60):
        while count not in said:
            await asyncio.sleep(0.01)
            said += "\n".join(shown.lines) if has_terminal else capsys.readouterr().err
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    if has_terminal:
        assert re.search(rf"making the bundle: {count}, 40% \(\d+ s, about [67]\d s left\)", said)
    else:
        assert f"{count} (40%, 31 s, about 70 s left)\n" in said


async def test_without_a_terminal_what_lasts_is_said_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was said once, and then nothing for the minutes that a target takes to load."""
    monkeypatch.setattr(up_command, "_SAY_SECONDS", 0.0)
    said = ""
    async with asyncio.timeout(60), up_command._counted("loading the target"):
        while "loading the target (0 s)\n" not in said:
            await asyncio.sleep(0)
            said += capsys.readouterr().err
    assert said.startswith("loading the target\n")


def test_a_command_is_on_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """It is copied as a whole, however long it is."""
    place = up_command.Place(page="http://h:1", verifier="ws://h:8765", bundle="/b" * 90)
    options = argparse.Namespace(json=False, target="t", no_browser=True)
    up_command._show_addresses(options, place)
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    assert f"edge-client chat --bundle {place.bundle} --verifier ws://h:8765" in lines


def test_a_model_without_a_chat_template_is_not_offered_for_a_chat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base model: the page was offered, and refused every message."""
    place = up_command.Place(page="http://h:1", verifier="ws://h:2", bundle="/b", chats=False)
    options = argparse.Namespace(json=False, target="t", no_browser=True)
    up_command._show_addresses(options, place)
    said = capsys.readouterr().err
    assert "edge-client chat " not in said
    assert "edge-client generate --raw --bundle /b --verifier ws://h:2 TEXT" in said
    assert "http://h:1/v1/completions" in said
    assert up_command._has_chat_template("")
    assert up_command._has_chat_template(str(EMBEDDED))
    bare = tmp_path / "bare"
    shutil.copytree(EMBEDDED, bare)
    manifest = json.loads((bare / MANIFEST).read_text())
    manifest["tokenizer"]["chat_template"] = None
    (bare / MANIFEST).write_text(json.dumps(manifest))
    assert not up_command._has_chat_template(str(bare))


_STUCK = """
import os, pathlib, signal, sys, time
def main():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in a long computation
    out = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
    folder = out.parent / f".{out.name}.building-{os.getpid()}-0a"
    folder.mkdir()
    (folder / "weights").write_bytes(bytes(1000))
    time.sleep(1000)
"""


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
async def test_a_bundle_that_is_given_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built_by(_STUCK, tmp_path, monkeypatch)
    bundles = tmp_path / "bundles"
    others = bundles / ".a[4b].building-1-0b"
    others.mkdir(parents=True)
    options = argparse.Namespace(target="t", device_model="d", again=False)
    plan = {"bundle": str(bundles / "a[4b]"), "made": False, "seconds": 1.0}
    making = asyncio.create_task(up_command._build(options, plan))
    async with asyncio.timeout(60):
        while not list(bundles.glob("*/weights")):
            await asyncio.sleep(0.01)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    assert list(bundles.iterdir()) == [others], "that of another process stays"


_MAKES = """
import pathlib, sys

def main():
    out = pathlib.Path(sys.argv[sys.argv.index("-o") + 1])
    assert ("--force" in sys.argv) == out.is_dir()
    out.mkdir(exist_ok=True)
    (out / "manifest.json").write_text("made here")
"""


@pytest.mark.skipif(os.name == "nt", reason="no locks of folders")
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("other", ["makes it", "gives it up"])
async def test_the_second_of_two_that_make_a_bundle_says_that_it_waits(
    other: str,
    again: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both made it, each with all of the memory that this takes, and neither said so."""
    import fcntl

    built_by(_MAKES, tmp_path, monkeypatch)
    monkeypatch.setattr(up_command, "_LOCKED_SECONDS", 0.01)
    bundles = tmp_path / "bundles"
    bundles.mkdir()
    manifest = bundles / "ours" / "manifest.json"
    plan = {"bundle": str(manifest.parent), "made": False, "seconds": 1.0}
    options = argparse.Namespace(target="t", device_model="d", again=again)
    first = os.open(bundles, os.O_RDONLY)
    fcntl.flock(first, fcntl.LOCK_EX)
    making = asyncio.create_task(up_command._build(options, plan))
    said = ""
    async with asyncio.timeout(60):
        while f"another process makes a bundle in {bundles}: waiting for its end" not in said:
            said += capsys.readouterr().err
            await asyncio.sleep(0.01)
        if other == "makes it":
            manifest.parent.mkdir()
            manifest.write_text("made there")
        os.close(first)
        await making
    said += capsys.readouterr().err
    assert said.count("another process") == 1
    is_kept = other == "makes it" and not again
    assert manifest.read_text() == ("made there" if is_kept else "made here")
    assert ("the other process has made the bundle" in said) == is_kept


@pytest.mark.slow
def test_a_bundle_is_made_once_and_kept(tmp_path: Path) -> None:
    target = str(save_tiny("qwen2", tmp_path / "target"))
    small = str(save_tiny("qwen2", tmp_path / "small", seed=5, **SMALL))
    words = (target, "--device-model", small, "--port", "0", "--json", "--no-browser")
    cache = tmp_path / "cache"
    for made in (False, True):
        with up(*words, "--dry-run", cache=cache) as process:
            plan = json.loads(process.communicate(timeout=300)[0])
            assert plan["made"] is made
            assert plan["memory"]["at_start_mb"] > plan["memory"]["weights_mb"]
        with up(*words, cache=cache) as process:
            found = places(process)
            assert found["bundle"] == plan["bundle"]
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=120)
            assert ("made the bundle in" in errors) is not made


@pytest.mark.parametrize("again", [False, True])
def test_a_bundle_that_is_kept_costs_nothing_in_the_plan(
    again: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = {"made": True, "seconds": 68, "disk_bytes": 5_400_000_000, "bundle_bytes": 400_000_000}
    up_command._show_plan(plan, argparse.Namespace(json=True, again=again))
    told = json.loads(capsys.readouterr().out)
    assert (told["seconds"], told["disk_bytes"]) == ((68, 5_400_000_000) if again else (0, 0))
    assert told["bundle_bytes"] == 400_000_000


async def test_an_error_is_the_last_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that has said why it ends takes seconds to do so."""
    monkeypatch.setattr(up_command, "_SAY_SECONDS", 0.0)
    program = asyncio.StreamReader()
    program.feed_data(b"moa-edge up: error: no such model\n")
    program.feed_eof()
    async with up_command._counted("reading") as status:
        await up_command._pass_on(program, status)
        for _ in range(10):
            await asyncio.sleep(0)
    assert capsys.readouterr().err.splitlines()[-1] == "moa-edge up: error: no such model"
