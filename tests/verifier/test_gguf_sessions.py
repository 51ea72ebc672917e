"""How many sessions a target in a GGUF file holds at a time, each a whole context: what is logged,
checked, counted and refused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from cloud_verifier.app import Verifier
from cloud_verifier.check import measure
from cloud_verifier.cli import main
from cloud_verifier.model import load
from cloud_verifier.settings import Settings
from moa.wire import ClientSession
from moa.wire.codes import Code
from moa.wire.limits import Limits
from moa.wire.messages import Error
from testing import gguf_tiny
from testing.tiny import tiny
from tests.verifier import kit

LIMITS = Limits(
    max_prompt_tokens=120, max_context_tokens=120, max_tree_nodes=8, idle_seconds=1000.0
)
CONTEXT = 128


@pytest.fixture
def file(tmp_path: Path) -> str:
    gguf_tiny.need_llama()
    return str(gguf_tiny.save(tiny("llama"), tmp_path / "target.gguf"))


def settings(file: str, **how: Any) -> Settings:
    return Settings(port=0, target=file, threads=1, limits=LIMITS, **how)


def events(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """What was logged, by its event."""
    return {record.event: record for record in caplog.records if hasattr(record, "event")}


async def test_as_many_sessions_are_told_as_there_can_be(
    file: str, caplog: pytest.LogCaptureFixture
) -> None:
    few = settings(file, kv_tokens=3 * CONTEXT)
    with caplog.at_level(logging.INFO, "cloud_verifier"):
        served = load(few)
    assert events(caplog)["loaded"].slots == 3
    async with Verifier(served, few).open() as running, kit.client(running) as edge:
        running.service.observe()
        assert kit.metric(running, "moa_slots_free") == 3
        for seed in range(3):
            await edge.start(kit.prompt(seed, 5), max_new_tokens=20)
        running.service.observe()
        assert kit.metric(running, "moa_slots_free") == 0
        await edge.send(ClientSession(kit.prompt(4, 5), max_new_tokens=20).open())
        refused = await edge.receive()
        assert isinstance(refused, Error)
        assert (refused.code, refused.limit) == (Code.BUSY, "kv_tokens")


def test_check_counts_them_too(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloud_verifier.check._SECONDS", 0.0)
    assert measure(settings(file, kv_tokens=3 * CONTEXT))["slots"] == 3
    assert measure(settings(file, kv_tokens=3 * CONTEXT, slots=2))["slots"] == 2


def test_what_it_will_take_is_said_before_it_is_loaded(
    file: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "cloud_verifier"):
        load(settings(file, kv_tokens=3 * CONTEXT, server_drafter=file))
    told = events(caplog)
    assert list(told) == ["memory", "loaded"]
    # Below "2 sessions 0.5 GB" stood a number of 16 sessions without a word that it is the most.
    assert hasattr(told["loaded"], "kv_megabytes_at_most")
    figures = told["memory"].figures
    assert (figures["sessions"], figures["kv_tokens"]) == (3, 3 * CONTEXT)
    size = round(Path(file).stat().st_size / 1e6)
    assert figures["drafter_mb"] == figures["weights_mb"] == size
    assert figures["at_most_mb"] >= figures["at_start_mb"] > figures["weights_mb"]


def test_fewer_sessions_than_asked_for_are_a_warning(
    file: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number alone stood in a line among others, and the fourth user was told `busy`."""

    def told(**how: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "cloud_verifier"):
            load(settings(file, **how))
        return [one.getMessage() for one in caplog.records if "free memory" in one.getMessage()]

    assert told(kv_tokens=3 * CONTEXT) == [], "all of them fit"
    weights = Path(file).stat().st_size
    monkeypatch.setattr("moa.llama.memory_plan.available_bytes", lambda: 2 * weights)
    assert told(kv_tokens=3 * CONTEXT) == [
        "--kv-tokens asks for 384 tokens, 3 sessions, and the free memory holds 128, 1 of them"
    ]
    assert told() == [], "nobody has asked for a number"


def test_less_memory_than_a_context_is_refused(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--target", file, "--kv-tokens", "100", "--max-context-tokens", "120"]
    flags += ["--max-prompt-tokens", "120"]
    with pytest.raises(SystemExit) as caught:
        main(["check", *flags, "--json"])
    assert caught.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert "--kv-tokens 100 holds no session" in line
    assert "--kv-tokens 184 at least" in line


def test_a_context_above_the_default_memory_is_one_session(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who gives no --kv-tokens is not told that it was too little."""
    monkeypatch.setattr("cloud_verifier.settings.USUAL_KV_TOKENS", 100)
    assert load(settings(file)).facts.slots == 1
