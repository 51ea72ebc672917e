"""A device whose drafter reads the target goes on alone behind a cut, with the records of what came
before."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.real import trained
from benchmarks.real.__main__ import main
from benchmarks.real.lines import Lines, read
from export.cli import main as export
from export.runner import OrtRunner
from export.source import load_source
from moa.bundle import Bundle
from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import new_attention
from moa.drafters.states.config import StateDrafterConfig
from moa.drafters.states.model import StateDrafter
from moa.errors import UsageError
from moa.graph.drafter import OnnxDrafter, run
from moa.graph.load import LoadedGraph
from moa.model.borrowed import SharedWeights
from moa.model.checkpoint import save_drafter
from moa.sampling import SamplingSettings
from moa.target.loading import load_model
from testing.tiny import save_tiny

PROMPT = [5, 9, 77, 30, 64, 8]
ANSWER = [100, 12, 61, 17, 9, 77, 31, 64, 8, 101, 12, 61]
NAME = "code/7@0"
TOKENS = 24
"""Most of an answer here."""


@dataclass(frozen=True)
class Reader:
    """A tiny drafter that reads its target."""

    target: Path
    drafter: Path
    bundle: Path

    def cuts(self, work: Path, *after: int, records: bool = True) -> dict[int, list[int]]:
        """What the verb writes behind each cut."""
        if not (work / "answers.jsonl").exists():
            Lines(work / "answers.jsonl").add(NAME, prompt=PROMPT, ids=ANSWER, finish="eos")
        words = ["cuts", str(work), "--bundle", str(self.bundle), "--after", *map(str, after)]
        if records:
            words += ["--target", str(self.target), "--drafter", str(self.drafter)]
        assert main(words) == 0
        return {line["after"]: line["ids"] for line in read(work / "cuts.jsonl")}


@pytest.fixture(scope="module", params=["states", "attention", "borrowing"])
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """Of states; of keys and values; of these and with a layer whose rows are the target's."""
    folder = tmp_path_factory.mktemp(request.param)
    target = save_tiny("qwen2", folder / "target", num_hidden_layers=8)
    loaded = load_model(target)
    torch.manual_seed(3)
    if request.param == "states":
        config = StateDrafterConfig.for_target(loaded.facts)
        made = StateDrafter.new(config, SharedWeights.of(loaded.model))
    else:
        shape = AttentionConfig.for_target(loaded.facts, tli=int(request.param == "borrowing"))
        made = new_attention(shape, loaded.model)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(4.0)  # what is read changes what is written
    save_drafter(made, folder / "drafter")
    words = ["build", "--target", str(target), "--drafter", str(folder / "drafter")]
    words += ["--out", str(folder / "bundle"), "-v", "cpu-fp32", "--no-step-times"]
    assert export(words) == 0
    return Reader(target, folder / "drafter", folder / "bundle")


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.real.cuts.TOKENS", TOKENS)


def test_behind_a_cut_it_writes_what_it_guesses_with_the_records_so_far(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a graph that is run by other code than a device's, with the records of all tokens but the
    last; without records it writes something else."""
    made: list[OnnxDrafter] = []
    new = LoadedGraph.drafter

    def kept(loaded: LoadedGraph) -> OnnxDrafter:
        made.append(new(loaded))
        return made[-1]

    monkeypatch.setattr(LoadedGraph, "drafter", kept)
    # A random drafter is torn between tokens: eight bits would turn some of its guesses.
    monkeypatch.setattr("benchmarks.real.cuts.DTYPES", ("fp16",))
    written = reader.cuts(tmp_path, 0, 3, 8)
    held = [list(drafter.records.held) for drafter in made if drafter.records is not None]
    assert held == [[], [(0, len(PROMPT) + 2)], [(0, len(PROMPT) + 7)]]

    source = load_source(str(reader.target), str(reader.drafter))
    bundle = Bundle.open(reader.bundle)
    runner = OrtRunner(bundle.path(bundle.variant("cpu-fp32").model), source.spec)
    known = trained.KnownTexts(str(reader.target), tmp_path / "states")
    for m in (3, 8):
        text = [*PROMPT, *ANSWER[:m]]
        whole = [*text, *written[m]]
        of_text = known.of(f"behind {m}", whole, source.module)
        chains = trained.Chains(runner, trained.continuation(source.module, of_text, len(PROMPT)))
        last = len(text) - 1
        assert list(chains.guesses(last, last)) == written[m]
        drafter = new(LoadedGraph.load(bundle))
        log = list(text)
        while len(log) < len(whole):
            log.append(run(drafter.guess(log, SamplingSettings())))
        assert log[len(text) :] != written[m]


def test_what_the_target_computes_of_a_text_is_kept(
    reader: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later run for other cuts reads it, and one with nothing to do does not even do that."""
    first = reader.cuts(tmp_path, 3)
    assert (tmp_path / trained.STATES / "code-7@0.safetensors").exists()

    def computed(*_: object) -> None:
        pytest.fail("the target runs again")

    monkeypatch.setattr(trained.KnownTexts, "_computed", computed)
    both = reader.cuts(tmp_path, 3, 8)
    assert both[3] == first[3]
    assert set(both) == {3, 8}
    assert reader.cuts(tmp_path, 3, 8) == both


def test_records_need_the_target_and_the_bundles_own_drafter(
    reader: Reader, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="behind a cut it has records"):
        reader.cuts(tmp_path, 8, records=False)
    assert set(reader.cuts(tmp_path, 0, 8, records=False)) == {0}
    words = ["cuts", str(tmp_path), "--bundle", str(reader.bundle)]
    with pytest.raises(UsageError, match="give both"):
        main([*words, "--target", str(reader.target)])
    loaded = load_model(reader.target)
    torch.manual_seed(4)
    config = StateDrafterConfig.for_target(loaded.facts)
    save_drafter(StateDrafter.new(config, SharedWeights.of(loaded.model)), tmp_path / "other")
    with pytest.raises(UsageError, match="is not of the drafter in"):
        main([*words, "--target", str(reader.target), "--drafter", str(tmp_path / "other")])
