"""The head of a GGUF file, and files that claim what is not so: one line each, before anything is
made of the claim."""

from __future__ import annotations

import struct
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from moa.errors import UsageError
from moa.gguf.reader import is_gguf, read_head


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, data: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + data


def number(key: str, value: int) -> bytes:
    return entry(key, 4, struct.pack("<I", value))


def strings(key: str, values: Sequence[str]) -> bytes:
    data = struct.pack("<IQ", 8, len(values)) + b"".join(map(text, values))
    return entry(key, 9, data)


def tensor(name: str, shape: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


ARCHITECTURE = entry("general.architecture", 8, text("llama"))


def file_of(
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    data: bytes = b"",
) -> bytes:
    entries = [ARCHITECTURE, *entries]
    found = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, *found) + b"".join([*entries, *tensors])
    return head + b"\0" * (-len(head) % 32) + data


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def write_file(content: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return write_file


def whole() -> bytes:
    return file_of(
        [
            number("llama.block_count", 2),
            strings("tokenizer.ggml.tokens", ["a", "é", "\u4e2d"]),
            entry("llama.rope.freq_base", 6, struct.pack("<f", 1e6)),
            entry("llama.attention.head_count_kv", 9, struct.pack("<IQ3I", 4, 3, 0, 2, 0)),
            entry("tokenizer.ggml.add_bos_token", 7, b"\1"),
        ],
        [tensor("token_embd.weight", [4, 3]), tensor("output.weight", [256, 2], 12, 64)],
        data=bytes(64 + 288),
    )


def test_it_reads_what_a_file_says(write: Callable[[bytes], Path]) -> None:
    path = write(whole())
    head = read_head(path)
    assert is_gguf(path)
    assert head.architecture == "llama"
    assert head.number("{arch}.block_count") == 2
    assert head.number("{arch}.attention.head_count_kv") == 2, "the largest of all layers"
    assert head.real("{arch}.rope.freq_base") == 1e6
    assert head.flag("tokenizer.ggml.add_bos_token", False)
    assert head.array("tokenizer.ggml.tokens", str) == ["a", "é", "\u4e2d"]
    assert [(t.name, t.kind, t.shape, t.size) for t in head.tensors] == [
        ("token_embd.weight", "F32", (4, 3), 48),
        ("output.weight", "Q4_K", (256, 2), 288),
    ]
    assert head.number("{arch}.expert_count", 0) == 0
    with pytest.raises(UsageError, match=r"does not say llama\.context_length"):
        head.number("{arch}.context_length")
    with pytest.raises(UsageError, match="must be a str"):
        head.text("{arch}.block_count")
    with pytest.raises(UsageError, match="items of one type"):
        head.array("tokenizer.ggml.tokens", int)


def test_a_vocabulary_is_read_without_a_call_for_each_word(
    write: Callable[[bytes], Path],
) -> None:
    words = [f"word {number} \u4e2d" for number in range(5000)]
    path = write(file_of([strings("tokenizer.ggml.tokens", words)]))
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        head = read_head(path)
    finally:
        sys.setprofile(None)
    assert head.array("tokenizer.ggml.tokens", str) == words
    assert calls < 1000


def test_a_file_that_is_cut_anywhere_is_refused(write: Callable[[bytes], Path]) -> None:
    content = whole()
    for length in range(len(content) - 1):
        with pytest.raises(UsageError) as refused:
            read_head(write(content[:length]))
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is not a GGUF file"),
        (b"PK\3\4 something else", "is not a GGUF file"),
        (file_of(version=1), "version 1"),
        (file_of(version=2**31), "version"),
        (file_of(counts=(2**63, 1)), "claims 9223372036854775808 tensors"),
        (file_of(counts=(0, 2**40)), "claims 1099511627776 entries"),
        (file_of(counts=(900_000, 1)), "cut short in its head, which has 900000 tensors"),
        (file_of([struct.pack("<Q", 2**50)]), "bytes for a key"),
        (file_of([entry("k", 8, struct.pack("<Q", 2**60))]), "bytes for k"),
        (file_of([entry("k", 9, struct.pack("<IQ", 8, 2**62))]), "items of k"),
        (file_of([entry("k", 9, struct.pack("<IQ", 4, 2**62))]), "items of k"),
        (file_of([entry("k", 9, struct.pack("<IQ", 4, 3_000_000))]), "cut short .* items of k"),
        (file_of([entry("k", 9, struct.pack("<IQ", 9, 1))]), "type 9"),
        (file_of([entry("k", 9, struct.pack("<IQQ", 8, 1, 2**60))]), "bytes for k"),
        (file_of([entry("k", 9, struct.pack("<IQQ", 8, 1, 2**20))]), "cut short in k"),
        (file_of([entry("k", 77, b"")]), "type 77"),
        (file_of([number("k", 1), number("k", 2)]), "says k twice"),
        (file_of([number("general.alignment", 0)]), "alignment of 0"),
        (file_of([number("general.alignment", 3)]), "alignment of 3"),
        (file_of([ARCHITECTURE.replace(b"architecture", b"alignment\0\0\0")]), None),
        (file_of([], [tensor("t", [1] * 5)]), "5 dimensions"),
        (file_of([], [tensor("t", [255], 12)]), "rows of 255 numbers"),
        (file_of([], [tensor("t", [2**62, 2**62])]), "cut short"),
        (file_of([], [tensor("t", [4], 0, 2**63)]), "cut short"),
    ],
)
def test_claims_that_cannot_be_so_are_refused_without_memory(
    content: bytes, why: str | None, write: Callable[[bytes], Path]
) -> None:
    path = write(content)
    tracemalloc.start()
    try:
        if why is None:
            read_head(path)
        else:
            with pytest.raises(UsageError, match=why) as refused:
                read_head(path)
            assert "\n" not in str(refused.value)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_what_is_no_file_is_no_gguf(tmp_path: Path) -> None:
    assert is_gguf("somewhere/model.GGUF")
    assert not is_gguf("org/model")
    assert not is_gguf(tmp_path)
    assert not is_gguf("x" * 5000)
    (tmp_path / "blob").write_bytes(b"GGUF and more")
    assert is_gguf(tmp_path / "blob")
    with pytest.raises(UsageError, match="there is no such file"):
        read_head(tmp_path / "none.gguf")
    with pytest.raises(UsageError, match="cannot read"):
        read_head(tmp_path)
