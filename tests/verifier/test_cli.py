"""The command, in fresh processes where that matters."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import Tensor, zeros
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from cloud_verifier import bearer_tokens, check
from cloud_verifier.cli import _until_stopped, main, parser, settings_from
from cloud_verifier.logs import JsonFormatter, log
from cloud_verifier.model import load
from cloud_verifier.serving.auth import Authenticator, token_line
from cloud_verifier.settings import Settings
from edge_client.settings import ClientSettings
from moa.cli.command_line import CommandParser, add_flags
from moa.errors import MoaError, UsageError
from moa.process.listening import Port
from moa.target.identity import SCHEME, short_id
from moa.target.rows import Row
from moa.version import running_version
from moa.wire import SUBPROTOCOL, ClientSession, decode_server, encode
from moa.wire.limits import Limits
from moa.wire.messages import Hello, Message, ServerMessage, Welcome
from testing.client import client
from testing.verifier import verifier
from tests.edge import kit as edge_kit
from tools.readme import cli_reference

FAST = [
    "--max-context-tokens",
    "128",
    "--max-prompt-tokens",
    "100",
    "--slots",
    "4",
    "--device",
    "cpu",
]


@pytest.fixture
def pair() -> tuple[Path, Path]:
    """A tiny target and drafter in folders."""
    return edge_kit.pair() / "target", edge_kit.pair() / "drafter"


_MAIN = "from cloud_verifier.cli import main; main()"
_DIES = """
from cloud_verifier.engine.schedule import Scheduler
real = Scheduler.schedule
def schedule(self, now):
    if self.queued:
        raise RuntimeError("the queue is damaged")
    return real(self, now)
Scheduler.schedule = schedule
"""
"""Once there is a round every turn of the engine raises, which it does not survive."""


_SAYS_THAT_IT_PREPARES = """
import sys
from moa.grammar.matcher import GrammarCompiler
line = '{"event": "grammars"}'
GrammarCompiler.prepare = lambda self: print(line, file=sys.stderr, flush=True)
"""
"""The first schema of a verifier's life took five seconds to open, in which its device wrote."""


@contextlib.contextmanager
def process_of(
    code: str, pair: tuple[Path, Path]
) -> Iterator[tuple[subprocess.Popen[str], str, ClientConnection]]:
    """`cloud-verifier serve` in a process, its address, and a connection to it."""
    command = [sys.executable, "-c", code, "serve", "--port", "0", *FAST]
    process = subprocess.Popen(
        [*command, "--target", str(pair[0]), "--drafter", str(pair[1])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening on ws://127.0.0.1:"), process.communicate()
    url = line.split()[-1]
    try:
        with connect(url, proxy=None, subprotocols=[SUBPROTOCOL]) as raw:  # type: ignore[list-item]
            yield process, url, raw
    finally:
        process.kill()
        process.communicate()


def test_a_process_whose_engine_dies_ends_with_an_exit_code(pair: tuple[Path, Path]) -> None:
    with process_of(_DIES + _MAIN, pair) as (process, _, raw):
        session = ClientSession([5, 6, 7], max_new_tokens=4)
        for message in (Hello([3], []), session.open(), session.stream()):
            raw.send(encode(message))
        with contextlib.suppress(ConnectionClosed):
            while True:
                raw.recv(timeout=300)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    *logged, last = errors.splitlines()
    assert "the engine has stopped (the log says why)" in last
    events = [json.loads(line).get("event") for line in logged]
    assert events.count("engine_died") == 1
    assert events.count("engine_fault") == 16


def test_serve_until_sigterm(pair: tuple[Path, Path]) -> None:
    with process_of(_SAYS_THAT_IT_PREPARES + _MAIN, pair) as (process, url, raw):

        def ask(message: Message) -> ServerMessage:
            raw.send(encode(message))
            return decode_server(raw.recv(timeout=300))  # type: ignore[arg-type]

        welcome = ask(Hello([3], []))
        assert isinstance(welcome, Welcome)
        names = welcome.target, welcome.tokenizer, welcome.drafter
        assert all(len(name.removeprefix(SCHEME)) == 64 for name in names)
        session = ClientSession([5, 6, 7], max_new_tokens=4)
        session.receive(ask(session.open()))
        message = ask(session.stream())
        while session.receive(message) and not session.finish:
            message = decode_server(raw.recv(timeout=300))
        assert session.round == 1
        raw.close()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0
    lines = [json.loads(line) for line in errors.splitlines()]  # logs are JSON, one object a line
    told = {line["event"]: line for line in lines if "event" in line}
    told.pop("loading", None)  # on a slow machine
    assert told.pop("grammars")
    assert list(told)[:6] == ["start", "memory", "loaded", "listening", "connected", "opened"]
    assert set(list(told)[6:]) == {"disconnected", "drain", "stopped"}
    assert list(told)[-1] == "stopped"
    # An operator compares replicas by it: who began an answer at one goes on at no other one.
    assert told["loaded"]["computes"] == short_id(welcome.computes) != ""
    found = told["listening"]["url"], told["loaded"]["slots"], told["opened"]["prompt_tokens"]
    assert (*found, told["disconnected"]["principal"]) == (url, 4, 3, "anonymous")


async def test_the_log_tells_both_addresses(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--openai 0` only a person could read which port it is."""

    @contextlib.asynccontextmanager
    async def opened(*_: object) -> AsyncIterator[str]:
        yield "http://127.0.0.1:2"

    died = asyncio.Event()
    died.set()
    verifier = SimpleNamespace(
        open=opened,
        transport=SimpleNamespace(url="ws://127.0.0.1:1"),
        service=SimpleNamespace(prepare_grammars=lambda: None),
        died=died,
    )
    monkeypatch.setattr(log, "propagate", True)
    with caplog.at_level("INFO", log.name), pytest.raises(MoaError, match="engine has stopped"):
        await _until_stopped(verifier, cast(Any, None), opened())
    told = json.loads(JsonFormatter().format(caplog.records[0]))
    assert (told["url"], told["api"]) == ("ws://127.0.0.1:1", "http://127.0.0.1:2")


def test_the_first_line_is_logged_before_anything_heavy_is_imported() -> None:
    code = """
import sys
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name in ("cloud_verifier.app", "huggingface_hub", "torch", "transformers"):
            sys.exit(f"imports {name}")
"""
    # Where the packages are is looked up first: that is no import.
    code += """
import contextlib
from cloud_verifier import cli
def told(what):
    print(what, file=sys.stderr)
    return contextlib.nullcontext()
cli.check_installed = list
cli.logs.told_while_it_lasts = told
sys.meta_path.insert(0, Stop())
"""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}cli.main()", "serve", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    first, lasting, last = done.stderr.splitlines()
    assert json.loads(first)["event"] == "start"
    assert lasting == "importing the libraries", "and it is said again while that lasts"
    assert last == "imports cloud_verifier.app"


@pytest.mark.parametrize("address", ["http://127.0.0.1:9/v1", "http://user:key@127.0.0.1:9/v1"])
def test_the_log_before_an_engine_begins_with_version_and_address_and_no_key(address: str) -> None:
    code = """
import contextlib
from cloud_verifier import cli
async def stopped(verifier, port, beside):
    pass
cli._until_stopped = stopped
cli.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "serve", "--port", "0", "--upstream", address],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "key@" not in done.stderr
    if done.returncode == 0:
        (line,) = done.stderr.splitlines()
        begun = json.loads(line)
        assert begun["event"] == "start"
        assert begun["version"] == running_version()
        assert begun["target"] == address
    else:
        assert "key" in address
        assert done.returncode == 2


def test_whoever_starts_it_is_told_that_the_embedded_target_is_a_toy(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    code = """
import sys
from cloud_verifier import cli, model
model.load = lambda settings: sys.exit(0)
cli.check_installed = list
cli._check_hub = print
cli.main()
"""
    for target, times in (([], 1), (["--target", str(tmp_path / "model")], 0)):
        done = subprocess.run(
            [sys.executable, "-c", code, "serve", "--port", "0", *target],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("the embedded toy model") == times


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--port", "0", "--target", "no/such/folder"], "no/such/folder"),
        (["serve", "--host", "0.0.0.0"], "without authentication"),
        (["serve", "--auth-tokens", "no/such/file"], "cannot read the token file"),
        (["serve", "--tls-cert", "x"], "--tls-key"),
        (
            [
                "serve",
                "--tls-cert",
                "pyproject.toml",
                "--tls-key",
                "pyproject.toml",
                "--target",
                "no/such",
            ],
            "holds no certificate in PEM",
        ),
        (
            ["serve", "--port", "9", "--openai", "9", "--target", "no/such"],
            "--openai needs a port of its own",
        ),
        (["serve", "--max-queue", "0"], "max_queue"),
        (["serve", "--max-queue", "x"], "invalid int"),
        (["check", "--dtype", "float8", "--target", "."], "float8"),
        (["check", "--slots", "65537", "--target", "TARGET", "--device", "cpu"], "slots must be"),
        (
            ["check", "--slots", "9", "--kv-tokens", "0", "--target", "TARGET", "--device", "cpu"],
            "kv_tokens must be",
        ),
        (["serve", "--device-map", "auto"], "--device-map"),
        (["serve", "--port", "0", "--device", "warp", "--target", "TARGET"], "warp"),
        ([], "name a command: serve, token, check (--help"),
        (["token"], "name a command: new, list, revoke (--help"),
        (["token", "new", "--append", "."], "is a folder, not a token file"),
        (["token", "new", "--append", "no/such/tokens"], "there is no such folder"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], said: str, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([argument.replace("TARGET", str(pair[0])) for argument in arguments])
    output = capsys.readouterr()
    assert (caught.value.code, output.out) == (2, "")
    assert said in output.err
    assert "Traceback" not in output.err
    assert output.err.strip().splitlines()[-1].startswith("cloud-verifier")


@pytest.mark.parametrize(
    ("flags", "warned"),
    [([], 0), (["--host", "0.0.0.0"], 1), (["--openai", "0"], 0), (["--openai", "0.0.0.0:0"], 1)],
)
def test_tokens_that_others_can_read_are_warned_of(
    flags: list[str], warned: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens"
    with pytest.raises(SystemExit):
        main(["token", "new", "--append", str(file)])
    with pytest.raises(SystemExit):
        main(["serve", *flags, "--port", "0", "--auth-tokens", str(file), "--target", "no/such"])
    assert capsys.readouterr().err.count('"event": "in_clear"') == warned


@pytest.mark.parametrize("flag", ["--port", "--openai"])
def test_that_a_port_is_taken_is_said_before_anything_is_loaded(
    flag: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(
        sys.modules, "cloud_verifier.model", None
    )  # its import fails: with torch it takes seconds
    with Port("127.0.0.1", 0) as theirs:
        theirs.listen(1)
        with pytest.raises(SystemExit) as caught:
            main(["serve", "--port", "0", flag, str(theirs.number), "--target", str(tmp_path)])
    assert caught.value.code == 2
    line = f"cannot listen on 127.0.0.1:{theirs.number}: Address already in use ({flag} N takes another, {flag} 0 any "
    assert line in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_token_that_nobody_has_seen_opens_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    program = [sys.executable, "-c", _MAIN, "token", "new", "--append", str(file)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            program, stdout=full, stderr=subprocess.PIPE, timeout=300, check=False
        )
    assert done.returncode == 2
    assert b"standard output cannot be written: No space left on device (no token" in done.stderr
    assert file.read_text() == ""


_FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (120, 120))
"""
"""The system then says of a larger file that it is too large, where a full disk has no space."""


@pytest.mark.skipif(sys.platform == "win32", reason="a limit of Unix")
def test_a_token_that_the_file_cannot_take_is_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    before = token_line("phone", "secret")  # without an end of line, as an editor may leave it
    file.write_text(before)

    def add(code: str) -> tuple[int, str, str]:
        program = [sys.executable, "-c", code, "token", "new", "--append", str(file)]
        done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
        return done.returncode, done.stdout, done.stderr

    code, shown, said = add(_FULL + _MAIN)
    assert (code, shown) == (2, ""), "a part of the line fits, and a part is no token"
    assert said.endswith("(nothing was changed: make room on that disk first)\n")
    assert file.read_text() == before
    code, shown, said = add(_MAIN)
    assert (code, said) == (0, "")
    assert Authenticator(file).principal([f"Bearer {shown.strip()}"]) == "edge"


def test_no_token_is_added_to_a_file_that_a_verifier_would_not_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens"
    file.write_text("carol notahash\n")
    with pytest.raises(SystemExit) as caught:
        main(["token", "new", "--append", str(file)])
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.out == "", "no token is shown"
    assert "line 1: expected NAME sha256:HASH" in said.err
    assert file.read_text() == "carol notahash\n"
    file.write_text("# all were revoked\n")
    with pytest.raises(SystemExit) as caught:
        main(["token", "new", "--append", str(file)])
    assert caught.value.code == 0


def test_token_new_list_and_revoke(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens"

    def token(*words: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["token", *words])
        return caught.value.code, *capsys.readouterr()

    secrets = [
        token("new", "--name", name, "--append", str(file))[1].strip()
        for name in ("phone", "phone", "tablet")
    ]
    file.write_text("# keep me\n" + file.read_text())
    assert not any(secret in file.read_text() for secret in secrets)
    listed = token("list", str(file))[1].splitlines()
    assert [line.split()[0] for line in listed] == ["phone", "phone", "tablet"]
    assert not any(secret in line for secret in secrets for line in listed)
    assert token("revoke", str(file), listed[0].split()[1])[0] == 0
    assert [Authenticator(file).principal([f"Bearer {s}"]) for s in secrets] == [
        None,
        "phone",
        "tablet",
    ]
    assert token("revoke", str(file), "phone")[2] == "1 token revoked\n"
    assert [Authenticator(file).principal([f"Bearer {s}"]) for s in secrets] == [
        None,
        None,
        "tablet",
    ]
    assert file.read_text().startswith("# keep me\n")
    assert file.stat().st_mode & 0o077 == 0
    code, _, errors = token("revoke", str(file), "nobody")
    assert code == 2
    assert "no token of 'nobody'" in errors


def test_tokens_for_a_team_are_made_and_revoked_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, names = tmp_path / "tokens", tmp_path / "names"
    names.write_text("ann\n\n  ben \n")
    append = ["--append", str(file)]
    assert _tokens("new", "--name", "eve", "--names-from", str(names), *append) == 0
    made = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert list(made) == ["eve", "ann", "ben"]
    auth = Authenticator(file)
    assert [auth.principal([f"Bearer {token}"]) for token in made.values()] == list(made)
    before = file.read_text()
    assert _tokens("revoke", str(file), "ann", "nobody") == 2
    assert "no token of 'nobody'" in capsys.readouterr().err
    assert file.read_text() == before, "all of them, or none"
    assert _tokens("revoke", str(file), "ann", "ben", "ann") == 0
    assert capsys.readouterr().err == "2 tokens revoked\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert _tokens("list", str(file)) == 0
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.startswith("NAME  HASH")
    assert line.startswith("eve   "), "below its heading"
    names.write_text("\n")
    assert _tokens("new", "--names-from", str(names), *append) == 2
    names.write_text("two words\n")
    assert _tokens("new", "--names-from", str(names), *append) == 2
    assert file.read_text().count("\n") == 1


def test_a_name_on_two_lines_of_a_file_gets_one_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It got two, of which a team's administrator handed on one."""
    names = tmp_path / "names"
    names.write_text("ann\nben\nann\n ann \n")
    file = tmp_path / "tokens"
    assert _tokens("new", "--names-from", str(names), "--append", str(file)) == 0
    said = capsys.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()] == ["ann", "ben"]
    once = f"stands in {names} more than once: left out (`--name NAME` makes one more)\n"
    assert said.err == f"ann {once}"
    assert file.read_text().count("\n") == 2
    assert _tokens("new", "--names-from", str(names), "--append", str(file)) == 0
    assert capsys.readouterr().err.startswith("ann, ben have tokens in "), "in one line"
    assert _tokens("new", "--names-from", str(names)) == 0, "without a token file"
    said = capsys.readouterr()
    assert said.out.count("token: ") == 2
    assert said.err == f"ann {once}"


def test_names_that_have_a_token_already_get_no_other_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file of a team, given again, made a second token for everybody."""
    file, names = tmp_path / "tokens", tmp_path / "names"
    names.write_text("ann\nben\n")
    new = ["new", "--names-from", str(names), "--append", str(file)]
    assert _tokens(*new) == 0
    before = file.read_text()
    capsys.readouterr()
    assert _tokens(*new) == 0
    said = capsys.readouterr()
    assert said.out == ""
    hint = "already: left out (`--name NAME` makes one more)\n"
    assert said.err == f"ann, ben have tokens in {file} {hint}"
    assert file.read_text() == before
    names.write_text("ann\ncarol\n")
    assert _tokens(*new) == 0
    said = capsys.readouterr()
    assert said.err == f"ann has a token in {file} {hint}"
    assert said.out.startswith("carol  "), "whose it is is seen"
    assert _tokens("new", "--name", "ann", "--append", str(file)) == 0
    assert [line.split()[0] for line in file.read_text().splitlines()] == [
        "ann",
        "ben",
        "carol",
        "ann",
    ]
    names.write_text("".join(f"user{number}\n" for number in range(7)))
    assert _tokens(*new) == 0
    capsys.readouterr()
    assert _tokens(*new) == 0
    assert "user4 and 2 more have tokens" in capsys.readouterr().err


def _tokens(*words: str) -> int:
    """Run `cloud-verifier token`; its exit code."""
    with pytest.raises(SystemExit) as caught:
        main(["token", *words])
    return int(caught.value.code or 0)


def test_a_revoked_token_is_revoked_in_the_file_that_a_link_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    link = tmp_path / "tokens"
    link.symlink_to(secret / "real")
    for name in ("phone", "tablet"):
        assert _tokens("new", "--name", name, "--append", str(link)) == 0
    phone, tablet = capsys.readouterr().out.split()
    (secret / "real").chmod(0o640)
    assert _tokens("revoke", str(link), "phone") == 0
    auth = Authenticator(secret / "real")
    assert auth.principal([f"Bearer {phone}"]) is None
    assert auth.principal([f"Bearer {tablet}"]) == "tablet"
    assert link.is_symlink()
    assert (secret / "real").stat().st_mode & 0o777 == 0o640, "a group that could read it still can"


_WHY_NOT = [
    (errno.EROFS, "do it where the mounted folder comes from"),
    (errno.EBUSY, "mount the file's folder"),
    (errno.EACCES, "do it as root, or as the file's owner"),
    (errno.EPERM, "do it as root, or as the file's owner"),
]


@pytest.mark.parametrize(("code", "hint"), _WHY_NOT)
def test_a_token_file_that_cannot_be_changed_is_said_with_what_to_do(
    code: int,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "tokens"
    assert _tokens("new", "--append", str(file)) == 0
    before = file.read_text()

    def refuse(*where: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(os, "open", refuse)
    for words in (["revoke", str(file), "edge"], ["new", "--append", str(file)]):
        capsys.readouterr()
        assert _tokens(*words) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert f"cannot change the token file {file}: {os.strerror(code)} (nothing was" in said.err
        assert hint in said.err
        assert len(said.err.splitlines()) == 1
    assert file.read_text() == before


def test_a_token_that_is_added_while_another_is_revoked_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokens"
    assert _tokens("new", "--name", "phone", "--append", str(file)) == 0
    added = [token_line("late", "secret") + "\n"]
    real = bearer_tokens._without

    def without(text: str, which: str) -> tuple[str, int]:
        found = real(text, which)
        if added:
            with file.open("a") as tokens:
                tokens.write(added.pop())
        return found

    monkeypatch.setattr(bearer_tokens, "_without", without)
    assert _tokens("revoke", str(file), "phone") == 0
    assert file.read_text() == token_line("late", "secret") + "\n"


_FROZEN = """
import gc
from cloud_verifier.cli import run_loop

async def main():
    print(gc.get_freeze_count(), len(gc.get_objects()))

print(len(gc.get_objects()))
run_loop(main())
"""


def test_the_garbage_collector_looks_no_longer_at_what_is_loaded() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _FROZEN], capture_output=True, text=True, timeout=300, check=True
    )
    loaded, left_out, left = map(int, ran.stdout.split())
    assert left_out > 0.9 * loaded > 4500
    assert left < 0.1 * loaded


_TALKATIVE = """
import logging, sys, warnings
from cloud_verifier import logs
from moa.wire.limits import Limits
from moa.version import running_version
logs.configure("info", Limits())
from transformers.utils import logging as theirs
theirs.get_logger("transformers.modeling_utils").warning("a weight\\nis new")
logs.take_over_libraries()
theirs.get_logger("transformers.modeling_utils").warning("a weight\\nis new")
list(theirs.tqdm(range(3), desc="Loading weights"))
warnings.warn("something is old")
logging.getLogger("torch").warning("slow path")
"""


def test_libraries_log_as_json_too() -> None:
    quiet = {
        name: value for name, value in os.environ.items() if name != "CI"
    }  # where it is set they say it twice
    quiet["USE_TORCH"] = "0"  # its import takes seconds, and is not asked about
    command = [sys.executable, "-c", _TALKATIVE]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=True, env=quiet
    )
    lines = done.stderr.partition("is new\n")[2].splitlines()  # the first warning came before
    assert [json.loads(line)["level"] for line in lines] == ["warning"] * 3, done.stderr


def test_limits_follow_the_context_unless_they_are_given() -> None:
    def limits(*flags: str) -> tuple[int, int]:
        found = settings_from(parser().parse_args(["serve", *flags])).limits
        return found.max_prompt_tokens, found.max_frame_bytes

    assert limits() == (8192, 256 * 1024)
    assert limits("--max-context-tokens", "1024") == (1024, 256 * 1024)
    assert limits("--max-context-tokens", "131072") == (131072, 5 * 131072 + 4096)
    assert limits("--max-context-tokens", "1024", "--max-prompt-tokens", "100")[0] == 100


def test_every_option_has_help() -> None:
    options = [line for line in cli_reference([parser()]).splitlines() if line.startswith("* `-")]
    assert len(options) > 50
    for line in options:
        assert len(line.partition("`: ")[2].partition("(default")[0]) > 5, line


def test_a_computed_default_is_said_unless_a_command_has_its_own() -> None:
    server = cli_reference([parser()])
    assert "(default: 131072, or one full context where that is more)" in " ".join(server.split())
    device, chat = CommandParser(), CommandParser()
    add_flags(device, ClientSettings, {"settle_seconds": "S"})
    add_flags(chat, ClientSettings, {"settle_seconds": "S"}, {"settle_seconds": 1.0})
    assert "(default: 5, or 0.5 where" in " ".join(device.format_help().split())
    assert "target (default: 1)" in " ".join(chat.format_help().split())


def test_check_prints_figures(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloud_verifier.check._SECONDS", 0.0)  # each size runs three times
    flags = ["--target", str(pair[0]), "--drafter", str(pair[1]), *FAST]
    flags += ["--max-context-tokens", "256"]
    with pytest.raises(SystemExit) as caught:
        main(["check", *flags, "--json"])
    assert caught.value.code == 0
    printed = capsys.readouterr()
    figures = json.loads(printed.out)
    told = [line.removeprefix("cloud-verifier: ") for line in printed.err.splitlines()]
    assert told[0] == "importing the libraries", "it takes ten seconds and more"
    doing = [line for line in told if "(" not in line][1:]
    assert doing[:2] == ["loading the model", "reading a context of 128 tokens"]
    assert [re.sub(r"\d+ s left", "N s left", line) for line in doing[2:]] == [
        "timing forwards of 1 token, about N s left",
        *(f"timing forwards of {nodes} tokens, about N s left" for nodes in (8, 16, 32, 64)),
    ]
    assert figures["context"] == 128
    assert figures["not_timed"] == []
    assert figures["slots"] == 4
    assert re.fullmatch("[0-9a-f]{12}", figures["computes"]), "what replicas are compared by"
    assert figures["kv_tokens"] == 4 * (256 + 64), "no more than all slots can hold"
    assert figures["fits"] == [{"tokens": 256, "sessions": 4}], "a full context is among them"
    assert figures["kv_bytes_per_token"] == 2 * 4 * 2 * 16 * 4
    assert [tree["nodes"] for tree in figures["trees"]] == [1, 8, 16, 32, 64]
    for tree in figures["trees"]:
        assert 0 < tree["from_ms"] <= tree["ms"] <= tree["to_ms"]
    assert figures["busy"] == (figures["times_vary_percent"] > 20)


@pytest.mark.parametrize(
    ("took", "quartiles", "varies", "busy"),
    [
        # The first forward is left out: it may have been slow.
        ([9.0, *[0.2, 0.1, 0.3, 0.1] * 5], (0.1, 0.225), 83, True),
        ([9.0, *[0.2, 0.21, 0.2] * 5], (0.2, 0.21), 5, False),
        ([9.0, 1.0, 3.0], (1.0, 3.0), 100, True),
    ],
)
def test_check_says_how_much_the_times_of_one_forward_vary(
    took: list[float],
    quartiles: tuple[float, float],
    varies: int,
    busy: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(check, "time", clock)
    monkeypatch.setattr(check, "_SECONDS", sum(took) - 0.01)
    target = FakeTarget(clock, took)
    figures = check._tree_figures(target, 0, nodes=8)  # type: ignore[arg-type]
    assert target.left == [], "no more forwards than were timed before"
    assert (figures["from_ms"], figures["to_ms"]) == tuple(
        round(1000 * one, 3) for one in quartiles
    )
    variation = check._variation([figures])
    assert variation == varies
    shown = {"trees": [figures], "not_timed": [], "times_vary_percent": variation, "busy": busy}
    assert (variation > check._QUIET_PERCENT) == busy
    check.show(shown, as_json=False)
    said = " ".join(capsys.readouterr().out.split())
    assert f"times vary percent: {varies}" in said
    assert (f"this machine was busy: the time of a forward varied by {varies} %" in said) == busy


@pytest.mark.parametrize(
    ("a_token", "context", "times", "most_seconds"),
    [
        (0.01, 128, {1: 100, 8: 12, 16: 6, 32: 3, 64: 2}, 10.0),
        (0.2, 64, {1: 5, 8: 2, 16: 2, 32: 2, 64: 1}, 65.0),
        (0.8, 16, {1: 2, 8: 2, 16: 1}, 50.0),
        (8.0, 2, {1: 1}, 35.0),
    ],
)
def test_a_check_on_a_slow_machine_ends_soon(
    a_token: float,
    context: int,
    times: dict[int, int],
    most_seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It took six minutes, and said nothing of that."""
    clock = FakeClock()
    monkeypatch.setattr(check, "time", clock)
    monkeypatch.setattr(check, "slowdown", lambda: 9.0)
    target: Any = SlowTarget(clock, a_token)
    told: list[str] = []
    read, seconds = check._read_context(target, 0, 128)
    assert read == context
    trees = check._time_trees(target, 0, check._TREES, seconds, told.append)
    assert {tree["nodes"]: tree["times"] for tree in trees} == times
    assert clock.now < most_seconds
    assert len(told) == len(trees)
    assert all(re.search(r", about \d+ s left$", line) for line in told)
    assert check._is_loaded(trees) == (1 in times.values())
    monkeypatch.setattr(check, "slowdown", lambda: 2.0)
    assert not check._is_loaded(trees)


def test_a_context_that_was_read_on_a_busy_machine_leaves_out_no_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forward over 64 nodes counted as longer than 20 s where one over 32 had taken 1.2 s."""
    clock = FakeClock()
    monkeypatch.setattr(check, "time", clock)
    target: Any = SlowTarget(clock, a_token=0.0375)
    trees = check._time_trees(target, 0, check._TREES, 0.35, lambda _: None)
    assert [tree["nodes"] for tree in trees] == list(check._TREES)


def test_what_was_not_timed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"not_timed": [32, 64], "times_vary_percent": 0, "busy": True}
    check.show(figures, as_json=False)
    said = " ".join(capsys.readouterr().out.split())
    assert "not timed: 32, 64 nodes, for a forward would take longer than 20 s" in said
    assert "this machine was busy: other programs use its processor;" in said


def test_a_tree_that_took_longer_than_a_larger_one_tells_of_a_busy_machine() -> None:
    def variation(*ms: float) -> int:
        """Of trees of 1, 2, ... nodes that took so long."""
        return check._variation(
            [{"nodes": n, "ms": one, "from_ms": one, "to_ms": one} for n, one in enumerate(ms, 1)]
        )

    assert variation(30.0, 10.0, 20.0, 25.0) == 0, "one token may run by other kernels"
    assert variation(5.0, 20.0, 30.0, 16.0) == 88


class FakeClock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class FakeTarget:
    """Its forwards take so long, one after another."""

    def __init__(self, clock: FakeClock, took: list[float]) -> None:
        self.left = list(took)
        self._clock = clock
        self.capabilities = SimpleNamespace(trees=True)

    def forward(self, rows: object) -> Tensor:
        self._clock.now += self.left.pop(0)
        return zeros(1, 1)


class SlowTarget:
    """Each token of its forwards takes so long."""

    capabilities = SimpleNamespace(trees=True)

    def __init__(self, clock: FakeClock, a_token: float) -> None:
        self._clock = clock
        self._a_token = a_token

    def forward(self, rows: list[Row]) -> Tensor:
        self._clock.now += self._a_token * sum(len(row.tokens) for row in rows)
        return zeros(1, 1)

    def commit(self, *_: object) -> None:
        """Keep nothing."""


def test_a_context_that_holds_no_draft_is_refused_before_the_weights_are_read(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cloud_verifier.model.open_target", lambda *_: pytest.fail("it was loaded"))
    limits = Limits(max_tree_nodes=4096, max_guess_tokens=4096)
    with pytest.raises(UsageError, match=r"a slot of \d+ tokens has no room for a draft of 4096"):
        load(Settings(target=str(pair[0]), device="cpu", limits=limits))


def test_a_head_that_finds_no_memory_is_one_line(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Tensor) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("moa.target.head.widened", full)
    with pytest.raises(UsageError, match=r"no memory for the \d.\d GiB of the LM head"):
        load(Settings(target=str(pair[0]), kv_tokens=512, slots=2))


async def test_a_full_disk_under_the_log_ends_no_answer() -> None:
    """Standard error goes to a device on which nothing can be written."""
    with (
        open("/dev/full", "w") as full,
        verifier("--log-level=info", threads=1, log=full) as running,
    ):
        for _ in range(3):
            async with client(running.url) as edge:
                session = await edge.start([5, 6, 7], max_new_tokens=4, ignore_eos=True)
                await edge.stream(session, speculate=False)
                assert len(session.log) == 3 + 4


_WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from cloud_verifier.cli import main
main()
"""


@pytest.mark.parametrize("target", ["nobody-has-this", "nobody/has-this"])
def test_a_target_that_nobody_has_is_refused_before_torch_is_imported(target: str) -> None:
    command = [sys.executable, "-c", _WITHOUT_TORCH, "serve", "--port=0", f"--target={target}"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 2
    line = f"cloud-verifier: error: no model {target}: not a folder here, not in the hub's cache"
    assert done.stderr.startswith(line), done.stderr
    assert done.stderr.count("\n") == 1


def test_what_the_port_of_the_api_needs_is_missed_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target was loaded first, and the extra that was named brings neither."""
    monkeypatch.setattr(
        "moa.cli.installed.find_spec",
        lambda name: None if name in ("starlette", "uvicorn") else object(),
    )
    monkeypatch.setattr("cloud_verifier.model.load", lambda settings: pytest.fail("it was loaded"))
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--port", "0", "--openai", "0"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("cloud-verifier: error: starlette and uvicorn are not installed")
    assert ".[serve]" in said
