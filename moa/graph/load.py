"""A variant of a bundle, loaded: weights that any number of drafters share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from moa.bundle import Bundle
from moa.errors import BundleError
from moa.graph.control_flow import refuse_foreign_weights
from moa.graph.drafter import OnnxDrafter
from moa.graph.step import StepGraph
from moa.graph.threads import fastest
from moa.manifest import Variant
from moa.process.memory import let_go_of_pages


@dataclass(frozen=True)
class LoadedGraph:
    """A step graph, and what its bundle says about it."""

    bundle: Bundle
    variant: str
    graph: StepGraph
    draft_tokens: NDArray[np.int64] | None

    @classmethod
    def load(
        cls, bundle: Bundle, variant: str = "", *, threads: int = 0, measured: bool = False
    ) -> LoadedGraph:
        """Load a variant, one of the forms in which a bundle has the drafter's graph; without a
        name its default one. With `measured` the number of threads is the fastest on this machine,
        unless one is given."""
        name = variant or bundle.manifest.default_variant
        chosen = bundle.variant(name)
        if chosen.form != "dynamic":
            raise BundleError(
                f"variant {name} is made for another host ({chosen.runtime})",
                hint=f"dynamic ones: {', '.join(dynamic_variants(bundle)) or 'none'}",
            )
        bundle.check_runtime(name, onnxruntime.__version__)
        model = bundle.path(chosen.model)
        refuse_foreign_weights(model, _listed_beside(chosen))
        if measured and not threads:
            graph = fastest(model, bundle.manifest.files[chosen.model].sha256)
        else:
            graph = StepGraph(model, threads=threads)
        # ONNX Runtime has a copy of the matrices and their scales, in the processor's order. Of the
        # mapped file rows of the embedding are read from now on, as a text needs them.
        for file in chosen.files:
            let_go_of_pages(bundle.path(file))
        return cls(bundle, name, graph, bundle.draft_to_target())

    def drafter(self) -> OnnxDrafter:
        """Make a drafter over this graph, with caches of its own; the weights are shared."""
        manifest = self.bundle.manifest
        borrowed = len(manifest.records.borrowed) if manifest.records else 0
        if borrowed > self.graph.layers:
            raise BundleError(f"{self.bundle.folder}: records bring more layers than the graph has")
        return OnnxDrafter(
            self.graph,
            vocab_size=manifest.vocabulary.target,
            draft_tokens=self.draft_tokens,
            borrowed=borrowed,
        )


def _listed_beside(variant: Variant) -> list[str]:
    """The variant's files, named from its model's folder, as the model names its weights."""
    folder = PurePosixPath(variant.model).parent
    files = [PurePosixPath(file) for file in variant.files]
    return [str(file.relative_to(folder)) for file in files if file.is_relative_to(folder)]


def dynamic_variants(bundle: Bundle) -> list[str]:
    """Variants that run here, on a CPU."""
    return sorted(
        name for name, variant in bundle.manifest.variants.items() if variant.form == "dynamic"
    )
