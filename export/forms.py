"""The forms of an exported drafter: operators and precision for each runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from export.assemble import Ends, step_graph
from export.body import Body, export_body
from export.quantize import block_layers, int8_layers, unpacked_layers
from export.source import Source
from export.storage import WeightedModel
from export.tables import BlockTable, FloatTable, Int8Table, Table, UnpackedTable


@dataclass(frozen=True)
class Blocks:
    """How to store four-bit weights; `tables` are the bits of embedding and head."""

    block: int
    tables: int

    def __str__(self) -> str:
        return f"int4 in blocks of {self.block}" + (
            f", embedding and head int{self.tables}" if self.tables != 4 else ""
        )


BLOCKS = (Blocks(32, 4), Blocks(32, 8))
"""From the fastest to the most accurate; the first with enough agreement is used."""


@dataclass
class Workshop:
    """A source and the intermediate results made from it, each computed once."""

    source: Source
    folder: Path
    top_k: int
    draft_to_target: NDArray[np.int64] | None = None
    int8_cpu: str = "avx512_vnni"
    _layers: dict[int, Path] = field(default_factory=dict)
    _int8: dict[int, tuple[Path, str]] = field(default_factory=dict)

    def layers(self, opset: int) -> Path:
        """The layers' graph in float32."""
        if opset not in self._layers:
            folder = self.folder / f"layers-{opset}"
            folder.mkdir(parents=True, exist_ok=True)
            export_body(Body(self.source.module), self.source.spec, folder / "layers.onnx", opset=opset)
            self._layers[opset] = folder / "layers.onnx"
        return self._layers[opset]

    @cached_property
    def head_rows(self) -> NDArray[np.float32]:
        """The head's matrix: only the rows of the draft vocabulary."""
        head = self.source.head()
        return head[: self.source.vocabulary] if self.draft_to_target is None else head[self.draft_to_target]

    @property
    def tied(self) -> bool:
        """Whether embedding and head share one table."""
        return self.source.tied and self.head_rows.shape == self.source.embedding().shape

    @property
    def parameters(self) -> int:
        """How many weights the graph has."""
        tables = self.source.shared.embedding.numel() + (0 if self.tied else self.head_rows.size)
        return tables + sum(weight.numel() for weight in self.source.module.parameters())

    def float_graph(self, opset: int) -> WeightedModel:
        """Float32, exact."""
        return self._graph(onnx.load(self.layers(opset)), FloatTable)

    def int8_graph(self, opset: int) -> tuple[WeightedModel, str]:
        """Eight bits with dynamically quantized activations; returns also the name of the quantizer."""
        if opset not in self._int8:
            work = self.folder / f"int8-{opset}"
            work.mkdir(parents=True, exist_ok=True)
            self._int8[opset] = int8_layers(self.layers(opset), work, self.int8_cpu)
        layers, maker = self._int8[opset]
        return self._graph(onnx.load(layers), Int8Table), maker

    def unpacked_graph(self, opset: int) -> WeightedModel:
        """Weights in eight bits, products in float32."""
        return self._graph(unpacked_layers(self.layers(opset)), UnpackedTable)

    def block_graph(self, opset: int, blocks: Blocks) -> WeightedModel:
        """Four bits in blocks."""
        layers = block_layers(self.layers(opset), bits=4, block=blocks.block)
        return self._graph(layers, lambda name, rows: BlockTable(name, rows, bits=blocks.tables, block=blocks.block))

    def _graph(self, layers: onnx.ModelProto, table: Callable[[str, NDArray[np.float32]], Table]) -> WeightedModel:
        embedding = table("embedding", self.source.embedding())
        ends = Ends(
            embedding=embedding,
            head=embedding if self.tied else table("head", self.head_rows),
            top_k=self.top_k,
            embedding_scale=self.source.shared.embedding_scale,
            logit_softcap=self.source.shared.logit_softcap,
            draft_to_target=self.draft_to_target,
        )
        return step_graph(layers, self.source.spec, ends)
