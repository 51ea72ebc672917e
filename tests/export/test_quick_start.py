"""What `moa-edge up` plans: from headers alone, and for GGUF files without unpacking them."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch
from transformers import PreTrainedModel

from cloud_verifier.settings import Settings
from export import quick_start
from export.cli import main as export_main
from export.quick_start import main, plan_pair
from export.setup import Setup, make_setup_plan
from moa.bundle import MANIFEST
from moa.cli import up
from moa.errors import UsageError
from moa.gguf import reader
from moa.target import identity
from testing import gguf_tiny
from testing.tiny import save_tiny, tiny

SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def folders(place: Path) -> tuple[Path, Path]:
    """The folders of a target and a smaller model of its tokenizer."""
    return save_tiny("qwen2", place / "target"), save_tiny(
        "qwen2", place / "small", seed=5, **SMALL
    )


def files(place: Path) -> tuple[Path, Path]:
    """The same two as GGUF files."""
    pytest.importorskip("gguf")
    return (
        gguf_tiny.save(tiny("qwen2"), place / "target.gguf"),
        gguf_tiny.save(tiny("qwen2", **SMALL), place / "small.gguf"),
    )


def test_no_weight_of_a_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> Any:
        raise AssertionError("every byte of the weights is read")

    target, small = folders(tmp_path)
    pair = (str(target), str(small))
    monkeypatch.setattr("moa.target.identity.WeightsHash", read)
    plan = plan_pair(*pair)
    assert not plan["made"]
    assert plan["bundle"] == plan_pair(*pair)["bundle"]
    weights = small / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    changed = plan_pair(*pair)
    assert changed["bundle"] != plan["bundle"], "a file that has changed is another model"
    assert any(line.startswith("making it takes") for line in changed["lines"])
    made = Path(changed["bundle"])
    made.mkdir(parents=True)
    (made / MANIFEST).touch()
    assert not any(line.startswith("making it") for line in plan_pair(*pair)["lines"])


def test_a_second_start_reads_what_it_knows_no_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head holds a whole vocabulary: ten of them were read, and three tokenizers hashed."""
    monkeypatch.setattr(identity, "_CACHED_FROM", 0)
    monkeypatch.setattr(identity, "_YOUNG_SECONDS", -60.0)
    target, small = files(tmp_path)
    first = plan_pair(str(target), str(small))
    done: list[str] = []
    read = reader._Parser.head
    hash_tokenizer = identity._hash_of_meaning

    def read_noted(parser: reader._Parser) -> reader.GgufHead:
        head = read(parser)
        done.append(head.path.stem)
        return head

    def hash_noted(content: bytes) -> str:
        done.append("tokenizer")
        return hash_tokenizer(content)

    monkeypatch.setattr(reader._Parser, "head", read_noted)
    monkeypatch.setattr(identity, "_hash_of_meaning", hash_noted)
    monkeypatch.setattr(identity, "_tokenizer_hashes", {})  # as a new process has it
    assert plan_pair(str(target), str(small))["bundle"] == first["bundle"]
    assert done.count("target") <= 2
    assert done.count("small") == 0
    assert done.count("tokenizer") == 1


def test_a_plan_imports_no_exporter() -> None:
    code = "import export.setup, sys; print({'onnx', 'onnxruntime', 'onnxscript'} & {*sys.modules})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "set()\n"


def test_swapped_models_are_refused_by_name_before_memory_is_spoken_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were refused only where memory was short, with a line about memory."""
    large, small = map(str, folders(tmp_path))
    monkeypatch.setattr("export.plan.available_bytes", lambda: 1)
    with pytest.raises(UsageError, match="making the bundle takes"):
        plan_pair(large, small)
    with pytest.raises(
        UsageError, match=r"target, the small model for the device, has .*B weights"
    ):
        plan_pair(small, large)
    monkeypatch.setattr("export.plan.available_bytes", lambda: 0)
    assert plan_pair(large, large), "one model may be both"


def test_a_head_that_repeats_the_embedding_is_counted_once(tmp_path: Path) -> None:
    """A model of 1.54B weights was called one of 1.78B."""
    pytest.importorskip("gguf")
    small = gguf_tiny.save(tiny("qwen2", **SMALL), tmp_path / "small.gguf")

    def counted(name: str, model: PreTrainedModel) -> int:
        file = gguf_tiny.save(model, tmp_path / name)
        return make_setup_plan(Setup(str(file), str(small), tmp_path / "out")).target_weights

    model: Any = tiny("qwen2", tie_word_embeddings=False)
    own = counted("own.gguf", model)
    assert own == sum(each.numel() for each in model.parameters())
    embedding = model.model.embed_tokens.weight.detach()
    rounded = embedding * (1 + 0.05 * torch.sign(torch.sin(1e4 * embedding)))  # fewer bits
    model.lm_head.weight.data.copy_(rounded)
    assert counted("repeated.gguf", model) == own - embedding.numel()


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_one_model_has_one_count_as_target_and_as_sibling(tmp_path: Path, kind: str) -> None:
    """Swapped, the model that its plan calls one of 1.54B weights was refused as one of 1.78B."""
    large: Any = tiny("qwen2", tie_word_embeddings=False)
    embedding = large.model.embed_tokens.weight.detach()
    own = sum(each.numel() for each in large.parameters())
    distinct = save_tiny("qwen2", tmp_path / "distinct", tie_word_embeddings=False)
    large.lm_head.weight.data.copy_(embedding)
    small: Any = tiny("qwen2", **SMALL)
    place = tmp_path / kind
    if kind == "gguf":
        pytest.importorskip("gguf")
        pair = [
            str(gguf_tiny.save(one, tmp_path / f"{name}.gguf"))
            for name, one in (("large", large), ("small", small))
        ]
    else:
        for name, one in (("large", large), ("small", small)):
            save_tiny("qwen2", place / name)  # for its tokenizer
            one.save_pretrained(place / name)
        pair = [str(place / "large"), str(place / "small")]

    def counted(target: str) -> int:
        return make_setup_plan(Setup(target, pair[1], tmp_path / "out")).target_weights

    def told(target: str) -> dict[str, Any]:
        found: dict[str, Any] = plan_pair(target, pair[1])["target"]
        assert found["tokenizer_hash"]
        assert "" not in found.values(), "what is not known is left out"
        return found

    once = own - embedding.numel()
    assert (told(pair[0])["weights"], told(pair[0])["tie_embeddings"]) == (once, True)
    assert counted(pair[0]) == once
    if kind == "folder":
        assert counted(str(distinct)) == own, "a head of its own counts"
        assert not told(str(distinct))["tie_embeddings"]
    with pytest.raises(UsageError, match=f"has {once / 1e9:.3g}B weights, and the"):
        make_setup_plan(Setup(pair[1], pair[0], tmp_path / "out"))


def test_a_dry_run_has_a_plan_of_what_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said the error, and nothing of what would be made."""
    words = list(map(str, folders(tmp_path)))
    monkeypatch.setattr("export.plan.available_bytes", lambda: 1)
    assert main(words) == 2
    assert "error: making the bundle takes" in capsys.readouterr().err
    assert main([*words, "--dry-run"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert any(line.startswith("making it takes") for line in plan["lines"])
    assert plan["problem"].startswith("making the bundle takes")
    shown = argparse.Namespace(target=words[0], device_model=words[1], dry_run=True)
    shown.__dict__ |= {"bundle": "", "again": False, "json": False}
    monkeypatch.setattr("moa.cli.up._plan", AsyncMock(return_value=plan))
    with pytest.raises(UsageError, match="making the bundle takes"):
        asyncio.run(up._start_and_watch(shown))
    assert "making it takes" in capsys.readouterr().out


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_file_in_gguf_is_unpacked_for_a_bundle_alone(
    dry_run: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target, small = files(tmp_path)
    words = [str(target), str(small), *(["--dry-run"] if dry_run else [])]
    assert main(words) == 0
    said = capfd.readouterr()
    plan = json.loads(said.out)
    assert any("in its GGUF file" in line for line in plan["lines"])
    assert plan["memory"]["weights_mb"] == round(target.stat().st_size / 1e6)
    assert plan["memory"]["at_start_mb"] < plan["memory"]["at_most_mb"]
    unpacked = [path.parent.name[:5] for path in (tmp_path / "cache").rglob("*.safetensors")]
    assert unpacked == ([] if dry_run else ["small"])
    assert ("unpacking small.gguf" in said.err) is not dry_run


def test_it_plans_for_what_a_verifier_serves_by_default() -> None:
    settings = Settings()
    assert (settings.slots, settings.kv_cache_tokens) == (
        quick_start._SLOTS,
        quick_start._KV_TOKENS,
    )


def test_a_bundle_that_memory_does_not_hold_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, small = map(str, folders(tmp_path))
    monkeypatch.setattr("export.plan.available_bytes", lambda: 100_000_000)
    with pytest.raises(UsageError, match=r"takes 0\.4 GB of memory, and 0\.1 GB are free"):
        plan_pair(target, small)


@pytest.mark.parametrize(
    "command",
    [
        ["setup", "{target}", "--sibling", "{small}"],
        ["build", "--target", "{target}", "--drafter", "independent:{small}"],
    ],
)
def test_who_makes_a_bundle_alone_is_told_of_memory_before(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They began to unpack, and would have been killed; `moa-edge up` refused."""
    target, small = map(str, folders(tmp_path))
    monkeypatch.setattr("export.plan.available_bytes", lambda: 100_000_000)
    words = [word.format(target=target, small=small) for word in command]
    out = tmp_path / "out"
    assert export_main([*words, "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert "making the bundle takes 0.4 GB of memory, and 0.1 GB are free" in said
    assert not list(tmp_path.rglob("manifest.json"))
