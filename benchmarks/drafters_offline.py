"""Right answers against the token at which the link dies, for every drafter, side by side in one engine.

python -m benchmarks.drafters_offline moa/demo/drafter OUT/eagle2 --target moa/demo/target

The target has run the prompt and m tokens of its answer, and the drafter has observed all of that; from there the
drafter writes on alone, greedily, to the end of the answer, and a program checks it. EAGLE feeds on its own guesses of
the target's features, MoA keeps attending to the activations that it holds, an independent model needs neither, and a
client of an API stops. Answers that were over before the cut count as they are.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import prompts as held_out
from benchmarks import report
from benchmarks.baselines.registry import load_target, open_drafting
from benchmarks.provenance import write_result
from moa.demo.skills import Example, is_right
from moa.errors import UsageError, run_cli
from moa.model.drafting import Drafting, DraftRequest
from moa.model.target import Row, Target
from moa.sampling import SamplingSettings
from moa.speculate import GenerationSettings, Speculator
from moa.tree import TreeShape

CUTS = (0, 4, 8, 16, 32, 64)
TARGET, STOPS = "target", "API client (stops)"


class Alone:
    """Conversations that the target has run up to a cut, and the drafter's own ends of them."""

    def __init__(self, target: Target, drafting: Drafting, logs: Sequence[Sequence[int]]) -> None:
        self._target, self._drafting = target, drafting
        self._slots = [(target.pool.acquire(), drafting.open(), list(log)) for log in logs]

    def run_to(self, lengths: Sequence[int]) -> None:
        """Have the target run all but the last of the first `lengths` tokens, and the drafter observe it."""
        pool = self._target.pool
        for (slot, draft_slot, log), length in zip(self._slots, lengths, strict=True):
            chunk = log[pool.lengths[slot] : length - 1]
            if chunk:
                step = self._target.forward([Row.chain(slot, chunk, judged="none")])
                self._drafting.observe(draft_slot, chunk, self._target.commit(step, 0, list(range(len(chunk)))))

    def ends(self, lengths: Sequence[int], tokens: int) -> list[list[int]]:
        """Up to `tokens` tokens that the drafter writes after the first `lengths`, with nobody to verify them."""
        shape = TreeShape.chain(tokens, min_score=float("-inf"))
        requests = [
            DraftRequest(draft_slot, log[length - 1], shape, SamplingSettings())
            for (_, draft_slot, log), length in zip(self._slots, lengths, strict=True)
        ]
        return [tree.tokens[1:] for tree in self._drafting.draft(requests)]

    def close(self) -> None:
        """Give the slots back."""
        for slot, draft_slot, _ in self._slots:
            self._target.pool.release(slot)
            self._drafting.close(draft_slot)


def finished(answer: Sequence[int], cut: int, end: Sequence[int], most: int, eos_ids: Sequence[int]) -> list[int]:
    """The answer's first `cut` tokens and the drafter's end, up to the first end-of-text and `most` tokens."""
    ids = [*answer[:cut], *end][:most]
    stop = next((n for n, token in enumerate(ids) if token in eos_ids), len(ids) - 1)
    return ids[: stop + 1]


def offline(
    target: Target, drafting: Drafting, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], most: int
) -> dict[int, list[list[int]]]:
    """By cut: every finished answer."""
    texts: dict[int, list[list[int]]] = {cut: [] for cut in CUTS}
    for start in range(0, len(prompts), target.pool.slots):
        group = list(zip(prompts, answers, strict=True))[start : start + target.pool.slots]
        alone = Alone(target, drafting, [[*prompt, *answer] for prompt, answer in group])
        try:
            for cut in CUTS:
                lengths = [len(prompt) + min(cut, len(answer)) for prompt, answer in group]
                alone.run_to(lengths)
                ends = alone.ends(lengths, most - cut) if cut < most else [[] for _ in group]
                texts[cut] += [
                    list(answer) if len(answer) <= cut else finished(answer, cut, end, most, target.facts.eos_ids)
                    for (_, answer), end in zip(group, ends, strict=True)
                ]
        finally:
            alone.close()
    return texts


def _right(target: Target, examples: Sequence[Example], answers: Sequence[Sequence[int]]) -> int:
    return sum(
        is_right(example, target.tokenizer.decode(list(answer), skip_special_tokens=True).strip())
        for example, answer in zip(examples, answers, strict=True)
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every drafter at every cut."""
    examples = held_out.skill_prompts(args.per_skill, args.seed)
    if not examples:
        raise UsageError("there are no prompts: --per-skill is 0")
    plain = load_target(args.target, slots=args.batch, capacity=args.capacity, device=args.device)
    prompts = [held_out.encode(plain.tokenizer, example) for example in examples]
    if max(map(len, prompts)) + args.tokens > args.capacity:
        raise UsageError(f"the longest prompt and its answer do not fit in --capacity {args.capacity}")
    settings = GenerationSettings(max_new_tokens=args.tokens, shape=None)
    answers = [list(one.ids) for one in Speculator(plain).generate(prompts, settings)]
    runs: list[dict[str, Any]] = []

    def note(way: str, texts: dict[int, list[list[int]]]) -> None:
        for cut, found in texts.items():
            same = sum(one == answer for one, answer in zip(found, answers, strict=True))
            right = _right(plain, examples, found)
            runs.append({"way": way, "cut": cut, "right": right, "same": same, "asked": len(examples)})

    note(TARGET, {cut: answers for cut in CUTS})
    for folder in args.drafters:
        began = time.perf_counter()
        target = load_target(args.target, slots=args.batch, capacity=args.capacity, drafter=folder, device=args.device)
        name = "MoA" if folder.name == "drafter" else folder.name
        note(name, offline(target, open_drafting(folder, target), prompts, answers, args.tokens))
        print(f"{name}: {len(examples)} prompts in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    note(STOPS, {cut: [answer[:cut] for answer in answers] for cut in CUTS})
    return {"prompts": len(examples), "tokens": args.tokens, "seed": args.seed, "drafters_offline": runs}


def tables(result: dict[str, Any]) -> str:
    """Right answers by drafter and cut."""
    runs = result["drafters_offline"]
    ways = list(dict.fromkeys(run["way"] for run in runs))
    found = {(run["way"], run["cut"]): run for run in runs}
    rows = [[way, *(f"{found[way, cut]['right'] / found[way, cut]['asked']:.1%}" for cut in CUTS)] for way in ways]
    error = 50 / result["prompts"] ** 0.5
    return "\n".join(
        [
            report.table(["right answers, cut after m tokens", *map(str, CUTS)], rows),
            "",
            f"{result['prompts']} held-out prompts, greedy; a share is good to about ±{error:.0f} points.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.drafters_offline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("drafters", nargs="+", type=Path, metavar="DIR", help="drafters, ours or baselines")
    parser.add_argument("--target", required=True, metavar="ID_OR_DIR")
    parser.add_argument("--per-skill", type=int, default=4, help="held-out prompts of every skill (default: 4)")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer at most (default: 128)")
    parser.add_argument("--batch", type=int, default=32, help="prompts at a time (default: 32)")
    parser.add_argument("--capacity", type=int, default=512, help="longest prompt and answer together (default: 512)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with its provenance")
    args = parser.parse_args(argv)
    result = measure(args)
    write_result(args.json, result)
    print(tables(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.drafters_offline", main))
