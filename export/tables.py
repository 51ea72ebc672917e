"""Embedding and head, the two largest matrices of a drafter, in each precision; tied ones are
stored once.

Each table adds its nodes to a graph: `embed` turns ids into rows, `project` turns hidden states
into logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    DefaultWeightOnlyQuantizer,
)

from export.progress import Counted, uncounted
from export.storage import WeightedModel

Matrix = NDArray[np.float32]
MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""
_ROWS_AT_ONCE = 8192
"""Rows that are quantized at once: a float or transposed copy of the whole table would double the
memory."""


class Table(Protocol):
    """A `[vocabulary, hidden]` matrix in some precision."""

    def embed(self, model: WeightedModel, ids: str, out: str) -> None:
        """Rows of `ids` `[1,T]`: `[1,T,hidden]`."""

    def project(self, model: WeightedModel, hidden: str, out: str) -> None:
        """`[1,N,hidden]` times the matrix transposed: `[1,N,vocabulary]`."""


@dataclass(frozen=True)
class FloatTable:
    """Float32."""

    name: str
    rows: Matrix

    def embed(self, model: WeightedModel, ids: str, out: str) -> None:
        """Gather the rows."""
        model.node("Gather", [model.constant(f"table.{self.name}.weight", self.rows), ids], [out])

    def project(self, model: WeightedModel, hidden: str, out: str) -> None:
        """The runtime folds the Transpose when it loads; so a tied matrix is stored once."""
        weight = model.constant(f"table.{self.name}.weight", self.rows)
        columns = model.node("Transpose", [weight], [f"table.{self.name}.columns"], perm=[1, 0])
        model.node("MatMul", [hidden, columns], [out])


class Int8Table:
    """Eight bits, a scale for each row. Rows of the embedding are columns of the head, so both can
    use the same data."""

    def __init__(self, name: str, rows: Matrix) -> None:
        """Quantize the rows to eight bits, each with a scale of its own."""
        self.name = name
        self.scale: Matrix = np.empty((len(rows), 1), np.float32)
        self.rows = np.empty(rows.shape, np.int8)
        for start in range(0, len(rows), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            scale = np.abs(rows[part]).max(axis=1, keepdims=True) / 127.0
            scale[scale == 0] = 1.0  # a row of zeros
            self.scale[part] = scale
            self.rows[part] = np.rint(rows[part] / self.scale[part])

    def embed(self, model: WeightedModel, ids: str, out: str) -> None:
        """Gather rows and scales, and multiply. Standard operators only, so that every runtime has
        them."""
        all_codes = model.constant(f"table.{self.name}.int8", self.rows)
        all_scales = model.constant(f"table.{self.name}.scale", self.scale)
        codes = model.node("Gather", [all_codes, ids], [f"{out}_codes"])
        scale = model.node("Gather", [all_scales, ids], [f"{out}_row_scale"])
        wide = model.node("Cast", [codes], [f"{out}_wide"], to=TensorProto.FLOAT)
        model.node("Mul", [wide, scale], [out])

    def project(self, model: WeightedModel, hidden: str, out: str) -> None:
        """Add the product with the head in eight bits, in the pattern of nodes that ONNX Runtime
        fuses into one dynamically quantized product."""
        codes = model.constant(f"table.{self.name}.int8", self.rows)
        columns = model.node("Transpose", [codes], [f"table.{self.name}.columns"], perm=[1, 0])
        zero = model.constant(f"table.{self.name}.zero", np.array(0, np.int8))
        scale = model.constant(f"table.{self.name}.column_scale", self.scale[:, 0].copy())
        model.node(
            "DynamicQuantizeLinear", [hidden], [f"{out}_q", f"{out}_q_scale", f"{out}_q_zero"]
        )
        product = model.node(
            "MatMulInteger", [f"{out}_q", columns, f"{out}_q_zero", zero], [f"{out}_integer"]
        )
        wide = model.node("Cast", [product], [f"{out}_wide"], to=TensorProto.FLOAT)
        both = model.node("Mul", [f"{out}_q_scale", scale], [f"{out}_scale"])
        model.node("Mul", [wide, both], [out])


class UnpackedTable(Int8Table):
    """Stored in eight bits; the head is unpacked when the runtime loads, by folding constants."""

    def project(self, model: WeightedModel, hidden: str, out: str) -> None:
        """Unpack, and multiply in float32."""
        codes = model.constant(f"table.{self.name}.int8", self.rows)
        wide = model.node("Cast", [codes], [f"table.{self.name}.wide"], to=TensorProto.FLOAT)
        scale = model.constant(f"table.{self.name}.scale", self.scale)
        rows = model.node("Mul", [wide, scale], [f"table.{self.name}.unpacked"])
        columns = model.node("Transpose", [rows], [f"table.{self.name}.columns"], perm=[1, 0])
        model.node("MatMul", [hidden, columns], [out])


class BlockTable:
    """Four or eight bits with a scale for every block of a row, in the layout of MatMulNBits."""

    def __init__(
        self,
        name: str,
        rows: Matrix,
        *,
        bits: int,
        block: int,
        counted: Counted = uncounted,
    ) -> None:
        """Quantize the rows to `bits` bits, with a scale for each `block` of numbers. `counted` is
        told of the weights that are done."""
        self.name = name
        self.bits = bits
        self.block = block
        self.count, self.width = rows.shape
        settings = DefaultWeightOnlyQuantConfig(block_size=block, is_symmetric=True, bits=bits)
        code_parts = []
        scale_parts = []
        for start in range(0, self.count, _ROWS_AT_ONCE):
            # The quantizer needs columns.
            columns = np.ascontiguousarray(rows[start : start + _ROWS_AT_ONCE].T)
            quantizer = DefaultWeightOnlyQuantizer(settings)
            codes, scales, _ = quantizer.qbits_block_quant(columns)
            code_parts.append(codes)
            scale_parts.append(scales.reshape(len(codes), -1))
            done = min(start + _ROWS_AT_ONCE, self.count)
            counted(columns.size, f"row {done:,} of {self.count:,} of the {name}")
        self.codes = np.concatenate(code_parts)
        self.scales: Matrix = np.concatenate(scale_parts)

    def embed(self, model: WeightedModel, ids: str, out: str) -> None:
        """Add the embedding: rows of the head's quantized data, in which a block is one row of the
        last axis."""
        codes = model.constant(f"table.{self.name}.codes", self.codes)
        scales = model.constant(f"table.{self.name}.block_scales", self.scales[:, :, None])
        blocks = model.node(
            "GatherBlockQuantized",
            [codes, ids, scales],
            [f"{out}_blocks"],
            domain=MICROSOFT,
            bits=self.bits,
            block_size=self.block,
            gather_axis=0,
            quantize_axis=2,
        )
        # Blocks side by side again; a last block that is not full leaves zeros, which are cut off.
        shape = model.constant(f"{out}_shape", np.array([0, 0, -1], np.int64))
        padded_width = self.codes.shape[1] * self.block
        if padded_width == self.width:
            model.node("Reshape", [blocks, shape], [out])
            return
        rows = model.node("Reshape", [blocks, shape], [f"{out}_padded"])
        start = model.constant(f"{out}_cut_0", np.array([0], np.int64))
        stop = model.constant(f"{out}_cut_1", np.array([self.width], np.int64))
        axis = model.constant(f"{out}_cut_2", np.array([2], np.int64))
        model.node("Slice", [rows, start, stop, axis], [out])

    def project(self, model: WeightedModel, hidden: str, out: str) -> None:
        """Add the product with the quantized matrix. Accuracy level 4 computes in eight bits: three
        times as fast as float."""
        model.node(
            "MatMulNBits",
            [
                hidden,
                model.constant(f"table.{self.name}.codes", self.codes),
                model.constant(f"table.{self.name}.scales", self.scales),
            ],
            [out],
            domain=MICROSOFT,
            K=self.width,
            N=self.count,
            bits=self.bits,
            block_size=self.block,
            accuracy_level=4,
        )
