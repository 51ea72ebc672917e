"""What one `moa-train` run consists of: target, drafter, teacher, data and loop, by its
configuration."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn

import moa
from moa.config import TargetFacts
from moa.drafters.registry import KINDS, find
from moa.errors import UsageError
from moa.model.checkpoint import save_drafter
from moa.target.loading import LoadedModel, load_model, load_tokenizer
from moa.training.config import TrainingConfig
from moa.training.data import Document, PackedRows, pack
from moa.training.loop import Loop
from moa.training.losses import TeacherLike
from moa.training.sampled import SampledHead, chances
from moa.training.sources import DocumentReader, examples
from moa.training.teacher import Teacher
from moa.training.teacher_files import StoredTeacher, bytes_per_token, write_outputs

SHORTEST_ROW = 16
"""A row must be longer than the lags that are trained."""
_SECONDS_BETWEEN_LINES = 10.0
"""Seconds between two lines about the target's states."""
_SHARE_OF_DISK = 0.5
"""Share of the free disk that the target's states may take unasked."""


class TrainingRun:
    """A prepared run. The target is in memory until its results are on disk."""

    def __init__(self, config: TrainingConfig, loaded: LoadedModel) -> None:
        """Prepare a run with a target in memory: check every option before any time is spent, and
        make the drafter and its objective."""
        facts = loaded.facts
        _check_lengths(config, facts)
        config.loop_settings(rows=1, world=1)
        torch.manual_seed(config.seed)
        self.config = config
        self.facts = facts
        self.target: LoadedModel | None = loaded
        """None once it is needed no more."""
        self.target_parameters = parameter_count(loaded.model)
        self.reader = DocumentReader(load_tokenizer(loaded.folder), facts.vocab_size)
        self.kind = KINDS[config.kind] if config.init is None else find(config.init).kind
        teacher = Teacher(loaded.model)
        teacher.caches = self.kind.reads_caches
        trainee = self.kind.trainee(config, loaded, teacher)
        self.drafter = trainee.drafter
        self.objective = trainee.objective
        self.starts_from = trainee.start

    @classmethod
    def of(cls, config: TrainingConfig, device: torch.device) -> TrainingRun:
        """A run with the target that the configuration names."""
        dtype = torch.float32 if config.loop["precision"] == "fp32" else torch.bfloat16
        return cls(config, load_model(config.target, device=device, dtype=dtype))

    @property
    def batch(self) -> int:
        """Rows per process and micro-step."""
        return self.config.loop_settings(rows=1, world=1).batch

    # ---- data

    def rows(self, folder: Path, about: Mapping[str, Any], sources: Sequence[str]) -> PackedRows:
        """The data as packed rows: written by the first process, once; a resumed run finds them
        there."""
        if _rank() == 0:
            self._pack_once(folder, about, sources)
        if dist.is_initialized():
            dist.barrier()
        return PackedRows(folder)

    def _pack_once(self, folder: Path, about: Mapping[str, Any], sources: Sequence[str]) -> None:
        """Write the data as packed rows into a folder, unless they are there already: `about` says
        what they are made of. A `UsageError` where a run on other data has begun there."""
        # As it will be read: JSON makes lists of tuples.
        wanted = json.loads(json.dumps({**about, "length": self.config.length}))
        about_file = folder / "about.json"
        if about_file.exists() and json.loads(about_file.read_text(encoding="utf-8")) == wanted:
            return
        if (folder.parent / "checkpoint").is_dir():
            raise UsageError(
                f"{folder.parent} holds a run on other data", hint="choose another --out"
            )
        shutil.rmtree(folder, ignore_errors=True)  # states of other rows
        pack(self.documents(sources), self.config.length, folder)
        about_file.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")

    def documents(self, sources: Iterable[str]) -> Iterator[Document]:
        """The documents of the data, which are to be learnt."""
        for example in examples(sources):
            yield from self.reader.documents(example)

    # ---- the teacher

    def keeps_states(self, rows: PackedRows, folder: Path, steps: int) -> bool:
        """Whether the target's results on the rows are kept on disk, so that it runs over each only
        once. They are if the user asks for it; left to us, if rows are seen more than once, and the
        disk of `folder` has room."""
        mode = self.config.teacher
        if mode != "auto":
            return mode == "disk"
        settings = self.config.loop_settings(len(rows), _world())
        rows_seen = steps * settings.batch * settings.accumulate * _world()
        if rows_seen <= len(rows):
            return False
        return self.states_bytes(rows) < _SHARE_OF_DISK * shutil.disk_usage(folder).free

    def states_bytes(self, rows: PackedRows) -> int:
        """How large the target's results on the rows are on disk, as far as the drafter reads
        them."""
        of_token = bytes_per_token(
            self.facts, taps=bool(self.drafter.taps), caches=self.kind.reads_caches
        )
        return rows.length * len(rows) * of_token

    @property
    def whole_teacher(self) -> Teacher:
        """The target itself, while it is in memory."""
        teacher = self.objective.teacher
        assert isinstance(teacher, Teacher)
        return teacher

    def write_states(self, rows: PackedRows, folder: Path) -> None:
        """Run the target over all rows and keep its results in a folder. The objective reads them
        there from now on, and the target's memory is given back."""
        teacher = self.objective.teacher
        if not isinstance(teacher, Teacher):
            return  # it reads them already
        write_outputs(
            teacher,
            rows,
            folder,
            caches=self.kind.reads_caches,
            tell=_StateLines(quiet=self.config.quiet or _rank() > 0),
            rank=_rank(),
            world=_world(),
        )
        if dist.is_initialized():
            dist.barrier()
        stored: TeacherLike = StoredTeacher(teacher.shared, folder)
        if self.drafter.taps:
            stored.tap(self.drafter.taps)
        self.objective.teacher = stored
        self.target = None

    def sample_the_head(self, rows: PackedRows) -> None:
        """Let drafter and target be compared over a part of a large vocabulary in each step, drawn
        by how often tokens occur in the rows. The drafter may have a head of its own."""
        own = self.drafter.shared
        their = self.objective.teacher.shared
        # Tables of one vocabulary may be padded differently.
        vocabulary = min(len(own.head), len(their.head))
        words = self.config.words_of_the_head(vocabulary)
        if words >= vocabulary:
            return
        likely = chances(rows.counts(vocabulary) + 1.0, words)
        self.objective.part_of_head = SampledHead(own, their, self.config.seed, likely)

    # ---- the loop

    def loop(
        self, rows: PackedRows, out: Path, *, identity: Mapping[str, Any], quiet: bool = False
    ) -> Loop:
        """The training loop over the rows, with checkpoints in `out`. `identity` and all else that
        determines the run are kept with a checkpoint: another run does not continue it."""
        settings = self.config.loop_settings(len(rows), _world())
        determines_the_run = {
            "kind": self.kind.name,
            **identity,
            "losses": dataclasses.asdict(self.objective.settings),
            "shape": dataclasses.asdict(self.drafter.config),
            "head words": self.config.words_of_the_head(self.facts.vocab_size),
            "target": self.facts.weights_id,
            "start": self.starts_from,
        }
        return Loop(
            self.objective,
            rows,
            settings,
            out,
            quiet=quiet or self.config.quiet,
            identity=determines_the_run,
        )

    def settings(self, loop: Loop) -> dict[str, Any]:
        """All settings of the run, with the defaults filled in, for the record of how a drafter was
        made."""
        return {
            "kind": self.kind.name,
            "loop": dataclasses.asdict(loop.settings),
            "losses": dataclasses.asdict(self.objective.settings),
            "shape": dataclasses.asdict(self.drafter.config),
            "head_words": self.config.words_of_the_head(self.facts.vocab_size),
            "states_on_disk": self.target is None,
            "length": self.config.length,
            "processes": loop.world,
            "gradient_checkpointing": self.objective.gradient_checkpointing,
        }

    def save(self, out: Path, dtype: torch.dtype) -> None:
        """Write the drafter's config and weights into `out`, in this precision. A folder beside
        them is written first, so that a failure leaves the old files as they are."""
        fresh = out / "weights.new"
        try:
            save_drafter(self.drafter, fresh, dtype)
        except (OSError, SafetensorError) as error:
            raise UsageError(
                f"cannot write the drafter to {out}: {error}", hint="its last checkpoint is kept"
            ) from None
        for file in fresh.iterdir():
            os.replace(file, out / file.name)
        fresh.rmdir()


class _StateLines:
    """Prints how many rows' states are there, every few seconds and at the end."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._last_line = time.monotonic()

    def __call__(self, done: int, missing: int, rate: float) -> None:
        """Print how many of the missing rows are done, and the tokens a second: every few seconds,
        and at the end."""
        now = time.monotonic()
        is_due = done >= missing or now - self._last_line >= _SECONDS_BETWEEN_LINES
        if self._quiet or not is_due:
            return
        self._last_line = now
        print(
            f"moa-train: the target's states of {done:,} of {missing:,} rows, {rate:,.0f} tokens/s",
            file=sys.stderr,
            flush=True,
        )


def _check_lengths(config: TrainingConfig, facts: TargetFacts) -> None:
    """Raise a `UsageError` if rows, or prompts with the answers that the target is to write, are
    longer than the texts that the target knows (its positions)."""
    if not SHORTEST_ROW <= config.length <= facts.max_positions:
        raise UsageError(
            f"--length must be within {SHORTEST_ROW}..{facts.max_positions}, the target's positions"
        )
    too_long = config.length + config.max_new_tokens > facts.max_positions
    if config.max_new_tokens < 1 or (too_long and config.generate):
        raise UsageError(
            f"--max-new-tokens must be 1 or more, and with --length within {facts.max_positions}"
        )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def parameter_count(module: nn.Module) -> int:
    """How many numbers a module's own weights have."""
    return sum(parameter.numel() for parameter in module.parameters())


def trained_count(module: nn.Module) -> int:
    """How many of these are trained: those of a frozen body are not."""
    return sum(part.numel() for part in module.parameters() if part.requires_grad)


def provenance(
    argv: Sequence[str],
    target: TargetFacts,
    *,
    settings: Mapping[str, Any],
    data: Mapping[str, Any],
) -> dict[str, Any]:
    """A record of how a drafter was made: the command, the versions, the machine, the target, the
    settings and the data of its run."""
    return {
        "command": ["moa-train", *argv],
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "moa-edge": moa.__version__,
            **{package: version(package) for package in ("torch", "transformers", "numpy")},
        },
        "hardware": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "target": dataclasses.asdict(target),
        "settings": dict(settings),
        "data": dict(data),
    }
