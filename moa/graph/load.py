"""A variant of a bundle, loaded: weights that any number of drafters share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from moa.bundle import Bundle
from moa.errors import BundleError
from moa.graph.drafter import OnePass, OnnxDrafter
from moa.graph.step import StepGraph


@dataclass(frozen=True)
class LoadedGraph:
    """A step graph, and what its bundle says about it."""

    bundle: Bundle
    variant: str
    graph: StepGraph
    draft_tokens: NDArray[np.int64] | None
    one_pass: OnePass | None

    @classmethod
    def load(cls, bundle: Bundle, variant: str = "", *, threads: int = 0, one_pass: bool = False) -> LoadedGraph:
        """Load a variant, by default the bundle's own; with `one_pass`, its drafters draft a block in one run, if they
        have learnt to."""
        name = variant or bundle.manifest.default_variant
        chosen = bundle.variant(name)
        if chosen.form != "dynamic":
            raise BundleError(
                f"variant {name} is made for another host ({chosen.runtime})",
                hint=f"dynamic ones: {', '.join(dynamic_variants(bundle)) or 'none'}",
            )
        bundle.check_runtime(name, onnxruntime.__version__)
        manifest = bundle.manifest
        pairs = bundle.pairs() if one_pass else None
        whole = OnePass(manifest.block.positions, pairs) if manifest.block and pairs else None
        graph = StepGraph(bundle.path(chosen.model), threads=threads)
        return cls(bundle, name, graph, bundle.draft_to_target(), whole)

    def drafter(self) -> OnnxDrafter:
        """A drafter with its own caches."""
        manifest = self.bundle.manifest
        return OnnxDrafter(
            self.graph,
            vocab_size=manifest.vocabulary.target,
            draft_tokens=self.draft_tokens,
            borrowed=len(manifest.records.borrowed) if manifest.records else 0,
            one_pass=self.one_pass,
        )


def dynamic_variants(bundle: Bundle) -> list[str]:
    """Variants that run here, on a CPU."""
    return sorted(name for name, variant in bundle.manifest.variants.items() if variant.form == "dynamic")
