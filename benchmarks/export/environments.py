"""Every variant on its runtime: the provider of each node, and the share of the float32 drafter's acceptance that it
keeps.

QNN (on the HTP emulation that its package brings) and OpenVINO (on the CPU) get an environment of their own with `venv`
and `pip`, the browser's runtime one with `npm`, where it is missing. The texts are the target's own: answers to
held-out exercises, and functions of the standard library continued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.export.remote import OPENVINO, QNN, WEB, NotHere, Remote, RemoteDynamic
from benchmarks.export.share import Measured, share
from benchmarks.export.share import measure as measured
from benchmarks.kit.figures import table
from benchmarks.kit.progress import Progress, say
from demo.held_out import CODE, code_prompts, encode, skill_prompts
from export.continuations import Continuation, make_traces
from export.describe import this_runtime
from export.embedded import embedded_sources
from export.runner import OrtRunner, Runner, TorchRunner
from export.source import Source, load_source
from export.static_forms import EMBEDDING, StaticShape
from export.static_runner import Feeds, StaticRunner, session_of
from export.verify import node_placement
from moa.bundle import Bundle
from moa.demo import paths
from moa.errors import MoaError, UsageError
from moa.manifest import Variant
from moa.model.target import Target

RUNTIMES = {"npu-qnn": QNN, "npu-openvino": OPENVINO, "portable": OPENVINO, "web": WEB}
NO_RUNTIME = ("coreml", "nnapi")
"""Does not exist for Linux: one partition by ONNX Runtime's checker, the arithmetic on the CPU."""
GOALS = {"cpu-int8": 0.99}
GOAL = 0.97
CPU = "CPUExecutionProvider"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which bundle, and where its runtimes are."""

    bundle: str = str(paths().bundle)
    """Folder of the bundle."""
    target: str = ""
    """Its target; without it the embedded pair."""
    drafter: str = ""
    """Its drafter."""
    variants: tuple[str, ...] = ()
    """Only these variants."""
    per_skill: int = 2
    """Held-out exercises of each skill."""
    code: int = 12
    """Held-out functions to continue."""
    emulated: int = 12
    """Prompts for npu-qnn, of these: its emulation is slow."""
    new_tokens: int = 48
    """Tokens of a text."""
    environments: str = "environments"
    """Folder of the runtimes' environments; made where it is missing."""

    def __post_init__(self) -> None:
        if bool(self.target) != bool(self.drafter):
            raise UsageError("--target and --drafter belong together", hint="leave out both for the embedded pair")


@dataclass(frozen=True)
class Texts:
    """The target's texts, and the float32 drafter's acceptance on them. `hard` are those with few accepted drafts."""

    traces: list[Continuation]
    reference: list[Measured]
    hard: list[bool]

    def some(self, count: int) -> Texts:
        """So many of them, evenly spread."""
        chosen = sorted({int(at) for at in np.linspace(0, len(self.traces) - 1, min(count, len(self.traces)))})
        return Texts(*([side[at] for at in chosen] for side in (self.traces, self.reference, self.hard)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Open:
    """A running variant: its runtime, its provider, and the placement of its nodes."""

    runner: Runner
    runtime: str
    provider: str
    placement: Callable[[], dict[str, int]]
    close: Callable[[], None]


def open_variant(bundle: Bundle, name: str, source: Source, environments: Path) -> Open:
    """Start a variant on its runtime."""
    variant, runtime = bundle.variant(name), RUNTIMES.get(name)
    model = bundle.path(variant.model)
    if runtime is not None:
        remote = Remote(runtime, environments, model)
        static = variant.form == "static"
        away = static_runner(bundle, variant, source, remote.run) if static else RemoteDynamic(remote, source.spec)
        return Open(away, remote.runtime, runtime.provider, lambda: remote.placement, remote.close)
    if variant.form == "static":
        return Open(static_runner(bundle, variant, source, session_of(model)), this_runtime(), "", dict, lambda: None)
    here = OrtRunner(model, source.spec)
    return Open(here, this_runtime(), CPU, lambda: node_placement(model, bundle, CPU), lambda: None)


def static_runner(bundle: Bundle, variant: Variant, source: Source, run: Callable[[Feeds], list[Any]]) -> StaticRunner:
    """The host's part around a static form."""
    return StaticRunner(
        run,
        np.load(bundle.path(variant.model).parent / EMBEDDING, mmap_mode="r"),
        source.spec,
        StaticShape(
            tokens=int(variant.inputs["x"][1]),
            past=int(variant.inputs["past_k_0"][2]),
            records=int(variant.inputs["record_k"][2]),
        ),
        rope_theta=source.rope_theta,
        top_k=bundle.manifest.top_k,
        draft_to_target=bundle.draft_to_target(),
    )


def row(bundle: Bundle, name: str, source: Source, texts: Texts, environments: Path) -> dict[str, Any]:
    """A variant's figures; an error if another provider ran all nodes."""
    try:
        variant = open_variant(bundle, name, source, environments)
    except NotHere as error:
        return {"variant": name, "not_run": str(error)}
    found, progress = [], Progress(len(texts.traces), f"texts by {name}")
    for trace in texts.traces:
        found.append(measured(variant.runner, trace))
        progress.step()
    variant.close()
    placed = variant.placement()
    if variant.provider and not placed.get(variant.provider):
        raise MoaError(f"{name}: {variant.provider} ran no node: {placed}")
    goal = GOALS.get(name, GOAL)
    result: dict[str, Any] = {"variant": name, "runtime": variant.runtime, "placement": placed, "goal": goal}
    result |= share(found, texts.reference)
    hard = [at for at, flag in enumerate(texts.hard) if flag]
    if len(hard) > 1:
        result["code"] = share([found[at] for at in hard], [texts.reference[at] for at in hard])
    return result | {"met": result["ratio"] >= goal}


def read_texts(options: Options, source: Source, target: str, top_k: int) -> Texts:
    """Let the target answer, and the float32 drafter draft along."""
    model = Target.load(target, slots=16, capacity=1024)
    chosen = [*skill_prompts(options.per_skill), *code_prompts(options.code)]
    prompts = [encode(model.tokenizer, example) for example in chosen]
    hard = [example.skill == CODE for example in chosen]
    traces = make_traces(model, source, prompts, new_tokens=options.new_tokens)
    reference = TorchRunner(source, top_k)
    return Texts(traces, [measured(reference, trace) for trace in traces], hard)


def measure(options: Options) -> dict[str, Any]:
    """Every variant."""
    bundle = Bundle.open(options.bundle)
    names = list(options.variants or bundle.manifest.variants)
    bundle.verify(names)
    target, drafter = (options.target, options.drafter) if options.target else embedded_sources()
    source = load_source(target, drafter)
    if source.drafter_id != bundle.manifest.drafter.weights_id:
        raise UsageError(f"{options.bundle} was built from another drafter than {drafter}")
    texts = read_texts(options, source, target, bundle.manifest.top_k)
    rows = []
    for name in names:
        few = texts.some(options.emulated) if name == "npu-qnn" else texts
        rows.append(row(bundle, name, source, few, Path(options.environments)))
        say(tables({"environments": rows[-1:]}))
    return {"environments": rows, "new_tokens": options.new_tokens}


def tables(result: Mapping[str, Any]) -> str:
    """A row for each variant, and in words what a reader needs beside it."""
    lines = []
    for entry in result["environments"]:
        if "not_run" in entry:
            lines.append([entry["variant"], f"not run: {entry['not_run']}", *[""] * 7])
            continue
        code = entry.get("code")
        lines.append(
            [
                entry["variant"],
                _where(entry),
                str(entry["prompts"]),
                f"{entry['acceptance']:.2f}",
                f"{entry['fp32']:.2f}",
                f"**{entry['ratio']:.1%}** ± {entry['se']:.1%}",
                f"{code['ratio']:.1%} ± {code['se']:.1%} ({code['prompts']})" if code else "",
                f"{entry['same_guess']:.1%} of {entry['positions']:,}",
                f"{entry['goal']:.0%}: {'met' if entry['met'] else '**missed**'}",
            ]
        )
    header = ["variant", "ran on", "prompts", "acceptance length", "fp32 torch", "of fp32 ± se"]
    header += ["code alone (prompts)", "same first guess", "goal"]
    return table(header, lines)


def _where(entry: Mapping[str, Any]) -> str:
    placed = ", ".join(f"{provider} {count}" for provider, count in entry["placement"].items())
    said = entry["runtime"] + (f"; nodes: {placed}" if placed else "")
    return f"{said}; its own runtime does not exist here" if entry["variant"] in NO_RUNTIME else said
