"""Right answers against the token at which the link is lost, for every drafter, in one engine. The target has run the
prompt and m tokens of its answer, and the drafter has observed all of that; from there the drafter continues alone,
greedily, to the end of the answer, which a program checks. EAGLE uses its own predictions of the target's features, MoA
attends to the activations it has, an independent model needs neither, and an API client stops. `without records` is a
MoA drafter that never gets any activation. Answers that were over before the cut count as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.baselines.registry import load_target, open_drafting
from benchmarks.kit.figures import right_by_cut
from benchmarks.kit.pair import Compared, shown_name
from benchmarks.kit.progress import steps
from demo import held_out
from demo.skills import is_right
from moa.errors import UsageError
from moa.model.drafting import Drafting, DraftRequest, MoaDrafting
from moa.model.generate import GenerationSettings, Speculator
from moa.model.target import Row, Target
from moa.sampling import SamplingSettings
from moa.tree import TreeShape

CUTS = (0, 4, 8, 16, 32, 64)
TARGET, STOPS = "target", "API client (stops)"


@dataclass(frozen=True, kw_only=True)
class Options(Compared):
    """What is asked."""

    per_skill: int = 4
    """Held-out prompts of every skill."""
    tokens: int = 128
    """Tokens of an answer at most."""
    batch: int = 32
    """Prompts at a time."""


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
        """Up to `tokens` unverified tokens that the drafter writes after the first `lengths`."""
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


def measure(options: Options) -> dict[str, Any]:
    """Every drafter at every cut."""
    examples = held_out.skill_prompts(options.per_skill, options.seed)
    room: dict[str, Any] = {"slots": options.batch, "capacity": options.capacity, "device": options.device}
    plain = load_target(options.target, **room)
    prompts = [held_out.encode(plain.tokenizer, example) for example in examples]
    if max(map(len, prompts)) + options.tokens > options.capacity:
        raise UsageError(f"the longest prompt and its answer do not fit in --capacity {options.capacity}")
    settings = GenerationSettings(max_new_tokens=options.tokens, shape=None)
    answers = [list(one.ids) for one in Speculator(plain).generate(prompts, settings)]
    ways = {TARGET: {cut: answers for cut in CUTS}}
    for folder in steps(options.folders, "drafters"):
        target = load_target(options.target, drafter=folder, **room)
        name, drafting = shown_name(folder), open_drafting(folder, target)
        ways[name] = offline(target, drafting, prompts, answers, options.tokens)
        if isinstance(drafting, MoaDrafting) and drafting.records is not None and drafting.borrowed is None:
            body = MoaDrafting(drafting.drafter, slots=options.batch, capacity=options.capacity, alone=True)
            ways[f"{name} without records"] = offline(target, body, prompts, answers, options.tokens)
    ways[STOPS] = {cut: [answer[:cut] for answer in answers] for cut in CUTS}

    def right(found: Sequence[Sequence[int]]) -> int:
        texts = [plain.tokenizer.decode(list(one), skip_special_tokens=True).strip() for one in found]
        return sum(map(is_right, examples, texts))

    return {
        "prompts": len(examples),
        "tokens": options.tokens,
        "seed": options.seed,
        "runs": [
            {"way": way, "cut": cut, "right": right(found), "asked": len(examples)}
            | {"same": sum(one == answer for one, answer in zip(found, answers, strict=True))}
            for way, texts in ways.items()
            for cut, found in texts.items()
        ],
    }


def tables(result: Mapping[str, Any]) -> str:
    """Right answers by drafter and cut."""
    return right_by_cut(result["runs"])
