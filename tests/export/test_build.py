"""A build gives a complete bundle, or an error and nothing."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from transformers import LlamaConfig

from export.agreement import read_prompts
from export.atomic_folder import new_folder
from export.build import build
from export.draft_vocabulary import count_files, most_frequent
from export.plan import make_plan
from export.source import load_source
from moa.bundle import MANIFEST, Bundle
from moa.drafters.attention.config import AttentionConfig
from moa.errors import UsageError
from moa.graph.step import open_session
from moa.target.loading import read_facts
from testing.tiny import save_tiny
from tests.export.conftest import PROMPTS, Pair, settings_for


def test_the_bundle_holds_what_the_design_says(bundle: Bundle, pair: Pair) -> None:
    manifest = bundle.manifest
    assert set(manifest.variants) == {"cpu-int4", "cpu-int8", "cpu-fp32"}
    assert manifest.default_variant == "cpu-int4"
    assert manifest.target.facts.weights_id
    assert manifest.drafter.kind == "moa"
    assert manifest.records is not None
    files = {
        path.relative_to(bundle.folder).as_posix()
        for path in bundle.folder.rglob("*")
        if path.is_file()
    }
    assert set(manifest.files) == files - {MANIFEST}
    exact = manifest.variants["cpu-fp32"]
    assert exact.parity is not None
    assert exact.parity <= 1e-4
    assert exact.agreement is not None
    assert exact.agreement.acceptance_ratio == 1.0
    assert exact.agreement.top1_same == 1.0
    assert manifest.calibration is not None
    assert manifest.calibration.prompts == len(PROMPTS)
    assert len(manifest.calibration.acceptance.chain) == 6
    assert str(pair.target.parent) not in (bundle.folder / MANIFEST).read_text(), "no local paths"
    card = (bundle.folder / "README.md").read_text()
    assert "3 held-out prompts" in card
    for name, variant in manifest.variants.items():
        assert f"| {name} | {variant.runtime} |" in card
        session = open_session(bundle.path(variant.model))
        for case in bundle.golden():
            assert (
                case.difference(name, *session.run(["top_logp", "top_tokens"], case.inputs)) < 1e-3
            )


def test_room_is_checked_before_work(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("export.atomic_folder.shutil.disk_usage", lambda _: usage)
    with pytest.raises(UsageError, match=r"not enough room .* \d\.\d MB wanted, 0.0 MB free"):
        build(settings_for(pair, tmp_path / "bundle"))


def test_only_a_bundle_is_replaced_and_only_when_told(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "thesis.txt").write_text("")
    with pytest.raises(UsageError, match="exists and is no bundle"), new_folder(old, force=True):
        pass
    (old / MANIFEST).write_text("{}")
    with pytest.raises(UsageError, match="holds a bundle already"), new_folder(old):
        pass
    with pytest.raises(RuntimeError), new_folder(old, force=True):
        raise RuntimeError
    assert (old / MANIFEST).exists()
    with new_folder(old, force=True) as folder:
        (folder / "new.txt").write_text("")
    assert [path.name for path in old.iterdir()] == ["new.txt"]
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_the_plan_counts_what_the_bundle_holds(pair: Pair, bundle: Bundle) -> None:
    plan = make_plan(str(pair.target), str(pair.drafter), ["cpu-fp32"], None)
    exact = bundle.manifest.files["variants/cpu-fp32/model.onnx.data"].size
    assert abs(plan.variant_bytes["cpu-fp32"] - exact) < 0.2 * exact  # pages are padded
    assert plan.sizes.cache == ((1, 16),)
    assert (
        make_plan(str(pair.target), str(pair.drafter), ["nnapi"], None).variant_bytes["nnapi"]
        < 1.1 * exact
    )
    independent = make_plan(str(pair.target), f"independent:{pair.target}", [], 50)
    assert len(independent.sizes.cache) == 4
    assert independent.draft_vocabulary == 50


def test_a_plan_for_8_billion_weights_reads_none_of_them(tmp_path: Path) -> None:
    """The target's weights are a sparse file of 16 GB: only its headers have contents."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path / "target")
    ends = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (128_256, 4096))
    _hole(
        tmp_path / "target",
        ends | {f"model.layers.{i}.mlp.up_proj.weight": (14_336, 14_336) for i in range(32)},
    )
    settings = AttentionConfig.for_target(read_facts(tmp_path / "target", identify=False)[0])
    (tmp_path / "drafter").mkdir()
    settings.write(tmp_path / "drafter")
    _hole(tmp_path / "drafter", {"self_attention.mlp.up_proj.weight": (4096, 50_000)})
    started = time.process_time()
    plan = make_plan(str(tmp_path / "target"), str(tmp_path / "drafter"), ["cpu-int4"], 32_000)
    assert time.process_time() - started < 2.0  # reading 16 GB takes longer
    assert plan.embedding_weights == 128_256 * 4096
    assert plan.head_weights == 32_000 * 4096
    assert plan.sizes.layer_weights == 4096 * 50_000
    assert 0.5e9 < plan.variant_bytes["cpu-int4"] < 0.6e9
    assert "time without calibration: about" in plan.lines()[-1]


def _hole(folder: Path, shapes: dict[str, tuple[int, int]]) -> None:
    header = {}
    end = 0
    for name, (rows, width) in shapes.items():
        start = end
        end = end + 2 * rows * width
        header[name] = {"dtype": "BF16", "shape": [rows, width], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(folder / "model.safetensors", 8 + len(text) + end)


def test_prompts_are_read_from_both_kinds_of_file_before_anything_is_loaded(
    pair: Pair, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "three\nlines"}) + "\n")
    assert read_prompts([tmp_path / "a.txt", tmp_path / "b.jsonl"]) == [
        "one",
        "two",
        "three\nlines",
    ]
    said: list[str] = []
    for name, content, wrong in (
        ("c.jsonl", "{}", "c.jsonl:1: .* must be text"),
        ("d.jsonl", "{", "d.jsonl:1: not valid JSON"),
        ("e.txt", "\n", "no prompt in"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(UsageError, match=wrong):
            build(settings_for(pair, tmp_path / "out", calibration=(tmp_path / name,)), said.append)
    assert not said


def test_an_independent_drafter_must_share_the_tokenizer(pair: Pair, tmp_path: Path) -> None:
    other = save_tiny("llama", tmp_path / "other", vocab_size=130)
    with pytest.raises(UsageError, match="has another tokenizer than the target"):
        load_source(str(pair.target), f"independent:{other}")


def test_the_draft_vocabulary_takes_ends_first_then_the_most_frequent(
    pair: Pair, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("aaaa bbb c")
    source = pair.source()
    counts = count_files(source.tokenizer.json, [tmp_path / "text.txt"])
    chosen = most_frequent(counts, 6, source)
    assert (np.diff(chosen) > 0).all()
    assert set(source.facts.eos_ids) <= set(chosen.tolist())
    assert counts.most_common(1)[0][0] in chosen
    with pytest.raises(UsageError, match="cannot read the vocabulary text"):
        count_files(source.tokenizer.json, [tmp_path / "none.txt"])
