from __future__ import annotations

import json
import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import load_attention
from moa.drafters.attention.training import settings_of
from moa.process.memory import forget_peak
from moa.target.loading import load_model
from moa.training import options
from moa.training.cli import main
from moa.training.config import TrainingConfig
from moa.training.loop import Loop, fast_precision
from moa.training.masks import AnchorRule, Spacing, parse_spacings
from moa.tree import MASKED
from moa.worth import reached_at, worth
from testing.close import assert_rounded
from testing.ports import reserved_port
from testing.tiny import save_tiny
from tests.training.conftest import in_processes

SMALL = [
    "--length",
    "64",
    "--batch",
    "2",
    "--steps",
    "4",
    "--precision",
    "fp32",
    "--quiet",
    "--device",
    "cpu",
]


def train(target: Path, data: Path, out: Path, *more: str) -> int:
    return main([str(target), "--data", str(data), "--out", str(out), *SMALL, *more])


def parsed(*more: str) -> TrainingConfig:
    return options.parse(["target", "--data", "x", "--out", "y", *more])


def history(out: Path) -> list[float]:
    lines = (out / "checkpoint" / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_a_run_leaves_a_drafter_and_its_provenance(
    target: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert (
        train(
            target,
            chats,
            out,
            "--json",
            "--attention",
            "--tli",
            "1",
            "--final-norm",
            "--weights",
            "fp16",
        )
        == 0
    )
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 4
    assert result["tokens_per_s"] > 0
    assert result["peak_memory_mib"] > 0
    loaded = load_model(target)
    drafter = load_attention(out, loaded.model, loaded.facts)
    assert (drafter.config.tli, drafter.config.final_norm) == (1, True)
    assert {value.dtype for value in load_file(out / "model.safetensors").values()} == {
        torch.float16
    }
    record = json.loads((out / "training.json").read_text(encoding="utf-8"))
    assert record["target"]["weights_id"] == loaded.facts.weights_id
    assert record["data"]["data"][0]["file"] == chats.name
    assert record["settings"]["loop"]["steps"] == 4
    assert record["command"][0] == "moa-train"


KINDS = pytest.mark.parametrize("kind", [("--attention",), ()], ids=["attention", "states"])


def train_as(rank: int, port: int, target: Path, data: Path, out: Path, *more: str) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "RANK": str(rank),
    }
    os._exit(train(target, data, out, "--batch", "2", *more))


@KINDS
def test_two_processes_learn_what_one_does(
    target: Path, chats: Path, tmp_path: Path, kind: tuple[str, ...]
) -> None:
    assert train(target, chats, tmp_path / "one", "--batch", "4", *kind) == 0
    with reserved_port() as port:
        ranks = [
            partial(train_as, rank, port, target, chats, tmp_path / "two", *kind) for rank in (0, 1)
        ]
        assert in_processes(*ranks) == [0, 0]
    assert_rounded(history(tmp_path / "two"), history(tmp_path / "one"))
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-4, rtol=1e-3)


def train_until_the_third_step(target: Path, data: Path, out: Path, *more: str) -> None:
    one_step = Loop._one_step
    Loop._one_step = lambda self: one_step(self) if self.step < 3 else os.kill(os.getpid(), 9)  # type: ignore
    train(target, data, out, "--checkpoint-every", "1", *more)


@KINDS
def test_the_same_command_goes_on_where_it_was_killed_and_says_what_a_drafter_is_worth(
    target: Path,
    chats: Path,
    tmp_path: Path,
    kind: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert worth(reached_at(0.65)) == "about 2.7 tokens a round, 65% of drafts right"
    assert worth(reached_at(0.5, 0.4)) == "about 1.8 tokens a round, 50% of drafts right"
    assert worth(reached_at(0.9), 10_000).endswith(
        "90% of drafts right in the text of the last steps"
    )
    assert "WARNING: it may know these 9,999 tokens by heart" in worth(reached_at(0.9), 9_999)
    assert train(target, chats, tmp_path / "whole", *kind) == 0
    assert in_processes(
        partial(train_until_the_third_step, target, chats, tmp_path / "out", *kind)
    ) == [-9]
    assert len(history(tmp_path / "out")) == 3
    assert train(target, chats, tmp_path / "out", *kind) == 0
    said = capsys.readouterr().out
    assert "tokens a round" in said
    assert ("WARNING: below 1.5" in said) == bool(kind), (
        "four steps make a drafter where least squares do"
    )
    assert history(tmp_path / "out") == history(tmp_path / "whole")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "whole")]
    assert weights[0] == weights[1]


def test_the_papers_published_layout_is_a_start(target: Path, chats: Path, tmp_path: Path) -> None:
    published = tmp_path / "published"
    assert train(target, chats, published, "--attention", "--steps", "1") == 0
    ours = AttentionConfig.read(published)
    unknown_to_the_paper = (
        "target_layers",
        "target_kv_heads",
        "tli",
        "final_state",
        "use_lsa",
        "use_ca",
    )
    values = {k: v for k, v in vars(ours).items() if k not in unknown_to_the_paper}
    values |= {
        "model_type": "moa_spec",
        "architectures": ["MOASpec"],
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
    }
    (published / "config.json").write_text(json.dumps(values), encoding="utf-8")
    weights = {k: v.bfloat16() for k, v in load_file(published / "model.safetensors").items()}
    save_file(weights, published / "model.safetensors")
    out = tmp_path / "out"
    assert (
        train(target, chats, out, "--init", str(published), "--learning-rate", "1e-9", "--tli", "1")
        == 0
    )
    for name, value in load_file(out / "model.safetensors").items():
        torch.testing.assert_close(value, weights[name].float(), atol=1e-5, rtol=0)


def test_generated_answers_are_what_is_learnt(target: Path, chats: Path, tmp_path: Path) -> None:
    flags = ("--generate", "--max-new-tokens", "8")
    assert train(target, chats, tmp_path, *flags, "--generate-only") == 0
    assert not (tmp_path / "checkpoint").exists()
    assert train(target, chats, tmp_path, *flags) == 0
    about = json.loads((tmp_path / "data" / "about.json").read_text(encoding="utf-8"))
    assert about["answers"]["max_new_tokens"] == 8


def test_a_dry_run_measures_and_leaves_nothing(
    target: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert (
        train(target, chats, out, "--dry-run", "--json", "--gradient-checkpointing", "--paper") == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"]["target"] > found["parameters"]["drafter"] > 0
    assert found["estimated_seconds"] > 0
    assert found["tokens"] > found["wanted_tokens"] > 0
    assert not out.exists()


def test_steps_that_would_take_minutes_are_measured_by_smaller_ones(
    target: Path,
    chats: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moa.training.cli.DRY_SECONDS", 0.0)
    if not forget_peak():
        pytest.skip("this system does not let a peak begin anew")
    rows: list[int] = []
    trial = Loop.trial

    def counted(loop: Loop, count: int) -> float:
        rows.append(count)
        return trial(loop, count)

    monkeypatch.setattr(Loop, "trial", counted)
    words = ("--dry-run", "--json", "--batch", "64", "--device", "cpu")
    assert train(target, chats, tmp_path / "out", *words) == 0
    found = json.loads(capsys.readouterr().out)
    assert max(rows) == 2
    assert found["tokens_per_s"] > 0
    assert found["peak_memory_mib"] > 0
    assert not (tmp_path / "out").exists()


def test_the_paper_preset_gives_way_to_flags() -> None:
    config = parsed("--paper", "--spacing", "4-8", "--epochs", "1")
    losses = settings_of(config)
    loop = config.loop_settings(rows=100, world=2)
    assert (losses.loss_weight, losses.feature_weight, losses.staircase) == (0.1, 1.0, True)
    assert losses.anchors.spacings == (Spacing(4, 8, 1.0),)
    assert not losses.anchors.strict
    assert (loop.optimizer, loop.learning_rate, loop.steps) == ("adam", 6e-4, 3)


def test_a_cpu_that_only_emulates_bf16_trains_in_fp32(
    target: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for computes, expected in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(
            torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda it=computes: it, raising=False
        )
        assert fast_precision(torch.device("cpu")) == expected
    assert fast_precision(torch.device("cuda")) == "bf16"
    rest = ["--length", "64", "--steps", "1", "--quiet", "--device", "cpu"]
    assert main([str(target), "--data", str(chats), "--out", str(tmp_path / "out"), *rest]) == 0
    record = json.loads((tmp_path / "out" / "training.json").read_text(encoding="utf-8"))
    assert record["settings"]["loop"]["precision"] == "fp32"


@pytest.mark.parametrize(("rows", "steps"), [(128, 160), (1000, 610), (100_000, 6250)])
def test_little_data_is_seen_more_than_once(rows: int, steps: int) -> None:
    """1,500 chats are about 128 rows of 512: one pass would be 8 steps, and a dead drafter."""
    assert parsed().loop_settings(rows=rows, world=1).steps == steps


def test_spacings() -> None:
    assert parse_spacings("6-14:0.6,32-64:0.2") == AnchorRule(
        (Spacing(6, 14, 0.6), Spacing(32, 64, 0.2))
    )
    assert parse_spacings("8") == AnchorRule((Spacing(8, 8, 1.0),))
    assert parse_spacings("8,cold:0.25") == AnchorRule((Spacing(8, 8, 0.75),), cold=0.25)


def test_a_body_begins_as_the_model_that_it_is_made_of(
    target: Path, chats: Path, tmp_path: Path
) -> None:
    """Without records a small frozen model, of another width, family and head, behaves exactly as
    before. Rows whose documents are all cold teach its attention nothing, and end no run."""
    sibling = save_tiny("qwen2", tmp_path / "sibling", num_hidden_layers=2, hidden_size=32, seed=5)
    loaded = load_model(target)
    ids = torch.tensor([[7, 9, 30, 11]])
    causal = torch.full((4, 4), MASKED).triu(1)[None, None]
    flags = ["--attention", "--body", str(sibling), "--freeze-body"]
    assert train(target, chats, tmp_path / "out", *flags) == 0
    cold = ["--spacing", "6-14:0.01,cold:0.99", "--batch", "1"]
    assert train(target, chats, tmp_path / "cold", *flags, *cold) == 0
    drafter = load_attention(tmp_path / "out", loaded.model, loaded.facts)
    inputs = ids, torch.arange(4)[None], causal, drafter.empty_rows(ids)
    with torch.no_grad():
        alone = drafter.logits(drafter.features(*inputs)[0])
        torch.testing.assert_close(
            alone, load_model(sibling).model(ids).logits, atol=1e-3, rtol=1e-3
        )
        records = [
            torch.randn(1, drafter.config.record_heads, 3, drafter.config.head_dim)
            for _ in range(2)
        ]
        informed = drafter.logits(drafter.features(*inputs, *records, torch.zeros(1, 1, 1, 3))[0])
    assert not torch.equal(informed, alone), "cross-attention adds what it has learnt"


# ---- user errors: one line each, exit code 2 ----------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(target: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Things that are wrong in one way each."""
    root = tmp_path_factory.mktemp("broken")
    found = {
        name: root / name
        for name in ("no_files", "drafter", "foreign_drafter", "empty_drafter", "stranger")
    }
    for name, content in {"empty": b"", "torn": b'{"text": "abc', "short": b'{"text": ""}'}.items():
        found[name] = root / f"{name}.jsonl"
        found[name].write_bytes(content)
    found["binary"] = root / "binary.txt"
    found["binary"].write_bytes(b"\xff\xfe\x00\x80")
    found["no_template"] = save_tiny("llama", root / "no_template")
    found["two_layers"] = save_tiny("llama", root / "two_layers", num_hidden_layers=2)
    found["other_tokenizer"] = save_tiny("llama", root / "other_tokenizer", vocab_size=120)
    assert train(target, chats, found["drafter"], "--attention", "--steps", "1") == 0
    shutil.copytree(found["drafter"], found["foreign_drafter"])
    config = found["foreign_drafter"] / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text(encoding="utf-8")) | {"hidden_size": 128})
    )
    for name in ("no_files", "empty_drafter", "stranger"):
        found[name].mkdir()
    shutil.copy(target / "model.safetensors", found["stranger"])
    return found


BAD_INPUTS: dict[str, tuple[list[str], str]] = {
    "no target": (["gone/folder/of/target"], "no model at"),
    "no chat template": (["{no_template}"], "no chat template"),
    "no data file": (["{target}", "--data", "gone.jsonl"], "no training data at gone.jsonl"),
    "an empty file": (["{target}", "--data", "{empty}"], "hold nothing to learn"),
    "an empty text": (["{target}", "--data", "{short}"], "hold nothing to learn"),
    "a torn line": (["{target}", "--data", "{torn}"], "torn.jsonl:1: not valid JSON"),
    "a binary file": (["{target}", "--data", "{binary}"], "not UTF-8"),
    "a folder without data": (["{target}", "--data", "{no_files}"], "holds no file named"),
    "an unknown flag": (["{target}", "--bogus"], "there is no flag --bogus"),
    "no steps": (["{target}", "--steps", "0"], "steps must be at least 1"),
    "a seed below 0": (["{target}", "--seed", "-1"], "seed must be within 0..2147483647, not -1"),
    "a seed too large": (["{target}", "--seed", str(2**70)], "seed must be within 0..2147483647"),
    "no new tokens": (["{target}", "--max-new-tokens", "0"], "--max-new-tokens must be 1 or more"),
    "no batch": (["{target}", "--batch", "0"], "batch must be at least 1"),
    "a short row": (["{target}", "--length", "2"], "--length must be within 16..512"),
    "a row beyond the target": (
        ["{target}", "--length", "1024"],
        "--length must be within 16..512",
    ),
    "too many borrowed layers": (["{target}", "--attention", "--tli", "5"], "tli must be 0..4"),
    "too few layers to read states of": (["{two_layers}"], "too few layers"),
    "heads that do not divide": (["{target}", "--attention", "--heads", "3"], "must divide"),
    "a spacing of words": (
        ["{target}", "--attention", "--spacing", "few"],
        "'few' is not LOW-HIGH",
    ),
    "shares above one": (
        ["{target}", "--attention", "--spacing", "6-14:0.9,32-64:0.9"],
        "more than 1",
    ),
    "a learning rate below zero": (
        ["{target}", "--learning-rate", "-1"],
        "learning_rate must be above 0",
    ),
    "cold documents beyond all": (
        ["{target}", "--attention", "--spacing", "6-14:0.9,cold:0.5"],
        "more than 1",
    ),
    "a body beside --init": (
        ["{target}", "--init", "{drafter}", "--body", "{target}"],
        "brings its own body",
    ),
    "a frozen body of nothing": (
        ["{target}", "--attention", "--freeze-body"],
        "--freeze-body is for --body MODEL",
    ),
    "a body of another tokenizer": (
        ["{target}", "--attention", "--body", "{other_tokenizer}"],
        "another tokenizer",
    ),
    "fewer layers than the body's": (
        ["{target}", "--attention", "--body", "{target}", "--layers", "2"],
        "layers must be 4",
    ),
    "a loss that is no number": (
        ["{target}", "--learning-rate", "1e30", "--optimizer", "adam"],
        "the loss is nan",
    ),
    "no such device": (["{target}", "--device", "abacus"], "cannot use device 'abacus'"),
    "no drafter to start from": (
        ["{target}", "--init", "{empty_drafter}"],
        "config.json is missing",
    ),
    "a drafter of another target": (
        ["{target}", "--init", "{foreign_drafter}"],
        "made for another target",
    ),
    "a shape beside --init": (
        ["{target}", "--init", "{drafter}", "--heads", "2"],
        "brings its own shape",
    ),
    "a checkpoint of other flags": (
        ["{target}", "--attention", "--out", "{drafter}"],
        "is of a run with steps 1, not 4",
    ),
    "a checkpoint of another kind": (
        ["{target}", "--out", "{drafter}", "--steps=1"],
        "with kind attention, not states",
    ),
    "a checkpoint of other data": (
        ["{target}", "--out", "{drafter}", "--data", "{short}"],
        "run on other data",
    ),
    "an out that is a file": (["{target}", "--out", "{empty}"], "is a file"),
    "an out of somebody else's": (["{target}", "--out", "{stranger}"], "not of a run of moa-train"),
    "an out that cannot be": (["{target}", "--out", "/proc/drafter"], "cannot write to"),
    "too long an answer": (
        ["{target}", "--generate", "--max-new-tokens", "500"],
        "and with --length within",
    ),
    "a negative temperature": (
        ["{target}", "--generate", "--temperature", "-1"],
        "temperature must be",
    ),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_a_mistake_is_one_clear_line(
    case: str,
    target: Path,
    chats: Path,
    broken: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given, message = BAD_INPUTS[case]
    arguments = [part.format(target=target, **broken) for part in given]
    defaults = ["--data", str(chats), "--out", str(tmp_path / "out"), *SMALL]
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"^2$"):
        raise SystemExit(main([*defaults, *arguments]))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"moa-train: error: [^\n]+\n", captured.err), captured.err
    assert message in captured.err


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """What a full disk is to a program: its writes fail once a file has this size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_one_clear_line_and_costs_only_what_came_after_the_last_checkpoint(
    target: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with largest_file(3_000):
        assert train(target, chats, out) == 2
    assert re.fullmatch(r"moa-train: error: .*File too large.*\n", capsys.readouterr().err)
    assert train(target, chats, tmp_path / "whole") == 0
    write = Loop._write_checkpoint

    def fails_later(self: Loop, fresh: Path) -> None:
        with largest_file(2**30 if self.step < 2 else 100_000):
            write(self, fresh)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_write_checkpoint", fails_later)
        assert train(target, chats, out, "--checkpoint-every", "1") == 2
    assert "moa-train: error: cannot write the checkpoint of step" in capsys.readouterr().err
    assert len(history(out)) == 1
    assert train(target, chats, out) == 0
    assert history(out) == history(tmp_path / "whole")
