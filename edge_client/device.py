"""The loaded bundle, shared by all conversations: weights and tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import onnxruntime

from edge_client.drafter.graph import StepGraph, default_threads
from edge_client.drafter.onnx import DeviceDrafter, OnePass, OnnxDrafter
from edge_client.settings import ClientSettings
from edge_client.text.codec import TextCodec
from edge_client.turn.guard import OfflineGuard
from edge_client.turn.one_pass import level_rates, one_pass_pays
from edge_client.turn.worker import StepDurations
from moa import demo
from moa.bundle import Bundle
from moa.errors import BundleError


@dataclass(frozen=True)
class Device:
    """A bundle that has been loaded."""

    bundle: Bundle
    variant: str
    codec: TextCodec
    new_drafter: Callable[[], DeviceDrafter]
    """Makes a drafter with its own caches over the shared weights: one for each conversation."""
    one_pass: bool = False
    """Whether its drafters draft a block in one run."""
    step_durations: StepDurations = field(default_factory=StepDurations)
    thread: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="drafter"))
    """The thread for long steps: one, because several would only compete for the same cores."""

    @classmethod
    def of(cls, settings: ClientSettings) -> Device:
        """The one that the settings name."""
        return cls.load(settings.bundle, variant=settings.variant, threads=settings.threads, one_pass=settings.one_pass)

    @classmethod
    def load(
        cls, folder: str | Path = "", *, variant: str = "", threads: int = 0, one_pass: bool | None = None
    ) -> Device:
        """Load a bundle, by default the embedded one. Sizes are checked; `doctor` also checks contents. `one_pass`
        drafts a block in one run of the graph, if the drafter has learnt to; None: if that pays, as measured."""
        bundle = Bundle.open(folder or embedded_bundle())
        name = variant or bundle.manifest.default_variant
        chosen = bundle.variant(name)
        if chosen.form != "dynamic":
            raise BundleError(
                f"variant {name} is made for another host ({chosen.runtime})",
                hint=f"dynamic ones: {', '.join(dynamic_variants(bundle)) or 'none'}",
            )
        bundle.check_runtime(name, onnxruntime.__version__)
        manifest = bundle.manifest
        graph, draft_tokens = StepGraph(bundle.path(chosen.model), threads=threads), bundle.draft_to_target()
        vocabulary = manifest.vocabulary.target
        borrowed = len(manifest.records.borrowed) if manifest.records else 0
        if one_pass is None:
            one_pass = one_pass_pays(manifest, chosen, threads or default_threads())
        pairs = bundle.pairs() if one_pass else None
        whole = OnePass(manifest.block.positions, pairs) if manifest.block and pairs else None

        def new_drafter() -> OnnxDrafter:
            return OnnxDrafter(
                graph, vocab_size=vocabulary, draft_tokens=draft_tokens, borrowed=borrowed, one_pass=whole
            )

        return cls(bundle, name, TextCodec.of(bundle), new_drafter, one_pass=whole is not None)

    def guard(self, stop_at: int, informed: Callable[[], bool]) -> OfflineGuard:
        """The calibrated guard; `stop_at` >= 0 overrides where it stops. `informed`: whether there are records."""
        return OfflineGuard.of(self.bundle.manifest.calibration, stop_at, informed)

    def acceptance(self) -> tuple[list[float], list[float]]:
        """Calibrated chances that a level of a chain, and of a tree, is accepted, given the level before."""
        calibration = self.bundle.manifest.calibration
        reached = calibration and (calibration.one_pass if self.one_pass else calibration.acceptance)
        return (level_rates(reached.chain), level_rates(reached.tree)) if reached else ([], [])


def embedded_bundle() -> Path:
    """The folder of the embedded bundle."""
    return demo.paths().bundle


def dynamic_variants(bundle: Bundle) -> list[str]:
    """Variants that this client can run."""
    return sorted(name for name, variant in bundle.manifest.variants.items() if variant.form == "dynamic")
