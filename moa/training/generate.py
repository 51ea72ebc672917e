"""`--generate`: the target answers the data's prompts, so that the drafter is trained on the
target's own text."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from moa.errors import UsageError
from moa.sampling import SamplingSettings
from moa.target.generate import Continued, generate
from moa.target.torch_target import Target
from moa.training.progress import Progress

PROMPT_TOKENS = 64
"""Tokens of a plain text that are the prompt of the target's continuation."""


class GeneratedAnswers:
    """`generated.jsonl`: one line per prompt, in the data's order, and a file with the settings it
    was made with."""

    def __init__(self, out: Path, made_with: dict[str, Any]) -> None:
        self.path = out / "generated.jsonl"
        self._about = out / "generated.json"
        self.made_with: dict[str, Any] = json.loads(json.dumps(made_with))

    def complete(self) -> bool:
        """Whether every prompt has its answer in the file. A `UsageError` if its answers were made
        with other settings than these."""
        if not self._about.exists():
            return False
        try:
            about = json.loads(self._about.read_text(encoding="utf-8"))
            saved = about["made_with"]
            done = bool(about["complete"])
        except (json.JSONDecodeError, KeyError, TypeError):
            raise UsageError(
                f"{self._about} is damaged", hint="delete it and generated.jsonl"
            ) from None
        for name in sorted({*saved, *self.made_with}):
            if saved.get(name) != self.made_with.get(name):
                raise UsageError(
                    f"{self.path} was generated with another {name.replace('_', ' ')}",
                    hint="use the flags it was made with, or another folder",
                )
        return done

    def write(
        self, target: Target, prompts: Iterable[Sequence[int]], *, quiet: bool = False
    ) -> None:
        """Have the target answer every prompt that has no line in the file yet, and write a line
        for each, as many prompts at once (a window) as the target has slots. A prompt for which the
        target has no room is left out."""
        if self.complete():
            return
        self._about.parent.mkdir(parents=True, exist_ok=True)
        self._note(complete=False)
        new_tokens = self.made_with["max_new_tokens"]
        room = target.cache.capacity - new_tokens
        # As arrays, which take an eighth of a list's memory.
        asked = [array("i", prompt) for prompt in prompts if 0 < len(prompt) <= room]
        window = target.cache.slots
        done = self._whole_windows(window)
        with (
            self.path.open("a", encoding="utf-8") as file,
            Progress(len(asked), done, quiet=quiet, of="answer") as bar,
        ):
            for first in range(done, len(asked), window):
                started = time.perf_counter()
                answers = generate(
                    target, asked[first : first + window], new_tokens, self._sampling(first)
                )
                file.writelines(_line(answer) for answer in answers)
                file.flush()
                tokens = sum(len(answer.ids) - answer.prompt for answer in answers)
                seconds = time.perf_counter() - started
                bar.advance({"tokens_per_s": tokens / seconds}, len(answers))
        self._note(complete=True)

    def _sampling(self, first: int) -> SamplingSettings:
        """How the answers of a window are drawn whose first one has this number. The noise of a
        sampled token is a function of seed and position: so every window has another seed."""
        return SamplingSettings(
            temperature=self.made_with["temperature"], seed=self.made_with["seed"] + first
        )

    def _whole_windows(self, size: int) -> int:
        """Cut the file after its last whole window of `size` answers, and return how many answers
        it has then. The rest was written by a process that was killed; it is made again, because
        the noise of a sampled answer depends on its window."""
        if not self.path.exists():
            return 0
        with self.path.open("r+b") as file:
            line_ends = [0]  # in bytes, after so many whole lines
            for line in file:
                if line.endswith(b"\n"):
                    line_ends.append(line_ends[-1] + len(line))
            answers = len(line_ends) - 1
            kept = answers // size * size
            file.truncate(line_ends[kept])
        return kept

    def _note(self, *, complete: bool) -> None:
        """Write down what the answers are made with, and whether all are there."""
        about = {"complete": complete, "made_with": self.made_with}
        self._about.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def _line(answer: Continued) -> str:
    """An answer's line in the file."""
    content = {
        "ids": answer.ids,
        "prompt_tokens": answer.prompt,
        "finish": answer.finish,
    }
    return json.dumps(content) + "\n"
