"""The loaded bundle, shared by all conversations: weights and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnxruntime

from edge_client.settings import ClientSettings
from edge_client.text.codec import TextCodec
from edge_client.turn.step_thread import StepThread
from moa import demo
from moa.bundle import Bundle
from moa.grammar.matcher import GrammarCompiler
from moa.graph.drafter import OnnxDrafter
from moa.graph.load import LoadedGraph
from moa.graph.trial import try_out
from moa.process.memory import give_back_free_memory, let_go_of_pages


@dataclass(frozen=True)
class Device:
    """A bundle that has been loaded."""

    bundle: Bundle
    variant: str
    codec: TextCodec
    new_drafter: Callable[[], OnnxDrafter]
    """Makes a drafter with its own caches over the shared weights: one for each conversation."""
    grammars: GrammarCompiler
    """Compiles what answers must match."""
    threads: int = 1
    """Of a step."""
    thread: StepThread = field(default_factory=StepThread)
    """The thread for long steps."""

    @classmethod
    def of(cls, settings: ClientSettings) -> Device:
        """The one that the settings name."""
        return cls.load(settings.bundle, variant=settings.variant, threads=settings.threads)

    @classmethod
    def load(cls, folder: str | Path = "", *, variant: str = "", threads: int = 0) -> Device:
        """Load a bundle's drafter and tokenizer; `folder` is empty for the embedded bundle,
        `variant` for the bundle's default, and `threads` is 0 for as many as suit. File sizes are
        checked here, contents by `doctor`."""
        bundle = Bundle.open(folder or embedded_bundle())
        name = variant or bundle.manifest.default_variant
        if folder and bundle.variant(name).form == "dynamic":  # others are refused with a reason
            bundle.check_runtime(name, onnxruntime.__version__)
            try_out(bundle, name, threads=threads)
        codec = TextCodec.of(bundle)
        # What the tokenizer was made of is free now, and the graph's weights would not fit into it.
        give_back_free_memory()
        loaded = LoadedGraph.load(bundle, variant, threads=threads, measured=True)
        size = bundle.manifest.vocabulary.target
        eos_ids = sorted(codec.eos_ids)
        grammars = GrammarCompiler(
            lambda: str(codec.tokenizer.to_str()),
            size=size,
            eos_ids=eos_ids,
            encode=codec.encode_behind,
        )
        in_use = loaded.graph.threads
        return cls(bundle, loaded.variant, codec, loaded.drafter, grammars, threads=in_use)

    def give_back(self) -> None:
        """Give back to the system what no text needs any more: the caches of those that are over,
        and the mapped rows of words that have been read. It takes some milliseconds."""
        give_back_free_memory()
        for file in self.bundle.variant(self.variant).files:
            let_go_of_pages(self.bundle.path(file))

    def acceptance(self) -> tuple[list[float], list[float]]:
        """Calibrated chances that a level of a chain, and of a tree, is accepted, given the level
        before."""
        calibration = self.bundle.manifest.calibration
        if calibration is None:
            return [], []
        return _level_rates(calibration.acceptance.chain), _level_rates(calibration.acceptance.tree)


def _level_rates(reached: Sequence[float]) -> list[float]:
    """Chances that a level is accepted, given the level before, from the chances that a draft gets
    so far."""
    before = (1.0, *reached)
    return [now / was if was > 0 else 0.0 for was, now in zip(before, reached, strict=False)]


def embedded_bundle() -> Path:
    """The folder of the embedded bundle."""
    return demo.paths().bundle
