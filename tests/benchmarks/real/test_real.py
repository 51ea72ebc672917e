"""The verbs of `benchmarks.real` on a tiny pair: what is measured is what device and target do."""

from __future__ import annotations

import functools
import gzip
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.real import (
    acceptance,
    assisted,
    cuts,
    exact,
    faults,
    forwards,
    links,
    mixture,
    peers,
    serving,
)
from benchmarks.real.__main__ import main
from benchmarks.real.faults import Restarted
from benchmarks.real.lines import Lines, read
from benchmarks.real.passing import code_of, passes
from benchmarks.real.prompts import Prompt, all_prompts, as_line
from benchmarks.real.recorded import (
    RecordedDrafting,
    RecordedDrafts,
    RecordedGraph,
    RecordedTarget,
    Text,
)
from benchmarks.real.sibling import Sibling
from benchmarks.real.writing import Task, write
from export.cli import main as export
from moa import demo
from moa.bundle import Bundle
from moa.drafters.contract import DraftRequest
from moa.errors import MoaError, UsageError, run_cli
from moa.graph.drafter import OnnxDrafter, run
from moa.graph.load import LoadedGraph
from moa.sampling import SamplingSettings
from moa.target.contract import LoadOptions
from moa.target.generate import generate
from moa.target.registry import open_target
from moa.target.torch_target import Target
from moa.tree import TreeShape
from testing.gguf_tiny import need_llama
from testing.gguf_tiny import save as save_gguf
from testing.tiny import save_tiny, tiny

SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}
_LONG = {"max_position_embeddings": 2048}
TEXT = [20, 31, 42, 53, 64, 75, 86, 97]
PROBLEM = {
    "task_id": "HumanEval/7",
    "prompt": "def add(a, b):\n    '''Sum.'''\n",
    "entry_point": "add",
    "test": "def check(f):\n    assert f(2, 3) == 5\n",
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target, and the bundle of a tiny sibling."""
    folder = tmp_path_factory.mktemp("real")
    save_tiny("llama", folder / "target", **_LONG)
    template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    (folder / "target" / "chat_template.jinja").write_text(template)
    save_tiny("llama", folder / "small", seed=5, **SMALL, **_LONG)
    words = ["setup", str(folder / "target"), "--sibling", str(folder / "small")]
    assert export([*words, "--out", str(folder / "out"), "-v", "cpu-fp32"]) == 0
    return folder


def device_alone(bundle: Path, ids: list[int], count: int, sampling: SamplingSettings) -> list[int]:
    drafter = LoadedGraph.load(Bundle.open(bundle)).drafter()
    log = list(ids)
    for _ in range(count):
        log.append(run(drafter.guess(log, sampling)))
    return log[len(ids) :]


def test_an_experiment_that_is_ended_ends_its_verifiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One went on for an hour, with 1.6 GB."""
    server = faults.Restarted(flags=[])

    def killed(*_: object) -> None:
        with server.running():
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()

    monkeypatch.setattr("benchmarks.real.__main__._tables", killed)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        main(["tables", str(tmp_path)])
    assert server.process is not None
    assert server.process.returncode == -signal.SIGKILL
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_verifier_that_is_not_heard_of_yet_ends_with_its_experiment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One was loading its target: it went on, with 9 GB."""
    server = faults.Restarted(flags=[])

    class Loading:
        """An experiment is ended while it waits for the verifier's address."""

        returncode = 0

        def __init__(self, *_: object, **__: object) -> None:
            self.pid = 0
            self.stdout = self

        def readline(self) -> str:
            raise KeyboardInterrupt

        def communicate(self) -> None:
            """As if it had ended."""

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))

    killed: list[tuple[int, int]] = []
    monkeypatch.setattr("benchmarks.real.faults.subprocess.Popen", Loading)
    monkeypatch.setattr("benchmarks.real.faults.os.kill", kill)
    with pytest.raises(KeyboardInterrupt), server.running():
        pytest.fail("it was not started")
    assert killed == [(0, signal.SIGKILL)]


def test_answers_of_a_folder_go_through_faults_in_float32(
    pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A GGUF file was all that could be asked and could judge."""
    prompts = [
        Prompt("chat", name, [{"role": "user", "content": "a b c d"}])
        for name in ("31", "2")  # drawn by name: the verifier is killed, the connection is cut
    ]
    prompts.append(Prompt("chat", "3", [{"role": "user", "content": "longer than --prompt"}]))
    (tmp_path / "prompts.jsonl").write_text("".join(as_line(one) + "\n" for one in prompts))
    flags: list[str] = []
    of = faults.Restarted.of

    def noted(target: str, some: list[str], *, threads: int) -> Restarted:
        flags.extend(some)
        return of(target, some, threads=threads)

    monkeypatch.setattr(faults.Restarted, "of", noted)
    target = str(pair / "target")
    run = ["faults", str(tmp_path), target, "--bundle", str(pair / "out" / "bundle")]
    run += ["--server-drafter", f"independent:{target}", "--answers", "9"]
    run += ["--prompt", "8"]
    assert main([*run, "--tokens", "8", "--threads", "1"]) == 0
    assert "--dtype=float32" in flags
    assert faults.options_of(target, threads=1).dtype == "float32"
    asked = list(read(tmp_path / "faults.jsonl"))
    assert [(line["draft"], line["temperature"], line["fault"]) for line in asked] == [
        ("server", 0.0, "kill"),
        ("server", 1.0, "cut"),
    ]
    assert all(line["verified"] for line in asked)
    assert all(line["same"] for line in read(tmp_path / "faults_judged.jsonl"))
    capsys.readouterr()
    assert main(["tables", str(tmp_path), "--out", str(tmp_path), "--suffix", "float32"]) == 0
    assert "| **all** |  | 2 | 1 | 1 | 2 | 2 |" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.glob("real_*")) == [
        "real_faults_float32.json",
        "real_faults_float32.md",
    ]


def test_branches_write_what_a_device_writes_from_there(pair: Path) -> None:
    sibling = Sibling(pair / "out" / "bundle")
    starts = [3, 5, 8]
    made = sibling.continuations(TEXT, starts, lambda log: len(log) >= 14)
    for start, ids in zip(starts, made, strict=True):
        alone = device_alone(pair / "out" / "bundle", TEXT[:start], len(ids), SamplingSettings())
        assert ids == alone
        assert len(ids) == 14 - start or ids[-1] in sibling.eos


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_along_a_text_are_those_of_a_device_that_has_it(
    pair: Path, temperature: float
) -> None:
    sampling = SamplingSettings(temperature=temperature, seed=3)
    bundle = pair / "out" / "bundle"
    found = Sibling(bundle).guesses(TEXT * 4, 4, sampling)
    assert len(found) == len(TEXT * 4) - 4
    for place, guesses in list(enumerate(found, 4))[::9]:
        assert guesses.tokens[:1] == device_alone(bundle, (TEXT * 4)[:place], 1, sampling)


def test_a_full_batch_writes_what_each_prompt_gets_alone(pair: Path) -> None:
    target = Target.load(pair / "target", slots=3, capacity=64)
    prompts = [TEXT[: 2 + n // 2] for n in range(5)]  # some share their prompt with a neighbour
    made: dict[str, tuple[list[int], str]] = {}
    tasks = [Task(str(n), ids, 6 + n) for n, ids in enumerate(prompts)]
    write(target, tasks, lambda task, ids, finish: made.update({task.key: (ids, finish)}))
    for n, ids in enumerate(prompts):
        (alone,) = generate(target, [ids], 6 + n)
        assert made[str(n)] == (alone.ids[alone.prompt :], alone.finish)
    assert target.cache.free == 3


def test_a_line_that_a_kill_has_cut_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    Lines(path).add("a", n=1)
    path.write_bytes(path.read_bytes() + b'{"key": "b", "n"')
    lines = Lines(path)
    assert "a" in lines
    assert "b" not in lines
    lines.add("b", n=2)
    assert [line["n"] for line in read(path)] == [1, 2]


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.", True),
        ("```python\ndef add(a, b):\n    return a + b", True),
        ("def add(a, b):\n    return a + b", True),
        ("```python\ndef add(a, b):\n    return a - b\n```", False),
        ("```python\ndef add(a, b):\n    while True: x = ' ' * 10**10\n```", False),
        ("no code \0", False),
    ],
)
def test_only_what_passes_the_tests_is_right(answer: str, right: bool) -> None:
    assert passes(PROBLEM, answer) == right


def test_the_first_block_is_the_code() -> None:
    assert code_of("a\n```\nx\n```\nb\n```\ny\n```") == "x"


def test_rounds_end_behind_the_first_wrong_guess() -> None:
    right = [True, True, False, True, True, True]
    assert acceptance.rounds(right, 4) == [3, 3]
    assert acceptance.rounds(right, 1) == [2, 1, 2, 1]
    assert acceptance.rounds([False] * 3, 4) == [1, 1, 1]


def test_a_cut_behind_the_answers_end_costs_nothing_and_a_client_alone_has_only_those(
    tmp_path: Path,
) -> None:
    known = Lines(tmp_path / "answers.jsonl")
    judged = Lines(tmp_path / "judged.jsonl")
    for name, length in (("1", 5), ("2", 50)):
        known.add(f"code/{name}@0", prompt=[1], ids=[2] * length, finish="eos")
        judged.add(f"target/code/{name}@0", right=True, tokens=length)
        judged.add(f"small/0/code/{name}@0", right=False, tokens=3)
    judged.add("small/8/code/2@0", right=False, tokens=9)
    found = cuts.figures(known, judged, cuts=(0, 8))
    assert found["client"] == {"0": 0, "8": 1}
    assert found["ways"]["small"]["8"] == {"right": 1, "of": 2}
    assert "| 0.0 ± 0.0 % | 50.0 ± 35.4 % | 100.0 ± 0.0 % |" in cuts.tables(found)


def test_a_drafter_that_reads_the_target_writes_by_itself_behind_the_prompt_alone(
    tmp_path: Path,
) -> None:
    bundle = demo.paths().bundle
    known = Lines(tmp_path / "answers.jsonl")
    known.add("code/1@0", prompt=[4, 5, 6], ids=[7] * 9, finish="eos")
    assert main(["cuts", str(tmp_path), "--bundle", str(bundle), "--after", "0", "8"]) == 0
    (line,) = read(tmp_path / "cuts.jsonl")
    assert (line["key"], line["after"]) == ("bundle/0/code/1@0", 0)
    ids = line["ids"]
    assert ids == device_alone(bundle, [4, 5, 6], len(ids), SamplingSettings())


def test_published_data_becomes_prompts(tmp_path: Path) -> None:
    human = tmp_path / "HumanEval.jsonl.gz"
    human.write_bytes(gzip.compress(json.dumps(PROBLEM).encode() + b"\n"))
    bench = tmp_path / "question.jsonl"
    questions = [
        {"question_id": 1, "category": "writing", "turns": ["Write."]},
        {"question_id": 2, "category": "summarization", "turns": ["Summarize: x"]},
        {"question_id": 3, "category": "rag", "turns": ["?"]},
    ]
    bench.write_text("".join(json.dumps(one) + "\n" for one in questions))
    tools = tmp_path / "BFCL_v4_multiple.json"
    function = {"name": "f", "parameters": {"type": "dict", "properties": {"x": {"type": "float"}}}}
    line = {"id": "m0", "question": [[{"role": "user", "content": "?"}]], "function": [function]}
    tools.write_text(json.dumps(line) + "\n")
    found = {prompt.key: prompt for prompt in all_prompts([human, bench, tools], 2)}
    assert sorted(found) == ["chat/1", "code/7", "english/2", "json/0", "json/1", "tools/m0"]
    parameters = found["tools/m0"].tools[0]["function"]["parameters"]
    assert parameters == {"type": "object", "properties": {"x": {"type": "number"}}}


def test_from_answers_to_tables_and_again_nothing_is_left_to_do(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    bundle = str(pair / "out" / "bundle")
    human = tmp_path / "HumanEval.jsonl"
    human.write_text(json.dumps(PROBLEM) + "\n")
    prompt = Prompt("code", "7", [{"role": "user", "content": "ab"}])
    (work / "prompts.jsonl").write_text(json.dumps(vars(prompt)) + "\n")
    flags = ["--temperatures", "0", "1", "--tokens", "20", "--dtype", "float32"]
    for _ in range(2):
        assert main(["answers", str(work), str(pair / "target"), *flags]) == 0
        words = ["--bundle", bundle, "--humaneval", str(human), "--after", "0", "8"]
        assert main(["cuts", str(work), *words]) == 0
        assert main(["guesses", str(work), "--bundle", bundle]) == 0
    assert len(list(read(work / "guesses.jsonl"))) == 2
    capsys.readouterr()
    assert main(["tables", str(work), "--out", str(tmp_path / "tables")]) == 0
    printed = capsys.readouterr().out
    assert "| alone, cpu-fp32 |" in printed
    assert "| code | 1 | 1 |" in printed
    assert (tmp_path / "tables" / "real_cuts.md").exists()


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (("guesses",), "has guesses along answers that"),
        (("judged",), "has verdicts on answers that"),
        (("answers", "judged/8"), "has no verdict on answers of"),
    ],
)
def test_tables_of_results_without_their_answers_end_in_one_line(
    there: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was the traceback of a KeyError, or a table of nothing."""
    facts: dict[str, dict[str, Any]] = {
        "answers": {"prompt": [5], "ids": [9], "finish": "eos"},
        "guesses": {"tokens": [[9]], "logp": [[-0.1]]},
        "judged": {"right": True, "tokens": 1},
    }
    for one in there:
        file, _, name = one.partition("/")
        key = f"code/{name or 7}@0"
        lines = Lines(tmp_path / f"{file}.jsonl")
        lines.add(f"target/{key}" if file == "judged" else key, **facts[file])
    tables = functools.partial(main, ["tables", str(tmp_path)])
    assert run_cli("benchmarks.real", tables) == 2
    told = capsys.readouterr()
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert said in line
    assert ": 1, such as code/" in line


def test_a_recorded_pair_says_and_guesses_what_was_recorded(pair: Path) -> None:
    guesses = [[9, 1], [11, 2], [13, 3], [14, 4]]
    logp = [[-0.1, -3.0]] * 4
    text = Text("code", [5, 6, 7], [9, 11, 12, 14], guesses, logp)
    other = Text("code", [5, 6, 8], [20, 21, 22, 23], guesses, logp)
    bundle = pair / "out" / "bundle"
    target = RecordedTarget(bundle, [other, text], seconds=0.0, slots=2, capacity=32)
    made: dict[str, list[int]] = {}
    tasks = [Task("a", text.prompt, 4), Task("b", other.prompt, 4)]
    write(target, tasks, lambda task, ids, _: made.update({task.key: ids}))
    assert made == {"a": text.answer, "b": other.answer}
    drafter = OnnxDrafter(RecordedGraph([other, text], 0.0, 0.0), vocab_size=128)
    shape = TreeShape.chain(3)
    assert run(drafter.draft(text.prompt, shape, SamplingSettings())).tokens == [7, 9, 11, 13]
    drafting = RecordedDrafting([other, text], level_seconds=0.0)
    slot = drafting.open()
    drafting.read[slot] = text.prompt[:-1]
    (tree,) = drafting.draft([DraftRequest(slot, 7, shape, SamplingSettings())])
    assert tree.tokens == [7, 9, 11, 13]
    drafts = [[9, 12], [11], [], [14]]
    scores = [[-0.5, -3.0], [-0.2], [], [-0.1]]
    drafted = [other, replace(text, drafts=drafts, scores=scores)]
    others = RecordedDrafts(drafted, level_seconds=0.0)
    slot = others.open()
    others.read[slot] = text.prompt[:-1]
    made_trees = []
    for pending, wanted in ((7, shape), (7, replace(shape, least=-1.0)), (9, shape), (11, shape)):
        if pending != 7:
            others.read[slot] = text.ids[: text.ids.index(pending)]
        (tree,) = others.draft([DraftRequest(slot, pending, wanted, SamplingSettings())])
        made_trees.append(tree.tokens)
    assert made_trees == [[7, 9, 12], [7, 9], [9, 11], [11]]


def test_every_way_over_a_link_gives_the_recorded_text(pair: Path, tmp_path: Path) -> None:
    known = Lines(tmp_path / "answers.jsonl")
    guessed = Lines(tmp_path / "guesses.jsonl")
    for number in range(2):
        ids = [10 + number, *range(20, 30)]
        known.add(f"code/{number}@0", prompt=[5, 6 + number], ids=ids, finish="length")
        guessed.add(f"code/{number}@0", tokens=[[i, 3] for i in ids], logp=[[-0.1, -4.0]] * 11)
    drafts = [[token] for token in (10, *range(20, 29))]
    Lines(tmp_path / "drafts.jsonl").add("states code/0@0", tokens=drafts, scores=[[-0.1]] * 10)
    usual = links.Settings(prompts=2, tokens=10, links=("wifi",), steps_ms=(10.0,), step_ms=1.0)
    ways = {*links.WAYS, "server-drafted, states"}
    # Of the drafter's drafts along the second text nothing is known.
    for drafter, texts_of, names in (("", 2, set(links.WAYS)), ("states", 1, ways)):
        work = tmp_path / (drafter or "usual")
        work.mkdir()
        for name in ("answers", "guesses", "drafts"):
            shutil.copy(tmp_path / f"{name}.jsonl", work)
        links.measure(work, pair / "out" / "bundle", replace(usual, drafter=drafter))
        lines = Lines(work / "links.jsonl")
        result = links.figures(lines)
        assert {run["way"] for run in result["runs"]} == names
        (cell,) = lines.found.values()
        for run_ in cell["runs"].values():
            assert [len(gaps) for gaps in run_["gaps_ms"]] == [9] * texts_of
        said = links.tables(result)
        assert "auto" in said
        assert "99th percentile" in said
    with pytest.raises(MoaError, match="no greedy answers"):
        links.measure(tmp_path, pair / "out" / "bundle", replace(usual, drafter="another"))


def test_a_reader_waits_for_the_first_token_and_for_the_slowest_ones() -> None:
    waits = links._waits([100.0, 300.0], [[0.0] * 90 + [50.0] * 10, [0.0] * 100])
    assert waits["first_ms"] == 200.0
    assert waits["first_ms_se"] == 100.0
    assert waits["p95_ms"] < 50.0  # ten of 200 gaps
    assert waits["p99_ms"] == 50.0
    assert waits["p95_ms_se"] > 0  # one text alone has none of them
    assert waits["texts"] == 2


def test_a_fixed_shape_gives_one_text_alone_and_among_others(tmp_path: Path) -> None:
    need_llama()
    file = save_gguf(tiny("qwen2"), tmp_path / "tiny.gguf")
    out = Lines(tmp_path / "exact.jsonl")
    tasks = [
        Task(f"{n}@{t:g}", TEXT[: 3 + n], 9, SamplingSettings(temperature=t, seed=n))
        for n in range(4)
        for t in (0.0, 1.0)
    ]
    shape = exact.SHAPES[0]
    target = open_target(str(file), LoadOptions(slots=4, capacity=64))
    exact.alone(target, shape, tasks, out)
    exact.mixed(target, shape, tasks, out, sessions=3)
    found = exact.figures(out)
    assert [(run["answers"], run["differ"]) for run in found["runs"]] == [(4, 0), (4, 0)]
    assert all(len(line["ids"]) == 9 for line in out.found.values())
    # Answers to other parts of the prompts, or longer ones, are not compared with these.
    for other in (replace(tasks[0], ids=tasks[0].ids[1:]), replace(tasks[0], tokens=10)):
        with pytest.raises(UsageError, match="answers with other --prompt"):
            exact.alone(target, shape, [other], out)


def test_every_way_to_draft_is_asked_and_the_server_only_where_it_can() -> None:
    tasks = [Task(f"chat/{number}@0", [1], 8, SamplingSettings()) for number in range(200)]
    with_server = [faults.drafting_of(task, server=True) for task in tasks]
    assert set(with_server) == set(faults.DRAFTS)
    assert all(with_server.count(draft) > 30 for draft in faults.DRAFTS)
    without = {faults.drafting_of(task, server=False) for task in tasks}
    assert without == set(faults.DRAFTS) - {"server"}


def test_peers_answer_the_same_prompts_and_again_only_what_is_missing(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_llama()
    prompts = [Prompt("chat", f"p{n}", [{"role": "user", "content": "ab" * n}]) for n in (2, 3)]
    (tmp_path / "prompts.jsonl").write_text("".join(as_line(one) + "\n" for one in prompts))
    files = [
        str(save_gguf(tiny("llama", **_LONG), tmp_path / "big.gguf")),
        str(save_gguf(tiny("llama", seed=5, **SMALL, **_LONG), tmp_path / "small.gguf")),
    ]
    words = ["peers", str(tmp_path), *files, "--bundle", str(pair / "out" / "bundle")]
    words += ["--tokens", "12", "--dtype", "float32"]
    assert main([*words, "--prompts", "1"]) == 0
    before = (tmp_path / "peers.jsonl").read_text()
    for _ in range(2):
        assert main([*words, "--prompts", "2", "--assisted", "2"]) == 0
    lines = list(read(tmp_path / "peers.jsonl"))
    assert len(lines) == len(peers.STEPS) + 1 + 2 * 2
    assert (tmp_path / "peers.jsonl").read_text().startswith(before)
    capsys.readouterr()
    assert main(["tables", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "Greedy answers of one core, 2 prompts" in shown
    assert "weights in float32, 2 of the prompts" in shown
    assert "In 2 of 2 answers the assisted text is the plain one." in shown


@pytest.mark.parametrize("helper", ["itself", "another"])
def test_transformers_answers_are_its_own_whoever_assists_and_the_prompt_is_read_before(
    tmp_path: Path, helper: str
) -> None:
    big = save_tiny("qwen2", tmp_path / "big")
    seed = 0 if helper == "itself" else 5
    small = save_tiny("qwen2", tmp_path / "small", seed=seed)
    out = Lines(tmp_path / "peers.jsonl")
    assisted.speeds(big, small, [("a@0", TEXT)], out, tokens=20, threads=1, dtype="float32")
    model: Any = tiny("qwen2")
    model.generation_config.eos_token_id = None
    wanted = model.generate(torch.tensor([TEXT]), max_new_tokens=20, do_sample=False)
    (line,) = assisted.answers(out)
    plain, helped = line["ways"].values()
    assert plain["ids"] == helped["ids"] == wanted[0, len(TEXT) :].tolist()
    # Each forward is of what is new: the last token of the prompt first, and the drafts behind it.
    assert plain["forwards"] == [1] * 20
    assert (len(helped["forwards"]) < 20) == (helper == "itself")
    assert plain["draft"] == 0 < helped["draft"]


def test_forwards_are_timed_beside_llama_cpps_own_and_again_only_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_llama()
    file = save_gguf(tiny("llama", max_position_embeddings=2048), tmp_path / "tiny.gguf")
    assert main(["forwards", str(tmp_path), str(file)]) == 0
    lines = list(read(tmp_path / "forwards.jsonl"))
    assert len(lines) == len(forwards.SHAPES) + 2  # the memory of each of the two
    assert all(line["ours"] > 0 < line["llama.cpp"] for line in lines if "sessions" in line)
    assert main(["forwards", str(tmp_path), str(file)]) == 0
    assert len(list(read(tmp_path / "forwards.jsonl"))) == len(lines)
    capsys.readouterr()
    assert main(["tables", str(tmp_path)]) == 0
    assert "times llama.cpp's own call" in capsys.readouterr().out


def _restarted(more: str, flags: list[str]) -> Restarted:
    return Restarted([*flags, more])


def test_a_prompt_beside_an_answer_and_clients_that_come_and_go_are_told_of(
    pair: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(serving, "_SAMPLE", 0.2)
    prompts = [
        Prompt("chat", f"p{n}", [{"role": "user", "content": f"word {n}"}]) for n in range(4)
    ]
    lines = "".join(as_line(prompt) + "\n" for prompt in prompts)
    (tmp_path / "prompts.jsonl").write_text(lines)
    target = str(pair / "target")
    bundle = ["--bundle", str(pair / "out" / "bundle"), "--threads", "0"]
    with monkeypatch.context() as patch:
        # Slow enough that tokens come one by one, also where this process seldom gets a core.
        slow = functools.partial(_restarted, "--emulate=100ms")
        patch.setattr(serving, "Restarted", slow)
        assert main(["beside", str(tmp_path), target, *bundle, "--prompt", "24"]) == 0
    (found,) = read(tmp_path / "beside.jsonl")
    assert found["prompt"] == 24
    assert found["tokens_beside"] >= 1
    # A longer run that was killed.
    killed = Lines(tmp_path / "crowd.jsonl")
    for name, second in (("start", 0.0), ("1", 500.0), ("2", 1000.0)):
        killed.add(f"1/{name}", second=second, megabytes=987654.0, answers=1)
    words = ["crowd", str(tmp_path), target, *bundle, "--clients", "3", "--minutes", "0.05"]
    assert main([*words, "--tokens", "8"]) == 0
    *_, end = read(tmp_path / "crowd.jsonl")
    assert end["answers"] >= 3
    assert (end["unverified"], end["short"], end["differ"]) == (0, 0, 0)
    capsys.readouterr()
    assert main(["tables", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "answers of 3 clients" in shown
    assert "987654" not in shown


def test_a_mixture_is_streamed_in_every_way_with_its_own_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_llama()
    model = tiny("qwen3_moe", norm_topk_prob=True, max_position_embeddings=1024)
    file = save_gguf(model, tmp_path / "tiny.gguf")
    out = Lines(tmp_path / "mixture.jsonl")
    mixture.measure(file, out, tokens=12, threads=1, chances=(0.0, 1.0))
    drafted = f"drafts of {mixture.WAYS[1].name.split()[-1]}"
    for chance in ("0.0", "1.0"):
        ways = out.found[chance]["ways"]
        assert ways["plain"]["guesses"] == 0 < ways[drafted]["guesses"]
        assert all(way["same"] == way["texts"] for way in ways.values())
    before = out.path.read_text()
    mixture.measure(file, out, tokens=12, threads=1, chances=(0.0, 1.0))
    assert out.path.read_text() == before
    other = save_gguf(model, tmp_path / "other.gguf", kind="F16")
    with pytest.raises(UsageError, match="of another file than other"):
        mixture.measure(other, out, tokens=12, threads=1)
    # Where every guess is right there are fewer rounds, and fewer guesses for the same text.
    wrong, right = (out.found[chance]["ways"][drafted]["guesses"] for chance in ("0.0", "1.0"))
    assert right < wrong
    assert main(["tables", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "times the better of the others" in shown
    assert "3, 3, 3 of 3" in shown
