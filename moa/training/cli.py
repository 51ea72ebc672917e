"""`moa-train`: from a target and some text to a drafter in a folder."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moa.drafters.contract import Drafter
from moa.errors import UsageError, run_cli
from moa.process.files import named
from moa.process.memory import (
    forget_peak,
    give_back_free_memory,
    peak_since_bytes,
    resident_bytes,
)
from moa.target.generate import generate
from moa.target.loading import checked_device
from moa.target.torch_target import Target
from moa.training import options
from moa.training.data import Document, PackedRows, pack
from moa.training.generate import PROMPT_TOKENS, GeneratedAnswers
from moa.training.loop import Loop, fast_precision, join_process_group, peak_memory_mib
from moa.training.run import TrainingRun, parameter_count, provenance, trained_count
from moa.training.sources import examples, fingerprint
from moa.training.teacher_files import write_outputs
from moa.worth import reached_at, worth

TRIAL_ROWS = 4
"""Rows that the target runs over in a dry run."""
QUICK_SECONDS = 5.0
"""Seconds of the first of these rows above which it must do: a large target on two cores takes ten
seconds for it."""
TRIAL_TOKENS = 8
"""Tokens of each answer that the target begins in a dry run."""
DRY_SECONDS = 40.0
"""Seconds after which no other step is begun in a dry run: it should answer within two minutes."""
DRY_STEPS = 8
"""Steps of a dry run. On a CPU the C library keeps what steps of other shapes have freed: memory
grows with them, ever more slowly."""
_MEASURED_STEPS = 50
"""The last steps of a run, over which its result's figures are means."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the command."""
    return run_cli("moa-train", lambda: _main(sys.argv[1:] if argv is None else list(argv)))


def _main(argv: list[str]) -> None:
    """Train by these arguments, or with --dry-run only measure, and print the result. Under torchrun
    all processes run this, and the first one prints."""
    config = options.parse(argv)
    started = time.perf_counter()
    device = _device(config.device)
    join_process_group(device)
    try:
        _check_out(config.out)
        precision = config.loop.get("precision") or fast_precision(device)
        config = replace(config, loop={**config.loop, "precision": precision})
        with named(config.out):
            run = TrainingRun.of(config, device)
            result = _dry_run(run) if config.dry_run else _run(run, argv, started)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if result is None:  # another process prints it
        return
    _show(result, as_json=config.json)
    if not config.json and "agree" in result:
        reached = reached_at(result["agree"], result.get("agree_later"))
        print(f"{config.out}: {worth(reached, result['wanted_tokens'])}")


def _run(run: TrainingRun, argv: list[str], started: float) -> dict[str, Any] | None:
    """Train a drafter, and write it into the output folder with a record of how it was made.
    Returns the figures that are printed; None in all processes but the first, which alone
    writes."""
    config = run.config
    out = config.out
    out.mkdir(parents=True, exist_ok=True)
    sources, made_with = _sources(run)
    if config.generate_only:
        return {"generated": str(out / "generated.jsonl")}
    about = {
        "data": fingerprint(config.data),
        "answers": made_with,
        "tokenizer": run.facts.tokenizer_hash,
    }
    rows = run.rows(out / "data", about, sources)
    loop = run.loop(rows, out, identity={"data": about})
    resumed_step = loop.checkpointed_step()
    _make_ready(run, rows, loop, is_new=not resumed_step)
    training_started = time.perf_counter()
    history = loop.run()
    training_seconds = time.perf_counter() - training_started
    if loop.rank > 0:
        return None
    run.save(out, getattr(torch, options.PRECISIONS[config.weights]))
    figures = _figures(run, loop, rows, history[-_MEASURED_STEPS:])
    figures["training_seconds"] = training_seconds
    figures["seconds"] = time.perf_counter() - started
    figures["processor_seconds_of_last_start"] = time.process_time()
    record = provenance(argv, run.facts, settings=run.settings(loop), data=about)
    record |= {
        "resumed_from_step": resumed_step,
        "rows": len(rows),
        "tokens": rows.tokens,
        "result": figures,
    }
    text = json.dumps(record, indent=2, default=str)
    (out / "training.json").write_text(text + "\n", encoding="utf-8")
    return figures


def _make_ready(run: TrainingRun, rows: PackedRows, loop: Loop, *, is_new: bool) -> None:
    """Compute what all steps need; of a run that `is_new`, also the weights that it starts with."""
    out = run.config.out
    # A target whose results are on disk need not run again in every step.
    if run.keeps_states(rows, out, loop.settings.steps):
        run.write_states(rows, out / "data")
    run.sample_the_head(rows)
    if is_new:
        run.objective.start(rows)


def _figures(
    run: TrainingRun, loop: Loop, rows: PackedRows, last_entries: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """The figures of a training, means over the last steps where a step has them. `last_entries`
    are the log of these steps."""

    def mean(name: str) -> float:
        return sum(entry[name] for entry in last_entries) / len(last_entries)

    agreements = [name for name in last_entries[-1] if name.startswith("agree")]
    return {
        "out": str(run.config.out),
        "steps": loop.step,
        "wanted_tokens": rows.wanted_tokens,
        "loss": mean("loss"),
        **{name: mean(name) for name in agreements},
        "parameters": parameter_count(run.drafter),
        "trained_parameters": trained_count(run.drafter),
        "tokens_per_s": mean("tokens_per_s"),
        "peak_memory_mib": peak_memory_mib(),
    }


def _sources(run: TrainingRun) -> tuple[Sequence[str], dict[str, Any] | None]:
    """The sources of the training data, and the settings that they were made with. They are the
    given data (with None), or a file with the target's own answers to the data's prompts, which are
    written first where they are not there."""
    config = run.config
    if not (config.generate or config.generate_only):
        return config.data, None
    made_with = {
        "data": fingerprint(config.data),
        "target": run.facts.weights_id,
        "max_new_tokens": config.max_new_tokens,
        "temperature": config.temperature,
        "seed": config.seed,
        "batch": run.batch,
    }
    answers = GeneratedAnswers(config.out, made_with)
    if not answers.complete():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(
                "the answers are generated by one process",
                hint="run with --generate-only first, without torchrun",
            )
        answers.write(_answering(run, run.batch), _prompts(run), quiet=config.quiet)
    return [str(answers.path)], made_with


def _prompts(run: TrainingRun) -> Iterator[list[int]]:
    """The prompts of the data, which the target is to answer."""
    for example in examples(run.config.data):
        yield run.reader.prompt(example, PROMPT_TOKENS)


def _answering(run: TrainingRun, slots: int) -> Target:
    """The target as a writer of answers, `slots` of them at once."""
    assert run.target is not None
    capacity = run.config.length + run.config.max_new_tokens  # of a prompt and its answer
    return Target(
        run.target.model,
        run.facts,
        slots=slots,
        capacity=capacity,
        folder=run.target.folder,
    )


# ---- the estimate


def _dry_run(run: TrainingRun) -> dict[str, Any]:
    """Do everything except the training, in a folder that is removed: the target runs over a few
    rows, and some steps are run. Returns figures that estimate the time, memory and disk of the
    run."""
    with tempfile.TemporaryDirectory() as temporary:
        trial = _trial(run, Path(temporary))
    rows = trial.rows
    state_bytes = 0
    if trial.keeps_states:
        state_bytes = run.states_bytes(rows)
    return {
        "rows": len(rows),
        "tokens": rows.tokens,
        "wanted_tokens": rows.wanted_tokens,
        "steps": trial.steps,
        "parameters": {
            "drafter": parameter_count(run.drafter),
            "target": run.target_parameters,
        },
        "record_numbers": record_numbers(run.drafter),
        "disk_mib": state_bytes / 2**20,
        "tokens_per_s": trial.tokens_per_s,
        "peak_memory_mib": trial.peak_mib,
        "seconds": {
            "answers": trial.answer_seconds,
            "target's states": trial.state_seconds,
            "steps": trial.step_seconds,
        },
        "estimated_seconds": trial.answer_seconds + trial.state_seconds + trial.step_seconds,
    }


class _Trial(NamedTuple):
    """What a trial has found out about the run."""

    rows: PackedRows
    steps: int
    keeps_states: bool
    """Whether the target's states will be kept on disk."""
    tokens_per_s: float
    peak_mib: float
    answer_seconds: float
    """Of the whole run, as the seconds that follow: for the target's answers."""
    state_seconds: float
    """For the target's states."""
    step_seconds: float
    """For all steps."""


def _trial(run: TrainingRun, folder: Path) -> _Trial:
    """Do a part of each of the run's stages, with files in this folder: of the target's answers, of
    its states, and of the steps."""
    config = run.config
    answer_seconds = 0.0
    documents = run.documents(config.data)
    if config.generate or config.generate_only:
        answer_seconds, documents = _trial_answers(run)
    rows = pack(documents, config.length, folder / "data")
    first_rows = rows.first(TRIAL_ROWS)
    loop = run.loop(rows, folder, identity={}, quiet=True)
    settings = loop.settings
    keeps_states = run.keeps_states(rows, config.out.absolute().parent, settings.steps)
    state_seconds = 0.0
    if keeps_states:
        first_rows, trial_seconds = _trial_states(run, first_rows, folder / "data")
        state_seconds = trial_seconds * rows.tokens / first_rows.tokens / loop.world
    run.sample_the_head(rows)
    loop.data = first_rows
    run.objective.start(first_rows)
    tokens_per_s, peak_mib = _trial_steps(run, loop, first_rows)
    rows_of_a_step = settings.batch * settings.accumulate * loop.world
    tokens_of_a_row = rows.tokens / len(rows)
    return _Trial(
        rows=rows,
        steps=settings.steps,
        keeps_states=keeps_states,
        tokens_per_s=tokens_per_s,
        peak_mib=peak_mib,
        answer_seconds=answer_seconds,
        state_seconds=state_seconds,
        step_seconds=tokens_of_a_row * rows_of_a_step * settings.steps / tokens_per_s,
    )


def _trial_steps(run: TrainingRun, loop: Loop, rows: PackedRows) -> tuple[float, float]:
    """Run a few steps of the training as a trial, and return the tokens a second, and the peak
    memory in MiB that the run will have.

    Where a step is quick, some are run as they are. Where it would take minutes, steps of two rows
    are run, and their time and memory are scaled up: both grow with the rows, but for the memory
    that the process has anyway.
    """
    settings = loop.settings
    before = peak_memory_mib()  # the target in memory, which is gone now if its states are kept
    _say(run, "measuring a step of one row")
    loop.trial(1)  # the first makes kernels
    seconds_of_a_row = loop.trial(1)
    can_be_extrapolated = loop.device.type == "cpu" and forget_peak()
    whole_step = seconds_of_a_row * settings.batch * settings.accumulate
    if whole_step <= DRY_SECONDS / 2 or not can_be_extrapolated or settings.batch == 1:
        _say(run, f"measuring {DRY_STEPS} steps, or as many as take {DRY_SECONDS:.0f} s")
        history = loop.run(stop_after=DRY_STEPS, stop_seconds=DRY_SECONDS)
        found = statistics.median(entry["tokens_per_s"] for entry in history)
        return found, max(before, peak_memory_mib())
    _say(run, f"measuring a step of two rows: one of {settings.batch} would take minutes")
    loop.trial(2)  # the first of a shape makes kernels
    give_back_free_memory()
    forget_peak()
    at_rest = resident_bytes() / 2**20
    seconds_of_two = loop.trial(2)
    of_two_rows = peak_since_bytes() / 2**20 - at_rest
    peak = at_rest + settings.batch / 2 * of_two_rows
    return 2 * rows.tokens / len(rows) / seconds_of_two, max(before, peak)


def _trial_states(run: TrainingRun, rows: PackedRows, folder: Path) -> tuple[PackedRows, float]:
    """Run the target over one row as a trial, and over the others if that was quick, and keep its
    states in the folder. Returns the rows that have states now, and the seconds that they took."""
    _say(run, "the target runs over the first rows")
    started = time.perf_counter()
    write_outputs(run.whole_teacher, rows.first(1), folder, caches=run.kind.reads_caches)
    if time.perf_counter() - started > QUICK_SECONDS:
        rows = rows.first(1)
    run.write_states(rows, folder)
    return rows, time.perf_counter() - started


def _trial_answers(run: TrainingRun) -> tuple[float, Iterator[Document]]:
    """Let the target begin a few answers as a trial. Returns the seconds that the answers to all
    prompts will take, and documents as long as those will be, both at most: an answer may end
    sooner."""
    config = run.config
    prompts = [prompt for prompt in _prompts(run) if 0 < len(prompt) <= config.length]
    if not prompts:
        raise UsageError("no prompt in the data is as short as --length")
    _say(run, f"the target begins {min(len(prompts), run.batch)} answers")
    first_window = prompts[: run.batch]
    started = time.perf_counter()
    generate(_answering(run, len(first_window)), first_window, TRIAL_TOKENS)
    seconds_of_a_token = (time.perf_counter() - started) / TRIAL_TOKENS
    windows = math.ceil(len(prompts) / run.batch)
    longest_answer = prompts[0][:1] * config.max_new_tokens  # any tokens: only their number counts
    documents = (Document.answer(prompt, longest_answer) for prompt in prompts)
    return seconds_of_a_token * config.max_new_tokens * windows, documents


def _say(run: TrainingRun, line: str) -> None:
    """Tell the user what happens, on stderr."""
    if not run.config.quiet:
        print(f"moa-train: {line}", file=sys.stderr, flush=True)


def record_numbers(drafter: Drafter) -> int:
    """Numbers in an activation record."""
    layout = drafter.record_layout
    if layout is None:
        return 0
    return 2 * layout.count * layout.width


def _show(result: dict[str, Any], *, as_json: bool) -> None:
    """Print a result, figures by name, as JSON or with a figure in each line."""
    if as_json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        figures = value if isinstance(value, dict) else {"": value}
        for part, figure in figures.items():
            label = f"{name} {part}".replace("_", " ").strip()
            text = f"{figure:,.4g}" if isinstance(figure, float) else str(figure)
            print(f"{label:>20}  {text}")


def _device(name: str | None) -> torch.device:
    """The device of this name; without a name a card, if there is one, else the CPU. Under
    `torchrun`, which starts a process for each card, `cuda` is this process's card."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    return checked_device(name)


def _check_out(out: Path) -> None:
    """Raise if the drafter cannot be written there, before any time is spent."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file, it must be a folder")
    if (out / "model.safetensors").exists() and not (out / "checkpoint").is_dir():
        raise UsageError(
            f"--out {out} holds a model that is not of a run of moa-train's",
            hint="choose another folder",
        )
    # A folder that is not there yet will be made in the nearest one that is.
    parent = out.absolute()
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK) or shutil.disk_usage(parent).free == 0:
        raise UsageError(
            f"cannot write to --out {out}: {parent} is not writable, or its disk is full"
        )


if __name__ == "__main__":
    raise SystemExit(main())
