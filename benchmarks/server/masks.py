"""Cost of a grammar: the mask of a token and its application, by size of the vocabulary, in
processor time of one core; what of the masks of a batch of drafts shows beside a forward; and
tokens a round with a mask and without, embedded pair, over held-out questions for JSON. A larger
vocabulary is the embedded one with pairs of its tokens added.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import mean
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.kit.figures import listing, titled
from moa import demo
from moa.drafters.attention.model import load_attention
from moa.drafters.body_drafting import BodyDrafting
from moa.grammar.matcher import GrammarCompiler, Matcher, unpacked
from moa.grammar.spec import Grammar
from moa.sampling import SamplingSettings, choose
from moa.target.torch_target import Target
from testing.speculator import GenerationSettings, Speculator

_PERSON = {
    "name": "Sofia Maria",
    "age": 32,
    "city": "Denver",
    "likes": ["tea", "long walks"],
    "member": True,
}
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "city": {"type": "string"},
        "likes": {"type": "array", "items": {"type": "string"}},
        "member": {"type": "boolean"},
    },
    "required": list(_PERSON),
    "additionalProperties": False,
}
_ASKED = {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}
"""What the held-out questions for JSON ask for."""
_SAMPLED = SamplingSettings(temperature=1.0, top_p=0.95, seed=3)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How much to measure."""

    repeats: int = 20
    """Runs through the answer."""
    forward_ms: float = 5.0
    """A forward on an accelerator, beside which the masks of a batch are made."""
    questions: int = 24
    """Held-out questions for tokens a round."""


def measure(options: Options) -> dict[str, Any]:
    """All of it."""
    torch.set_num_threads(1)
    sizes = [_of_size(size, options) for size in (4096, 131_072)]
    return {"sizes": sizes, "rounds": _rounds(options)}


def _of_size(size: int, options: Options) -> dict[str, Any]:
    tokenizer = _widened(size)
    compiler = GrammarCompiler(tokenizer.to_str, size=size, eos_ids=[4])
    began = time.thread_time()
    compiled = compiler.compile(Grammar.of_schema(_SCHEMA))
    prepared = time.thread_time() - began
    text = tokenizer.encode(json.dumps(_PERSON), add_special_tokens=False).ids
    logits = np.random.default_rng(1).normal(size=size).astype(np.float32)
    masks, greedy, sampled, free = (list[float]() for _ in range(4))
    ways: list[tuple[list[float], SamplingSettings, bool]] = [
        (greedy, SamplingSettings(), True),
        (sampled, _SAMPLED, True),
        (free, _SAMPLED, False),
    ]
    for _ in range(options.repeats):
        matcher = compiled.matcher(0)
        for at in range(len(text)):
            began = time.thread_time()
            bits = matcher.after(text[:at]).allowed()
            masks.append(time.thread_time() - began)
            for times, sampling, masked in ways:
                began = time.thread_time()
                choose(logits, sampling, at, (), unpacked(bits, size) if masked else None)
                times.append(time.thread_time() - began)
    found: dict[str, Any] = {"vocabulary": size, "prepared_seconds": prepared, "tokens": len(text)}
    found |= {f"mask_{name}": value for name, value in _milliseconds(masks).items()}
    found |= {f"greedy_{name}": value for name, value in _milliseconds(greedy).items()}
    found |= {"sampled_ms": 1000 * mean(sampled), "free_ms": 1000 * mean(free)}
    found["beside"] = [
        _beside([compiled.matcher(0) for _ in range(sessions)], text, 8, options)
        for sessions in (1, 8)
    ]
    return found


def _beside(
    matchers: list[Matcher], text: list[int], nodes: int, options: Options
) -> dict[str, float]:
    """Masks for drafts of so many nodes in a thread, and a forward that leaves the processor alone
    meanwhile: the fastest tenth of the calls, since others may use the machine."""

    def judge(at: int) -> None:
        draft = text[at : at + nodes]
        for matcher in matchers:
            matcher.after(text[:at]).judge([0, *draft], range(-1, len(draft)))

    def forward() -> None:
        time.sleep(options.forward_ms / 1000)

    times: dict[str, list[float]] = {"masks": [], "forward": [], "both": []}
    with ThreadPoolExecutor(1) as thread:
        for at in list(range(len(text) - nodes)) * max(1, options.repeats // 4):
            times["masks"].append(_timed(partial(judge, at)))
            times["forward"].append(_timed(forward))

            def both(at: int = at) -> None:
                made = thread.submit(judge, at)
                forward()
                made.result()

            times["both"].append(_timed(both))
    fast = {name: 1000 * sorted(seconds)[len(seconds) // 10] for name, seconds in times.items()}
    return {"sessions": len(matchers), **fast, "shown": fast["both"] - fast["forward"]}


def _rounds(options: Options) -> list[dict[str, Any]]:
    questions = [
        one for one in json.loads(demo.paths().prompts.read_text())["heldout"] if "JSON" in one
    ]
    target = Target.load(str(demo.paths().target), slots=1, capacity=512)
    drafter = load_attention(demo.paths().drafter, target.model, target.facts)
    speculator = Speculator(target, BodyDrafting(drafter, slots=1, capacity=512))
    found = []
    for name, sampling in (("greedy", SamplingSettings()), ("sampled", _SAMPLED)):
        won: dict[str, list[int]] = {"without": [], "with": []}
        same = 0
        for question in questions[: options.questions]:
            chat = [{"role": "user", "content": question}]
            text = target.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, tokenize=False
            )
            prompt = target.tokenizer(text, add_special_tokens=False)["input_ids"]
            answers = []
            for how, grammar in (("without", None), ("with", Grammar.of_schema(_ASKED))):
                settings = GenerationSettings(max_new_tokens=64, sampling=sampling, grammar=grammar)
                answers.append(speculator.generate([prompt], settings)[0])
                won[how] += answers[-1].won
            same += answers[0].ids == answers[1].ids
        found.append(
            {"sampling": name, "questions": len(questions[: options.questions]), "same_texts": same}
        )
        found[-1] |= {how: mean(counts) for how, counts in won.items()}
    return found


def _widened(size: int) -> Tokenizer:
    parts = json.loads((demo.paths().tokenizer / "tokenizer.json").read_text())
    model = parts["model"]
    words = [word for word in model["vocab"] if word.isalpha()]
    known = set(model["vocab"])
    for left, right in product(words, words):
        if len(known) >= size:
            break
        if left + right not in known:
            known.add(left + right)
            model["vocab"][left + right] = len(model["vocab"])
            model["merges"].append([left, right])
    return Tokenizer.from_str(json.dumps(parts))


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    return {
        "mean_ms": 1000 * mean(seconds),
        "p99_ms": 1000 * sorted(seconds)[int(0.99 * len(seconds))],
    }


def _timed(do: Callable[[], None]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def tables(result: dict[str, Any]) -> str:
    """Costs, what shows beside a forward, and tokens a round."""
    beside = [
        {"size": one["vocabulary"], **row} for one in result["sizes"] for row in one["beside"]
    ]
    return titled(
        (
            "Processor time of a token",
            listing(
                result["sizes"],
                {
                    "vocabulary": "{vocabulary:,}",
                    "mask, ms (99 %)": "{mask_mean_ms:.3f} ({mask_p99_ms:.2f})",
                    "apply it and choose, greedy, ms (99 %)": "{greedy_mean_ms:.3f} ({greedy_p99_ms:.2f})",
                    "sampled, ms": "{sampled_ms:.2f}",
                    "sampled without a mask, ms": "{free_ms:.2f}",
                    "prepared once, s": "{prepared_seconds:.1f}",
                },
            ),
        ),
        (
            "Masks of drafts of 8 beside a forward, ms, the fastest tenth",
            listing(
                beside,
                {
                    "vocabulary": "{size:,}",
                    "sessions": "{sessions}",
                    "masks": "{masks:.2f}",
                    "forward": "{forward:.2f}",
                    "both": "{both:.2f}",
                    "shown": "{shown:.2f}",
                },
            ),
        ),
        (
            "Tokens a round",
            listing(
                result["rounds"],
                {
                    "sampling": "{sampling}",
                    "questions": "{questions}",
                    "the same text": "{same_texts}",
                    "without a mask": "{without:.2f}",
                    "with": "{with:.2f}",
                },
            ),
        ),
    )
