from __future__ import annotations

import contextlib
import hmac
import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cloud_verifier.engine.loop import Workload
from cloud_verifier.engine.schedule import Scheduler
from cloud_verifier.logs import JsonFormatter
from cloud_verifier.serving.admission import Admission
from cloud_verifier.serving.auth import WRONG_TOKENS, Authenticator, new_token, token_line
from cloud_verifier.sessions.service import Service
from moa.api.access import ANONYMOUS
from moa.errors import ConfigError, UsageError
from moa.wire import FEATURES
from moa.wire.messages import Open
from tests.verifier.sessions import FACTS, LIMITS

ALICE = new_token()
BOB = new_token()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A token file of alice and bob, with a comment."""
    made = tmp_path / "tokens"
    made.write_text(
        f"# who may connect\n{token_line('alice', ALICE)}\n\n{token_line('bob', BOB)} # a comment\n"
    )
    return made


def test_a_token_lets_its_principal_in(file: Path) -> None:
    assert ALICE not in file.read_text(), "the file holds no secret"
    assert len(ALICE) > 40
    auth = Authenticator(file)
    assert auth.principal([f"Bearer {ALICE}"]) == "alice"
    assert auth.principal([f"bearer  {BOB} "]) == "bob"
    for wrong in (
        "",
        "Bearer",
        "Bearer ",
        f"Basic {ALICE}",
        ALICE,
        f"Bearer {ALICE}x",
        "Bearer \udcff",
    ):
        assert auth.principal([wrong]) is None
    for several in ([], [f"Bearer {ALICE}", f"Bearer {ALICE}"], [f"Bearer {ALICE}", "Basic eA=="]):
        assert auth.principal(several) is None
    assert Authenticator().principal([]) == ANONYMOUS, "without a file everybody is one principal"


def test_every_entry_is_compared_in_constant_time(
    monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    auth = Authenticator(file)
    compared: list[int] = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(len(a)) or real(a, b))
    assert auth.principal([f"Bearer {ALICE}"]) == "alice"
    assert compared == [32] * 2


@pytest.mark.parametrize(
    "line",
    ["edge", "edge token", "edge sha256:12", "ed ge sha256:" + "0" * 64, "é sha256:" + "0" * 64],
)
def test_a_bad_line_is_named_but_not_repeated(file: Path, line: str) -> None:
    file.write_text(f"# first\n{line}\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        Authenticator(file)
    assert line not in str(caught.value)


def test_files_that_let_nobody_in_are_mistakes(file: Path) -> None:
    file.write_text("# nobody\n")
    with pytest.raises(ConfigError, match="no entries"):
        Authenticator(file)
    with pytest.raises(UsageError, match="name"):
        token_line("a b", "t")


def test_a_token_file_is_read_again_when_it_has_changed(file: Path) -> None:
    tokens = Authenticator(file)
    file.write_text(token_line("alice", ALICE) + "\n")
    assert tokens.principal([f"Bearer {BOB}"]) is None
    file.write_text("a mistake\n")
    assert tokens.principal([f"Bearer {ALICE}"]) == "alice", "a mistake changes nothing"
    file.unlink()
    assert tokens.principal([f"Bearer {ALICE}"]) == "alice"
    file.write_text("# everybody was revoked\n")
    assert tokens.principal([f"Bearer {ALICE}"]) is None
    assert tokens.principal([]) is None, "and nobody is anonymous"


def test_a_reload_says_how_many_tokens_there_were_and_are(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("cloud_verifier"), "propagate", True)
    caplog.set_level("INFO", "cloud_verifier")
    whole = file.read_text()
    auth = Authenticator(file)
    for content in (f"{token_line('alice', ALICE)}\n", "", whole, whole[:-40]):
        file.write_text(content)
        auth.principal([])
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said[:3] == [
        ("WARNING", "the token file was read again: 1 token, 2 before; gone: bob"),
        (
            "WARNING",
            "the token file was read again: 0 tokens, 1 before: everybody is refused; gone: alice",
        ),
        ("INFO", "the token file was read again: 2 tokens, 0 before; new: alice, bob"),
    ]
    level, line = said[3]
    assert level == "ERROR"
    assert line.endswith("(the 2 tokens of before stay valid)")


def test_a_reload_names_some_of_many_and_never_a_hash(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("cloud_verifier"), "propagate", True)
    caplog.set_level("INFO", "cloud_verifier")
    auth = Authenticator(file)
    names = ["alice", *(f"phone-{number:02}" for number in range(40))]
    file.write_text("".join(f"{token_line(name, new_token())}\n" for name in names))
    auth.principal([])
    (record,) = caplog.records
    assert record.getMessage() == (
        "the token file was read again: 41 tokens, 2 before; gone: alice, bob;"
        " new: alice, phone-00, phone-01, phone-02, phone-03 and 36 more"
    )
    told = json.loads(JsonFormatter().format(record))
    assert told["gone"] == ["alice", "bob"], "alice has another one"
    assert len(told["new"]) == 5


def test_a_file_that_cannot_be_read_is_looked_at_until_it_can(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may read it is changed later, which changes neither its time nor its size."""
    monkeypatch.setattr(logging.getLogger("cloud_verifier"), "propagate", True)
    auth = Authenticator(file)
    assert auth.unread == ""
    forbidden = True
    real = Path.read_text

    def read_text(path: Path, *words: Any, **more: Any) -> str:
        if forbidden:
            raise PermissionError(13, "Permission denied")
        return real(path, *words, **more)

    monkeypatch.setattr(Path, "read_text", read_text)
    with watched(auth, ALICE) as ended:
        file.write_text(token_line("bob", BOB) + "\n")
        for _ in range(3):
            look_until_settled(auth)
        assert auth.unread.endswith("Permission denied")
        assert [one.levelname for one in caplog.records] == ["ERROR"], "it is said once"
        assert ended == []
        forbidden = False
        look_until_settled(auth)
        assert (auth.unread, ended) == ("", [ALICE])
    file.write_text("a mistake\n")
    look_until_settled(auth)
    assert "line 1" in auth.unread
    assert [one.levelname for one in caplog.records][-1] == "ERROR"


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ([], "missing"),
        (["Bearer wrong"], "unknown"),
        ([f"Bearer {ALICE}"] * 2, "malformed"),
        (["Basic eA=="], "malformed"),
    ],
)
def test_who_is_refused_is_logged_with_what_was_wrong_and_where(
    given: list[str],
    kind: str,
    file: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("cloud_verifier"), "propagate", True)
    assert Authenticator(file).refused(given, "10.0.0.1:99", "openai") == kind
    (record,) = caplog.records
    assert record.getMessage() == f"unauthorized: {WRONG_TOKENS[kind]}"
    fields = vars(record)
    assert (fields["event"], fields["peer"], fields["port"]) == (
        "unauthorized",
        "10.0.0.1:99",
        "openai",
    )
    assert ALICE not in record.getMessage()


@contextlib.contextmanager
def watched(auth: Authenticator, *tokens: str) -> Iterator[list[str]]:
    """Connections that were opened with these tokens; yields the tokens of those that were ended."""
    ended: list[str] = []
    with contextlib.ExitStack() as open_ones:
        for token in tokens:
            key = [f"Bearer {token}"]
            open_ones.enter_context(auth.watching_key(key, partial(ended.append, token)))
        yield ended


def look_until_settled(auth: Authenticator) -> None:
    """What happens within two seconds."""
    auth.end_revoked()
    auth.end_revoked()


def test_only_what_was_opened_with_a_revoked_token_is_ended(file: Path) -> None:
    second = new_token()
    with file.open("a") as tokens:
        tokens.write(token_line("alice", second) + "\n")
    auth = Authenticator(file)
    with watched(auth, ALICE, second, BOB, "unknown") as ended:
        look_until_settled(auth)
        assert ended == []
        file.write_text(f"{token_line('alice', second)}\n{token_line('bob', BOB)}\n")
        look_until_settled(auth)
        assert ended == [ALICE], "another token of alice's is valid still"
        look_until_settled(auth)
        assert ended == [ALICE], "it is ended once"
        file.write_text(f"{token_line('robert', BOB)}\n{token_line('alice', second)}\n")
        look_until_settled(auth)
        assert ended == [ALICE, BOB], "the token is of another principal now"
        file.write_text("# everybody was revoked\n")
        look_until_settled(auth)
    assert ended == [ALICE, BOB, second]


def test_a_token_file_that_is_being_written_ends_nothing(file: Path) -> None:
    auth = Authenticator(file)
    whole = file.read_text()
    with watched(auth, ALICE) as ended:
        file.write_text("")  # as an editor empties a file before it writes it
        auth.end_revoked()
        file.write_text(whole)
        look_until_settled(auth)
        file.write_text("a mistake\n")
        look_until_settled(auth)
        file.unlink()
        look_until_settled(auth)
        assert ended == []
        file.write_text(token_line("bob", BOB) + "\n")
        look_until_settled(auth)
        assert ended == [ALICE], "it is told of all the same later"


def test_a_token_that_was_revoked_during_the_handshake_ends_too(file: Path) -> None:
    auth = Authenticator(file)
    caller = auth.caller([f"Bearer {ALICE}"])
    assert caller is not None
    file.write_text(token_line("bob", BOB) + "\n")
    look_until_settled(auth)
    ended: list[str] = []
    with auth.watching(caller, lambda: ended.append("alice")):
        look_until_settled(auth)
        assert ended == ["alice"]
    with Authenticator().watching(caller, lambda: ended.append("nobody")):
        Authenticator().end_revoked()
    assert ended == ["alice"], "without a token file nothing can be revoked"


def test_a_session_that_was_still_opening_when_its_token_was_revoked_is_ended_too(
    file: Path,
) -> None:
    service = Service(FACTS, LIMITS, Workload(Scheduler(LIMITS)))
    auth = Authenticator(file)
    admission = Admission(service, auth, wrong=lambda: "")
    with watched(auth, ALICE):
        file.write_text(token_line("bob", BOB) + "\n")
        admission.end_revoked()
        admission.end_revoked()
        opened_late = service.open(Open(bytes(16), [4, 5, 6]), "alice", FEATURES)
        stays = service.open(Open(bytes(16), [4, 5, 6]), "bob", FEATURES)
        admission.end_revoked()
    assert opened_late not in list(service.table)
    assert list(service.table) == [stays]
