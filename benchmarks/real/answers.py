"""The target's own answers, on disk: everything else is measured along them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kit.progress import Progress
from benchmarks.real.lines import Lines
from benchmarks.real.prompts import FENCE_CLOSED, Prompt, encoded
from benchmarks.real.writing import Task, write
from moa.grammar.spec import Grammar
from moa.sampling import SamplingSettings
from moa.target.contract import LoadOptions, Target
from moa.target.registry import open_target

_CONTEXT = 2048


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How they are written."""

    temperatures: Sequence[float] = (0.0,)
    tokens: int = 96
    """Most of an answer."""
    sessions: int = 32
    """Written side by side."""
    dtype: str = "bfloat16"
    """Of a folder's weights; a GGUF file has its own."""
    exact: bool = False
    """Whether a GGUF file's numbers must not depend on the batch: that is slower."""


def opened(source: str, settings: Settings) -> Target:
    """The target, with room for so many sessions."""
    is_file = Path(source).is_file()
    return open_target(
        source,
        LoadOptions(
            dtype="auto" if is_file else settings.dtype,
            slots=settings.sessions,
            capacity=_CONTEXT,
            exact=settings.exact,
        ),
    )


def key_of(prompt: Prompt, temperature: float) -> str:
    """An answer's name."""
    return f"{prompt.key}@{temperature:g}"


def seed_of(prompt: str) -> int:
    """Another for each prompt, by its name, the same in every run."""
    return sum(ord(letter) * 31**place for place, letter in enumerate(prompt)) % 2**31


def sampling_of(prompt: str, temperature: float) -> SamplingSettings:
    """Greedy, or the noise of the prompt of this name."""
    return SamplingSettings(temperature=temperature, seed=seed_of(prompt) if temperature else 0)


def sampling_of_answer(key: str) -> SamplingSettings:
    """With which an answer of this name was written."""
    prompt, _, temperature = key.rpartition("@")
    return sampling_of(prompt, float(temperature))


def task_of(target: Target, prompt: Prompt, temperature: float, tokens: int) -> Task:
    """What is to be written; code ends with its first block, behind which nothing is run."""
    return Task(
        key=key_of(prompt, temperature),
        ids=encoded(target.tokenizer, prompt),
        tokens=tokens,
        sampling=sampling_of(prompt.key, temperature),
        stop=(FENCE_CLOSED,) if prompt.kind == "code" else (),
        grammar=Grammar.of_schema(prompt.schema) if prompt.schema is not None else None,
    )


def answer(target: Target, prompts: Sequence[Prompt], out: Path, settings: Settings) -> Lines:
    """Write what is missing."""
    lines = Lines(out)
    wanted = [
        (prompt, temperature)
        for prompt in prompts
        for temperature in settings.temperatures
        if key_of(prompt, temperature) not in lines
    ]
    progress = Progress(len(wanted), "answers")
    tasks = (task_of(target, prompt, t, settings.tokens) for prompt, t in wanted)

    def keep(task: Task, ids: list[int], finish: str) -> None:
        lines.add(
            task.key,
            prompt=task.ids,
            ids=ids,
            finish=finish,
            target=target.machine.dtype,
            decoder=target.capabilities.decoder,
        )
        progress.step()

    write(target, tasks, keep)
    return lines
