"""Right answers by skill, to held-out exercises or ways of asking: the target, and independent drafters alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from benchmarks.baselines.independent import as_llama
from benchmarks.baselines.layers import parameter_count
from benchmarks.baselines.registry import load_independent
from benchmarks.kit.figures import table
from benchmarks.kit.options import one_of
from benchmarks.kit.pair import Compared, independent
from benchmarks.kit.progress import steps
from demo import held_out
from demo.skills import FRESH, SKILLS, TALK, Example, is_right
from demo.skills.fresh import fresh
from moa.model.generate import GenerationSettings, Speculator
from moa.model.target import Target


@dataclass(frozen=True, kw_only=True)
class Options(Compared):
    """What is asked. The drafters are independent ones, which are also complete models."""

    what: str = one_of("exercises", ("exercises", "asked", "fresh"))
    """Exercises; every skill in the ways of asking that training lacked; or three skills that no training knew."""
    count: int = 500
    """Exercises; of fresh ones of each skill at most 16."""
    tokens: int = 256
    """Tokens of an answer at most."""
    batch: int = 32
    """Exercises at a time."""


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


def measure(options: Options) -> dict[str, Any]:
    """The target, then every independent drafter."""
    examples = _asked(options)
    room: dict[str, Any] = {"slots": options.batch, "capacity": options.capacity}
    target = Target.load(options.target, device=options.device, **room)
    runs = []
    folders = options.folders if options.drafters else independent()
    for folder in steps([None, *folders], "models"):
        if folder is None:
            name, parameters, model = "target", target.model.num_parameters(), target
        else:
            loaded, facts = load_independent(folder, options.target)
            llama = as_llama(loaded, facts.max_positions, facts.eos_ids).to(options.place)
            name, parameters, model = folder.name, parameter_count(loaded), Target.from_model(llama, **room)
        judged = judge(model, target.tokenizer, examples, options.tokens)
        runs.append({"model": name, "parameters": parameters, **judged})
    return {"asked": len(examples), "max_new_tokens": options.tokens, "seed": options.seed, "runs": runs}


def _asked(options: Options) -> list[Example]:
    if options.what == "asked":
        return held_out.asked_prompts(options.seed)
    if options.what == "fresh":
        return list(fresh(min(16, options.count), options.seed))
    return held_out.exercises(options.count, options.seed)


def tables(result: Mapping[str, Any]) -> str:
    """Right answers by skill."""
    runs = result["runs"]

    def share(count: Mapping[str, int]) -> str:
        return f"{count['right'] / count['asked']:.1%} ({count['right']}/{count['asked']})"

    rows = [[skill, *(share(run["skills"][skill]) for run in runs)] for skill in runs[0]["skills"]]
    rows.append(["**all**", *(f"**{share(run['all'])}**" for run in runs)])
    return table(["skill", *(run["model"] for run in runs)], rows)
