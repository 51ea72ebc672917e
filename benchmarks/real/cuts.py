"""The link dies after m tokens of an answer, and the device goes on alone: are the tests passed?"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.kit.figures import table
from benchmarks.kit.progress import Progress, steps
from benchmarks.real.lines import Line, Lines
from benchmarks.real.passing import passes
from benchmarks.real.prompts import FENCE_CLOSED
from benchmarks.real.sibling import Sibling
from benchmarks.real.trained import KnownTexts
from benchmarks.real.writing import Task, write
from export.agreement import KeptRecords
from export.source import load_source
from moa.bundle import Bundle
from moa.drafters.contract import Drafter, RecordPair
from moa.errors import UsageError
from moa.graph.cache import RecordBuffer
from moa.graph.drafter import run
from moa.graph.load import LoadedGraph
from moa.records import DTYPES, decode, encode
from moa.sampling import SamplingSettings
from moa.target.contract import Target

CUTS = (0, 8, 32, 64)
TOKENS = 320
"""Most of an answer, as the target's own."""
_WINDOW = 12
"""Tokens that the end of a block surely fits in."""


@dataclass(frozen=True)
class Cut:
    """A place of a known answer at which the link dies."""

    key: str
    text: list[int]
    prompt: int
    """Tokens of the prompt in it."""
    after: int
    """Tokens of the answer that have come."""


def chosen(answers: Lines, share: float = 1.0) -> list[Line]:
    """The greedy answers to this share of the problems, picked by their names alone and in an order
    that is as good as random: an answer that came early is no more likely to be among them."""
    found = [
        line
        for key, line in answers.found.items()
        if key.startswith("code/") and key.endswith("@0") and _place(key) < share
    ]
    return sorted(found, key=lambda line: _place(line["key"]))


def _place(key: str) -> float:
    """A number from 0 to 1 that a name stands for."""
    return zlib.crc32(key.encode()) / 2**32


def cuts_of(
    answers: Lines, way: str, cuts: Sequence[int], known: Lines, share: float
) -> Iterator[list[Cut]]:
    """By answer its cuts that are not known yet: an answer that ended before one needs none."""
    for line in chosen(answers, share):
        text = line["prompt"] + line["ids"]
        found = [
            Cut(f"{way}/{m}/{line['key']}", text, len(line["prompt"]), m)
            for m in cuts
            if m < len(line["ids"])
        ]
        if missing := [cut for cut in found if cut.key not in known]:
            yield missing


def by_bundle(
    sibling: Sibling,
    tokenizer: Tokenizer,
    answers: Lines,
    out: Lines,
    cuts: Sequence[int],
    share: float = 1.0,
) -> None:
    """What the device's graph writes behind each cut."""
    way = sibling.variant
    for some in steps(list(cuts_of(answers, way, cuts, out, share)), "problems"):
        text = some[0].text
        prompt = some[0].prompt
        ended = partial(_ended, tokenizer, prompt)
        made = sibling.continuations(text, [prompt + cut.after for cut in some], ended)
        for cut, ids in zip(some, made, strict=True):
            out.add(cut.key, way=way, after=cut.after, ids=ids)


@dataclass(frozen=True)
class Records:
    """What a verifier has sent of a known text by the time the link dies."""

    drafter: Drafter
    """Which makes them of the target's results."""
    texts: KnownTexts

    @classmethod
    def of(cls, bundle: Bundle, target: str, drafter: Path, states: Path) -> Records:
        """Those that this bundle's device reads, made by the drafter in a folder; the target's
        results are kept in the folder `states`."""
        source = load_source(target, str(drafter))
        if source.drafter_id != bundle.manifest.drafter.weights_id:
            raise UsageError(f"{bundle.folder} is not of the drafter in {drafter}")
        return cls(source.module, KnownTexts(target, states))

    def pair(self, name: str, text: Sequence[int]) -> RecordPair:
        """Of every token of an answer with its prompt."""
        kept = KeptRecords(self.drafter)
        kept.add(self.texts.of(name, text, self.drafter))
        return kept.pair()


def by_reader(
    loaded: LoadedGraph,
    way: str,
    tokenizer: Tokenizer,
    answers: Lines,
    out: Lines,
    cuts: Sequence[int],
    share: float = 1.0,
    *,
    records: Records | None = None,
) -> None:
    """What a device writes by itself with a drafter that reads the target.

    Behind the prompt alone it has nothing of the target: no verifier was ever there. Behind a cut
    it has the records of a device that was in step: of all tokens but the last, which the target
    runs with the next round. Without `records` only the first is measured.
    """
    ends = frozenset(loaded.bundle.manifest.tokenizer.eos_ids)
    if records is None:
        cuts = [m for m in cuts if m == 0]
    for some in steps(list(cuts_of(answers, way, cuts, out, share)), "problems"):
        pair: RecordPair | None = None
        for cut in some:
            drafter = loaded.drafter()
            log = cut.text[: cut.prompt + cut.after]
            if cut.after and records is not None and drafter.records is not None:
                pair = pair or records.pair(_answer_of(cut.key), cut.text)
                _receive(drafter.records, pair, len(log) - 1)
            token = -1
            while token not in ends and not _ended(tokenizer, cut.prompt, log):
                token = run(drafter.guess(log, SamplingSettings()))
                log.append(token)
            out.add(cut.key, way=way, after=cut.after, ids=log[cut.prompt + cut.after :])


def _receive(buffer: RecordBuffer, pair: RecordPair, count: int) -> None:
    """Give a device the first records of a text, in the precision of the wire."""
    keys, values = (half[:count] for half in pair)
    payload = encode(keys, values, DTYPES[0])
    _, heads, width = keys.shape
    buffer.put(0, *decode(payload, DTYPES[0], count, heads, width))


def _answer_of(key: str) -> str:
    """The name of the answer that a cut is in."""
    return "/".join(key.split("/")[2:])


def _ended(tokenizer: Tokenizer, prompt: int, log: Sequence[int]) -> bool:
    """Whether an answer behind so many tokens of a prompt is long enough, or its block of code
    closed."""
    answer = log[prompt:]
    closed = FENCE_CLOSED in tokenizer.decode(answer[-_WINDOW:], skip_special_tokens=False)
    return closed or len(answer) >= TOKENS


def by_target(
    way: str, model: Target, answers: Lines, out: Lines, cuts: Sequence[int], share: float = 1.0
) -> None:
    """The same by a model in a folder: what the bundle was made of."""
    some = [cut for cuts_ in cuts_of(answers, way, cuts, out, share) for cut in cuts_]
    after = {cut.key: cut.after for cut in some}
    progress = Progress(len(some), "cuts")

    def keep(task: Task, ids: list[int], _: str) -> None:
        out.add(task.key, way=way, after=after[task.key], ids=ids)
        progress.step()

    tasks = (
        Task(
            key=cut.key,
            ids=cut.text[: cut.prompt + cut.after],
            tokens=TOKENS - cut.after,
            stop=(FENCE_CLOSED,),
        )
        for cut in some
    )
    write(model, tasks, keep)


def judge(
    problems: Sequence[Line], answers: Lines, continued: Lines, tokenizer: Tokenizer, out: Lines
) -> None:
    """Run the tests of every text that has not been judged."""
    by_name = {problem["task_id"].rpartition("/")[2]: problem for problem in problems}
    texts: dict[str, tuple[str, list[int]]] = {}
    for line in chosen(answers):
        texts[f"target/{line['key']}"] = line["key"], line["ids"]
    for key, line in continued.found.items():
        answer = _answer_of(key)
        known = answers.found[answer]["ids"][: line["after"]]
        texts[key] = answer, known + line["ids"]
    missing = [key for key in texts if key not in out]
    for key in steps(missing, "judged"):
        answer, ids = texts[key]
        problem = by_name[answer.partition("/")[2].partition("@")[0]]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        out.add(key, right=passes(problem, text), tokens=len(ids))


def check(answers: Lines, judged: Lines) -> None:
    """Raise a `UsageError` where the answers are not those that were judged."""
    unjudged = [line["key"] for line in chosen(answers) if f"target/{line['key']}" not in judged]
    if unjudged:
        raise UsageError(
            f"{judged.path} has no verdict on answers of {answers.path}:"
            f" {len(unjudged)}, such as {unjudged[0]}",
            hint="run the verb `cuts` again",
        )
    known = {key.removeprefix("target/") for key in judged.found if key.startswith("target/")}
    unknown = sorted(known - answers.found.keys())
    if unknown:
        raise UsageError(
            f"{judged.path} has verdicts on answers that {answers.path} lacks:"
            f" {len(unknown)}, such as {unknown[0]}",
            hint="run the verb `answers` into this WORK, or take the verdicts out of it",
        )


def figures(answers: Lines, judged: Lines, cuts: Sequence[int] = CUTS) -> dict[str, Any]:
    """Shares of right answers by way and cut, over the problems that all ways have."""
    names = [line["key"] for line in chosen(answers)]
    target = {name: judged.found[f"target/{name}"]["right"] for name in names}
    ways = sorted({key.split("/")[0] for key in judged.found} - {"target"})
    right: dict[str, dict[int, list[bool]]] = {way: {} for way in ways}
    for way in ways:
        measured = [name for name in names if f"{way}/{min(cuts)}/{name}" in judged]
        for m in cuts:
            found: list[bool] = []
            if not any(key.startswith(f"{way}/{m}/") for key in judged.found):
                right[way][m] = found
                continue
            for name in measured:
                ended = len(answers.found[name]["ids"]) <= m
                line = judged.found.get(f"{way}/{m}/{name}")
                if ended or line is not None:
                    found.append(target[name] if ended or line is None else line["right"])
            right[way][m] = found
    client = {
        m: sum(target[name] for name in names if len(answers.found[name]["ids"]) <= m) for m in cuts
    }
    first = min(cuts)
    by_first = {
        way: {
            name: judged.found[f"{way}/{first}/{name}"]["right"]
            for name in names
            if f"{way}/{first}/{name}" in judged
        }
        for way in ways
    }
    lengths = sorted(len(answers.found[name]["ids"]) for name in names)
    return {
        "problems": len(names),
        "target": sum(target.values()),
        "client": {str(m): count for m, count in client.items()},
        "ways": {
            way: {str(m): {"right": sum(found), "of": len(found)} for m, found in by_cut.items()}
            for way, by_cut in right.items()
        },
        "pairs": _pairs(by_first),
        "median_tokens": lengths[len(lengths) // 2] if lengths else 0,
    }


def _pairs(right: dict[str, dict[str, bool]]) -> list[dict[str, Any]]:
    """Of two ways, the problems that one alone solves."""
    found = []
    for one, other in combinations(right, 2):
        both = [name for name in right[one] if name in right[other]]
        found.append(
            {
                "ways": [one, other],
                "only_first": sum(right[one][n] and not right[other][n] for n in both),
                "only_second": sum(right[other][n] and not right[one][n] for n in both),
                "of": len(both),
            }
        )
    return found


def tables(result: dict[str, Any]) -> str:
    """Pass@1 by the place of the cut."""
    cuts = list(result["client"])
    whole = percent(result["target"], result["problems"])
    rows = []
    for way, by_cut in result["ways"].items():
        cells = [percent(by_cut[m]["right"], by_cut[m]["of"]) for m in cuts]
        rows.append([f"alone, {way}", *cells, whole])
    client = [percent(count, result["problems"]) for count in result["client"].values()]
    rows.append(["a client of the API, whose answer is lost", *client, whole])
    header = ["right answers (pass@1), cut after m tokens", *[f"m = {m}" for m in cuts], "never"]
    said = [
        f"{result['problems']} problems, greedy, answers of {result['median_tokens']} tokens in the median."
    ]
    said += [
        f"Alone from the start, {pair['ways'][0]} solves {pair['only_first']} that {pair['ways'][1]} "
        f"does not, and that solves {pair['only_second']} others."
        for pair in result["pairs"]
    ]
    return f"{table(header, rows)}\n\n{' '.join(said)}"


def percent(right: int, of: int) -> str:
    """Percent, with the standard error."""
    if not of:
        return "-"
    part = right / of
    return f"{100 * part:.1f} ± {100 * math.sqrt(part * (1 - part) / of):.1f} %"
