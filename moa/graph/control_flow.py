"""Refuses ONNX graphs with loops or branches, as a drafter's step needs none, and a loop could run
for ever; and graphs whose weights lie in files that their bundle does not list.

Every operator with a graph inside (Loop, If, Scan, SequenceMap) has it as an attribute, so the file
is walked for such attributes: as protobuf, for the device has no onnx package. Weights are skipped,
not read.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from moa.errors import BundleError
from moa.safe_text import safe_line

# Numbers of fields in the messages of onnx.proto, by message.
_MODEL_GRAPH = 7
_MODEL_FUNCTION = 25
_GRAPH_NODE = 1
_GRAPH_TENSORS = 5
_GRAPH_SPARSE_TENSORS = 15
_FUNCTION_NODE = 7
_NODE_ATTRIBUTE = 5
_ATTRIBUTE_GRAPHS = (6, 11)
_ATTRIBUTE_TENSORS = (5, 10)
_ATTRIBUTE_SPARSE_TENSORS = (22, 23)
_TENSOR_PLACE = 13
"""An entry (`location`, `offset`, `length`) of what says where a tensor's bytes are."""
_ENTRY_KEY = 1
_ENTRY_VALUE = 2

# Wire types of protobuf, the low three bits of a field's key.
_VARINT = 0
_FIXED_64 = 1
_BYTES = 2
_FIXED_32 = 5

_MOST_FIELDS = 1_000_000
"""Fields that are walked in one file: bounds the time that a file from a stranger takes."""
_ORT = b"ORTM"
"""Identifier of ONNX Runtime's own format, a flatbuffer."""
_ORT_LOOPS = tuple(
    len(name).to_bytes(4, "little") + name + b"\0"
    for name in (b"Loop", b"Scan", b"If", b"SequenceMap")
)
"""Names of operators as strings of a flatbuffer: the length, the bytes, and a zero."""


class _Message(NamedTuple):
    """Where a protobuf message, or another field that holds bytes, lies in the file."""

    start: int
    stop: int


class _Field(NamedTuple):
    """A field that holds bytes: its number, and where its content lies."""

    number: int
    content: _Message


def refuse_control_flow(model: Path) -> None:
    """Raise a `BundleError` if the graph of an `.onnx` or `.ort` file has loops or branches,
    operators with a graph inside; or if it cannot be read."""
    with _opened(model) as content:
        if content[4:8] == _ORT:  # a format in which the names of operators are searched for
            has_inner_graph = any(content.find(name) >= 0 for name in _ORT_LOOPS)
        else:
            has_inner_graph = _Walk(content).finds_inner_graph()
    if has_inner_graph:
        raise BundleError(
            f"{model} has loops or branches: a drafter's graph has none",
            hint="do not use this bundle",
        )


def refuse_foreign_weights(model: Path, listed: Collection[str]) -> None:
    """Raise a `BundleError` if the graph of an `.onnx` file reads weights from a file whose name is
    not among those `listed` beside it: only these were hashed, and lie in the bundle."""
    with _opened(model) as content:
        if content[4:8] == _ORT:
            return  # it has its weights inside
        foreign = set(_Walk(content).locations()) - set(listed)
    if foreign:
        raise BundleError(
            f"{model} reads {safe_line(min(foreign), 80)!r}, which its bundle does not list",
            hint="do not use this bundle",
        )


@contextmanager
def _opened(model: Path) -> Iterator[mmap.mmap]:
    """Yield a file's content, mapped into memory. An error of the file system, or a `ValueError` of
    whoever reads the content, becomes a `BundleError`."""
    try:
        with (
            model.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            yield content
    except (OSError, ValueError) as error:
        raise BundleError(f"{model} is not an ONNX graph: {error}") from None


class _Walk:
    """A walk through the protobuf messages of a model. Raises a `ValueError` where they are
    damaged, or too many."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._whole = _Message(0, len(content))
        self._fields_left = _MOST_FIELDS

    def finds_inner_graph(self) -> bool:
        """Whether some operator of the graph, or of a function, has a graph as an attribute."""
        for model_field in self._fields(self._whole):
            if model_field.number == _MODEL_GRAPH:
                node_number = _GRAPH_NODE
            elif model_field.number == _MODEL_FUNCTION:
                node_number = _FUNCTION_NODE
            else:
                continue
            for field in self._fields(model_field.content):
                if field.number == node_number and self._has_graph_attribute(field.content):
                    return True
        return False

    def _has_graph_attribute(self, node: _Message) -> bool:
        """Whether an attribute of this operator is a graph."""
        for field in self._fields(node):
            if field.number != _NODE_ATTRIBUTE:
                continue
            for part in self._fields(field.content):
                if part.number in _ATTRIBUTE_GRAPHS:
                    return True
        return False

    def locations(self) -> Iterator[str]:
        """Names of the files that tensors are read from."""
        for tensor in self._tensors():
            for field in self._fields(tensor):
                if field.number != _TENSOR_PLACE:
                    continue
                entry: dict[int, bytes] = {}
                for part in self._fields(field.content):
                    entry[part.number] = self._content[part.content.start : part.content.stop]
                if entry.get(_ENTRY_KEY) == b"location":
                    yield entry.get(_ENTRY_VALUE, b"").decode("utf-8", "backslashreplace")

    def _tensors(self) -> Iterator[_Message]:
        """All tensors of the model: weights of the graph, and constants of its operators and of
        functions'."""
        for model_field in self._fields(self._whole):
            if model_field.number == _MODEL_GRAPH:
                yield from self._tensors_of_graph(model_field.content)
            elif model_field.number == _MODEL_FUNCTION:
                for field in self._fields(model_field.content):
                    if field.number == _FUNCTION_NODE:
                        yield from self._tensors_of_node(field.content)

    def _tensors_of_graph(self, graph: _Message) -> Iterator[_Message]:
        """Yield the weights of a graph, and the tensors in its operators' attributes."""
        for field in self._fields(graph):
            if field.number == _GRAPH_TENSORS:
                yield field.content
            elif field.number == _GRAPH_SPARSE_TENSORS:
                yield from self._tensors_of_sparse(field.content)
            elif field.number == _GRAPH_NODE:
                yield from self._tensors_of_node(field.content)

    def _tensors_of_node(self, node: _Message) -> Iterator[_Message]:
        """Yield the tensors in a node's attributes, sparse ones by their parts."""
        for field in self._fields(node):
            if field.number != _NODE_ATTRIBUTE:
                continue
            for part in self._fields(field.content):
                if part.number in _ATTRIBUTE_TENSORS:
                    yield part.content
                elif part.number in _ATTRIBUTE_SPARSE_TENSORS:
                    yield from self._tensors_of_sparse(part.content)

    def _tensors_of_sparse(self, sparse: _Message) -> Iterator[_Message]:
        """Values and indices of a sparse tensor, its only fields that are messages."""
        for field in self._fields(sparse):
            yield field.content

    def _fields(self, message: _Message) -> Iterator[_Field]:
        """Yield the fields of a protobuf message that hold bytes: strings, and messages inside of
        it; numbers are skipped. A field begins with a key, which has its number and, in the low
        three bits, the type of its content. A `ValueError` for what is no message."""
        offset, stop = message
        while offset < stop:
            self._fields_left -= 1
            if self._fields_left < 0:
                raise ValueError(f"more than {_MOST_FIELDS} fields")
            key, offset = self._varint(offset, stop)
            wire_type = key & 7
            start, offset = self._content_of(wire_type, offset, stop)
            if offset > stop:
                raise ValueError("a field ends behind its message")
            if wire_type == _BYTES:
                yield _Field(key >> 3, _Message(start, offset))

    def _content_of(self, wire_type: int, offset: int, stop: int) -> tuple[int, int]:
        """Returns where the content of a field begins and ends, whose key ends at `offset`."""
        if wire_type == _BYTES:  # its size comes first
            size, start = self._varint(offset, stop)
            return start, start + size
        if wire_type == _VARINT:
            _, end = self._varint(offset, stop)
            return offset, end
        if wire_type == _FIXED_64:
            return offset, offset + 8
        if wire_type == _FIXED_32:
            return offset, offset + 4
        raise ValueError("a field of an unknown kind")

    def _varint(self, offset: int, stop: int) -> tuple[int, int]:
        """Read a number as protobuf writes it: 7 bits a byte, the lowest first, where the top bit
        says that another byte follows. Returns it and the offset after it; ten bytes are enough for
        64 bits."""
        value = 0
        for shift in range(0, 70, 7):
            if offset >= stop:
                break
            byte = self._content[offset]
            offset += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & (2**64 - 1), offset
        raise ValueError("a number without an end")
