"""The loaded bundle, shared by all conversations: weights and tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from edge_client.settings import ClientSettings
from edge_client.text.codec import TextCodec
from edge_client.turn.guard import OfflineGuard
from edge_client.turn.one_pass import level_rates, one_pass_pays
from edge_client.turn.worker import StepDurations
from moa import demo
from moa.bundle import Bundle
from moa.graph.drafter import DeviceDrafter
from moa.graph.load import LoadedGraph
from moa.graph.step import default_threads


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
        if one_pass is None:
            one_pass = one_pass_pays(bundle.manifest, bundle.variant(variant), threads or default_threads())
        loaded = LoadedGraph.load(bundle, variant, threads=threads, one_pass=one_pass)
        return cls(bundle, loaded.variant, TextCodec.of(bundle), loaded.drafter, one_pass=loaded.one_pass is not None)

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
