"""The training loop for any `Objective`: gradient accumulation, mixed precision, several processes,
checkpoints, progress."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moa.errors import ConfigError, UsageError
from moa.process.memory import peak_bytes
from moa.training.data import Batch, PackedRows
from moa.training.muon import Muon
from moa.training.progress import Progress

_ADAM_BETAS = (0.9, 0.95)
"""The usual ones for language models: a shorter memory of squares than the library's 0.999."""


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How to train. `batch` rows per process and micro-step, `accumulate` micro-steps per step."""

    steps: int
    batch: int = 16
    accumulate: int = 1
    learning_rate: float = 2e-3
    final_rate: float = 0.05
    """The last learning rate, as a share of the peak."""
    warmup: int = 50
    optimizer: Literal["muon", "adam"] = "muon"
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0
    precision: Literal["bf16", "fp32"] = "bf16"
    checkpoint_every: int = 200

    def __post_init__(self) -> None:
        """Raise a `ConfigError` that names the first setting that is out of range."""
        for name in ("steps", "batch", "accumulate", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(f"{name} must be above 0, not {value}")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"seed must be within 0..{2**31 - 1}, not {self.seed}")
        if self.warmup < 0 or not 0 <= self.final_rate <= 1 or self.weight_decay < 0:
            raise ConfigError(
                "warmup and weight_decay must not be negative, and final_rate must be within 0..1"
            )

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear up, then a cosine down."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = (1 + math.cos(math.pi * done)) / 2  # from 1 to 0
        share = self.final_rate + (1 - self.final_rate) * cosine
        return self.learning_rate * share


@dataclass(frozen=True)
class Loss:
    """A batch's summed loss, its number of tokens, and other summed metrics."""

    total: Tensor
    weight: Tensor
    metrics: dict[str, Tensor]


class Objective(Protocol):
    """The trained module and its loss."""

    @property
    def module(self) -> nn.Module:
        """The trained module."""

    def loss(self, batch: Batch, step: int, progress: float) -> Loss:
        """The loss of one batch; `progress` goes from 0 to 1 over the run."""


class Loop:
    """Trains an objective to its end, from its last checkpoint."""

    def __init__(
        self,
        objective: Objective,
        data: PackedRows,
        settings: LoopSettings,
        out: Path,
        *,
        quiet: bool = False,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        """Train `objective` on `data`, with checkpoints in `out`. `identity` is what determines the
        run beside the settings, such as data and losses: a checkpoint of a run with another
        identity is not continued."""
        self.objective = objective
        self.data = data
        self.settings = settings
        self.out = out
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.quiet = quiet or self.rank > 0
        self.step = 0
        self.parameters = [p for p in objective.module.parameters() if p.requires_grad]
        self.optimizers = _optimizers(self.parameters, objective.module, settings)
        self._history: list[dict[str, float]] = []
        whole_identity = {**self._settings_of_the_curve(), **(identity or {})}
        # As it will be read from a checkpoint: JSON makes lists of tuples.
        self._identity = json.loads(json.dumps(whole_identity))

    def _settings_of_the_curve(self) -> dict[str, Any]:
        """Settings that determine the loss curve; how a step's rows are distributed over processes
        does not."""
        settings = asdict(self.settings)
        del settings["checkpoint_every"]
        rows = settings.pop("batch") * settings.pop("accumulate") * self.world
        return settings | {"rows of a step": rows}

    @property
    def device(self) -> torch.device:
        """The module's device."""
        return self.parameters[0].device

    def run(
        self, *, stop_after: int | None = None, stop_seconds: float = math.inf
    ) -> list[dict[str, float]]:
        """Train from the last checkpoint to the end, or for `stop_after` more steps, or until
        `stop_seconds` have passed. Returns the history, an entry with the figures of each step."""
        deadline = time.monotonic() + stop_seconds
        self.resume()
        if self.world > 1:  # what a start computes may round differently on another card
            for parameter in self.parameters:
                dist.broadcast(parameter.data, 0)
        last = self.settings.steps
        if stop_after is not None:
            last = min(last, self.step + stop_after)
        with Progress(self.settings.steps, self.step, quiet=self.quiet) as bar:
            while self.step < last and time.monotonic() < deadline:
                started = time.perf_counter()
                entry = self._one_step()
                entry["tokens_per_s"] = entry.pop("tokens") / (time.perf_counter() - started)
                self._history.append(entry)
                bar.advance(entry)
                if self.step % self.settings.checkpoint_every == 0 or self.step == last:
                    self.checkpoint()
        return self._history

    def trial(self, rows: int) -> float:
        """Run one step of so many rows, whatever the settings say, and return its seconds. It
        changes the weights, so that no run may follow that is to be kept: only an estimate calls
        this."""
        settings = self.settings
        step = self.step
        self.settings = replace(settings, batch=rows, accumulate=1)
        started = time.perf_counter()
        try:
            self._one_step()
        finally:
            self.settings = settings
            self.step = step
        return time.perf_counter() - started

    def _one_step(self) -> dict[str, float]:
        """Run one step of the optimizer; returns its entry of the history."""
        settings = self.settings
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = settings.rate(self.step)
        sums, tokens = self._add_up_gradients()
        # All processes must reduce the same tensors, also one whose rows left a weight without any.
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self.parameters
        ]
        if self.world > 1:
            for tensor in [*sums.values(), *gradients]:
                dist.all_reduce(tensor)
        # Losses are sums; the step's is the mean over the tokens of all processes.
        weight = sums.pop("weight").clamp(min=1)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient / weight
        metrics = {name: float(value / weight) for name, value in sums.items()}
        if not math.isfinite(metrics["loss"]):
            raise UsageError(
                f"the loss is {metrics['loss']} at step {self.step}; the last checkpoint is kept",
                hint="a lower --learning-rate, or --precision fp32",
            )
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, settings.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return {"step": self.step, **metrics, "grad_norm": float(norm), "tokens": tokens}

    def _add_up_gradients(self) -> tuple[dict[str, Tensor], int]:
        """Run the micro-steps of a step, batches whose gradients add up in the parameters. Returns
        the sums of losses, weights and metrics over this process's batches, and the number of
        tokens of all processes."""
        sums: dict[str, Tensor] = {}
        tokens = 0
        progress = self.step / self.settings.steps
        in_bf16 = self.settings.precision == "bf16"
        for batch in self._batches():
            with torch.autocast(self.device.type, torch.bfloat16, enabled=in_bf16):
                loss = self.objective.loss(batch, self.step, progress)
            # Not where nothing trained took part: a frozen body whose texts saw no record.
            if loss.total.requires_grad:
                loss.total.backward()
            figures = {"loss": loss.total, "weight": loss.weight, **loss.metrics}
            for name, value in figures.items():
                before = sums.get(name, torch.zeros((), device=self.device))
                sums[name] = before + value.detach().float()
            tokens += int((batch.segments > 0).sum()) * self.world
        return sums, tokens

    def _batches(self) -> Iterator[Batch]:
        """This process's rows of the step, a batch for each micro-step."""
        for micro in range(self.settings.accumulate):
            number = self.step * self.settings.accumulate + micro
            yield self.data.batch(
                self.settings.seed, number, self.settings.batch, rank=self.rank, world=self.world
            )

    # ---- checkpoints ------------------------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Save everything a resumed run needs. The checkpoint before is removed only when the new
        one is complete, so that there is one whenever the process is killed."""
        if self.rank > 0:
            return  # all processes have the same weights: one writes
        folder = self.out / "checkpoint"
        fresh = self.out / "checkpoint.new"
        old = self.out / "checkpoint.old"
        shutil.rmtree(old, ignore_errors=True)
        try:
            self._write_checkpoint(fresh)
        except (OSError, RuntimeError) as error:
            # torch's writer turns a full disk into a RuntimeError.
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            shutil.rmtree(fresh, ignore_errors=True)
            raise UsageError(
                f"cannot write the checkpoint of step {self.step} to {self.out}: {reason}",
                hint="the checkpoint before it is kept; is the disk full?",
            ) from None
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)

    def _write_checkpoint(self, fresh: Path) -> None:
        """Write a checkpoint into a new folder. The file with its state comes last, and appears
        whole: a folder that has it is complete."""
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        state = {
            "step": self.step,
            "identity": json.dumps(self._identity),
            "module": self._trained_parameters(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        with (fresh / "history.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(entry) + "\n" for entry in self._history)
        with (fresh / "state.part").open("wb") as file:
            torch.save(state, file)
        (fresh / "state.part").rename(fresh / "state.pt")

    def resume(self) -> None:
        """Take weights, optimizers, history and step from the last checkpoint, if there is one; a
        `UsageError` if it is damaged or of another run."""
        folder = self._newest()
        if folder is None:
            return
        try:
            self._load(folder)
        except (OSError, RuntimeError, KeyError, ValueError, EOFError, UnpicklingError) as error:
            raise UsageError(
                f"the checkpoint in {folder} does not fit this run: {str(error).splitlines()[0]}",
                hint="use the flags it was made with, or another --out",
            ) from None

    def _load(self, folder: Path) -> None:
        """Take weights, optimizers, history and step from the checkpoint in this folder."""
        state = torch.load(folder / "state.pt", weights_only=True, map_location=self.device)
        self._refuse_another(json.loads(state.get("identity", "{}")))
        parameters = self._trained_parameters()
        only_in_one = set(parameters) ^ set(state["module"])  # names
        if only_in_one:
            raise ValueError(f"{min(only_in_one)} is not in both")
        with torch.no_grad():
            for name, value in state["module"].items():
                parameters[name].copy_(value)
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        with (folder / "history.jsonl").open(encoding="utf-8") as file:
            self._history = [json.loads(line) for line in file]
        self.step = state["step"]

    def checkpointed_step(self) -> int:
        """The step from which a run would continue."""
        folder = self._newest()
        if folder is None:
            return 0
        with (folder / "history.jsonl").open("rb") as file:
            return sum(1 for _ in file)

    def _trained_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        named = self.objective.module.named_parameters()
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    def _newest(self) -> Path | None:
        """The folder of the last complete checkpoint."""
        # A run that was killed between the two renames has no "checkpoint", but a complete new one:
        # its state file is written last.
        for folder in (self.out / "checkpoint", self.out / "checkpoint.new"):
            if (folder / "state.pt").exists():
                return folder
        return None

    def _refuse_another(self, saved: dict[str, Any]) -> None:
        """Raise a `UsageError` if a checkpoint, whose identity was `saved` with it, is of a run
        with other data or settings."""
        for name, value in saved.items():
            own = self._identity.get(name)
            if value != own:
                raise UsageError(
                    f"the checkpoint in {self.out} is of a run with {name.replace('_', ' ')} {value},"
                    f" not {own}",
                    hint="use the flags it was made with, or another --out",
                )


def _optimizers(
    parameters: list[nn.Parameter], module: nn.Module, settings: LoopSettings
) -> list[torch.optim.Optimizer]:
    """The optimizers of a run. With `muon` that one trains the matrices, and Adam the rest:
    embeddings, norms and biases. With `adam` Adam trains everything."""
    rate = settings.learning_rate
    decay = settings.weight_decay
    optimizers: list[torch.optim.Optimizer] = []
    others = parameters
    if settings.optimizer == "muon":
        matrices, others = _matrices_and_others(parameters, module)
        dtype = torch.bfloat16 if fast_precision(parameters[0].device) == "bf16" else torch.float32
        optimizers.append(Muon(matrices, lr=rate, weight_decay=decay, dtype=dtype))
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=rate, betas=_ADAM_BETAS, weight_decay=decay))
    return optimizers


def _matrices_and_others(
    parameters: list[nn.Parameter], module: nn.Module
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters that are matrices, but for embeddings, whose rows have nothing to do with each
    other; and all others."""
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    matrices = []
    others = []
    for parameter in parameters:
        is_matrix = parameter.ndim == 2 and min(parameter.shape) > 1
        if is_matrix and id(parameter) not in embeddings:
            matrices.append(parameter)
        else:
            others.append(parameter)
    return matrices, others


def fast_precision(device: torch.device) -> Literal["bf16", "fp32"]:
    """The precision in which a device computes fastest: bf16, unless it is a CPU that only emulates
    it, which makes it many times slower than fp32."""
    if device.type != "cpu":
        return "bf16"
    # Absent where torch lacks oneDNN.
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    if supported is None or not supported():
        return "fp32"
    return "bf16"


def peak_memory_mib() -> float:
    """Peak memory of this process, on the GPU if it used one."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 2**20
    return peak_bytes() / 2**20


def join_process_group(device: torch.device) -> None:
    """Join the other processes when started under `torchrun`."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
