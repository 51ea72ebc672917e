"""Drafters on the witness, along its own held-out texts: tokens won a round with its newest state
at hand, with states that are some tokens late, and with none.

From every token of a greedy text, and from every `stride`-th of a sampled one, a chain of `depth`
tokens is drafted. The k-th counts by the chance that it and all before it are accepted: 1 or 0 in
greedy texts, where rounds follow each other; in sampled ones the chance that both choose the same
token by the same noise, averaged over all places.

With --alone N each writes N tokens by itself instead, from the place --cut of every greedy text, as
without a link; what counts is the share that the target would have written there. `none` is a cold
start: no state of the prompt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.baselines.registry import load_any
from benchmarks.baselines.train import finished
from benchmarks.kit.figures import table, titled, values_of
from benchmarks.kit.progress import say
from benchmarks.witness.rows import heldout_folders
from moa.drafters.attention.model import AttentionDrafter
from moa.drafters.states.model import StateDrafter
from moa.drafters.states.training import drafted, shifted, visible
from moa.model.blocks import additive
from moa.model.borrowed import SharedWeights
from moa.target.loading import load_model
from moa.training.data import Batch, PackedRows
from moa.training.loop import fast_precision
from moa.training.masks import same_document
from moa.training.teacher import TeacherOutput
from moa.training.teacher_files import StoredTeacher, written

NONE = "none"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is drafted."""

    target: str = ""
    """The prepared model."""
    drafters: tuple[str, ...] = ()
    """Folders."""
    texts: str = ""
    """Its own texts: `python -m benchmarks.witness heldout`."""
    behind: tuple[str, ...] = ("0", "8", NONE)
    """How many tokens the newest state is late, or none."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    depth: int = 6
    """Tokens of a draft."""
    stride: int = 4
    """In sampled texts."""
    rows: int = 100
    """Of each kind of text at most."""
    alone: int = 0
    """Tokens that each writes by itself; 0: none, rounds are measured."""
    cut: int = 0
    """Tokens of the target's answer before that."""


class Row:
    """A row of texts, and what the target computed on it."""

    def __init__(self, batch: Batch, lesson: TeacherOutput) -> None:
        self.batch = batch
        self.lesson = lesson
        self.ids, self.positions, self.segments = (
            torch.from_numpy(part) for part in (batch.ids, batch.positions, batch.segments)
        )

    def copy(self) -> Row:
        """One whose words may be replaced."""
        return Row(replace(self.batch, ids=self.batch.ids.copy()), self.lesson)

    def starts(self, document: int, stride: int) -> Tensor:
        """The tokens before the target's own, of one document."""
        inside = self.batch.segments[0] == document
        own = (self.batch.wanted[0] & inside)[1:] & inside[:-1]
        return torch.from_numpy(own.nonzero()[0][::stride])


def states_of(model: Any, row: Row, starts: Tensor, behind: str, depth: int) -> Iterator[Tensor]:
    """The drafter's states at the tokens `starts`, then at the next ones."""
    if isinstance(model, AttentionDrafter):
        return _with_records(model, row, starts, behind, depth)
    return _with_features(model, row, starts, behind, depth)


def _with_features(
    model: Any, row: Row, starts: Tensor, behind: str, depth: int
) -> Iterator[Tensor]:
    late = 0 if behind == NONE else int(behind)
    features = shifted(model.read(row.lesson.states), row.positions)
    causal = visible(model, row.positions, row.segments)
    mask = additive(causal).unsqueeze(1)
    if behind == NONE:
        features = torch.zeros_like(features)
        if isinstance(model, StateDrafter):
            hidden, _ = model.step(
                row.ids, features, row.positions, mask, model.empty_rows(row.ids)
            )
            features = shifted(model.feedback(hidden), row.positions)
    hidden, past = model.step(row.ids, features, row.positions, mask, model.empty_rows(row.ids))
    anchors = starts - late
    if not late:
        yield hidden[0, anchors]
    for lag, last in drafted(
        model, row.ids, row.positions, causal, hidden, past, anchors, late + depth
    ):
        if lag >= late:
            yield last[0]


def _with_records(
    model: AttentionDrafter, row: Row, starts: Tensor, behind: str, depth: int
) -> Iterator[Tensor]:
    index = torch.arange(row.ids.shape[1])
    same = same_document(row.segments)
    causal = same & (index.view(1, 1, -1) <= index.view(1, -1, 1))
    records: tuple[Tensor, ...] = ()
    if model.config.use_ca and behind != NONE:
        lesson = row.lesson
        key, value = model.project(
            lesson.keys[:, 0], lesson.values[:, 0], lesson.hidden[0], row.positions[0]
        )
        known = same[:, starts] & (index < (starts - int(behind)).unsqueeze(1))
        records = (
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            additive(known).unsqueeze(1),
        )
    _, past = model.features(
        row.ids, row.positions, additive(causal).unsqueeze(1), model.empty_rows(row.ids)
    )
    own = torch.eye(len(starts), dtype=torch.bool).unsqueeze(0)
    seen = causal[:, starts] & (index < starts.unsqueeze(1))
    for lag in range(depth):
        place = (starts + lag).clamp(max=len(index) - 1)
        mask = additive(torch.cat([seen, *[own] * (lag + 1)], -1)).unsqueeze(1)
        hidden, rows = model.features(
            row.ids[:, place], row.positions[:, place], mask, past, *records
        )
        past = [
            (torch.cat([a, k], -2), torch.cat([b, v], -2))
            for (a, b), (k, v) in zip(past, rows, strict=True)
        ]
        yield hidden[0]


@torch.inference_mode()
def won(
    model: Any, row: Row, starts: Tensor, behind: str, depth: int, temperature: float, head: Tensor
) -> Tensor:
    """Expected tokens of a round from each of the tokens `starts`."""
    last = row.ids.shape[1] - 1
    likely = torch.ones(len(starts))
    total = torch.ones(len(starts))
    for lag, hidden in enumerate(states_of(model, row, starts, behind, depth)):
        at = (starts + lag).clamp(max=last)
        after = (at + 1).clamp(max=last)
        mine = (hidden.to(head.dtype) @ head.T).float()
        if temperature:
            theirs = (row.lesson.hidden[0, at].to(head.dtype) @ head.T).float()
            chance = same_choice(mine / temperature, theirs / temperature)
        else:
            chance = (mine.argmax(-1) == row.ids[0, after]).float()
        inside = (starts + lag < last) & (row.segments[0, after] == row.segments[0, starts])
        likely = likely * chance * inside
        total = total + likely
    return total


def same_choice(mine: Tensor, theirs: Tensor) -> Tensor:
    """The chance that both logits are largest at the same token after the same Gumbel noise is
    added: the sum over i of 1 / sum over j of max(p_j / p_i, q_j / q_i)."""
    p = mine.double().log_softmax(-1)
    q = theirs.double().log_softmax(-1)
    order = (q - p).argsort(-1)
    p = p.gather(-1, order).exp()
    q = q.gather(-1, order).exp()
    tiny = torch.finfo(p.dtype).tiny
    others = p.cumsum(-1) / p.clamp(min=tiny) + (1 - q.cumsum(-1)).clamp(min=0) / q.clamp(min=tiny)
    return (1 / others).sum(-1).float()


@torch.inference_mode()
def alone(model: Any, row: Row, start: int, behind: str, tokens: int, head: Tensor) -> Row:
    """The row with the model's own greedy words behind `start`."""
    own = row.copy()
    for lag, hidden in enumerate(states_of(model, own, torch.tensor([start]), behind, tokens)):
        own.ids[0, start + 1 + lag] = int((hidden.to(head.dtype) @ head.T).argmax())
    return own


@torch.inference_mode()
def as_the_target(target: Any, row: Row, start: int, tokens: int) -> float:
    """The share of words behind `start` that the target would have written."""
    first = int((row.segments[0] == row.segments[0, start]).nonzero()[0])
    stop = start + tokens
    said = target(row.ids[:, first:stop]).logits[0, start - first :].argmax(-1)
    return float((said == row.ids[0, start + 1 : stop + 1]).float().mean())


def fast_head(model: Any) -> Tensor:
    """The model's head, in the precision that its device computes in."""
    head: Tensor = model.get_output_embeddings().weight.detach()
    return head.to(torch.bfloat16 if fast_precision(head.device) == "bf16" else torch.float32)


def greedy_rounds(tokens: Tensor) -> float:
    """Tokens a round where each begins behind the one before it."""
    rounds = 0
    at = 0
    while at < len(tokens):
        at += round(float(tokens[at]))
        rounds += 1
    return len(tokens) / rounds


def named(folders: Sequence[str]) -> list[tuple[Path, str]]:
    """Each folder with its name, or with its parent's too where two have the same."""
    paths = [Path(folder).resolve() for folder in folders]
    often = Counter(path.name for path in paths)
    return [
        (path, path.name if often[path.name] == 1 else f"{path.parent.name}/{path.name}")
        for path in paths
    ]


def measure(options: Options) -> dict[str, Any]:
    """Run every drafter over every kind of text, temperature and lateness."""
    temperatures = (0.0,) if options.alone else options.temperatures
    loaded = load_model(options.target)
    head = fast_head(loaded.model)
    runs = []
    for folder, name in named(options.drafters):
        model = load_any(folder, loaded.model, loaded.facts)
        trained = finished(folder) or {}
        taps = getattr(model.config, "taps", ())
        for behind in options.behind:
            for kind, temperature, place in heldout_folders(Path(options.texts)):
                if temperature not in temperatures:
                    continue
                each = [
                    figure
                    for row in _rows(loaded.model, taps, place, options.rows)
                    for document in range(1, int(row.batch.segments.max()) + 1)
                    for figure in _figures(
                        model, loaded.model, row, document, behind, temperature, options, head
                    )
                ]
                run = {
                    "drafter": name,
                    "steps": trained.get("steps"),
                    "parameters": trained.get("parameters"),
                    "behind": behind,
                    "kind": kind,
                    "temperature": temperature,
                    "texts": len(each),
                    "won": float(np.mean(each)),
                    "se": float(np.std(each) / math.sqrt(len(each))),
                }
                say(
                    f"{name} {behind} late, {kind}, T={temperature:g}: {run['won']:.3f} ± {run['se']:.3f}"
                )
                runs.append(run)
    return {"alone": options.alone, "runs": runs}


def _figures(
    model: Any,
    target: Any,
    row: Row,
    document: int,
    behind: str,
    temperature: float,
    options: Options,
    head: Tensor,
) -> Iterator[float]:
    """What is measured of one text; nothing where it is too short."""
    starts = row.starts(document, options.stride if temperature else 1)
    if options.alone:
        if options.cut + options.alone <= len(starts):
            start = int(starts[options.cut])
            own = alone(model, row, start, behind, options.alone, head)
            yield as_the_target(target, own, start, options.alone)
    elif len(found := won(model, row, starts, behind, options.depth, temperature, head)):
        yield float(found.mean()) if temperature else greedy_rounds(found)


def _rows(target: Any, taps: Sequence[int], place: Path, most: int) -> Iterator[Row]:
    return (row_of(target, taps, place, number) for number in range(min(most, len(written(place)))))


def row_of(target: Any, taps: Sequence[int], place: Path, number: int) -> Row:
    """A row of texts."""
    teacher = StoredTeacher(SharedWeights.of(target), place, target.dtype)
    batch = PackedRows(place).rows(np.array([number]))
    if taps:
        teacher.tap(taps)
    lesson = teacher(batch)
    parts = (lesson.keys, lesson.values, lesson.hidden, lesson.tapped)
    return Row(batch, TeacherOutput(*(None if part is None else part.float() for part in parts)))  # type: ignore[arg-type]


def tables(result: Mapping[str, Any]) -> str:
    """Tokens a round, one table for each temperature."""
    parts = []
    kinds = values_of(result["runs"], "kind")
    for temperature in values_of(result["runs"], "temperature"):
        cells = {
            (run["drafter"], run["behind"], run["kind"]): run
            for run in result["runs"]
            if run["temperature"] == temperature
        }
        rows = []
        for drafter, behind in dict.fromkeys(key[:2] for key in cells):
            mine = [cells[drafter, behind, kind] for kind in kinds]
            error = math.sqrt(sum(run["se"] ** 2 for run in mine)) / len(mine)
            mean = f"**{np.mean([run['won'] for run in mine]):.2f}** ± {error:.2f}"
            rows.append(
                [drafter, behind, *(f"{run['won']:.2f} ± {run['se']:.2f}" for run in mine), mean]
            )
        header = ["drafter", "tokens late", *kinds, "**mean**"]
        what = "Share as the target would have written" if result["alone"] else "Tokens a round"
        parts.append((f"{what} (± standard error), T = {temperature:g}", table(header, rows)))
    return titled(*parts)
