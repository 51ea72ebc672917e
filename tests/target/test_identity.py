"""What a model's identity covers: every byte of its weights, and what decides how they are used. A
header that is no header is refused in one line."""

from __future__ import annotations

import json
import os
import random
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moa.errors import UsageError
from moa.target import identity
from moa.target.identity import WeightsHash, computation_id, stored_tensors, weights_id
from moa.target.loading import load_model, read_facts
from testing.tiny import save_tiny


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return save_tiny("llama", tmp_path / "model")


@pytest.fixture
def kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose hash is kept, however small and young it is."""
    monkeypatch.setattr(identity, "_CACHED_FROM", 0)
    monkeypatch.setattr(identity, "_YOUNG_SECONDS", -60.0)
    return folder


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))


def test_one_bit_anywhere_is_another_identity(folder: Path) -> None:
    facts = load_model(folder).facts
    path = folder / "model.safetensors"
    spans = [(one.start, one.end) for one in stored_tensors(folder).values()]
    chance = random.Random(1)
    seen = {facts.weights_id}
    for _ in range(200):
        start, end = chance.choices(spans, weights=[end - start for start, end in spans])[0]
        at = chance.randrange(start, end)
        bit = chance.randrange(8)
        flip(path, at, bit)
        seen.add(weights_id(folder, facts))
        flip(path, at, bit)
    assert len(seen) == 201
    assert weights_id(folder, facts) == facts.weights_id == read_facts(folder)[0].weights_id


def test_a_restart_hashes_nothing(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = load_model(kept).facts
    monkeypatch.setattr(WeightsHash, "_hash_one", lambda *_: pytest.fail("it is hashed again"))
    assert weights_id(kept, facts) == facts.weights_id


@pytest.mark.parametrize("how", ["in place, its time set back", "copied over", "another file"])
def test_a_file_that_changed_is_hashed_again(kept: Path, how: str) -> None:
    facts = load_model(kept).facts
    path = kept / "model.safetensors"
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    while time.time_ns() - before.st_ctime_ns < 50_000_000:
        pass  # the grain of a file's times
    if how == "copied over":
        path.write_bytes(content)
    elif how == "another file":
        other = kept / "other"
        other.write_bytes(content)
        os.replace(other, path)
    else:
        flip(path, before.st_size - 5)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert weights_id(kept, facts) != facts.weights_id


@pytest.mark.parametrize(
    "spoilt", [b"", b"[]", b"{", b'{"file": 1, "tensors": {}}', b"[" * 100_000]
)
def test_a_spoilt_cache_is_not_believed(kept: Path, spoilt: bytes) -> None:
    facts = load_model(kept).facts
    (entry,) = (kept.parent / "cache" / "moa-edge" / "weights").iterdir()
    entry.write_bytes(spoilt)
    assert weights_id(kept, facts) == facts.weights_id


def test_a_cache_that_cannot_be_written_costs_only_time(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kept.parent / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept.parent / "file"))
    facts = load_model(kept).facts
    assert weights_id(kept, facts) == facts.weights_id


def edit(name: str, **changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    "change",
    [
        edit("config.json", rope_scaling={"rope_type": "linear", "factor": 2.0}),
        edit("tokenizer.json", truncation={"max_length": 12}),
        edit("tokenizer.json", padding={"length": 9}),
        lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}"),
        lambda folder: (folder / "tokenizer_config.json").write_text('{"chat_template": "a"}'),
    ],
)
def test_what_is_beside_the_weights_changes_what_is_computed(
    folder: Path, change: Callable[[Path], object]
) -> None:
    (folder / "tokenizer.json").write_text("{}")
    one = computation_id("v2-a", folder, dtype="float32")
    assert one == computation_id("v2-a", folder, dtype="float32") != ""
    change(folder)
    assert computation_id("v2-a", folder, dtype="float32") != one


def test_precision_and_quantization_change_what_is_computed(folder: Path) -> None:
    found = {
        computation_id("v2-a", folder, dtype="float32"),
        computation_id("v2-b", folder, dtype="float32"),
        computation_id("v2-a", folder, dtype="bfloat16"),
        computation_id("v2-a", folder, dtype="float32", quantize="int8"),
    }
    assert len(found) == 4
    assert computation_id("v2-a", None, dtype="float32") == ""


# ---- headers


def write(path: Path, header: bytes, data: int = 16) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(data))


def one(**changes: Any) -> bytes:
    entry = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes
    return json.dumps({"a": entry}).encode()


HEADERS = {
    "deep": b'{"a":' * 50_000,
    "deep lists": b'{"a":' + b"[" * 100_000,
    "no object": b"[]",
    "a number": b"7",
    "null": b"null",
    "no text": b"\xff\xfe",
    "an entry that is no object": b'{"a": 3}',
    "an entry that is a list": b'{"a": ["F32", [1], [0, 4]]}',
    "no offsets": b'{"a": {"dtype": "F32", "shape": [2, 2]}}',
    "NaN": one(data_offsets=[0, float("nan")]),
    "infinity": one(data_offsets=[0, float("inf")]),
    "a float": one(data_offsets=[0, 16.0]),
    "a text": one(data_offsets=["0", "16"]),
    "truth": one(data_offsets=[False, 16]),
    "negative": one(data_offsets=[-16, 0]),
    "reversed": one(data_offsets=[16, 0]),
    "three": one(data_offsets=[0, 8, 16]),
    "one": one(data_offsets=[0]),
    "an object": one(data_offsets={"0": 16}),
    "no end": one(data_offsets=[0, 2**70]),
    "5,000 digits": b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, '
    + b"9" * 5000
    + b"]}}",
    "a shape of texts": one(shape=["2", "2"]),
    "a shape that is a text": one(shape="22"),
    "a negative shape": one(shape=[-2, -2]),
    "a shape too large": one(shape=[2**40, 2**40]),
    "a shape too small": one(shape=[1]),
    "a float in a shape": one(shape=[2.0, 2]),
    "a thousand dimensions": one(shape=[1] * 1000),
    "an unknown type": one(dtype="F31"),
    "a type that is a number": one(dtype=32),
    "a type that is a list": one(dtype=["F32"]),
    "overlap": json.dumps(
        {
            "a": {"dtype": "U8", "shape": [10], "data_offsets": [0, 10]},
            "b": {"dtype": "U8", "shape": [8], "data_offsets": [8, 16]},
        }
    ).encode(),
    "the same bytes": json.dumps(
        {name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} for name in "ab"}
    ).encode(),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_is_none_is_refused_in_one_line(name: str, folder: Path) -> None:
    write(folder / "model.safetensors", HEADERS[name])
    for read in (stored_tensors, load_model):
        with pytest.raises(UsageError, match=r"damaged|cut short") as refused:
            read(folder)
        assert "\n" not in refused.value.line()


@pytest.mark.parametrize(
    "index",
    [
        b"[" * 100_000,
        b'{"weight_map": {"a": 7}}',
        b'{"weight_map": {"a": "b", "c": 7}}',
        b'{"weight_map": {"a": ["b"]}}',
        b'{"weight_map": 7}',
        b"7",
    ],
)
def test_an_index_that_is_none_is_refused_in_one_line(index: bytes, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(UsageError, match="not an index"):
        stored_tensors(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": -4},
        {"hidden_size": "64"},
        {"num_hidden_layers": 1.5},
        {"vocab_size": True},
        {"layer_types": 7},
        {"layer_types": [["full_attention"]]},
    ],
)
def test_a_config_of_impossible_numbers_is_refused_in_one_line(
    change: dict[str, Any], folder: Path
) -> None:
    edit("config.json", **change)(folder)
    for read in (read_facts, load_model):
        with pytest.raises(UsageError, match=next(iter(change))):
            read(folder)
