"""The verifier's load benchmark with a target of one's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from benchmarks.experiments import EXPERIMENTS
from benchmarks.server import latency, load
from moa.errors import UsageError
from testing import gguf_tiny
from testing import verifier as verifiers
from testing.tiny import tiny


def test_a_target_that_is_not_there_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--target: no such file or folder"):
        load.Options(target=str(tmp_path / "target.gguf"))
    with pytest.raises(UsageError, match="--drafter: no such file or folder"):
        load.Options(drafter=str(tmp_path / "drafter"))


def test_a_verifier_that_loads_gives_a_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing was printed in 90 s."""
    told = tmp_path / "told"
    program = f"""
from pathlib import Path
while not Path({str(told)!r}).exists(): pass
print("listening on ws://127.0.0.1:1", flush=True)
"""
    real = verifiers.working

    def soon(*what: str, at_once: bool) -> object:
        """The same, without a pause; the program goes on when something was said."""
        monkeypatch.setattr(sys.stderr, "write", lambda text: told.touch() or len(text))
        return real(*what, at_once=at_once, every=0.01)

    monkeypatch.setattr(verifiers, "_SERVE", ("-c", program))
    monkeypatch.setattr(verifiers, "working", soon)
    with verifiers.verifier() as running:
        assert running.url == "ws://127.0.0.1:1"
    assert told.exists()


@pytest.mark.parametrize(
    ("context", "length"), [(16_384, 8000), (2048, 1536), (1024, 512), (512, 256), (128, 64)]
)
def test_the_long_prompt_is_no_longer_than_its_target_holds(context: int, length: int) -> None:
    """A context below the crowd's room ended in an IndexError: the prompt had no tokens."""
    assert latency.long_prompt(8000, context) == length


@pytest.mark.slow
def test_a_gguf_file_is_measured_and_has_no_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gguf_tiny.need_llama()
    file = gguf_tiny.save(tiny("llama", max_position_embeddings=1024), tmp_path / "tiny.gguf")
    experiment = EXPERIMENTS["server_load"]
    args = bench.parser_for(experiment).parse_args(["--target", str(file)])
    vars(args).update({"clients": (2,), "tokens": 8, "repeats": 1, "long": 200})
    bench.run(experiment, args)
    said = capsys.readouterr().out
    assert said.count("(tiny.gguf)") == 4
    assert "records int8" not in said
