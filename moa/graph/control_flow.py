"""Refuses ONNX graphs with loops or branches, as a drafter's step needs none, and a loop could run
for ever; and graphs whose weights lie in files that their bundle does not list.

Every operator with a graph inside (Loop, If, Scan, SequenceMap) has it as an attribute, so the file
is walked for such attributes: as protobuf, for the device has no onnx package. Weights are skipped,
not read.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator
from pathlib import Path

from moa.errors import BundleError
from moa.safe_text import safe_line

_MODEL_GRAPH = 7
_MODEL_FUNCTION = 25
_GRAPH_NODE = 1
_FUNCTION_NODE = 7
_NODE_ATTRIBUTE = 5
_INNER_GRAPHS = (6, 11)
_GRAPH_TENSORS = 5
_GRAPH_SPARSE_TENSORS = 15
_ATTRIBUTE_TENSORS = (5, 10)
_ATTRIBUTE_SPARSE_TENSORS = (22, 23)
_TENSOR_PLACE = 13
"""An entry (`location`, `offset`, `length`) of what says where a tensor's bytes are."""
_ENTRY_KEY = 1
_ENTRY_VALUE = 2
_MOST_FIELDS = 1_000_000
_ORT = b"ORTM"
_ORT_LOOPS = tuple(
    len(name).to_bytes(4, "little") + name + b"\0"
    for name in (b"Loop", b"Scan", b"If", b"SequenceMap")
)


def refuse_control_flow(model: Path) -> None:
    """Raise if the graph of a `.onnx` or `.ort` file has one inside, or cannot be read."""
    try:
        with (
            model.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            if content[4:8] == _ORT:  # a flatbuffer: a string is its length, its bytes, and a zero
                found = any(content.find(name) >= 0 for name in _ORT_LOOPS)
            else:
                found = _Walk(content).finds_inner_graph()
    except (OSError, ValueError) as error:
        raise BundleError(f"{model} is not an ONNX graph: {error}") from None
    if found:
        raise BundleError(
            f"{model} has loops or branches: a drafter's graph has none",
            hint="do not use this bundle",
        )


def refuse_foreign_weights(model: Path, listed: Collection[str]) -> None:
    """Raise if the graph of an `.onnx` file reads weights from a file that is not among the `listed`
    names beside it: those were hashed, and lie in the bundle."""
    try:
        with (
            model.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            if content[4:8] == _ORT:
                return  # it has its weights inside
            foreign = set(_Walk(content).locations()) - set(listed)
    except (OSError, ValueError) as error:
        raise BundleError(f"{model} is not an ONNX graph: {error}") from None
    if foreign:
        raise BundleError(
            f"{model} reads {safe_line(min(foreign), 80)!r}, which its bundle does not list",
            hint="do not use this bundle",
        )


class _Walk:
    """Fields of protobuf messages, as (number, start, stop) of those that hold bytes."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._left = _MOST_FIELDS

    def finds_inner_graph(self) -> bool:
        for number, *model in self._fields(0, len(self._content)):
            nodes = {_MODEL_GRAPH: _GRAPH_NODE, _MODEL_FUNCTION: _FUNCTION_NODE}.get(number)
            for kind, *node in self._fields(*model) if nodes else ():
                for part, *attribute in self._fields(*node) if kind == nodes else ():
                    if part == _NODE_ATTRIBUTE and any(
                        f[0] in _INNER_GRAPHS for f in self._fields(*attribute)
                    ):
                        return True
        return False

    def locations(self) -> Iterator[str]:
        """Names of the files that tensors are read from."""
        for tensor in self._tensors():
            for number, *entry in self._fields(*tensor):
                if number == _TENSOR_PLACE:
                    texts = {key: self._content[at:stop] for key, at, stop in self._fields(*entry)}
                    if texts.get(_ENTRY_KEY) == b"location":
                        yield texts.get(_ENTRY_VALUE, b"").decode("utf-8", "backslashreplace")

    def _tensors(self) -> Iterator[tuple[int, int]]:
        for number, *model in self._fields(0, len(self._content)):
            if number == _MODEL_GRAPH:
                for kind, *part in self._fields(*model):
                    if kind == _GRAPH_TENSORS:
                        yield (part[0], part[1])
                    elif kind == _GRAPH_SPARSE_TENSORS:
                        yield from self._inside(*part)
                    elif kind == _GRAPH_NODE:
                        yield from self._of_node(*part)
            elif number == _MODEL_FUNCTION:
                for kind, *part in self._fields(*model):
                    if kind == _FUNCTION_NODE:
                        yield from self._of_node(*part)

    def _of_node(self, at: int, stop: int) -> Iterator[tuple[int, int]]:
        for number, *attribute in self._fields(at, stop):
            for kind, *value in self._fields(*attribute) if number == _NODE_ATTRIBUTE else ():
                if kind in _ATTRIBUTE_TENSORS:
                    yield (value[0], value[1])
                elif kind in _ATTRIBUTE_SPARSE_TENSORS:
                    yield from self._inside(*value)

    def _inside(self, at: int, stop: int) -> Iterator[tuple[int, int]]:
        """Values and indices of a sparse tensor."""
        for _, start, end in self._fields(at, stop):
            yield start, end

    def _fields(self, at: int, stop: int) -> Iterator[tuple[int, int, int]]:
        while at < stop:
            self._left -= 1
            if self._left < 0:
                raise ValueError(f"more than {_MOST_FIELDS} fields")
            key, at = self._number(at, stop)
            start = at
            kind = key & 7
            if kind == 0:
                _, at = self._number(at, stop)
            elif kind in (1, 5):
                at += 8 if kind == 1 else 4
            elif kind == 2:
                size, start = self._number(at, stop)
                at = start + size
            else:
                raise ValueError("a field of an unknown kind")
            if at > stop:
                raise ValueError("a field ends behind its message")
            if kind == 2:
                yield key >> 3, start, at

    def _number(self, at: int, stop: int) -> tuple[int, int]:
        value = 0
        for shift in range(0, 70, 7):
            if at >= stop:
                break
            byte = self._content[at]
            at = at + 1
            value = value | (byte & 127) << shift
            if byte < 128:
                return value & (2**64 - 1), at
        raise ValueError("a number without an end")
