"""Drafters that were trained on the target's own answers, beside the sibling, along answers to
prompts that the training has not seen.

The guesses of a drafter with a bundle are those of its graph, as a device makes them: with the
newest record of the target at hand; with records that are some tokens late; and alone, with none
since the prompt, as without a link. A sibling, or an independent drafter, reads no records: its
guesses are the same in all three cases. A drafter for servers alone has no bundle: it drafts in
torch, and always has the newest states.
"""

from __future__ import annotations

import json
import math
import statistics
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, product, repeat, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.kit.figures import table
from benchmarks.kit.progress import Progress
from benchmarks.real.acceptance import DEPTHS, standard_error
from benchmarks.real.answers import sampling_of_answer
from benchmarks.real.lines import Line, Lines, read
from benchmarks.real.prompts import KINDS
from export.agreement import Continuation, KeptRecords, Replay
from export.runner import OrtRunner, Runner, StepInput
from export.source import load_source
from moa.bundle import Bundle
from moa.drafters.contract import Drafter, Drafting, DraftRequest
from moa.drafters.registry import find
from moa.drafters.taps import authors_taps
from moa.errors import UsageError
from moa.records import DTYPES, row_bytes
from moa.sampling import SamplingSettings, gumbel
from moa.target.generate import Continued
from moa.target.loading import load_model, read_facts, read_partial_target
from moa.target.torch_target import Committed
from moa.text_stream import common_prefix
from moa.training.data import Batch
from moa.training.loop import fast_precision
from moa.training.teacher import Teacher, TeacherOutput
from moa.tree import DraftTree, TreeShape

LATE = 8
"""Tokens by which records are late: a slow link's."""
_LATE_EVERY = 4
"""Of the places of a text every fourth is tried with late records: each takes up to `LATE` steps
more."""
_MORE = (3, 6)
"""Tokens of the steps behind a first guess that was right, where a step may read several."""
_PIECE = 64
"""Tokens of all later steps."""
STATES = "held_states"
"""Folder in WORK of what the target computes along its answers: `cuts` reads the same."""
_HELD_OUT = 3
"""One prompt in so many is held out, with all answers to it."""


# ---- what is learnt, and what is held out


class Parts(NamedTuple):
    """Lines for `moa-train`, and the answers that it does not see."""

    train: list[Line]
    held: list[Line]


def split(answers: Lines, *, longest: int, tokens: int) -> Parts:
    """Answers of at most `longest` tokens with their prompts: all to the prompts that are held out,
    and of the others as many as have `tokens` together."""
    train: list[Line] = []
    held: list[Line] = []
    seen = 0
    # In an order that is as good as random, so that the first ones are of every kind.
    for key in sorted(answers.found, key=lambda key: zlib.crc32(key.encode())):
        answer = answers.found[key]
        ids = answer["prompt"] + answer["ids"]
        if len(ids) > longest:
            continue
        line = {"ids": ids, "prompt_tokens": len(answer["prompt"])}
        if is_held_out(key.rpartition("@")[0]):
            held.append({"key": key, **line})
        elif seen + len(ids) <= tokens:
            train.append(line)
            seen += len(ids)
    return Parts(train, held)


def is_held_out(prompt: str) -> bool:
    """Whether the training sees no answer to the prompt of this name."""
    return zlib.crc32(prompt.encode()) % _HELD_OUT == 0


def write_split(work: Path, parts: Parts) -> None:
    """Write them where `moa-train` and `measure` read them."""
    for name, lines in parts._asdict().items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (work / f"{name}.jsonl").write_text(text, encoding="utf-8")


# ---- what it guesses


class Guesser(Protocol):
    """A drafter along one text, of which it knows the target's results."""

    def reach(self, place: int, depth: int) -> int:
        """How many tokens of a draft after `place` are right, with the newest record: a target that
        is to judge this token has computed those before it."""

    def behind(self, prompt: int) -> dict[str, list[bool]]:
        """Which guesses are right where records are late or absent, from the end of the prompt on;
        nothing of a drafter that always has the newest, or reads none."""


@dataclass
class Chains:
    """Drafts of a bundle's graph along one text, with the records that a verifier makes of it."""

    runner: Runner
    text: Continuation
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    words: int | NDArray[np.int64] = 0
    """The target's ids of the tokens that the graph knows, or how many if it knows all: those that
    sampling has noise for."""

    @property
    def ids(self) -> list[int]:
        """The text."""
        return self.text.ids

    @cached_property
    def rows(self) -> Sequence[Any]:
        """Rows of the graph's cache for every token of the text: those that records carry, and for
        all other layers its own, which depend on tokens alone."""
        if len(self.text.borrowed) == 2 * len(self.runner.spec.cache):
            return self.text.borrowed
        return Replay(self.runner, self.text).rows

    def guesses(self, known: int, first: int) -> Iterator[int]:
        """Yield the guess after each token from `first` on, where the records of the text's first
        `known` tokens are there. What no record tells of the tokens behind those, a step makes."""
        cache = [rows[:, :known] for rows in self.rows]
        place = known
        last = len(self.ids) - 1
        for size in self._sizes(first - known + 1):
            if place == last:
                return
            stop = min(place + size, last)
            queries = [at for at in range(stop - place) if place + at >= first]
            # A step predicts after one token at least. Nobody reads this prediction.
            made = self.runner.step(self._step(place, stop, queries or [0], known, cache))
            cache = [np.concatenate(pair, axis=1) for pair in zip(cache, made.rows, strict=True)]
            place = stop
            yield from (int(token) for token in made.top_tokens[: len(queries), 0])

    def _sizes(self, first: int) -> Iterator[int]:
        """How many tokens each step reads, of which the first brings a guess."""
        if self.runner.spec.features:
            return repeat(1)  # a token reads what the one before it made
        return chain((first, *_MORE), repeat(_PIECE))

    def _step(
        self, start: int, stop: int, queries: Sequence[int], known: int, cache: Sequence[Any]
    ) -> StepInput:
        """The step over the text's tokens `start` to `stop - 1`."""
        count = stop - start
        keys = self.text.record_k
        values = self.text.record_v
        greedy = self.sampling.greedy
        return StepInput(
            ids=self.ids[start:stop],
            queries=queries,
            positions=range(start, stop),
            mask=np.tri(count, stop, start, dtype=np.bool_),
            past=list(cache),
            record_k=None if keys is None else keys[:, :known],
            record_v=None if values is None else values[:, :known],
            feature_rows=range(start - 1, stop - 1),
            scale=1.0 if greedy else 1.0 / self.sampling.temperature,
            noise=None if greedy else self._noise([start + query + 1 for query in queries]),
        )

    def _noise(self, positions: Sequence[int]) -> NDArray[np.float32]:
        """That by which the target chooses at these positions."""
        drawn = [gumbel(self.sampling.seed, position, self.words) for position in positions]
        return np.stack(drawn).astype(np.float32)

    def reach(self, place: int, depth: int) -> int:
        """Of the graph's guesses, each behind right ones."""
        right = 0
        guesses = self.guesses(place, place)
        for token in self.ids[place + 1 : place + 1 + depth]:
            if next(guesses) != token:
                break
            right += 1
        return right

    def right_when_late(self, place: int) -> bool:
        """Whether the guess after `place` is right where records are `LATE` tokens late."""
        return next(self.guesses(place - LATE, place)) == self.ids[place + 1]

    def right_alone(self, prompt: int) -> list[bool]:
        """For each place behind the answer's first token: whether the guess is right with no record
        since the prompt."""
        guesses = self.guesses(prompt, prompt)
        return [
            guess == token for guess, token in zip(guesses, self.ids[prompt + 1 :], strict=True)
        ]

    def behind(self, prompt: int) -> dict[str, list[bool]]:
        """Late, and alone."""
        if self.text.record_k is None and not self.text.borrowed:
            return {}  # its guesses never change
        places = range(prompt, len(self.ids) - 1)[LATE::_LATE_EVERY]
        late = [self.right_when_late(place) for place in places]
        return {"late": late, "alone": self.right_alone(prompt)}


@dataclass
class Drafts:
    """Drafts in torch along one text, as a server makes them: places are asked for in order."""

    drafting: Drafting
    text: Committed
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    _slot: int = field(init=False)

    def __post_init__(self) -> None:
        self._slot = self.drafting.open()

    def reach(self, place: int, depth: int) -> int:
        """Of a chain; a longer one only where a shorter one is right."""
        read = self.drafting.known(self._slot)
        ids = list(self.text.tokens)
        self.drafting.observe(self._slot, ids[read:place], self.text.part(read, place))
        right = 0
        for size in sorted({min(size, depth) for size in (1, *DEPTHS)}):
            shape = TreeShape.chain(size, min_score=-math.inf)
            request = DraftRequest(self._slot, ids[place], shape, self.sampling)
            (tree,) = self.drafting.draft([request])
            drafted = tree.tokens[1:]  # without the pending token
            right = common_prefix(drafted, list(ids[place + 1 :]))
            if right < len(drafted):
                break
        return right

    def behind(self, prompt: int) -> dict[str, list[bool]]:
        """A server's drafter has the newest states."""
        self.drafting.close(self._slot)
        return {}


def figures_of(
    guesser: Guesser, prompt: int, tokens: int, *, in_step: bool = False
) -> dict[str, Any]:
    """What is counted of a text of so many tokens, from its answer's first on, which comes with the
    prompt. Drafts of several tokens are made where a round begins, of one everywhere. Where the
    device is always `in_step`, no record is late."""
    reach: list[int] = []
    begins = dict.fromkeys(DEPTHS, prompt)  # where the next round of drafts so deep does
    for place in range(prompt, tokens - 1):
        beginning = [depth for depth, at in begins.items() if at == place]
        reach.append(guesser.reach(place, max(DEPTHS) if beginning else 1))
        for depth in beginning:
            begins[depth] = place + min(reach[-1], depth) + 1
    if in_step:
        return {"reach": reach}
    return {"reach": reach, **guesser.behind(prompt)}


def measure(
    target: str, folder: Path, bundle: Path | None, work: Path, *, in_step: bool = False
) -> None:
    """What is known of the drafter in `folder`, and its guesses along every text that has none
    yet."""
    out = Lines(work / "trained.jsonl")
    name = folder.name
    source = None if bundle is None else load_source(target, str(folder))
    drafter = _in_torch(target, folder) if source is None else source.module
    opened = None if bundle is None else Bundle.open(bundle)
    about = {"drafter": name, **_about(folder, drafter, opened)}
    if name in out and out.found[name] != {"key": name, **about}:
        raise UsageError(
            f"{out.path} is of another drafter than {folder}", hint="take it out of WORK"
        )
    texts = [line for line in read(work / "held.jsonl") if f"{name} {line['key']}" not in out]
    if name not in out:
        out.add(name, **about)
    known = KnownTexts(target, work / STATES)
    progress = Progress(len(texts), "texts")
    runner: OrtRunner | None = None
    words: int | NDArray[np.int64] = 0
    if source is not None and opened is not None:
        variant = opened.variant(opened.manifest.default_variant)
        runner = OrtRunner(opened.path(variant.model), source.spec)
        own_words = opened.draft_to_target()
        words = opened.manifest.vocabulary.target if own_words is None else own_words
    for line in texts:
        ids = line["ids"]
        text = known.of(line["key"], ids, drafter)
        sampling = sampling_of_answer(line["key"])
        guesser: Guesser
        if runner is None:
            guesser = Drafts(drafter.drafting(slots=1, capacity=len(ids)), text, sampling)
        else:
            kept = continuation(drafter, text, line["prompt_tokens"])
            guesser = Chains(runner, kept, sampling, words)
        found = figures_of(guesser, line["prompt_tokens"], len(ids), in_step=in_step)
        out.add(f"{name} {line['key']}", drafter=name, text=line["key"], **found)
        progress.step()


def _in_torch(target: str, folder: Path) -> Drafter:
    """A drafter that has no graph, with embedding and head of the target."""
    part = read_partial_target(target)
    return find(folder).load(part.model, part.facts)


def _about(folder: Path, drafter: Drafter, bundle: Bundle | None) -> dict[str, Any]:
    """How a drafter was trained, and what it costs."""
    made = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    result = made.get("result", made)  # of moa-train, or of benchmarks.baselines.train
    layout = drafter.record_layout
    record = 0 if layout is None else row_bytes(DTYPES[0], layout.count, layout.width)
    about = {
        "steps": result["steps"],
        "processor_seconds": result["processor_seconds_of_last_start"],
        "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
        "trained_parameters": result["trained_parameters"],
        "record_bytes": record,
    }
    if bundle is not None:
        about["bundle_bytes"] = sum(entry.size for entry in bundle.manifest.files.values())
    return about


@dataclass
class PlaceDrafts:
    """What a server's drafter drafts at each place of an answer."""

    tokens: list[list[int]] = field(default_factory=list)
    scores: list[list[float]] = field(default_factory=list)
    """The log-probability of each whole draft so far."""

    def add(self, tree: DraftTree) -> None:
        """At the next place, without the pending token."""
        self.tokens.append(tree.tokens[1:])
        self.scores.append([round(score, 3) for score in tree.scores[1:]])


SERVER_DRAFT = TreeShape.chain(16, min_score=-4.0)
"""As deep as a verifier drafts a stream, and until it is as unlikely to go on."""


def drafts_along(drafting: Drafting, text: Committed, prompt: int, places: int) -> PlaceDrafts:
    """Chains behind the prompt and behind each token of the answer, at so many places, with the
    newest states: those of all tokens but the pending one."""
    found = PlaceDrafts()
    slot = drafting.open()
    ids = list(text.tokens)
    for place in range(prompt - 1, min(prompt - 1 + places, len(ids))):
        read = drafting.known(slot)
        drafting.observe(slot, ids[read:place], text.part(read, place))
        request = DraftRequest(slot, ids[place], SERVER_DRAFT, SamplingSettings())
        (tree,) = drafting.draft([request])
        found.add(tree)
    drafting.close(slot)
    return found


def draft(target: str, folder: Path, work: Path, *, texts: int, tokens: int) -> None:
    """What the drafter in `folder` drafts at a server along the first `tokens` tokens of greedy
    answers that are held out, kind by kind in turn: for `links`, which looks it up."""
    out = Lines(work / "drafts.jsonl")
    by_kind: dict[str, list[Line]] = {}
    for line in read(work / "held.jsonl"):
        if line["key"].endswith("@0") and len(line["ids"]) - line["prompt_tokens"] >= tokens:
            by_kind.setdefault(line["key"].partition("/")[0], []).append(line)
    chosen = [line for some in zip_longest(*by_kind.values()) for line in some if line][:texts]
    drafter = _in_torch(target, folder)
    known = KnownTexts(target, work / STATES)
    progress = Progress(len(chosen), "texts")
    for line in chosen:
        key = f"{folder.name} {line['key']}"
        if key not in out:
            ids = line["ids"]
            text = known.of(line["key"], ids, drafter)
            drafting = drafter.drafting(slots=1, capacity=len(ids))
            found = drafts_along(drafting, text, line["prompt_tokens"], tokens)
            out.add(key, drafter=folder.name, text=line["key"], **vars(found))
        progress.step()


def continuation(drafter: Drafter, text: Committed, prompt: int) -> Continuation:
    """A text with the records that a verifier sends of it."""
    kept = KeptRecords(drafter)
    kept.add(text)
    return kept.trace(Continued(list(text.tokens), prompt))


# ---- what the target computes along the texts


@dataclass
class _Cache:
    """Keys and values `[layers, n, heads, width]` of one text, in place of a target's pool."""

    keys: Tensor
    values: Tensor

    def read(self, _slot: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Those of some tokens."""
        return self.keys[:, start:stop], self.values[:, start:stop]


class KnownTexts:
    """The target's results along texts, kept in a folder in 16 bits: the target runs over each text
    once, whichever drafters read of it."""

    def __init__(self, target: str, folder: Path) -> None:
        self._target = target
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        facts, _ = read_facts(target, identify=False)
        self._layers = facts.layers
        self._taps = authors_taps(facts.layers)
        self._has_caches = facts.uniform_cache

    @cached_property
    def _teacher(self) -> Teacher:
        """The target, once it is needed."""
        device = torch.device("cpu")
        dtype = torch.bfloat16 if fast_precision(device) == "bf16" else torch.float32
        teacher = Teacher(load_model(self._target, device=device, dtype=dtype).model)
        teacher.caches = self._has_caches
        teacher.tap(self._taps)
        return teacher

    def of(self, key: str, ids: Sequence[int], drafter: Drafter) -> Committed:
        """A text, as the target has computed it for this drafter."""
        path = self._folder / f"{key.replace('/', '-')}.safetensors"
        if not path.exists():
            known = {**self._computed(ids), "ids": torch.tensor(ids)}
            save_file(known, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)
        stored: dict[str, Tensor] = load_file(path)
        _refuse_another(path, stored, ids)
        hidden = stored["hidden"].float()
        tapped = self._tapped(stored, drafter.taps)
        pool: Any = None
        if self._has_caches:
            pool = _Cache(stored["keys"].float(), stored["values"].float())
        return Committed(pool, 0, 0, hidden=hidden, tapped=tapped, tokens=list(ids))

    def _computed(self, ids: Sequence[int]) -> dict[str, Tensor]:
        """What the target computes of a text."""
        known = self._teacher(_batch(ids))
        return {name: value.to(torch.bfloat16) for name, value in _of_text(known).items()}

    def _tapped(self, stored: Mapping[str, Tensor], taps: Sequence[int]) -> Tensor | None:
        """The states that a drafter taps; the number behind the last layer is the final one."""
        if not taps:
            return None
        if tuple(taps) not in (self._taps, (*self._taps, self._layers)):
            raise UsageError(f"no states of layers {list(taps)} are kept: only {list(self._taps)}")
        parts = [stored["tapped"], stored["hidden"]][: 1 + len(taps) - len(self._taps)]
        return torch.cat(parts, -1).float()


def _refuse_another(path: Path, stored: Mapping[str, Tensor], ids: Sequence[int]) -> None:
    """Raise where a kept file is of another text than this: of the same name, in an earlier run."""
    if "ids" not in stored or stored["ids"].tolist() != list(ids):
        raise UsageError(f"{path} is of another text", hint="take it out of WORK")


def _batch(ids: Sequence[int]) -> Batch:
    """One text as a teacher takes it."""
    count = len(ids)
    return Batch(
        ids=np.array([ids], np.int64),
        segments=np.ones((1, count), np.int64),
        positions=np.arange(count)[None],
        wanted=np.ones((1, count), np.bool_),
        rows=np.zeros(1, np.int64),
    )


def _of_text(known: TeacherOutput) -> dict[str, Tensor]:
    """The results of a batch of one text, contiguous."""
    assert known.tapped is not None
    found = {"hidden": known.hidden[0], "tapped": known.tapped[0]}
    if known.keys.numel():
        found |= {"keys": known.keys[:, 0], "values": known.values[:, 0]}
    return {name: value.contiguous() for name, value in found.items()}


# ---- tables

SIBLING = "the sibling"


def figures(held: Sequence[Line], guessed: Lines, found: Lines, train: Sequence[Line]) -> Any:
    """By kind of text and drafter, each over the texts along which it has guessed."""
    drafters = [line for line in found.found.values() if "text" not in line]
    temperatures: set[float] = set()
    cells: dict[tuple[str, float, str], list[dict[str, float]]] = {}
    for text in held:
        key = text["key"]
        lines = [found.found.get(f"{about['drafter']} {key}") for about in drafters]
        if key not in guessed:
            continue
        answer = text["ids"][text["prompt_tokens"] :]
        tops = [tokens[0] for tokens in guessed.found[key]["tokens"]]
        # The first token of an answer comes with its prompt, and is not drafted.
        right = [mine == theirs for mine, theirs in zip(tops, answer, strict=True)][1:]
        if len(right) <= LATE:
            continue  # too short to tell
        kind = key.partition("/")[0]
        temperature = float(key.rpartition("@")[2])
        temperatures.add(temperature)
        cells.setdefault((kind, temperature, SIBLING), []).append(_of_reach(_reach(right)))
        for about, line in zip(drafters, lines, strict=True):
            if line is None:
                continue
            one = _of_reach(line["reach"])
            one |= {name: statistics.fmean(line[name]) for name in _BEHIND if line.get(name)}
            cells.setdefault((kind, temperature, about["drafter"]), []).append(one)
    names = [SIBLING, *(about["drafter"] for about in drafters)]
    runs = []
    for cell in product(KINDS, sorted(temperatures), names):
        if texts := cells.get(cell):
            run: dict[str, Any] = dict(zip(("kind", "temperature", "drafter"), cell, strict=True))
            run["texts"] = len(texts)
            # Of texts that were measured in step alone the others are not known.
            known = [name for name in texts[0] if all(name in one for one in texts)]
            for figure in known:
                values = [one[figure] for one in texts]
                run[figure] = statistics.fmean(values)
                run[f"{figure}_se"] = standard_error(values)
            runs.append(run)
    return {
        "drafters": drafters,
        "learnt": {
            "answers": len(train),
            "tokens": sum(len(line["ids"]) for line in train),
            "answer_tokens": sum(len(line["ids"]) - line["prompt_tokens"] for line in train),
        },
        "runs": runs,
    }


_BEHIND = ("late", "alone")


def _reach(right: Sequence[bool]) -> list[int]:
    """How many guesses in a row are right, from each place on, where none depends on a draft."""
    found: list[int] = []
    run = 0
    for is_right in reversed(right):
        run = run + 1 if is_right else 0
        found.append(min(run, max(DEPTHS)))
    return found[::-1]


def _of_reach(reach: Sequence[int]) -> dict[str, float]:
    """The share of right first guesses, and tokens a round."""
    one = {"right": statistics.fmean(right > 0 for right in reach)}
    for depth in DEPTHS:
        one[f"won_{depth}"] = len(reach) / _rounds_of(reach, depth)
    return one


def _rounds_of(reach: Sequence[int], depth: int) -> int:
    """How many rounds bring all tokens, where a draft at each place has so many right ones."""
    count = 0
    place = 0
    while place < len(reach):
        place += min(reach[place], depth) + 1
        count += 1
    return count


def tables(result: Mapping[str, Any]) -> str:
    """Right guesses by kind and drafter, and what each costs."""
    header = ["text", "T", "drafter", "texts", "right, newest record"]
    header += [f"tokens a round, drafts of {depth}" for depth in DEPTHS]
    header += [f"right, records {LATE} tokens late", "right alone"]
    without_records = {SIBLING}
    for about in result["drafters"]:
        if "bundle_bytes" in about and not about["record_bytes"]:
            without_records.add(about["drafter"])
    rows = []
    for run in result["runs"]:
        cells = [run["kind"], f"{run['temperature']:g}", run["drafter"], run["texts"]]
        cells.append(_share(run, "right"))
        cells += [_won(run, f"won_{depth}") for depth in DEPTHS]
        # Without records guesses are the same in all three cases.
        names = ["right", "right"] if run["drafter"] in without_records else list(_BEHIND)
        rows.append(cells + [_share(run, name) for name in names])
    costs = [
        [
            about["drafter"],
            f"{about['parameters'] / 1e6:.0f} M",
            f"{about['trained_parameters'] / 1e6:.0f} M",
            about["steps"],
            f"{about['processor_seconds'] / 60:.0f}",
            about["record_bytes"] or "—",
            f"{about['bundle_bytes'] / 1e6:.0f} MB" if "bundle_bytes" in about else "—",
        ]
        for about in result["drafters"]
    ]
    of_costs = ["drafter", "numbers of its own", "of them trained", "steps"]
    of_costs += ["processor minutes of its last start", f"bytes a record, {DTYPES[0]}", "bundle"]
    learnt = result["learnt"]
    return (
        f"{table(header, rows)}\n\n{table(of_costs, costs)}\n\nThey have learnt from"
        f" {learnt['answers']} of the target's own answers, {learnt['answer_tokens']:,} tokens, with"
        f" their prompts {learnt['tokens']:,}; prompts of these texts are not among them. The"
        " answer's first token, which comes with the prompt, is not counted. A drafter without a"
        " bundle is for servers alone, where states are never late. One that reads no records, as"
        " the sibling, guesses the same in all three cases."
    )


def _share(run: Mapping[str, Any], name: str) -> str:
    if name not in run:
        return "—"
    return f"{100 * run[name]:.1f} ± {100 * run[f'{name}_se']:.1f} %"


def _won(run: Mapping[str, Any], name: str) -> str:
    return f"{run[name]:.2f} ± {run[f'{name}_se']:.2f}"
