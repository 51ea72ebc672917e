"""The threads of a step: measured once for a large graph, kept, and never slower than the usual number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moa import demo
from moa.bundle import Bundle
from moa.graph import threads
from moa.graph.load import LoadedGraph
from moa.graph.step import default_threads, usable_cores

MODEL = demo.paths().bundle / "variants" / "cpu-int4" / "model.onnx"


@pytest.fixture(autouse=True)
def two_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded graph stands for a large one, on a machine with two cores and nothing else to do."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(threads, "WORTH_MEASURING", 1)
    monkeypatch.setattr(threads, "_SECONDS", 0.02)
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    monkeypatch.setattr(threads, "default_threads", lambda: 1)
    monkeypatch.setattr(threads, "_is_busy", lambda: False)


def kept(folder: Path) -> list[dict[str, object]]:
    return [json.loads(file.read_bytes()) for file in folder.rglob("*.json")]


def test_another_number_is_taken_where_it_is_clearly_faster() -> None:
    assert threads.pick({1: 0.035, 2: 0.022}, usual=1) == 2
    assert threads.pick({1: 0.022, 2: 0.021}, usual=1) == 1
    assert threads.pick({4: 0.010, 8: 0.030}, usual=4) == 4


def test_it_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = threads.fastest(MODEL, "content")
    (found,) = kept(tmp_path)
    assert found["threads"] == graph.threads
    assert set(found["ms"]) == {"1", "2"}  # type: ignore[call-overload]
    monkeypatch.setattr(threads, "_measured", lambda _: pytest.fail("measured again"))
    assert threads.fastest(MODEL, "content").threads == graph.threads
    bundle = Bundle.open(demo.paths().bundle)
    monkeypatch.setattr(threads, "_measured", lambda _: {1: 3.0, 2: 1.0})
    assert LoadedGraph.load(bundle, measured=True).graph.threads == 2
    assert LoadedGraph.load(bundle, measured=True, threads=1).graph.threads == 1
    assert LoadedGraph.load(bundle).graph.threads == default_threads()


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"threads": 0}', '{"threads": "8"}'])
def test_a_damaged_answer_is_measured_again(content: str, tmp_path: Path) -> None:
    threads.fastest(MODEL, "content")
    (file,) = tmp_path.rglob("*.json")
    file.write_text(content)
    assert threads.fastest(MODEL, "content").threads in (1, 2)
    assert kept(tmp_path)[0]["ms"]


def test_a_busy_machine_measures_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_is_busy", lambda: True)
    monkeypatch.setattr(threads, "_measured", lambda _: pytest.fail("measured"))
    assert threads.fastest(MODEL, "content").threads == 1
    assert not kept(tmp_path)


def test_a_small_graph_or_a_place_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert threads.fastest(MODEL, "content").threads in (1, 2)
    monkeypatch.setattr(threads, "WORTH_MEASURING", 1 << 40)
    assert threads.fastest(MODEL, "content").threads == 1
    assert usable_cores() >= 1
