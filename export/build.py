"""The pipeline: graph -> parity -> quantize -> agreement -> golden vectors and times -> manifest."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from export.agreement import Continuation, Reference, encode_prompts, make_traces, read_prompts
from export.atomic_folder import new_folder
from export.card import model_card
from export.describe import describe, public_name, tool_versions, write_shared
from export.draft_vocabulary import count_files, most_frequent
from export.forms import Workshop
from export.kinds import OPSET, VariantKind, choose_kinds
from export.parity import STEPS_COMPARED, Case, compare, working_steps
from export.plan import (
    COMPARING,
    EXPORTING,
    MAKING,
    READING,
    RECORDING,
    TIMING_SECONDS,
    Cost,
    check_memory,
    make_plan,
)
from export.progress import Notify, Part, Progress, silent
from export.runner import OrtRunner, StepInput, TorchRunner, random_steps
from export.source import Source, load_source
from export.static_forms import StaticShape
from export.variants import Judge, make_dynamic, make_static
from moa.bundle import GOLDEN, SCHEMA, Bundle, GoldenCase, sha256, write_golden, write_manifest
from moa.cli.working import lasting
from moa.drafters.graph import GraphSpec
from moa.errors import ConfigError
from moa.manifest import (
    Calibration,
    DrafterIdentity,
    FileEntry,
    KVHeads,
    Manifest,
    RecordFormat,
    StepTime,
    TargetIdentity,
    TokenizerFiles,
    Variant,
    Vocabulary,
)
from moa.process.busy import slowdown
from moa.process.memory import give_back_free_memory
from moa.target.contract import LoadOptions, Target
from moa.target.memory_plan import plan_memory
from moa.target.registry import open_target, source_of
from moa.target.torch_target import Target as TorchTarget
from moa.worth import worth

_SLOTS = 16
"""Texts that the target answers at once."""
PAST = 256
"""Cache rows in a timed step: a chat of some length."""
RECORDS = 256
"""Records in a timed step."""
STEPS = (1, 8)
"""Tokens of a chain's step, and of a tree's."""
_GOLDEN_CASES = (
    Case("first", tokens=1, queries=1, past=0, records=0),
    Case("tree", tokens=6, queries=6, past=9, records=5),
    Case("prompt", tokens=12, queries=1, past=4, records=0),
)


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """What to build. `prompts` are added to those of the `calibration` files."""

    target: str
    drafter: str
    out: Path
    variants: tuple[str, ...] = ()
    draft_vocab: int | None = None
    vocab_text: tuple[Path, ...] = ()
    vocab_prompts: tuple[str, ...] = ()
    """If no text is given: prompts for the target, whose answers are used to choose the draft
    vocabulary."""
    calibration: tuple[Path, ...] = ()
    prompts: tuple[str, ...] = ()
    new_tokens: int = 96
    top_k: int = 16
    int8_cpu: str = "avx512_vnni"
    static_shape: StaticShape = field(default_factory=StaticShape)
    force: bool = False
    time_steps: bool = True

    @property
    def needs_target(self) -> bool:
        """Whether the target's answers are needed, to calibrate with or to choose a vocabulary by."""
        texts = self.prompts or self.calibration
        return bool(texts or (self.draft_vocab and not self.vocab_text))

    def __post_init__(self) -> None:
        if self.draft_vocab is not None and not (self.vocab_text or self.vocab_prompts):
            raise ConfigError(
                "--draft-vocab needs text to choose tokens by",
                hint="give --vocab-text FILE [FILE ...]",
            )


_UNKNOWN = 0.0
_TICK_SECONDS = 1.0
"""Between two lines on the same work."""


def build(settings: BuildSettings, say: Notify = silent, show: Notify = silent) -> Bundle:
    """Build a bundle, what a device drafts from, at `settings.out`: the folder gets that name when
    it is complete. `say` gets lines of progress, and `show` those between them, each of which takes
    the place of the one before."""
    started = time.monotonic()
    plan = make_plan(settings.target, settings.drafter, settings.variants, settings.draft_vocab)
    check_memory(plan)
    progress = Progress(parts_of(settings, plan.weights, slowdown()), say, show)
    with (
        new_folder(settings.out, needed=plan.disk, force=settings.force) as folder,
        lasting(lambda _: progress.tick(), _TICK_SECONDS),
    ):
        _Build(settings, folder, say, progress).run()
    say(f"{settings.out} is done after {time.monotonic() - started:.0f} s")
    return Bundle.open(settings.out)


def parts_of(settings: BuildSettings, weights: int, slowdown: float) -> list[Part]:
    """Returns the parts of a build, in the order in which they are begun, with the time that each
    takes about for so many weights, where everything takes `slowdown` times as long as on a machine
    that does nothing else."""

    def part(doing: str, *costs: Cost) -> Part:
        return Part(doing, slowdown * sum(cost.of(weights) for cost in costs))

    parts = [part("reading the drafter and what it shares of its target", READING)]
    if settings.needs_target:
        # How long it takes depends on the texts.
        parts.append(Part("loading the target to record its answers", _UNKNOWN))
    parts.append(part("exporting the graph", EXPORTING))
    parts.append(part("comparing the graph with torch", COMPARING))
    for kind in choose_kinds(settings.variants):
        doing = f"variant {kind.name}"
        if kind.form == "static":  # it has a graph of its own
            parts.append(part(doing, MAKING, EXPORTING))
        else:
            parts.append(Part(doing, part(doing, MAKING).seconds + TIMING_SECONDS))
    parts.append(part("recording golden vectors", RECORDING))
    return parts


class _Build:
    """One bundle in the making."""

    def __init__(
        self, settings: BuildSettings, folder: Path, say: Notify, progress: Progress
    ) -> None:
        """Read what the settings name, and load the drafter."""
        self.settings = settings
        self.folder = folder
        self.say = say
        self.kinds = choose_kinds(settings.variants)
        # A mistake in a file is found before anything is loaded.
        self.texts = list(settings.prompts)
        """Prompts to calibrate with."""
        if settings.calibration:
            self.texts += read_prompts(settings.calibration)
        self.progress = progress
        self.progress.begin()
        self.source: Source = load_source(settings.target, settings.drafter, folder)

    def run(self) -> None:
        """Write all files of the bundle, the manifest last."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="work-") as work:
            target = self._target()
            chosen = self._draft_vocabulary(target)
            shop = self._workshop(Path(work), chosen)
            difference = self._parity(shop)
            reference = self._reference(target)
            del target  # its memory is for the quantizers
            variants = {}
            for kind in self.kinds:
                variants[kind.name] = self._variant(shop, kind, difference, reference)
            self._golden(variants)
            calibration = self._calibration(reference)
        tokenizer, vocabulary = write_shared(self.source, chosen, self.folder)
        self._manifest(shop.top_k, variants, tokenizer, vocabulary, calibration)

    def _workshop(self, work: Path, chosen: NDArray[np.int64] | None) -> Workshop:
        """Returns the workshop that makes the graphs in the folder `work`. `chosen` are the tokens
        that the drafter may propose, None for all."""
        vocabulary = self.source.vocabulary if chosen is None else len(chosen)
        return Workshop(
            source=self.source,
            folder=work,
            top_k=min(self.settings.top_k, vocabulary),
            draft_to_target=chosen,
            int8_cpu=self.settings.int8_cpu,
            counted=self.progress.count,
        )

    def _target(self) -> Target | None:
        """Returns the whole target model if its answers are needed, to calibrate with or to choose
        a vocabulary by; else None."""
        settings = self.settings
        if not settings.needs_target:
            return None
        self.progress.begin()
        how = LoadOptions(device="cpu", dtype="float32", slots=_SLOTS, capacity=1024)
        if not source_of(settings.target).planned:
            how = dataclasses.replace(how, dtype="auto")  # a GGUF file has its own
            return open_target(settings.target, how)
        plan_memory(settings.target, how)  # refused now, not killed later
        target = TorchTarget.load(settings.target, slots=how.slots, capacity=how.capacity)
        taps = self.source.module.taps
        if taps:
            target.tap(taps)
        return target

    def _draft_vocabulary(self, target: Target | None) -> NDArray[np.int64] | None:
        """Returns the ids of the tokens that the drafter may propose, as the target numbers them;
        None for all."""
        source = self.source
        settings = self.settings
        if settings.draft_vocab is None:
            if source.vocabulary == source.facts.vocab_size:
                return None
            # An independent drafter's embedding may have less padding than the target's.
            return np.arange(source.vocabulary)
        self.say("choosing the draft vocabulary")
        if settings.vocab_text:
            counts = count_files(source.tokenizer.json, settings.vocab_text)
            return most_frequent(counts, settings.draft_vocab, source)
        assert target is not None
        traces = self._answers(target, settings.vocab_prompts)
        counts = Counter(token for trace in traces for token in trace.ids[trace.prompt :])
        return most_frequent(counts, settings.draft_vocab, source)

    def _answers(self, target: Target, prompts: Sequence[str]) -> list[Continuation]:
        """The target's answers to these prompts."""
        return make_traces(
            target,
            self.source,
            encode_prompts(target, prompts),
            new_tokens=self.settings.new_tokens,
        )

    def _parity(self, shop: Workshop) -> float:
        """The largest difference of the float32 graph's logits from torch's; an error if it is too
        large."""
        folder = shop.folder / "reference"
        folder.mkdir()
        model = folder / "model.onnx"
        self.progress.begin()
        shop.float_graph(OPSET).save(model)
        reference = TorchRunner(self.source, shop.top_k)
        self.progress.begin(total=STEPS_COMPARED)
        difference = compare(reference, model, shop.draft_to_target, self.progress.count)
        shutil.rmtree(folder)
        return difference

    def _reference(self, target: Target | None) -> Reference | None:
        """Returns the target's answers to the calibration prompts, which each variant is compared
        with; None without prompts."""
        if target is None or not self.texts:
            return None
        self.say(f"recording the target's answers to {len(self.texts)} prompts")
        traces = self._answers(target, self.texts)
        names = ", ".join(path.name for path in self.settings.calibration)
        if not names:
            names = "held-out prompts of the embedded pair"
        # The float32 drafter with its whole vocabulary: the ratio then includes the cost of a
        # smaller one.
        runner = TorchRunner(self.source, min(self.settings.top_k, self.source.vocabulary))
        return Reference(traces, runner, names)

    def _calibration(self, reference: Reference | None) -> Calibration | None:
        """Measure what a device expects of this drafter, and tell what it is worth; None without
        the target's answers."""
        if reference is None:
            return None
        measured = reference.calibration()
        self.say(f"on {measured.prompts} held-out prompts {worth(measured.acceptance.chain)}")
        return measured

    def _variant(
        self, shop: Workshop, kind: VariantKind, difference: float, reference: Reference | None
    ) -> Variant:
        """Make one variant, the drafter in one precision for one runtime; returns its entry of the
        manifest."""
        self.progress.begin(total=shop.parameters)
        folder = self.folder / "variants" / kind.name
        times: tuple[StepTime, ...] = ()
        if kind.form == "static":
            made = make_static(shop, kind, folder, self.settings.static_shape, reference)
        else:
            judge: Judge = reference.judge if reference else lambda _: None
            made = make_dynamic(shop, kind, folder, judge)
            if self.settings.time_steps:
                times = step_times(made.files[0], self.source.spec, self.source.vocabulary)
        give_back_free_memory()
        return describe(kind, made, self.folder, parity=difference, times=times)

    def _golden(self, variants: dict[str, Variant]) -> None:
        """Write the golden vectors: inputs of a few steps, and what each dynamic variant makes of
        them here."""
        self.progress.begin()
        runners = {}
        for name, variant in variants.items():
            if variant.form == "dynamic":
                runners[name] = OrtRunner(self.folder / variant.model, self.source.spec)
        reference = TorchRunner(self.source, min(self.settings.top_k, self.source.vocabulary))
        write_golden(self.folder / GOLDEN, golden_cases(reference, runners))

    def _manifest(
        self,
        top_k: int,
        variants: dict[str, Variant],
        tokenizer: TokenizerFiles,
        vocabulary: Vocabulary,
        calibration: Calibration | None,
    ) -> None:
        """Write the bundle's card, then its manifest, which lists all files with their hashes."""
        source = self.source
        # The first variant that runs anywhere; a bundle of static ones alone has none.
        dynamic = [name for name, variant in variants.items() if variant.form == "dynamic"]
        default_variant = dynamic[0] if dynamic else next(iter(variants))
        manifest = Manifest(
            schema=SCHEMA,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            producer=tool_versions(),
            recipe=self._recipe(),
            target=TargetIdentity(source=public_name(self.settings.target), facts=source.facts),
            drafter=DrafterIdentity(
                kind=source.module.bundle_kind,
                source=public_name(self.settings.drafter),
                weights_id=source.drafter_id,
                config=asdict(source.module.config),
            ),
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            cache=source.spec.cache,
            records=self._record_format(),
            top_k=top_k,
            default_variant=default_variant,
            variants=variants,
            calibration=calibration,
            files={},
        )
        (self.folder / "README.md").write_text(model_card(manifest), encoding="utf-8")
        # The card is one of the files that it lists.
        write_manifest(self.folder, msgspec.structs.replace(manifest, files=self._files()))

    def _files(self) -> dict[str, FileEntry]:
        """Returns all files of the bundle, each with its hash and size."""
        files = {}
        for path in sorted(self.folder.rglob("*")):
            if path.is_file():
                name = path.relative_to(self.folder).as_posix()
                files[name] = FileEntry(sha256=sha256(path), size=path.stat().st_size)
        return files

    def _record_format(self) -> RecordFormat | None:
        """Returns the format of the activation records that a verifier sends to the drafter: the
        target's hidden states, as keys and values that the drafter's layers read. None if the
        drafter reads none."""
        cache = self.source.spec.cache
        # Borrowed layers keep their keys and values in the cache, and take them from records as far
        # as these are there. They are the last of the cache's layers.
        own_layers = len(cache) - self.source.spec.borrowed
        borrowed = cache[own_layers:]
        # Cross-attention reads nothing but records.
        crossing = self.source.spec.records
        if crossing is None and not borrowed:
            return None
        if crossing is None:
            # Without it records have rows for the borrowed layers alone. A format always has a part
            # for cross-attention: here one of no heads, as wide as those of the cache.
            crossing = KVHeads(kv_heads=0, head_dim=cache[0].head_dim)
        return RecordFormat(
            kv_heads=crossing.kv_heads,
            head_dim=crossing.head_dim,
            rope_theta=self.source.module.config.rope_theta,
            borrowed=borrowed,
        )

    def _recipe(self) -> dict[str, Any]:
        """Returns the settings for the manifest, without paths of this machine."""
        settings = asdict(self.settings)
        for name in ("target", "drafter", "out", "force", "prompts", "vocab_prompts"):
            del settings[name]
        for name in ("calibration", "vocab_text"):
            settings[name] = [path.name for path in settings[name]]
        settings["variants"] = [kind.name for kind in self.kinds]
        return settings


def step_times(
    model: Path,
    spec: GraphSpec,
    vocabulary: int,
    *,
    threads: tuple[int, ...] = (1, 2),
    seconds: float = 0.5,
) -> tuple[StepTime, ...]:
    """Returns the median time of a step of the drafter in milliseconds, over few and over several
    tokens, with one thread and with two. Each is measured for about `seconds`."""
    times = []
    for count in threads:
        runner = OrtRunner(model, spec, threads=count)
        for width in STEPS:
            (step,) = random_steps(spec, vocabulary, sizes=((width, width, PAST, RECORDS),))
            milliseconds = 1000 * _median_seconds(runner, step, seconds)
            times.append(StepTime(tokens=width, threads=count, ms=round(milliseconds, 4)))
    return tuple(times)


def _median_seconds(runner: OrtRunner, step: StepInput, seconds: float) -> float:
    """Returns the median time of this step, which is run again and again for about `seconds`."""
    feeds = {name: np.ascontiguousarray(value) for name, value in step.feeds(runner.spec).items()}
    for _ in range(_WARM_UP_RUNS):
        runner.session.run(None, feeds)
    samples: list[float] = []
    while sum(samples) < seconds or len(samples) < _LEAST_RUNS:
        start = perf_counter()
        runner.session.run(None, feeds)
        samples.append(perf_counter() - start)
    return statistics.median(samples)


_WARM_UP_RUNS = 3
_LEAST_RUNS = 5


def golden_cases(reference: TorchRunner, runners: Mapping[str, OrtRunner]) -> list[GoldenCase]:
    """Returns the inputs of a few steps, with what each variant makes of them here, so that any
    machine can compare its own. The steps run over states that the model itself has computed: over
    random ones a real model's numbers depend on the processor."""
    cases = []
    for case, step in working_steps(reference, _GOLDEN_CASES):
        feeds = step.feeds(reference.spec)
        inputs = {key: np.ascontiguousarray(value) for key, value in feeds.items()}
        outputs = ["top_logp", "top_tokens"]
        expected = {}
        for variant, runner in runners.items():
            top_logp, top_tokens = runner.session.run(outputs, inputs)
            expected[variant] = (top_logp, top_tokens)
        cases.append(GoldenCase(case.says, inputs, expected))
    return cases
