"""An ONNX model with its weights stored separately: protobuf cannot hold 2 GB, and equal weights
are stored once. Weights that were read stay in their file, mapped into memory, which the system can
take back at any time."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import (
    ExternalDataInfo,
    load_external_data_for_tensor,
    uses_external_data,
)

from moa.errors import UsageError

Array = NDArray[Any]
_PAGE = 4096
"""Bytes to whose multiples weights are aligned: memory maps need page-aligned offsets."""
_LARGEST_MESSAGE = 2**31 - 2**24
"""Bytes of weights in one file: protobuf's limit, less the graph itself."""
_INLINE = 1024
"""Bytes of a constant that stays in the graph: shape inference reads small ones."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A context that suppresses logs, warnings and prints of the exporter and the quantizers, which
    log every node and warn about their own deprecations; exceptions pass."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class _Place(NamedTuple):
    """Where a weight lies in the file of weights, in bytes."""

    offset: int
    length: int


@dataclass
class WeightedModel:
    """A graph whose larger initializers are numpy arrays beside it."""

    proto: onnx.ModelProto
    weights: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> WeightedModel:
        """Returns the model in a file with its larger initializers, the weights, as arrays; those
        that lie in a file beside it are mapped. What the exporter says of each node's origin is
        dropped."""
        proto = onnx.load(path, load_external_data=False)
        initializers = list(proto.graph.initializer)
        del proto.graph.initializer[:]
        model = cls(proto)
        for tensor in initializers:
            if not uses_external_data(tensor):
                model.add(tensor)
                continue
            value = _mapped(tensor, path.parent)
            if value.nbytes > _INLINE:
                model.weights[tensor.name] = value
            else:
                load_external_data_for_tensor(tensor, str(path.parent))
                model.add(tensor)
        for node in proto.graph.node:
            node.ClearField("metadata_props")
            node.ClearField("doc_string")
        return model

    def add(self, tensor: TensorProto) -> None:
        """Add an initializer, as one of the weights unless it is small."""
        if len(tensor.raw_data) > _INLINE:
            self.weights[tensor.name] = numpy_helper.to_array(tensor)
        else:
            self.proto.graph.initializer.append(tensor)

    def constant(self, name: str, value: Array) -> str:
        """Add a constant to the graph, inline if it is small; returns its name. One that is there
        already is not added again: a table that embedding and head share comes twice."""
        inline = {tensor.name for tensor in self.proto.graph.initializer}
        if name in self.weights or name in inline:
            return name
        if value.nbytes <= _INLINE:
            self.proto.graph.initializer.append(numpy_helper.from_array(value, name))
        else:
            self.weights[name] = value
        return name

    def node(
        self, op: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any
    ) -> str:
        """Append a node to the graph; returns the name of its first output."""
        self.proto.graph.node.append(
            helper.make_node(op, inputs, outputs, outputs[0], domain=domain, **attributes)
        )
        if domain and domain not in {opset.domain for opset in self.proto.opset_import}:
            self.proto.opset_import.append(helper.make_opsetid(domain, 1))
        return outputs[0]

    def save_whole(self, path: Path) -> list[Path]:
        """Write one file that includes the weights, for runtimes that need it; equal weights are
        stored twice. Returns the file in a list."""
        size = sum(value.nbytes for value in self.weights.values())
        if size > _LARGEST_MESSAGE:
            raise UsageError(
                f"{size / 2**30:.1f} GB of weights do not fit one ONNX file",
                hint="leave the variant out",
            )
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        proto.graph.initializer.extend(
            numpy_helper.from_array(value, name) for name, value in self.weights.items()
        )
        onnx.save(proto, path)
        return [path]

    def save(self, path: Path) -> list[Path]:
        """Write the graph to `path` and the weights to `path`.data beside it, equal ones once.
        Returns both files."""
        data = path.with_name(f"{path.name}.data")
        proto = onnx.ModelProto()
        proto.CopyFrom(self.proto)
        places = self._write_weights(data)
        for name, value in self.weights.items():
            tensor = proto.graph.initializer.add(
                name=name,
                dims=value.shape,
                data_type=helper.np_dtype_to_tensor_dtype(value.dtype),
                data_location=TensorProto.EXTERNAL,
            )
            place = places[name]
            tensor.external_data.add(key="location", value=data.name)
            tensor.external_data.add(key="offset", value=str(place.offset))
            tensor.external_data.add(key="length", value=str(place.length))
        onnx.save(proto, path)
        return [path, data]

    def _write_weights(self, file_path: Path) -> dict[str, _Place]:
        """Write all weights to a file, equal ones once. Returns where each lies."""
        places: dict[str, _Place] = {}
        written: dict[bytes, _Place] = {}  # by the hash of the bytes
        with file_path.open("wb") as file:
            for name, value in self.weights.items():
                content = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
                key = hashlib.sha256(content).digest()
                if key not in written:
                    padding = -file.tell() % _PAGE
                    file.write(b"\0" * padding)
                    written[key] = _Place(file.tell(), len(content))
                    file.write(content)
                places[name] = written[key]
        return places


def _mapped(tensor: TensorProto, folder: Path) -> Array:
    """Returns the value of an initializer that lies in a file of this folder, mapped."""
    place = ExternalDataInfo(tensor)
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    shape = tuple(tensor.dims)
    if not math.prod(shape):  # nothing cannot be mapped
        return np.zeros(shape, dtype)
    return np.memmap(folder / place.location, dtype, "r", place.offset or 0, shape)
