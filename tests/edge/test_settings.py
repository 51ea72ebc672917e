"""Flag > environment > config file > default, and every mistake named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_client.settings import ClientSettings
from edge_client.turn.budget import Budget, Spending
from edge_client.turn.guard import OfflineGuard
from moa.errors import ConfigError, UsageError


def load(tmp_path: Path, text: str = "", flags: dict[str, Any] | None = None, **environment: str) -> ClientSettings:
    home = tmp_path / "moa-edge"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(text)
    return ClientSettings.load(flags or {}, environment={"XDG_CONFIG_HOME": str(tmp_path), **environment})


def test_the_order(tmp_path: Path) -> None:
    text = 'max_kbps = 10\nverifier = "ws://file"\ntop_k = 3\nstop = ["a", "b"]\n'
    settings = load(tmp_path, text, {"top_k": 5, "seed": None}, MOA_EDGE_VERIFIER="ws://env", MOA_EDGE_TOP_K="4")
    assert (settings.max_kbps, settings.verifier, settings.top_k, settings.seed) == (10.0, "ws://env", 5, 0)
    assert settings.stop == ("a", "b")


def test_environment_values_have_types(tmp_path: Path) -> None:
    settings = load(tmp_path, MOA_EDGE_OFFLINE="true", MOA_EDGE_TEMPERATURE="0.5", MOA_EDGE_STOP="x,y")
    assert (settings.offline, settings.temperature, settings.stop) == (True, 0.5, ("x", "y"))


@pytest.mark.parametrize(
    ("text", "environment", "flags", "what"),
    [
        ("max_kbs = 3", {}, {}, "max_kbs"),
        ("top_k = 'many'", {}, {}, "top_k"),
        ("stop = 3", {}, {}, "stop"),
        ("= 3", {}, {}, "TOML"),
        ("", {"MOA_EDGE_TOP_K": "many"}, {}, "MOA_EDGE_TOP_K"),
        ("", {"MOA_EDGE_OFFLINE": "maybe"}, {}, "MOA_EDGE_OFFLINE"),
        ("", {}, {"draft": "nobody"}, "draft must be one of"),
        ("", {}, {"verifier": "http://x"}, "no verifier address"),
        ("", {}, {"temperature": -1.0}, "temperature"),
        ("", {}, {"max_new_tokens": 0}, "max_new_tokens"),
        ("", {}, {"max_kbps": -1.0}, "budget"),
        ("", {}, {"settle_seconds": -1.0}, "waiting times"),
        ("", {}, {"offline": True, "verifier": "local"}, "--offline"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, environment: Any, flags: Any, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        load(tmp_path, text, flags, **environment)


def test_a_named_config_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no config file"):
        ClientSettings.load({}, environment={}, file=tmp_path / "none.toml")


def test_spending_calls() -> None:
    spending = Spending(Budget(max_calls=2))
    assert spending.left == 2
    spending.calls = 2
    assert not spending.calls_left
    assert Spending(Budget()).left is None


def test_spending_bytes_is_waited_for() -> None:
    spending = Spending(Budget(max_kbps=8))  # 1000 bytes a second, two seconds of burst
    assert spending.wait(0, now=0.0) == 0
    assert spending.wait(3000, now=0.0) == pytest.approx(1.0)
    assert spending.wait(3000, now=0.5) == pytest.approx(0.5)
    assert spending.wait(3000, now=5.0) == 0
    assert spending.wait(4000, now=100.0) == 0


def test_budgets_out_of_range() -> None:
    with pytest.raises(ConfigError):
        Budget(max_kbps=0.5)


def test_the_guard_warns_once_for_each_time_offline() -> None:
    guard = OfflineGuard(warn_at=3, stop_at=5)
    assert [bool(guard.warning(n)) for n in (1, 2, 3, 4)] == [False, False, True, False]
    assert [guard.stops(n) for n in (4, 5)] == [False, True]
    guard.reset()
    assert guard.warning(3)
