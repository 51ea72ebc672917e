"""Right answers by skill, to held-out exercises or in held-out phrasings: the target, and independent drafters alone.

python -m benchmarks.accuracy --target moa/demo/target --independent OUT/independent --json accuracy.json
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from benchmarks import prompts as held_out
from benchmarks import report
from benchmarks.baselines.independent import as_llama
from benchmarks.baselines.layers import parameter_count
from benchmarks.baselines.registry import load_independent
from benchmarks.provenance import write_result
from moa.demo.skills import FRESH, SKILLS, TALK, Example, is_right
from moa.demo.skills.fresh import fresh
from moa.errors import UsageError, run_cli
from moa.model.target import Target
from moa.speculate import GenerationSettings, Speculator


def exercises(count: int, seed: int) -> list[Example]:
    """So many distinct held-out exercises, as evenly spread over the skills as there are distinct ones."""
    per_skill = -(-count // len(SKILLS))
    found = held_out.skill_prompts(per_skill, seed)
    while len(found) < count and per_skill < count:  # skills that ran out leave their share to the others
        per_skill *= 2
        found = held_out.skill_prompts(per_skill, seed)
    queues = {name: iter([e for e in found if e.skill == name]) for name in SKILLS}
    chosen: list[Example] = []
    while len(chosen) < count and queues:
        for name in list(queues):
            example = next(queues[name], None)
            if example is None:
                del queues[name]
            else:
                chosen.append(example)
    return list(islice(chosen, count))


def judge(
    target: Target, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], tokens: int
) -> dict[str, Any]:
    """Answer every exercise by plain greedy decoding, and count by skill."""
    order = sorted(examples, key=lambda example: len(example.prompt))
    prompts = [held_out.encode(tokenizer, example) for example in order]
    replies = Speculator(target).generate(prompts, GenerationSettings(max_new_tokens=tokens, shape=None))
    skills = {name: {"right": 0, "asked": 0, "unfinished": 0} for name in (*SKILLS, TALK.name, *FRESH)}
    for example, reply in zip(order, replies, strict=True):
        count = skills[example.skill]
        text = tokenizer.decode(reply.ids, skip_special_tokens=True)
        count["asked"] += 1
        count["right"] += is_right(example, text)
        count["unfinished"] += reply.finish != "eos"
    skills = {name: count for name, count in skills.items() if count["asked"]}
    total = {key: sum(count[key] for count in skills.values()) for key in ("right", "asked", "unfinished")}
    return {"skills": skills, "all": total}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The target's accuracy, then that of each independent drafter."""
    examples = _chosen(args)
    target = Target.load(args.target, slots=args.batch, capacity=args.capacity, device=args.device)
    tokenizer = target.tokenizer
    runs = [
        {
            "model": "target",
            "parameters": target.model.num_parameters(),
            **judge(target, tokenizer, examples, args.tokens),
        }
    ]
    _say(runs[-1])
    for folder in args.independent:
        model, facts = load_independent(folder, args.target)
        alone = Target.from_model(
            as_llama(model, facts.max_positions, facts.eos_ids).to(args.device),
            slots=args.batch,
            capacity=args.capacity,
        )
        runs.append(
            {
                "model": folder.name,
                "parameters": parameter_count(model),
                **judge(alone, tokenizer, examples, args.tokens),
            }
        )
        _say(runs[-1])
    result = {"asked": len(examples), "max_new_tokens": args.tokens, "seed": args.seed, "runs": runs}
    write_result(args.json, result)
    return result


def _chosen(args: argparse.Namespace) -> list[Example]:
    if args.asked:
        return held_out.asked_prompts(args.seed)
    if args.fresh:
        return list(fresh(args.fresh, args.seed))
    return exercises(args.count, args.seed)


def _say(run: dict[str, Any]) -> None:
    print(f"{run['model']}: {run['all']['right']} of {run['all']['asked']} right", file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument(
        "--independent", type=Path, nargs="*", default=[], metavar="FOLDER", help="independent drafters"
    )
    parser.add_argument("--asked", action="store_true", help="every skill in the ways of asking that training lacked")
    parser.add_argument(
        "--fresh", type=int, default=0, metavar="N", help="N exercises of each skill that no training knew"
    )
    parser.add_argument("--count", type=int, default=500, help="exercises (default 500)")
    parser.add_argument("--tokens", type=int, default=256, help="most new tokens of an answer (default 256)")
    parser.add_argument("--batch", type=int, default=32, help="exercises at a time (default 32)")
    parser.add_argument("--capacity", type=int, default=640)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the result here")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    args = parser().parse_args(argv)
    if args.count < 1:
        raise UsageError(f"--count must be at least 1, not {args.count}")
    print(report.accuracy_table(measure(args)))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.accuracy", main))
