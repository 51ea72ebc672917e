"""Every variant on the runtime it is for: who ran its nodes, and what it keeps of the float32 drafter's acceptance.

python -m benchmarks.export_environments BUNDLE --target DIR --drafter DIR --environments FOLDER --json OUT.json

QNN (on the HTP emulation that its package brings) and OpenVINO (on the CPU) get an environment of their own with `venv`
and `pip`, the browser's runtime one with `npm`, where it is missing. The texts are the target's own: answers to
held-out exercises, and functions of the standard library continued.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.export_remote import OPENVINO, QNN, WEB, NotHere, Remote, RemoteDynamic
from benchmarks.export_share import Measured, measure, share
from benchmarks.prompts import CODE, code_prompts, encode, skill_prompts
from benchmarks.provenance import write_result
from benchmarks.report import table
from export.continuations import Continuation, encode_prompts, make_traces, read_prompts
from export.describe import this_runtime
from export.embedded import embedded_sources
from export.runner import OrtRunner, Runner, TorchRunner
from export.source import Source, load_source
from export.static_forms import EMBEDDING, StaticShape
from export.static_runner import Feeds, StaticRunner, session_of
from export.verify import node_placement
from moa.bundle import Bundle
from moa.errors import MoaError, UsageError, run_cli
from moa.manifest import Variant
from moa.model.target import Target

RUNTIMES = {"npu-qnn": QNN, "npu-openvino": OPENVINO, "portable": OPENVINO, "web": WEB}
NO_RUNTIME = ("coreml", "nnapi")
"""Exists for no Linux: one partition by ONNX Runtime's checker, the arithmetic on the CPU."""
GOALS = {"cpu-int8": 0.99}
GOAL = 0.97
CPU = "CPUExecutionProvider"


@dataclass(frozen=True)
class Texts:
    """What the target says, and how the float32 drafter does on it. `hard` are those where few drafts are accepted."""

    traces: list[Continuation]
    reference: list[Measured]
    hard: list[bool]

    def some(self, count: int) -> Texts:
        """So many of them, evenly spread."""
        chosen = sorted({int(at) for at in np.linspace(0, len(self.traces) - 1, min(count, len(self.traces)))})
        return Texts(*([side[at] for at in chosen] for side in (self.traces, self.reference, self.hard)))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Open:
    """A variant that drafts: in what, by which provider, and where its nodes went."""

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
    """A variant's figures; fails loudly where another provider than the one meant ran everything."""
    began = time.perf_counter()
    try:
        variant = open_variant(bundle, name, source, environments)
    except NotHere as error:
        return {"variant": name, "not_run": str(error)}
    found = []
    for number, trace in enumerate(texts.traces, 1):
        found.append(measure(variant.runner, trace))
        print(f"{name}: {number}/{len(texts.traces)}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
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


def report(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table, and in words what a reader needs beside it."""
    lines = []
    for entry in rows:
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


def _where(entry: dict[str, Any]) -> str:
    placed = ", ".join(f"{provider} {count}" for provider, count in entry["placement"].items())
    said = entry["runtime"] + (f"; nodes: {placed}" if placed else "")
    return f"{said}; its own runtime does not exist here" if entry["variant"] in NO_RUNTIME else said


def read_texts(args: argparse.Namespace, source: Source, target: str, top_k: int) -> Texts:
    """Let the target answer, and the float32 drafter draft along."""
    model = Target.load(target, slots=16, capacity=1024)
    if args.prompts_file:
        prompts = encode_prompts(model, read_prompts(args.prompts_file))
        hard = [False] * len(prompts)
    else:
        chosen = [*skill_prompts(args.per_skill), *code_prompts(args.code)]
        prompts = [encode(model.tokenizer, example) for example in chosen]
        hard = [example.skill == CODE for example in chosen]
    traces = make_traces(model, source, prompts, new_tokens=args.new_tokens)
    reference = TorchRunner(source, top_k)
    return Texts(traces, [measure(reference, trace) for trace in traces], hard)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.export_environments",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--drafter")
    parser.add_argument("--variant", action="append", default=[], help="only this one; may be given again")
    parser.add_argument("--prompts-file", type=Path, nargs="+", default=[], help="for pairs other than the embedded")
    parser.add_argument("--per-skill", type=int, default=2, help="held-out exercises of each skill (default 2)")
    parser.add_argument("--code", type=int, default=12, help="held-out functions to continue (default 12)")
    parser.add_argument("--emulated", type=int, default=12, help="prompts for npu-qnn, of these (default 12)")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--environments", type=Path, required=True, help="folder of the runtimes' environments")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if bool(args.target) != bool(args.drafter):
        raise UsageError("--target and --drafter belong together", hint="leave out both for the embedded pair")
    bundle = Bundle.open(args.bundle)
    names = args.variant or list(bundle.manifest.variants)
    bundle.verify(names)
    target, drafter = (args.target, args.drafter) if args.target else embedded_sources()
    source = load_source(target, drafter)
    if source.drafter_id != bundle.manifest.drafter.weights_id:
        raise UsageError(f"{args.bundle} was built from another drafter than {drafter}")
    texts = read_texts(args, source, target, bundle.manifest.top_k)
    rows = []
    for name in names:
        few = texts.some(args.emulated) if name == "npu-qnn" else texts
        rows.append(row(bundle, name, source, few, args.environments))
        print(report(rows[-1:]), file=sys.stderr, flush=True)
    write_result(args.json, {"environments": rows, "new_tokens": args.new_tokens})
    print(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli("export_environments", main))
