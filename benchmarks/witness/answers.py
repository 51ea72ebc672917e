"""Short continuations that can be checked, of things a small base model knows: what a drafter
answers by itself, from a cold start, and with the records of the prompt, as after a link that was
cut before the answer."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.baselines.registry import load_any
from benchmarks.drafters.witness import NONE, Row, alone, fast_head
from benchmarks.kit.figures import table
from moa.target.loading import load_model, load_tokenizer
from moa.target.torch_target import Target
from moa.training.data import Batch
from moa.training.teacher import Teacher
from testing.speculator import GenerationSettings, Speculator

_TOKENS = 4
"""Of an answer: none is longer."""
_PHRASES = """as well/as|in order/to|at the same/time|on the other/hand|as soon/as|according/to|rather/than
in addition/to|a number/of|due/to|based/on|in front/of|for the first/time|more or/less|black and/white
instead/of|such/as|each/other|import numpy as/np|import pandas as/pd
if __name__ == "__/main|for i in/range|if x is not/None|while not/self
def __init__(self, *args,/**kwargs|super().__init__(*args,/**kwargs|with open(path, "r") as/f
def __init__(self, name): self.name =/name|from typing import/Any|lambda x:/x|assert x is not/None"""
_OPPOSITES = "hot-cold big-small up-down left-right open-closed good-bad fast-slow old-new light-dark rich-poor"
_COLOURS = ["red", "blue", "green", "white", "black", "yellow"]
_NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Frank"]


def tasks() -> Iterator[tuple[str, str, str]]:
    """Kind, prompt and right answer."""
    for phrase in _PHRASES.replace("\n", "|").split("|"):
        prompt, _, answer = phrase.partition("/")
        yield "phrases", prompt, answer
    for name, words in {
        "letters": string.ascii_uppercase[:20],
        "counting": [str(n) for n in range(1, 22)],
    }.items():
        for at in range(len(words) - 3):
            yield name, ", ".join(words[at : at + 3]) + ",", words[at + 3]
    pairs = [pair.split("-") for pair in _OPPOSITES.split()]
    for at in range(3, len(pairs)):
        yield (
            "opposites",
            "\n".join(" - ".join(pair) for pair in pairs[at - 3 : at]) + f"\n{pairs[at][0]} -",
            pairs[at][1],
        )
    for shift in range(6):
        colours = [*_COLOURS[shift:], *_COLOURS[:shift]]
        said = " ".join(
            f"The colour of {name} is {colour}."
            for name, colour in zip(_NAMES[:4], colours, strict=False)
        )
        yield from (("recall", f"{said} The colour of {_NAMES[n]} is", colours[n]) for n in (0, 3))
    for (a, b), (c, d) in pairwise(zip(_NAMES, _COLOURS, strict=True)):
        yield "keys", f'[{{"name": "{a}", "colour": "{b}"}}, {{"name": "{c}", "', "colour"
        yield "code", f"def {b}(x, y):\n    return x + y\n\ndef {d}({a}, {c}):\n    return {a} +", c


def measure(target: Path, drafters: Sequence[Path]) -> list[dict[str, Any]]:
    """For each task who is right: the target, and each drafter by itself without and with records."""
    tokenizer = load_tokenizer(target)
    loaded = load_model(target)
    asked = list(tasks())
    prompts = [
        [tokenizer.bos_token_id, *tokenizer(prompt, add_special_tokens=False).input_ids]
        for _, prompt, _ in asked
    ]

    def right(number: int, ids: list[int]) -> bool:
        return str(tokenizer.decode(ids)).strip().startswith(asked[number][2])

    settings = GenerationSettings(max_new_tokens=_TOKENS, shape=None, ignore_eos=True)
    said = Speculator(Target(loaded.model, loaded.facts, slots=16, capacity=96)).generate(
        prompts, settings
    )
    found = [
        {"kind": kind, "target": right(n, said[n].ids)} for n, (kind, _, _) in enumerate(asked)
    ]
    head = fast_head(loaded.model)
    for folder in drafters:
        model, teacher = load_any(folder, loaded.model, loaded.facts), Teacher(loaded.model)
        if taps := getattr(model.config, "taps", ()):
            teacher.tap(taps)
        reads = taps or getattr(model.config, "use_ca", False)
        for number, prompt in enumerate(prompts):
            row = _row(teacher, prompt)
            start = len(prompt) - 1
            for way, behind in {
                folder.name: NONE,
                **({f"{folder.name}, records": "0"} if reads else {}),
            }.items():
                own = alone(model, row, start, behind, _TOKENS, head)
                found[number][way] = right(number, own.ids[0, start + 1 :].tolist())
    return found


def _row(teacher: Teacher, prompt: Sequence[int]) -> Row:
    """A prompt, and room for its answer."""
    ids = np.array([[*prompt, *[0] * _TOKENS]])
    whole = np.ones_like(ids)
    batch = Batch(
        ids,
        whole,
        np.arange(ids.shape[1])[None],
        whole.astype(np.bool_),
        np.zeros(1, dtype=np.int64),
    )
    return Row(batch, teacher(batch))


def tables(found: Sequence[dict[str, Any]]) -> str:
    """Right answers by kind, and of those that the target has right."""
    ways = [way for way in found[0] if way != "kind"]
    groups = {
        kind: [one for one in found if one["kind"] == kind]
        for kind in dict.fromkeys(one["kind"] for one in found)
    }
    groups |= {
        "all": list(found),
        "where the target is right": [one for one in found if one["target"]],
    }
    rows = [
        [kind, len(ones), *(sum(one[way] for one in ones) for way in ways)]
        for kind, ones in groups.items()
    ]
    return table(["", "asked", *ways], rows)
