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
        """Load a variant, by default the bundle's own; with `measured`, its number of threads is
        the fastest here, unless one is given."""
        name = variant or bundle.manifest.default_variant
        chosen = bundle.variant(name)
        if chosen.form != "dynamic":
            raise BundleError(
                f"variant {name} is made for another host ({chosen.runtime})",
                hint=f"dynamic ones: {', '.join(dynamic_variants(bundle)) or 'none'}",
            )
        bundle.check_runtime(name, onnxruntime.__version__)
        model = PurePosixPath(chosen.model)
        beside = [
            str(PurePosixPath(file).relative_to(model.parent))
            for file in chosen.files
            if PurePosixPath(file).is_relative_to(model.parent)
        ]
        refuse_foreign_weights(bundle.path(chosen.model), beside)
        place = bundle.path(chosen.model)
        if measured and not threads:
            graph = fastest(place, bundle.manifest.files[chosen.model].sha256)
        else:
            graph = StepGraph(place, threads=threads)
        return cls(bundle, name, graph, bundle.draft_to_target())

    def drafter(self) -> OnnxDrafter:
        """A drafter with its own caches."""
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


def dynamic_variants(bundle: Bundle) -> list[str]:
    """Variants that run here, on a CPU."""
    return sorted(
        name for name, variant in bundle.manifest.variants.items() if variant.form == "dynamic"
    )
