"""Is a GGUF target's text the same in every batch? Every answer alone, one token a forward, beside the
same answer among others whose drafts, right and wrong, are of any length; by llama.cpp's own batches
and in calls that run every token through the same kernels, which are the default.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.kit.figures import table
from benchmarks.kit.progress import Progress
from benchmarks.real.lines import Lines
from benchmarks.real.writing import Task
from moa.errors import UsageError
from moa.target.choosing import Judged, accept_rows
from moa.target.contract import Target
from moa.target.rows import Row

SHAPES = (
    "the same kernels for every token (the default)",
    "llama.cpp's own batches (--inexact)",
)
_LONGEST_DRAFT = 11
_RIGHT = 0.8
"""Chance that a drafted token is the answer's."""
_PIECES = (3, 17, 64, 128)
"""Tokens of a prompt in a forward: its pieces must not matter either."""


def name(shape: str, way: str, task: Task) -> str:
    """Of an answer among all."""
    return f"{shape}/{way}/{task.key}"


def alone(target: Target, shape: str, tasks: Iterable[Task], out: Lines) -> None:
    """Plain decoding, one session after another."""
    missing = [task for task in tasks if not _known(out, shape, "alone", task)]
    progress = Progress(len(missing), f"alone, {shape}")
    for task in missing:
        _together(target, [task], lambda task, log: [], _keep(out, shape, "alone"), sessions=1)
        progress.step()


def mixed(target: Target, shape: str, tasks: Iterable[Task], out: Lines, *, sessions: int) -> None:
    """Sessions side by side, each with drafts of its own: the answer as it was alone, with errors."""
    missing = [
        task
        for task in tasks
        if not _known(out, shape, "mixed", task) and _known(out, shape, "alone", task)
    ]
    rng = random.Random(0)
    rng.shuffle(missing)
    words = target.facts.vocab_size
    progress = Progress(len(missing), f"mixed, {shape}")

    def draft(task: Task, log: Sequence[int]) -> list[int]:
        truth = out.found[name(shape, "alone", task)]["ids"]
        done = len(log) - len(task.ids)
        wanted = truth[done : done + rng.randint(0, _LONGEST_DRAFT)]
        return [token if rng.random() < _RIGHT else rng.randrange(words) for token in wanted]

    keep = _keep(out, shape, "mixed")

    def kept(task: Task, ids: list[int]) -> None:
        keep(task, ids)
        progress.step()

    _together(target, missing, draft, kept, sessions=sessions)


def _known(out: Lines, shape: str, way: str, task: Task) -> bool:
    """Whether this answer was written before; a `UsageError` if it was one to another part of the
    prompt, or of another length: beside it, the same target would seem to differ from itself."""
    line = out.found.get(name(shape, way, task))
    if line is None:
        return False
    if (line.get("prompt"), len(line["ids"])) != (len(task.ids), task.tokens):
        raise UsageError(
            f"{out.path} has answers with other --prompt, --cut or --tokens",
            hint="take another folder",
        )
    return True


def _keep(out: Lines, shape: str, way: str) -> Callable[[Task, list[int]], None]:
    def keep(task: Task, ids: list[int]) -> None:
        out.add(
            name(shape, way, task),
            ids=ids,
            prompt=len(task.ids),
            temperature=task.sampling.temperature,
        )

    return keep


@dataclass
class _Session:
    task: Task
    slot: int
    log: list[int]
    read: int = 0
    """Prompt tokens that have been run."""
    turn: int = 0

    @property
    def ended(self) -> bool:
        return len(self.log) >= len(self.task.ids) + self.task.tokens


def _together(
    target: Target,
    tasks: Sequence[Task],
    draft: Callable[[Task, Sequence[int]], list[int]],
    done: Callable[[Task, list[int]], None],
    *,
    sessions: int,
) -> None:
    """Prompts run in pieces beside other sessions' rounds. The end of text does not end an answer:
    all are of one length."""
    waiting = deque(tasks)
    active: list[_Session] = []
    while waiting or active:
        while waiting and len(active) < sessions and target.cache.free:
            task = waiting.popleft()
            active.append(_Session(task, target.cache.acquire(), list(task.ids)))
        rows = []
        for one in active:
            last = len(one.task.ids) - 1
            if one.read < last:
                size = _PIECES[(one.turn + len(one.task.ids)) % len(_PIECES)]
                piece = one.log[one.read : min(one.read + size, last)]
                rows.append(Row.chain(one.slot, piece, judged="none"))
            else:
                tokens = [one.log[-1], *draft(one.task, one.log)]
                rows.append(Row.chain(one.slot, tokens, judged="all"))
        step = target.forward(rows)
        for b, (one, row) in enumerate(zip(active, rows, strict=True)):
            one.turn += 1
            if row.judged == "none":
                target.commit(step, b, range(len(row.tokens)))
                one.read += len(row.tokens)
        deciding = [b for b, row in enumerate(rows) if row.judged == "all"]
        for b in deciding:
            _settle(target, step, b, active[b], rows[b])
        for one in [one for one in active if one.ended]:
            active.remove(one)
            target.cache.release(one.slot)
            done(one.task, one.log[len(one.task.ids) :][: one.task.tokens])


def _settle(target: Target, step: Any, b: int, one: _Session, row: Row) -> None:
    judged = Judged(row.tokens, row.parents, one.log, one.task.sampling)
    found = accept_rows(_Only(step, b), [judged])[0]
    target.commit(step, b, found.path)
    one.log += [row.tokens[node] for node in found.path[1:]] + [found.next_token]


class _Only:
    """One row of a step as if there were no others: rows that run a prompt are not judged."""

    choose = None

    def __init__(self, step: Any, row: int) -> None:
        self._step = step
        self._row = row

    @property
    def sizes(self) -> Sequence[int]:
        """Of this row."""
        return [self._step.sizes[self._row]]

    path = "one row"

    def wait(self) -> None:
        """All is computed."""

    def argmax(self, b: int) -> Any:
        """Of this row."""
        return self._step.argmax(self._row + b)

    def host_logits(self, nodes: Sequence[Any]) -> Any:
        """Of this row."""
        return self._step.host_logits([(self._row + b, node) for b, node in nodes])


def figures(out: Lines) -> dict[str, Any]:
    """How many answers differ from their own alone, by shape and temperature."""
    runs = []
    for shape in SHAPES:
        for temperature in (0.0, 1.0):
            compared = []
            for key, line in out.found.items():
                if not key.startswith(f"{shape}/mixed/") or line["temperature"] != temperature:
                    continue
                other = out.found[key.replace("/mixed/", "/alone/")]["ids"]
                pairs = enumerate(zip(line["ids"], other, strict=True))
                compared.append(next((n for n, (a, b) in pairs if a != b), None))
            if compared:
                runs.append(
                    {
                        "shape": shape,
                        "temperature": temperature,
                        "answers": len(compared),
                        "differ": sum(place is not None for place in compared),
                        "places": [place for place in compared if place is not None],
                    }
                )
    lengths = {len(line["ids"]) for line in out.found.values()}
    return {"runs": runs, "tokens": max(lengths, default=0)}


def tables(result: dict[str, Any]) -> str:
    """A line for each shape and temperature."""
    rows = [
        [run["shape"], f"{run['temperature']:g}", run["answers"], run["differ"]]
        for run in result["runs"]
    ]
    header = ["how tokens are cut into calls", "T", "answers", "differ from plain decoding alone"]
    return f"{table(header, rows)}\n\nAnswers of {result['tokens']} tokens."
