"""What one `moa-train` run consists of: drafter, teacher, data and loop, made from the options."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn

import moa
from moa.config import TargetFacts
from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import (
    AttentionDrafter,
    attention_around,
    load_attention,
    new_attention,
)
from moa.drafters.attention.training import Distillation
from moa.drafters.states.config import StateDrafterConfig
from moa.drafters.states.least_squares import solve
from moa.drafters.states.model import StateDrafter
from moa.drafters.states.training import ChainSettings, ChainTraining
from moa.errors import UsageError
from moa.model.borrowed import SharedWeights
from moa.model.checkpoint import save_drafter
from moa.model.loading import LoadedModel, load_model, load_tokenizer
from moa.training import options
from moa.training.data import Document, PackedRows, pack
from moa.training.loop import Loop, LoopSettings
from moa.training.sources import DocumentReader, examples
from moa.training.teacher import Teacher

SHORTEST_ROW = 16
"""A row must be longer than the lags that are trained."""
TRIAL_ROWS = 16
"""Packed rows that a dry run starts from."""


@dataclass(frozen=True)
class TrainingRun:
    """A prepared run, without its data."""

    args: argparse.Namespace
    drafter: AttentionDrafter | StateDrafter
    objective: Distillation
    reader: DocumentReader
    target_id: str
    start: str
    """What training starts from: a digest of weights, or least squares; empty for random ones."""

    @classmethod
    def of(cls, args: argparse.Namespace, loaded: LoadedModel) -> TrainingRun:
        """Check every option, before any time is spent."""
        facts = loaded.facts
        if not SHORTEST_ROW <= args.length <= facts.max_positions:
            raise UsageError(
                f"--length must be within {SHORTEST_ROW}..{facts.max_positions}, the target's positions"
            )
        if args.max_new_tokens < 1 or (
            args.length + args.max_new_tokens > facts.max_positions and args.generate
        ):
            raise UsageError(
                f"--max-new-tokens must be 1 or more, and with --length within {facts.max_positions}"
            )
        options.check_body(args)
        lesson = options.distill_settings(args)
        options.loop_settings(args, rows=1, world=1)
        seed = args.seed or 0
        torch.manual_seed(seed)
        drafter: AttentionDrafter | StateDrafter
        objective: Distillation
        teacher = Teacher(loaded.model)
        if args.states:
            shape = StateDrafterConfig.for_target(facts, **options.server_shape(args))
            drafter = StateDrafter.new(shape, SharedWeights.of(loaded.model))
            start = "least squares"
            objective = ChainTraining(drafter, teacher, ChainSettings(), seed)
        else:
            drafter, start = _new_drafter(args, loaded)
            objective = Distillation(
                drafter, teacher, lesson, seed, gradient_checkpointing=args.gradient_checkpointing
            )
        return cls(
            args,
            drafter,
            objective,
            DocumentReader(load_tokenizer(loaded.folder), facts.vocab_size),
            facts.weights_id,
            start,
        )

    @property
    def batch(self) -> int:
        """Rows per process and micro-step."""
        return options.loop_settings(self.args, rows=1, world=1).batch

    def rows(self, folder: Path, about: Mapping[str, Any], sources: Sequence[str]) -> PackedRows:
        """The data as packed rows: written by the first process, once; a resumed run finds them
        there."""
        wanted = json.loads(json.dumps({**about, "length": self.args.length}))
        note = folder / "about.json"
        if not dist.is_initialized() or dist.get_rank() == 0:
            found = json.loads(note.read_text(encoding="utf-8")) if note.exists() else None
            if found != wanted:
                if (folder.parent / "checkpoint").is_dir():
                    raise UsageError(
                        f"{folder.parent} holds a run on other data", hint="choose another --out"
                    )
                pack(self._documents(sources), self.args.length, folder)
                note.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
        if dist.is_initialized():
            dist.barrier()
        return PackedRows(folder)

    def _documents(self, sources: Sequence[str]) -> Iterator[Document]:
        for example in examples(sources):
            yield from self.reader.documents(example)

    def loop(
        self, rows: PackedRows, out: Path, *, identity: Mapping[str, Any], trial: bool = False
    ) -> Loop:
        """The loop over the rows; a `trial` is quiet, and starts from few of them."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        course = {
            "--states": isinstance(self.drafter, StateDrafter),
            **identity,
            "losses": dataclasses.asdict(self.objective.settings),
            "shape": dataclasses.asdict(self.drafter.config),
            "target": self.target_id,
            "start": self.start,
        }
        settings = options.loop_settings(self.args, len(rows), world)
        if isinstance(self.drafter, StateDrafter) and not (out / "checkpoint").is_dir():
            solve(self.drafter, self.objective.teacher, rows.first(TRIAL_ROWS) if trial else rows)
        return Loop(
            self.objective, rows, settings, out, quiet=trial or self.args.quiet, identity=course
        )

    def settings(self, loop: Loop) -> dict[str, Any]:
        """All settings, as they were resolved."""
        settings: LoopSettings = loop.settings
        return {
            "loop": dataclasses.asdict(settings),
            "losses": dataclasses.asdict(self.objective.settings),
            "shape": dataclasses.asdict(self.drafter.config),
            "length": self.args.length,
            "processes": loop.world,
            "gradient_checkpointing": self.objective.gradient_checkpointing,
        }

    def save(self, out: Path, dtype: torch.dtype) -> None:
        """Write config and weights atomically."""
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


def parameter_count(module: nn.Module) -> int:
    """Numbers in a module's own weights."""
    return sum(p.numel() for p in module.parameters())


def _new_drafter(args: argparse.Namespace, loaded: LoadedModel) -> tuple[AttentionDrafter, str]:
    """The drafter, and the name of its starting point."""
    facts = loaded.facts
    if args.init is not None:
        config = options.initial_config(args, AttentionConfig.read(args.init, facts))
        drafter = load_attention(args.init, loaded.model, facts, torch.float32, config).train()
        return drafter, _digest(drafter)
    shape: dict[str, Any] = {"tli": args.tli or 0, **options.shape_overrides(args)}
    if args.body is None:
        return new_attention(AttentionConfig.for_target(facts, **shape), loaded.model), ""
    body = load_model(args.body, device=loaded.model.device)
    drafter = attention_around(loaded.model, facts, body, shape, frozen=args.freeze_body)
    return drafter, _digest(drafter)


def _digest(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode() + value.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def provenance(
    argv: Sequence[str],
    target: TargetFacts,
    *,
    settings: Mapping[str, Any],
    data: Mapping[str, Any],
) -> dict[str, Any]:
    """The command, the versions, the machine, the target and the data of a run."""
    return {
        "command": ["moa-train", *argv],
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()}
        | {"moa-edge": moa.__version__}
        | {package: version(package) for package in ("torch", "transformers", "numpy")},
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
