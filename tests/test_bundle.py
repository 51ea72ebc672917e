"""A bundle is complete, unchanged and matching, or a one-line error says why not."""

from __future__ import annotations

import io
import json
import re
import shutil
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from moa import demo
from moa.bundle import (
    GOLDEN,
    MANIFEST,
    Bundle,
    GoldenCase,
    read_golden,
    sha256,
    write_golden,
    write_manifest,
)
from moa.errors import BundleError

LOGP = np.array([[[-0.5, -1.5]]], np.float32)
TOKENS = np.array([[[3, 7]]], np.int64)
MODEL, OTHER, TOKENIZER, MAP = (
    "variants/cpu-int4/model.onnx",
    "variants/web/model.onnx",
    "shared/tokenizer.json",
    "shared/map.npy",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded bundle, with two variants, and a reduced vocabulary."""
    folder = tmp_path / "bundle"
    shutil.copytree(demo.paths().bundle, folder)
    np.save(folder / MAP, np.array([3, 5, 9], np.int64))
    entry = {"sha256": sha256(folder / MAP), "size": (folder / MAP).stat().st_size}
    edit(
        folder,
        lambda m: (m["files"].update({MAP: entry}), m["vocabulary"].update(draft=3, map=MAP)),
    )
    return folder


Edit = Callable[[dict[str, Any]], object]


def edit(folder: Path, change: Edit) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    change(content)
    (folder / MANIFEST).write_text(json.dumps(content))


def test_a_bundle_reads_back_as_written(folder: Path) -> None:
    bundle = Bundle.open(folder)
    write_manifest(folder, bundle.manifest)
    assert Bundle.open(folder).manifest == bundle.manifest
    assert bundle.variant() == bundle.variant("cpu-int4")
    assert bundle.verify() == sum(entry.size for entry in bundle.manifest.files.values())
    ids = bundle.draft_to_target()
    assert ids is not None
    assert ids.tolist() == [3, 5, 9]
    for version in ("1.24.1", "1.31.1", "2.0"):
        bundle.check_runtime("web", version)


@pytest.mark.parametrize(
    ("within", "message"),
    [
        ("../nowhere", "there is no such folder"),
        ("shared", r"manifest.json is missing"),
        ("shared/tokenizer.json", "it is a file .*unpack"),
    ],
)
def test_what_is_no_bundle_is_refused(folder: Path, within: str, message: str) -> None:
    with pytest.raises(BundleError) as refused:
        Bundle.open(folder / within)
    assert re.search(message, refused.value.line())


def test_the_folder_around_a_bundle_is_told_apart(folder: Path) -> None:
    if folder.name != "bundle":
        folder.rename(folder.parent / "bundle")
    with pytest.raises(BundleError) as refused:
        Bundle.open(folder.parent)
    assert f"did you mean {folder.parent / 'bundle'}?" in refused.value.line()


def test_a_mistyped_folder_is_told_what_is_there(folder: Path) -> None:
    """Also where the part that is mistyped is not the last one."""
    inside = folder.parent / "ours" / "bundle"
    inside.parent.mkdir()
    folder.rename(inside)
    for mistyped in (inside.parent / "bundel", folder.parent / "orus" / "bundle"):
        with pytest.raises(BundleError) as refused:
            Bundle.open(mistyped)
        assert f"(did you mean {inside}?)" in refused.value.line()
    with pytest.raises(BundleError) as refused:
        Bundle.open(folder.parent / "zzz")
    assert "did you mean" not in refused.value.line()
    assert "makes one" in refused.value.line()


def test_a_missing_or_cut_file_is_found_when_opened(folder: Path) -> None:
    (folder / MODEL).write_bytes(b"cp")
    with pytest.raises(BundleError, match=rf"damaged: {MODEL} has 2 bytes, not \d+"):
        Bundle.open(folder)
    (folder / MODEL).unlink()
    with pytest.raises(BundleError, match=rf"incomplete: {MODEL} is missing"):
        Bundle.open(folder)


def test_changed_contents_are_found_by_hash_and_only_where_asked_for(folder: Path) -> None:
    bundle = Bundle.open(folder)
    (folder / OTHER).write_bytes(b"xxx")
    bundle.verify(["cpu-int4"])
    with pytest.raises(BundleError, match=rf"contents of {OTHER}"):
        bundle.verify()
    (folder / TOKENIZER).write_text("[]")
    with pytest.raises(BundleError, match=rf"contents of {TOKENIZER}"):
        bundle.verify(["cpu-int4"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(schema=2), "manifest schema 2, this version reads 1"),
        (lambda m: m.pop("variants"), "not a valid manifest: .*variants"),
        (lambda m: m.update(colour="red"), "not a valid manifest: .*colour"),
        (
            lambda m: m.update(block={"positions": 4, "pair_rank": 8, "pairs": "x.npy"}),
            "unknown field `block`",
        ),
        (
            lambda m: m["files"].update({"../x": {"sha256": "", "size": 1}}),
            "'../x' is no name for a file of a bundle",
        ),
        (
            lambda m: m["files"].update({"/x": {"sha256": "", "size": 1}}),
            "'/x' is no name for a file of a bundle",
        ),
        (
            lambda m: m["files"].pop(GOLDEN),
            "names golden.npz as its golden vectors, but does not list it",
        ),
        (
            lambda m: m["variants"]["cpu-int4"].update(model="shared/x.onnx"),
            "names shared/x.onnx as its variant cpu-int4",
        ),
        (lambda m: m.update(default_variant="gpu"), "names 'gpu' its default"),
        (
            lambda m: m["variants"]["cpu-int4"].update(opset=99),
            "opset 99, which this version does not know",
        ),
        (lambda m: m["vocabulary"].update(draft=4), "does not fit its manifest"),
        (lambda m: m["variants"].pop("web"), r"no variant 'web' \(it has cpu-int4\)"),
        (lambda m: None, r"variant web needs ONNX Runtime 1.23 or newer, here is 1.9.1"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(folder: Path, change: Edit, message: str) -> None:
    edit(folder, change)
    with pytest.raises(BundleError) as refused:
        use(folder)
    assert re.search(message, refused.value.line())


def use(folder: Path) -> None:
    """What a device does with a bundle, with an old ONNX Runtime."""
    bundle = Bundle.open(folder)
    bundle.variant()
    bundle.draft_to_target()
    bundle.check_runtime("web", "1.9.1")


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
    (folder / MAP).write_bytes(content)
    edit(folder, lambda m: m["files"][MAP].update(size=len(content)))
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
        golden_of(**{"one.npy": npy(np.zeros(2))}),
        golden_of(**{"a/inputs/ids.npy": b"no array"}),
        golden_of(**{"a/inputs/ids.npy": LYING}),
        golden_of(**{"a/cpu/top_logp.npy": npy(np.zeros(2))}),
        golden_of(**{"a/inputs/ids.npy": npy(np.zeros(2))}).replace(b"PK\x01\x02", b"PK\x01\x03"),
    ],
)
def test_golden_vectors_that_are_garbage_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / GOLDEN).write_bytes(content)
    with pytest.raises(BundleError, match="does not hold golden vectors"):
        read_golden(tmp_path / GOLDEN)


def test_golden_vectors_that_would_fill_the_memory_are_not_read(tmp_path: Path) -> None:
    with (
        zipfile.ZipFile(tmp_path / GOLDEN, "w", zipfile.ZIP_DEFLATED) as file,
        file.open("a/inputs/x.npy", "w") as one,
    ):
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


def test_golden_cases_read_back_and_measure_the_expected_best_token(tmp_path: Path) -> None:
    write_golden(
        tmp_path / "g.npz", [GoldenCase("first", {"ids": np.array([[5]])}, {"cpu": (LOGP, TOKENS)})]
    )
    (read,) = read_golden(tmp_path / "g.npz")
    assert read.inputs["ids"].tolist() == [[5]]
    assert read.difference("cpu", LOGP, TOKENS) == 0.0
    swapped = np.array([[[-0.6, -0.7]]], np.float32), np.array([[[7, 3]]], np.int64)
    assert read.difference("cpu", *swapped) == pytest.approx(0.2)
    assert read.difference("cpu", LOGP, np.array([[[4, 7]]])) == float("inf")
    assert read.difference("cpu", LOGP * np.nan, TOKENS) == float("inf")


def test_an_interrupted_manifest_leaves_the_old_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.open(folder)

    def fails(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("moa.bundle.os.fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        write_manifest(folder, bundle.manifest)
    assert Bundle.open(folder).manifest == bundle.manifest
