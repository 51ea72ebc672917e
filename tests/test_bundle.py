"""A bundle is complete, unchanged and matching, or a one-line error says why not."""

from __future__ import annotations

import io
import json
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moa.bundle import GOLDEN, MANIFEST, SCHEMA, Bundle, GoldenCase, read_golden, sha256, write_golden, write_manifest
from moa.config import TargetFacts
from moa.errors import BundleError
from moa.manifest import (
    DrafterIdentity,
    FileEntry,
    KVHeads,
    Manifest,
    RecordFormat,
    TargetIdentity,
    TokenizerFiles,
    Variant,
    Vocabulary,
)

FACTS = TargetFacts(
    family="llama",
    layers=2,
    hidden_size=8,
    vocab_size=32,
    heads=2,
    kv_heads=1,
    head_dim=4,
    rope_theta=1e4,
    rms_norm_eps=1e-6,
    max_positions=64,
    tie_embeddings=True,
    eos_ids=(2,),
)
LOGP, TOKENS = np.array([[[-0.5, -1.5]]], np.float32), np.array([[[3, 7]]], np.int64)


def case() -> GoldenCase:
    return GoldenCase("first", {"ids": np.array([[5]])}, {"cpu": (LOGP, TOKENS), "other": (LOGP, TOKENS)})


def variant(name: str, **changes: Any) -> Variant:
    model = f"variants/{name}/model.onnx"
    settings: dict[str, Any] = {
        "model": model,
        "files": (model,),
        "runtime": "onnxruntime",
        "precision": "fp32",
        "form": "dynamic",
        "opset": 23,
        "min_onnxruntime": "1.23",
        "size": 3,
        "checked": "executed",
        "checked_with": "here",
        "inputs": {"ids": (1, "T")},
        "outputs": {},
    }
    return Variant(**(settings | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small bundle with two variants and a reduced vocabulary."""
    folder = tmp_path / "bundle"
    for name in ("cpu", "other"):
        (folder / "variants" / name).mkdir(parents=True)
        (folder / "variants" / name / "model.onnx").write_bytes(name[:3].encode())
    (folder / "shared").mkdir()
    (folder / "shared" / "tokenizer.json").write_text("{}")
    np.save(folder / "shared" / "map.npy", np.array([3, 5, 9], np.int64))
    write_golden(folder / GOLDEN, [case()])
    files = {
        path.relative_to(folder).as_posix(): FileEntry(sha256=sha256(path), size=path.stat().st_size)
        for path in folder.rglob("*")
        if path.is_file()
    }
    manifest = Manifest(
        schema=SCHEMA,
        created="2026-01-01T00:00:00Z",
        producer={},
        recipe={},
        target=TargetIdentity(source="t", facts=FACTS),
        drafter=DrafterIdentity(kind="moa", source="d", weights_id="w", config={}),
        tokenizer=TokenizerFiles(hash="abc", file="shared/tokenizer.json", eos_ids=(2,)),
        vocabulary=Vocabulary(target=32, draft=3, map="shared/map.npy"),
        cache=(KVHeads(kv_heads=1, head_dim=4),),
        records=RecordFormat(kv_heads=1, head_dim=4, rope_theta=1e4),
        top_k=2,
        default_variant="cpu",
        variants={"cpu": variant("cpu"), "other": variant("other", opset=20, min_onnxruntime="1.17")},
        calibration=None,
        files=files,
    )
    write_manifest(folder, manifest)
    return folder


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    change(content)
    (folder / MANIFEST).write_text(json.dumps(content))


def test_a_bundle_reads_back_as_written(folder: Path) -> None:
    bundle = Bundle.open(folder)
    assert bundle.manifest.target.facts == FACTS
    assert bundle.variant() == bundle.variant("cpu")
    assert bundle.verify() == sum(entry.size for entry in bundle.manifest.files.values())
    ids = bundle.draft_to_target()
    assert ids is not None
    assert ids.tolist() == [3, 5, 9]
    bundle.check_runtime("cpu", "1.31.1")


def test_a_folder_without_a_manifest_is_no_bundle(folder: Path, tmp_path: Path) -> None:
    (folder / MANIFEST).unlink()
    with pytest.raises(BundleError, match=r"manifest.json is missing"):
        Bundle.open(folder)
    with pytest.raises(BundleError, match="there is no such folder"):
        Bundle.open(tmp_path / "nowhere")
    with pytest.raises(BundleError, match="it is a file") as refused:
        Bundle.open(next(path for path in folder.rglob("*") if path.is_file()))
    assert "unpack" in str(refused.value.hint)


def test_a_missing_or_cut_file_is_found_when_opened(folder: Path) -> None:
    model = folder / "variants" / "cpu" / "model.onnx"
    model.write_bytes(b"cp")
    with pytest.raises(BundleError, match=r"damaged: variants/cpu/model.onnx has 2 bytes, not 3"):
        Bundle.open(folder)
    model.unlink()
    with pytest.raises(BundleError, match=r"incomplete: variants/cpu/model.onnx is missing"):
        Bundle.open(folder)


def test_changed_contents_are_found_by_hash_and_only_where_asked_for(folder: Path) -> None:
    (folder / "variants" / "other" / "model.onnx").write_bytes(b"xxx")
    bundle = Bundle.open(folder)
    bundle.verify(["cpu"])
    with pytest.raises(BundleError, match=r"contents of variants/other/model.onnx"):
        bundle.verify()
    (folder / "shared" / "tokenizer.json").write_text("[]")
    with pytest.raises(BundleError, match=r"contents of shared/tokenizer.json"):
        bundle.verify(["cpu"])


def test_a_missing_variant_is_named_with_those_there_are(folder: Path) -> None:
    with pytest.raises(BundleError, match="no variant 'gpu'") as error:
        Bundle.open(folder).variant("gpu")
    assert error.value.hint == "it has cpu, other"


def test_an_unknown_opset_is_refused(folder: Path) -> None:
    edit(folder, lambda m: m["variants"]["cpu"].update(opset=99))
    with pytest.raises(BundleError, match="opset 99, which this version does not know"):
        Bundle.open(folder).variant("cpu")


def test_an_onnx_runtime_that_is_too_old_is_refused(folder: Path) -> None:
    bundle = Bundle.open(folder)
    bundle.check_runtime("other", "1.17.3")
    with pytest.raises(BundleError, match=r"variant cpu needs ONNX Runtime 1.23 or newer, here is 1.9.1"):
        bundle.check_runtime("cpu", "1.9.1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(schema=2), "manifest schema 2, this version reads 1"),
        (lambda m: m.pop("variants"), "not a valid manifest: .*variants"),
        (lambda m: m.update(colour="red"), "not a valid manifest: .*colour"),
        (lambda m: m.update(block={"positions": 4, "pair_rank": 8, "pairs": "x.npy"}), "unknown field `block`"),
        (lambda m: m["files"].update({"../x": {"sha256": "", "size": 1}}), "outside the bundle: '../x'"),
        (lambda m: m["files"].update({"/x": {"sha256": "", "size": 1}}), "outside the bundle: '/x'"),
        (lambda m: m["files"].pop(GOLDEN), "names golden.npz as its golden vectors, but does not list it"),
        (lambda m: m["variants"]["cpu"].update(model="shared/x.onnx"), "names shared/x.onnx as its variant cpu"),
        (lambda m: m.update(default_variant="gpu"), "names 'gpu' its default"),
    ],
)
def test_a_bad_manifest_is_refused(folder: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    edit(folder, change)
    with pytest.raises(BundleError, match=message):
        Bundle.open(folder)


@pytest.mark.parametrize(
    "content",
    [b"\xff{", b"[" * 1_000_000, b'{"schema": 1, "recipe": ' + b'{"a":' * 500_000],
    ids=["", "deep", "deeper"],
)
def test_a_manifest_that_is_not_json_or_too_deep_is_refused(folder: Path, content: bytes) -> None:
    (folder / MANIFEST).write_bytes(content)
    with pytest.raises(BundleError, match="not a valid manifest"):
        Bundle.open(folder)


def npy(array: NDArray[Any]) -> bytes:
    made = io.BytesIO()
    np.save(made, array)
    return made.getvalue()


LYING = npy(np.zeros(4, np.int64)).replace(b"(4,), }    ", b"(1000000000000,), }")[:200]


@pytest.mark.parametrize("content", [b"", b"no array", npy(np.zeros(3))[:-4], LYING])
def test_a_draft_vocabulary_that_is_no_array_is_refused(folder: Path, content: bytes) -> None:
    name = json.loads((folder / MANIFEST).read_text())["vocabulary"]["map"]
    (folder / name).write_bytes(content)
    edit(folder, lambda m: m["files"][name].update(size=len(content)))
    with pytest.raises(BundleError, match=r"map\.npy|is not|does not"):
        Bundle.open(folder).draft_to_target()


def golden_of(**members: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return made.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        b"garbage",
        golden_of(),
        golden_of(**{"one.npy": npy(np.zeros(2))}),
        golden_of(**{"a/inputs/ids.npy": b"no array"}),
        golden_of(**{"a/inputs/ids.npy": LYING}),
        golden_of(**{"a/cpu/top_logp.npy": npy(np.zeros(2))}),
        golden_of(**{"a/inputs/ids.npy": npy(np.zeros(2))}).replace(b"PK\x01\x02", b"PK\x01\x03"),
    ],
)
def test_golden_vectors_that_are_garbage_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / GOLDEN).write_bytes(content)
    if content == golden_of():
        assert read_golden(tmp_path / GOLDEN) == []
        return
    with pytest.raises(BundleError, match="does not hold golden vectors"):
        read_golden(tmp_path / GOLDEN)


def test_golden_vectors_that_would_fill_the_memory_are_not_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / GOLDEN, "w", zipfile.ZIP_DEFLATED) as file, file.open("a/inputs/x.npy", "w") as one:
        one.write(npy(np.zeros(2**27, np.int8))[:128])
        for _ in range(128):
            one.write(bytes(2**20))
    assert (tmp_path / GOLDEN).stat().st_size < 2**20
    tracemalloc.start()
    try:
        with pytest.raises(BundleError, match="134217856 bytes, at most 67108864"):
            read_golden(tmp_path / GOLDEN)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_draft_vocabulary_of_another_size_is_refused(folder: Path) -> None:
    edit(folder, lambda m: m["vocabulary"].update(draft=4))
    with pytest.raises(BundleError, match="does not fit its manifest"):
        Bundle.open(folder).draft_to_target()


def test_golden_cases_read_back_and_measure_the_expected_best_token(tmp_path: Path) -> None:
    write_golden(tmp_path / "g.npz", [case()])
    (read,) = read_golden(tmp_path / "g.npz")
    assert read.inputs["ids"].tolist() == [[5]]
    assert read.difference("cpu", LOGP, TOKENS) == 0.0
    swapped = np.array([[[-0.6, -0.7]]], np.float32), np.array([[[7, 3]]], np.int64)
    assert read.difference("cpu", *swapped) == pytest.approx(0.2)
    assert read.difference("cpu", LOGP, np.array([[[4, 7]]])) == float("inf")
    assert read.difference("cpu", LOGP * np.nan, TOKENS) == float("inf")


def test_an_interrupted_manifest_leaves_the_old_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.open(folder)

    def fails(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moa.bundle.os.fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        write_manifest(folder, bundle.manifest)
    assert Bundle.open(folder).manifest == bundle.manifest
