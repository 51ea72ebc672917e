"""Train drafters on the same rows with the same steps, batch and optimizer, one after another, each
resumable.

python -m benchmarks.baselines.train moa0 eagle2 independent --target moa/demo/target --data DIR
--out DIR --steps 2000
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.baselines.presets import PRESETS, build, preset
from benchmarks.baselines.registry import parameter_count, save
from benchmarks.provenance import write_result
from moa.errors import UsageError, run_cli
from moa.model.borrowed import SharedWeights
from moa.target.loading import LoadedModel, load_model, read_partial_target
from moa.training.data import PackedRows
from moa.training.loop import Loop, LoopSettings, fast_precision, peak_memory_mib
from moa.training.losses import TeacherLike
from moa.training.sampled import SampledHead, chances
from moa.training.teacher import Teacher
from moa.training.teacher_files import StoredTeacher, written

SUMMARY = "training.json"
LAST = 50
"""Steps at the end of a run whose mean is its result."""


def train_preset(
    name: str,
    target: str,
    data: PackedRows,
    settings: LoopSettings,
    out: Path,
    *,
    shape: Mapping[str, Any],
    distill: Mapping[str, Any],
    start: Sequence[int] = (),
    init: Path | None = None,
    device: str = "cpu",
    stop: int | None = None,
    states: Path | None = None,
    head_words: int = 0,
) -> dict[str, Any]:
    """Train one preset from its checkpoint to its end, or to the step `stop` of its schedule;
    returns its summary. With `states` the target's results on the data are read from there."""
    last = min(settings.steps, stop or settings.steps)
    recipe: dict[str, Any] = {
        "preset": name,
        "loop": dataclasses.asdict(settings),
        "shape": dict(shape),
        "distill": dict(distill),
    }
    recipe["start"] = list(start)
    if head_words:
        recipe["head_words"] = head_words
    if init is not None:
        recipe["init"] = init.name
    if (done := finished(out)) is not None:
        if done["recipe"] != recipe:
            raise UsageError(
                f"{out} holds a finished run with other settings", hint="use another --out"
            )
        if done["steps"] >= last:
            return done
    loaded = _target(name, target, device, start=start, states=states)
    torch.manual_seed(settings.seed)
    teacher: TeacherLike
    if states:
        shared = SharedWeights.of(loaded.model)
        teacher = StoredTeacher(shared, states, loaded.model.dtype)
    else:
        # In bf16 a copy of the target runs a third faster than the same under autocast.
        dtype = torch.bfloat16 if settings.precision == "bf16" else None
        teacher = Teacher(loaded.model, dtype)
    drafter, task = build(
        name,
        loaded.model,
        loaded.facts,
        shape,
        distill,
        settings.seed,
        start=start,
        init=init,
        data=data,
        teacher=teacher,
    )
    identity = {name: recipe[name] for name in ("preset", "shape", "distill", "start")}
    if head_words:
        counts = data.counts(len(teacher.shared.head))
        likely = chances(counts + 1.0, head_words)
        task.part_of_head = SampledHead(drafter.shared, teacher.shared, settings.seed, likely)
    loop = Loop(task, data, settings, out, identity={**identity, "rows of data": len(data)})
    began = time.perf_counter()
    history = loop.run(stop_after=max(0, last - loop.checkpointed_step()))
    save(drafter, out)
    shown = [key for key in history[-1] if key not in ("step", "tokens_per_s", "grad_norm")]
    summary = {
        "recipe": recipe,
        "says": preset(name).says,
        "parameters": parameter_count(drafter, device_only=True),
        "settings": dataclasses.asdict(task.settings),
        "steps": len(history),
        "last": {key: statistics.fmean(entry[key] for entry in history[-LAST:]) for key in shown},
        "tokens_per_s": statistics.median(entry["tokens_per_s"] for entry in history),
        "seconds_of_last_start": round(time.perf_counter() - began, 1),
        "processor_seconds_of_last_start": round(time.process_time(), 1),
        "trained_parameters": parameter_count(drafter),
        "peak_memory_mib": round(peak_memory_mib()),
    }
    write_result(out / SUMMARY, summary)
    return summary


def _target(
    name: str, target: str, device: str, *, start: Sequence[int], states: Path | None
) -> LoadedModel:
    """The target, or of one whose results are on disk what its drafters share with it: a body may
    begin as its layers, or borrow some, all others take embedding and head."""
    if states is None or start or preset(name).kind == "moa":
        return load_model(target, device=device)
    part = read_partial_target(target)
    # The library's wrapper hides the method's signature.
    torch.nn.Module.to(part.model, torch.device(device))
    return part


def finished(out: Path) -> dict[str, Any] | None:
    """The summary of a run that came to its end."""
    path = out / SUMMARY
    if not path.exists():
        return None
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise UsageError(
            f"{path} is not valid JSON", hint="delete the folder to train it again"
        ) from None
    return summary


def line(name: str, summary: Mapping[str, Any]) -> str:
    """A run in one line."""
    last = " ".join(f"{key} {value:.4f}" for key, value in summary["last"].items())
    speed = f"{summary['tokens_per_s']:,.0f} tokens/s"
    return f"{name:22} {summary['parameters']:>9,} parameters on the device  {last}  {speed}  ({summary['says']})"


def assignments(pairs: Sequence[str], flag: str) -> dict[str, Any]:
    """`name=value` pairs; a value is JSON, or else a plain string."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(f"{flag} takes NAME=VALUE, not {pair!r}")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.baselines.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="presets:\n" + "\n".join(f"  {name:22} {p.says}" for name, p in PRESETS.items()),
    )
    parser.add_argument(
        "presets", nargs="+", metavar="PRESET", help="what to train, in this order; a list is below"
    )
    parser.add_argument("--target", required=True, help="folder or hub id of the target")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--data", type=Path, help="folder of packed rows, the same for every preset"
    )
    source.add_argument(
        "--states", type=Path, help="such a folder with the target's states: see benchmarks.witness"
    )
    parser.add_argument("--rows", type=int, help="train on the first so many rows only")
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        help="each preset's folder is OUT/PRESET, or OUT/PRESET-SEED",
    )
    parser.add_argument("--steps", required=True, type=int)
    parser.add_argument(
        "--stop", type=int, metavar="STEP", help="stop at this step of the schedule, and save"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change the MoA drafter's config",
    )
    parser.add_argument(
        "--distill",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change the training of MoA and of states",
    )
    parser.add_argument(
        "--start",
        nargs="+",
        type=int,
        default=[],
        metavar="LAYER",
        help="the target's layers that a body starts from",
    )
    parser.add_argument(
        "--init", type=Path, metavar="DIR", help="a trained MoA drafter that the run goes on from"
    )
    for name in ("batch", "accumulate", "warmup", "seed", "checkpoint_every"):
        default = getattr(LoopSettings(steps=1), name)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=default, help=f"default {default}"
        )
    for name in ("learning_rate", "weight_decay", "clip"):
        default = getattr(LoopSettings(steps=1), name)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=float, default=default, help=f"default {default}"
        )
    parser.add_argument("--optimizer", choices=["muon", "adam"], default="muon")
    parser.add_argument(
        "--head-words",
        type=int,
        default=0,
        metavar="N",
        help="compare over the batch's words and N others at random, not over all",
    )
    parser.add_argument(
        "--precision", choices=["bf16", "fp32"], help="default: the faster on the device"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, train, summarise."""
    args = parser().parse_args(argv)
    for name in args.presets:
        preset(name)  # find a misspelt name before hours of training
    args.precision = args.precision or fast_precision(torch.device(args.device))
    fields = [f.name for f in dataclasses.fields(LoopSettings) if hasattr(args, f.name)]
    settings = LoopSettings(**{name: getattr(args, name) for name in fields})
    data = written(args.states) if args.states else PackedRows(args.data)
    data = data.first(args.rows or len(data))
    shape = assignments(args.shape, "--shape")
    distill = assignments(args.distill, "--distill")
    lines = []
    for name in args.presets:
        print(f"== {name}: {preset(name).says}", flush=True)
        folder = f"{name}-{args.seed}" if args.seed else name
        summary = train_preset(
            name,
            args.target,
            data,
            settings,
            args.out / folder,
            shape=shape,
            distill=distill,
            start=args.start,
            init=args.init,
            device=args.device,
            stop=args.stop,
            states=args.states,
            head_words=args.head_words,
        )
        lines.append(line(name, summary))
        print(lines[-1], flush=True)
    if len(lines) > 1:
        print("\n" + "\n".join(lines), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.baselines.train", main))
