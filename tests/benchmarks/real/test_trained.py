"""A trained drafter along held-out answers: its guesses are those of a device with so many records,
and no prompt is on both sides."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.baselines.eagle3 import eagle3_config, new_eagle3, save_eagle3
from benchmarks.baselines.presets import NO_RECORDS
from benchmarks.real import trained
from benchmarks.real.__main__ import main
from benchmarks.real.answers import sampling_of_answer
from benchmarks.real.lines import Lines, read
from export.agreement import Continuation, Replay, make_traces, offline
from export.cli import main as export
from export.runner import StepInput, StepOutput, TorchRunner
from export.source import Source, load_source
from moa.bundle import Bundle
from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import new_attention
from moa.drafters.contract import Drafter, DraftRequest
from moa.drafters.states.config import StateDrafterConfig
from moa.drafters.states.model import StateDrafter
from moa.errors import UsageError
from moa.graph.drafter import run
from moa.graph.load import LoadedGraph
from moa.model.borrowed import SharedWeights
from moa.model.checkpoint import save_drafter
from moa.sampling import SamplingSettings, choose, gumbel
from moa.target.loading import LoadedModel, load_model
from moa.target.torch_target import Committed, Target
from moa.training.cli import main as train
from moa.tree import TreeShape
from testing.tiny import save_tiny

TEXT = [5, 9, 77, 30, 64, 8, 100, 12, 61, 17, 9, 77, 31, 64, 8, 101, 12, 61, 18, 20]
PROMPT = 6


@dataclass(frozen=True)
class Known:
    source: Source
    text: Committed
    """The text as the target has computed it."""
    trace: Continuation
    """The text with the records that a verifier makes of it."""


def new_drafter(kind: str, loaded: LoadedModel) -> Drafter:
    """Of its states, or of its keys and values with a layer of its own for each row of records."""
    if kind == "states":
        config = StateDrafterConfig.for_target(loaded.facts)
        return StateDrafter.new(config, SharedWeights.of(loaded.model))
    shape = AttentionConfig.for_target(loaded.facts, tli=1 if kind == "borrowing" else 0)
    return new_attention(shape, loaded.model)


@pytest.fixture(scope="module", params=["states", "attention", "borrowing"])
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    folder = tmp_path_factory.mktemp("trained")
    path = save_tiny("qwen2", folder / "target", num_hidden_layers=8)
    loaded = load_model(path)
    torch.manual_seed(3)
    drafter = new_drafter(request.param, loaded)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(4.0)  # guesses differ from place to place
    save_drafter(drafter, folder / "drafter")
    source = load_source(str(path), str(folder / "drafter"))
    target = Target.load(path, slots=1, capacity=64)
    if source.module.taps:
        target.tap(source.module.taps)
    (trace,) = make_traces(target, source, [TEXT], new_tokens=1)
    texts = trained.KnownTexts(str(path), folder / "states")
    text = texts.of("code/1@0", TEXT, source.module)
    return Known(source, text, replace(trace, ids=list(TEXT), prompt=PROMPT))


@pytest.fixture
def chains(known: Known) -> trained.Chains:
    runner = TorchRunner(known.source, 4)
    return trained.Chains(runner, known.trace)


def test_the_records_are_those_that_a_verifier_sends(known: Known) -> None:
    """Up to the sixteen bits in which the target's results are kept."""
    made = trained.continuation(known.source.module, known.text, PROMPT)
    pairs = list(zip(made.borrowed, known.trace.borrowed, strict=True))
    if made.record_k is not None and made.record_v is not None:
        pairs += [(made.record_k, known.trace.record_k), (made.record_v, known.trace.record_v)]
    assert pairs
    for mine, sent in pairs:
        apart = np.linalg.norm(mine[:, : sent.shape[1]] - sent)
        assert apart < 0.1 * np.linalg.norm(sent)


def test_a_kept_file_of_another_text_is_refused(tmp_path: Path) -> None:
    """It was read for the text that was asked for, which has the same name after another run."""
    path = save_tiny("qwen2", tmp_path / "target", num_hidden_layers=8)
    drafter = new_drafter("states", load_model(path))
    texts = trained.KnownTexts(str(path), tmp_path / "states")
    texts.of("a", TEXT, drafter)
    assert texts.of("a", TEXT, drafter).tokens == TEXT
    with pytest.raises(UsageError, match=r"a\.safetensors is of another text"):
        texts.of("a", [*TEXT[:-1], TEXT[-1] + 1], drafter)
    kept = load_file(tmp_path / "states" / "a.safetensors")
    del kept["ids"]  # of which text it is, nobody knows
    save_file(kept, tmp_path / "states" / "a.safetensors")
    with pytest.raises(UsageError, match="another text"):
        texts.of("a", TEXT, drafter)


@pytest.mark.parametrize("behind", [0, 3])
def test_guesses_are_those_of_a_device_whose_records_end_there(
    known: Known, chains: trained.Chains, behind: int
) -> None:
    if behind and known.source.spec.borrowed:
        pytest.skip("a replay makes rows of borrowed layers without any record")
    for place in range(PROMPT + behind, len(TEXT) - 1, 4):
        records = place - behind
        replay = Replay(chains.runner, known.trace, held=records)
        wanted = replay.guesses(place, place + 1, held=records)[0]
        assert next(chains.guesses(records, place)) == wanted


def test_guesses_of_one_step_are_those_of_several(chains: trained.Chains) -> None:
    """A draft along the text reads many tokens a step where none reads what another made."""
    whole = list(chains.guesses(PROMPT, PROMPT))
    assert whole == [next(chains.guesses(PROMPT, place)) for place in range(PROMPT, len(TEXT) - 1)]


def test_alone_agrees_with_what_a_bundle_says_of_its_drafter(
    known: Known, chains: trained.Chains
) -> None:
    alone = chains.right_alone(PROMPT)
    said = offline(chains.runner, [known.trace], cold=False)
    assert np.mean(alone[:1]) == said.agreement[0]
    assert np.mean(alone[4:8]) == pytest.approx(said.agreement[3])


class Remembers:
    """Keeps its steps."""

    def __init__(self, source: Source) -> None:
        self.runner = TorchRunner(source, 4)
        self.spec = source.spec
        self.steps: list[StepInput] = []

    def step(self, step: StepInput) -> StepOutput:
        self.steps.append(step)
        return self.runner.step(step)


def test_sampled_guesses_have_the_noise_of_the_place_that_they_are_for(known: Known) -> None:
    """So the target would choose, had it the drafter's logits."""
    sampling = SamplingSettings(temperature=2.0, seed=11)
    runner = Remembers(known.source)
    words = known.source.vocabulary
    sampled = trained.Chains(runner, known.trace, sampling, words)
    places = range(PROMPT, len(TEXT) - 1)
    for place in places:
        guess = next(sampled.guesses(place, place))
        step = runner.steps[-1]
        assert step.scale == 0.5
        assert step.noise is not None
        assert step.noise[0] == pytest.approx(gumbel(11, place + 1, words), rel=1e-5)
        assert guess == choose(runner.runner.parts(step).logits[0], sampling, place + 1)
    # Those of later steps, which have several tokens, have theirs.
    whole = list(sampled.guesses(PROMPT, PROMPT))
    assert whole == [next(sampled.guesses(PROMPT, place)) for place in places]


class Counts:
    """Guesses the number after each, but behind a multiple of 5 a zero."""

    def __init__(self, source: Source) -> None:
        self.runner = TorchRunner(source, 4)
        self.spec = source.spec

    def step(self, step: trained.StepInput) -> object:
        made = self.runner.step(step)
        for row, query in enumerate(step.queries):
            token = step.ids[query]
            made.top_tokens[row, 0] = token + 1 if token % 5 else 0
        return made


def test_a_draft_is_right_as_far_as_its_guesses_are(known: Known, chains: trained.Chains) -> None:
    text = list(range(1, len(TEXT) + 1))
    trace = replace(chains.text, ids=text)
    counting = trained.Chains(Counts(known.source), trace)  # type: ignore[arg-type]
    found = trained.figures_of(counting, 2, len(text))
    # Behind 3 come the right guesses 4 and 5; behind 5 a wrong one.
    assert found["reach"][:4] == [2, 1, 0, 4]
    assert found["late"] == [True, False, True]  # behind 11, 15, 19
    assert found["alone"][:3] == [True, True, False]
    in_step = trained.figures_of(counting, 2, len(text), in_step=True)
    assert in_step == {"reach": found["reach"]}


def answers(work: Path) -> Lines:
    lines = Lines(work / "answers.jsonl")
    for prompt in range(12):
        for temperature in ("0", "1"):
            ids = [20 + prompt + step % 7 for step in range(14)]
            lines.add(f"code/{prompt}@{temperature}", prompt=[5, 6, 7 + prompt], ids=ids)
    return lines


def held_prompts(work: Path) -> Iterator[str]:
    return (line["key"].partition("@")[0] for line in read(work / "held.jsonl"))


def test_no_prompt_is_both_learnt_and_held_out(tmp_path: Path) -> None:
    lines = answers(tmp_path)
    parts = trained.split(lines, longest=17, tokens=10**6)
    assert parts.train
    assert parts.held
    held = {tuple(line["ids"][:3]) for line in parts.held}
    assert held.isdisjoint(tuple(line["ids"][:3]) for line in parts.train)
    assert len(parts.held) == 2 * len(held)
    assert all(trained.is_held_out(line["key"].partition("@")[0]) for line in parts.held)
    assert len(parts.train) == 2 * (12 - len(held))
    assert trained.split(lines, longest=16, tokens=10**6) == ([], [])
    few = trained.split(lines, longest=17, tokens=40)
    assert len(few.train) == 2
    assert few.held == parts.held


def eagle_beside(target: str, out: Path) -> None:
    """An EAGLE-3 that was trained as the baselines are: it has no graph."""
    loaded = load_model(target)
    config = eagle3_config(loaded.facts, intermediate_size=32, heads=4, kv_heads=2)
    save_eagle3(new_eagle3(config, SharedWeights.of(loaded.model)), out)
    say_trained(out)


def say_trained(drafter: Path) -> None:
    """The summary that the baselines' training leaves beside a drafter."""
    summary = {"steps": 2, "processor_seconds_of_last_start": 3.0, "trained_parameters": 4}
    (drafter / "training.json").write_text(json.dumps(summary))


def test_guesses_without_records_are_counted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An independent drafter on a device: nothing is late, and it is never alone."""
    work = tmp_path / "work"
    path = save_tiny("qwen2", tmp_path / "target")
    answers(work)
    assert main(["split", str(work)]) == 0
    loaded = load_model(path)
    torch.manual_seed(3)
    out = tmp_path / "independent"
    config = AttentionConfig.for_target(loaded.facts, **NO_RECORDS)
    save_drafter(new_attention(config, loaded.model), out)
    say_trained(out)
    bundle = tmp_path / "bundle"
    words = ["build", "--target", str(path), "--drafter", str(out), "--out", str(bundle)]
    assert export([*words, "-v", "cpu-fp32"]) == 0
    guessed = Lines(work / "guesses.jsonl")
    for line in read(work / "held.jsonl"):
        answer = line["ids"][line["prompt_tokens"] :]
        guessed.add(line["key"], tokens=[[0]] * len(answer), logp=[[-0.1]] * len(answer))
    assert main(["trained", str(work), str(path), str(out), "--bundle", str(bundle)]) == 0
    found = Lines(work / "trained.jsonl").found
    for line in found.values():
        assert not {"late", "alone"} & set(line)
    device = LoadedGraph.load(Bundle.open(bundle)).drafter()
    for line in read(work / "held.jsonl"):
        ids = line["ids"]
        sampling = sampling_of_answer(line["key"])
        right = [
            run(device.guess(ids[: place + 1], sampling)) == ids[place + 1]
            for place in range(line["prompt_tokens"], len(ids) - 1)
        ]
        assert [reach > 0 for reach in found[f"independent {line['key']}"]["reach"]] == right
    capsys.readouterr()
    assert main(["tables", str(work)]) == 0
    printed = capsys.readouterr().out.splitlines()
    for temperature in (0, 1):
        begins = f"| code | {temperature} | independent |"
        (row,) = (line.split(" | ") for line in printed if line.startswith(begins))
        assert row[-2] == row[-1].removesuffix(" |") == row[4]
        assert "±" in row[4]


def of_states(folder: Path) -> tuple[StateDrafter, trained.KnownText]:
    """A new drafter of states, and what it reads of a text."""
    path = save_tiny("qwen2", folder / "target", num_hidden_layers=8)
    loaded = load_model(path)
    torch.manual_seed(3)
    config = StateDrafterConfig.for_target(loaded.facts)
    drafter = StateDrafter.new(config, SharedWeights.of(loaded.model)).eval()
    return drafter, trained.KnownTexts(str(path), folder / "states").of("a", TEXT, drafter)


def test_drafts_of_a_server_are_counted_with_the_newest_states(tmp_path: Path) -> None:
    """As far as a chain is right, whether it is asked for at once or grows."""
    drafter, text = of_states(tmp_path)
    shape = TreeShape.chain(10, min_score=-math.inf)
    drafting = drafter.drafting(slots=2, capacity=64)
    slot = drafting.open()
    drafting.observe(slot, TEXT[:PROMPT], text.part(0, PROMPT))
    (tree,) = drafting.draft([DraftRequest(slot, TEXT[PROMPT], shape, SamplingSettings())])
    own = [*TEXT[:PROMPT], *tree.tokens]  # a text that begins with the drafter's own draft
    for wrong in (3, 7, 10):
        ids = [*own[: PROMPT + 1 + wrong], (own[PROMPT + wrong] + 1) % 128, 5, 5]
        mine = replace(text.part(0, PROMPT), tokens=ids)
        drafts = trained.Drafts(drafting, mine)
        assert drafts.reach(PROMPT, 10) == min(wrong, 10)
        drafts.behind(PROMPT)


def test_a_server_drafts_at_every_place_with_the_states_of_all_before_it(tmp_path: Path) -> None:
    drafter, text = of_states(tmp_path)
    found = trained.drafts_along(drafter.drafting(slots=1, capacity=64), text, PROMPT, 5)
    assert len(found.tokens) == len(found.scores) == 5
    for at, place in enumerate(range(PROMPT - 1, PROMPT + 4)):
        drafting = drafter.drafting(slots=1, capacity=64)
        slot = drafting.open()
        drafting.observe(slot, TEXT[:place], text.part(0, place))
        request = DraftRequest(slot, TEXT[place], trained.SERVER_DRAFT, SamplingSettings())
        (tree,) = drafting.draft([request])
        assert found.tokens[at] == tree.tokens[1:]
        assert found.scores[at] == pytest.approx(tree.scores[1:], abs=1e-2)


def test_from_answers_to_a_table_of_a_trained_drafter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    target = str(save_tiny("qwen2", tmp_path / "target"))
    answers(work)
    assert main(["split", str(work)]) == 0
    out = tmp_path / "drafter"
    flags = ["--length", "32", "--batch", "1", "--steps", "2", "--quiet", "--device", "cpu"]
    assert train([target, "--data", str(work / "train.jsonl"), "--out", str(out), *flags]) == 0
    bundle = tmp_path / "bundle"
    words = ["build", "--target", target, "--drafter", str(out), "--out", str(bundle)]
    assert export([*words, "-v", "cpu-fp32"]) == 0
    guessed = Lines(work / "guesses.jsonl")
    for line in read(work / "held.jsonl"):
        answer = line["ids"][line["prompt_tokens"] :]
        tops = [[token if at % 2 else 0] for at, token in enumerate(answer)]
        guessed.add(line["key"], tokens=tops, logp=[[-0.1]] * len(answer))
    for _ in range(2):  # the second time nothing is left to do
        assert main(["trained", str(work), target, str(out), "--bundle", str(bundle)]) == 0
    made = json.loads((out / "training.json").read_text())
    made["result"]["steps"] = 3
    (out / "training.json").write_text(json.dumps(made))
    with pytest.raises(UsageError, match="of another drafter than"):
        main(["trained", str(work), target, str(out), "--bundle", str(bundle)])
    at_server = tmp_path / "eagle"
    eagle_beside(target, at_server)
    assert main(["trained", str(work), target, str(at_server)]) == 0
    for _ in range(2):
        drafts = ["drafts", str(work), target, str(out), "--texts", "2", "--tokens", "9"]
        assert main(drafts) == 0
    drafted = list(read(work / "drafts.jsonl"))
    assert len(drafted) == len(set(held_prompts(work)))
    assert all(len(line["tokens"]) == 9 and line["key"].endswith("@0") for line in drafted)
    found = Lines(work / "trained.jsonl")
    names = ["drafter", "eagle"]
    assert set(found.found) == {
        *names,
        *(f"{name} {key}" for name in names for key in guessed.found),
    }
    assert len(list(read(work / "trained.jsonl"))) == 2 * (len(guessed.found) + 1)
    assert "late" not in found.found[f"eagle {next(iter(guessed.found))}"]
    prompts = set(held_prompts(work))
    capsys.readouterr()
    assert main(["tables", str(work), "--out", str(tmp_path / "tables")]) == 0
    printed = capsys.readouterr().out
    # Of 13 guesses of the sibling 7 are right.
    for temperature in (0, 1):
        row = f"| code | {temperature} |"
        assert f"{row} the sibling | {len(prompts)} | 53.8 ± 0.0 %" in printed
        assert f"{row} eagle | {len(prompts)} |" in printed
    assert f"{2 * 17 * (12 - len(prompts))}; prompts of these texts" in printed
    assert (tmp_path / "tables" / "real_trained.md").exists()
