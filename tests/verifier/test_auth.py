from __future__ import annotations

import hmac
from pathlib import Path

import pytest

from cloud_verifier.serving.auth import Authenticator, new_token, token_line
from moa.api.access import ANONYMOUS
from moa.errors import ConfigError, UsageError


def test_a_token_lets_its_principal_in(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    alice, bob = new_token(), new_token()
    file.write_text(f"# who may connect\n{token_line('alice', alice)}\n\n{token_line('bob', bob)} # a comment\n")
    auth = Authenticator(file)
    assert auth.principal([f"Bearer {alice}"]) == "alice"
    assert auth.principal([f"bearer  {bob} "]) == "bob"
    for wrong in ("", "Bearer", "Bearer ", f"Basic {alice}", alice, f"Bearer {alice}x", "Bearer \udcff"):
        assert auth.principal([wrong]) is None
    assert auth.principal([]) is None


def test_several_authorization_headers_let_nobody_in(tmp_path: Path) -> None:
    file, token = tmp_path / "tokens", new_token()
    file.write_text(token_line("alice", token) + "\n")
    auth = Authenticator(file)
    assert auth.principal([f"Bearer {token}", f"Bearer {token}"]) is None
    assert auth.principal([f"Bearer {token}", "Basic eA=="]) is None


def test_the_file_holds_no_secret(tmp_path: Path) -> None:
    token = new_token()
    assert token not in token_line("edge", token)
    assert len(token) > 40


def test_without_a_file_everybody_is_one_principal() -> None:
    assert Authenticator().principal([]) == ANONYMOUS


def test_every_entry_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tokens = [new_token() for _ in range(5)]
    file = tmp_path / "tokens"
    file.write_text("".join(token_line(f"p{i}", token) + "\n" for i, token in enumerate(tokens)))
    auth = Authenticator(file)
    compared: list[int] = []
    real = hmac.compare_digest

    def count(a: bytes, b: bytes) -> bool:
        compared.append(len(a))
        return real(a, b)

    monkeypatch.setattr(hmac, "compare_digest", count)
    assert auth.principal([f"Bearer {tokens[0]}"]) == "p0"
    assert compared == [32] * 5


@pytest.mark.parametrize(
    "line", ["edge", "edge token", "edge sha256:12", "ed ge sha256:" + "0" * 64, "é sha256:" + "0" * 64]
)
def test_a_bad_line_is_named_but_not_repeated(tmp_path: Path, line: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# first\n{line}\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        Authenticator(file)
    assert line not in str(caught.value)


def test_files_that_let_nobody_in_are_mistakes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        Authenticator(tmp_path / "none")
    (tmp_path / "empty").write_text("# nobody\n")
    with pytest.raises(ConfigError, match="no entries"):
        Authenticator(tmp_path / "empty")
    with pytest.raises(UsageError, match="name"):
        token_line("a b", "t")


def test_a_token_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    alice, bob = new_token(), new_token()
    file.write_text(token_line("alice", alice) + "\n")
    tokens = Authenticator(file)
    assert tokens.principal([f"Bearer {bob}"]) is None
    file.write_text(f"{token_line('alice', alice)}\n{token_line('bob', bob)}\n")
    assert tokens.principal([f"Bearer {bob}"]) == "bob"
    file.write_text("a mistake\n")
    assert tokens.principal([f"Bearer {alice}"]) == "alice", "a mistake changes nothing"
    file.unlink()
    assert tokens.principal([f"Bearer {alice}"]) == "alice"
    file.write_text("# everybody was revoked\n")
    assert tokens.principal([f"Bearer {alice}"]) is None
    assert tokens.principal([]) is None, "and nobody is anonymous"
