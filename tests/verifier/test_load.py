"""What is refused before the target is loaded, and what is said while it is."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from cloud_verifier.logs import log, told_while_it_lasts
from cloud_verifier.model import load
from cloud_verifier.settings import Settings
from edge_client.device import embedded_bundle
from moa.errors import UsageError
from moa.target.memory_plan import DrafterMemory
from moa.wire import Limits
from testing import gguf_tiny
from testing.tiny import tiny
from tests.edge.kit import pair


def test_what_cannot_draft_is_refused_before_the_target_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sibling's folder cost the load of the target, and its memory, before it was refused."""

    def never(settings: Settings, drafters: DrafterMemory) -> Any:
        raise AssertionError("the target is being loaded")

    monkeypatch.setattr("cloud_verifier.model.load_target", never)
    target = str(pair() / "target")
    for wrong, words in (
        (
            {"server_drafter": target},
            "a small model .* drafts here as its GGUF file, or as its bundle",
        ),
        ({"server_drafter": str(embedded_bundle())}, "is a bundle .*with --bundle"),
        ({"server_drafter": str(tmp_path / "nowhere")}, "no model at"),
        ({"drafter": str(tmp_path / "nowhere")}, "no drafter at"),
        ({"bundle": str(tmp_path / "nowhere")}, "nowhere"),
    ):
        with pytest.raises(UsageError) as caught:
            load(Settings(target=target, **wrong))
        assert re.search(words, caught.value.line())


@pytest.mark.parametrize(("kv_tokens", "is_told"), [(100, True), (None, False)])
def test_a_cache_that_holds_no_full_session_is_told(
    kv_tokens: int | None, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """`--kv-tokens 100` was taken without a word, and every question was refused."""
    with caplog.at_level(logging.WARNING, "cloud_verifier"):
        served = load(
            Settings(target=str(pair() / "target"), device="cpu", slots=2, kv_tokens=kv_tokens)
        )
    told = [one.getMessage() for one in caplog.records if "--kv-tokens" in one.getMessage()]
    most = Limits().context_within(served.facts.capacity)
    assert bool(told) == is_told
    assert not told or told[0].startswith(f"the KV cache has room for {most} tokens of one session")


def test_a_small_model_of_another_tokenizer_is_refused_before_the_target_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one of the same tokenizer is not, whatever its weights."""
    gguf_tiny.need_llama()

    class Loading(Exception):
        pass

    def load_target(settings: Settings, drafters: DrafterMemory) -> Any:
        raise Loading

    monkeypatch.setattr("cloud_verifier.model.load_target", load_target)
    target = str(gguf_tiny.save(tiny("llama"), tmp_path / "target.gguf"))
    alike = str(gguf_tiny.save(tiny("qwen2"), tmp_path / "alike.gguf"))
    other = str(gguf_tiny.save(tiny("llama", vocab_size=120), tmp_path / "other.gguf"))
    with pytest.raises(Loading):
        load(Settings(target=target, server_drafter=alike))
    with pytest.raises(UsageError, match="another tokenizer than the target"):
        load(Settings(target=target, server_drafter=other))


def test_a_load_that_takes_long_says_so() -> None:
    told = threading.Event()

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            about: Any = record
            if getattr(record, "event", "") == "loading" and about.resident_megabytes > 0:
                told.set()

    handler = Seen()
    log.addHandler(handler)
    level = log.level
    log.setLevel("INFO")
    try:
        with told_while_it_lasts("loading the model", every=0.01):
            assert told.wait(60)
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_path_that_leads_nowhere_is_refused_before_torch_is_loaded(
    command: str, tmp_path: Path
) -> None:
    (tmp_path / "coder15.gguf").touch()
    mistyped = str(tmp_path / "coder51.gguf")
    program = (
        "import sys\n"
        "from cloud_verifier.cli import main\n"
        f"try:\n    main([{command!r}, '--target', {mistyped!r}])\n"
        "finally:\n    assert 'torch' not in sys.modules"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert ran.stderr == (
        f"cloud-verifier: error: --target: no such file or folder: {mistyped}"
        f" (did you mean {tmp_path / 'coder15.gguf'}?)\n"
    )
