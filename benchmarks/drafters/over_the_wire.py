"""Tokens won a round by drafting on the device over loopback, for several bundles beside their drafters: held-out code.

To compare drafters, every draft is a chain of one depth: the best depth depends on the machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from benchmarks.kit.figures import listing
from benchmarks.kit.lab import Lab
from benchmarks.kit.progress import steps
from benchmarks.kit.verifier import Pair, verifier
from demo.held_out import code_prompts, encode
from edge_client.device import Device
from edge_client.turn.controller import Controller, Plan
from moa.demo import paths
from moa.errors import UsageError
from moa.model.loading import load_tokenizer, locate
from moa.tree import TreeShape

_VARIANT, _PIECES = "cpu-int8", 32


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which drafters, on which text."""

    pairs: tuple[str, ...] = (f"embedded={paths().bundle}={paths().drafter}",)
    """NAME=BUNDLE=DRAFTER of each pair."""
    target: str = str(paths().target)
    """Folder of the target."""
    tokens: int = 64
    """Tokens of a continuation."""
    depth: int = 6
    """Depth of every draft."""

    def __post_init__(self) -> None:
        if wrong := [text for text in self.pairs if text.count("=") != 2]:
            raise UsageError(f"{wrong[0]!r} is not NAME=BUNDLE=DRAFTER")


async def measure(options: Options) -> dict[str, Any]:
    """Every bundle with a verifier of its own; the text of the first one, decoded plainly, is the truth."""
    tokenizer = load_tokenizer(locate(options.target))
    examples = code_prompts(_PIECES)
    pieces = [encode(tokenizer, example) for example in examples]
    truth: list[list[int]] = []
    runs = []
    for pair in steps(options.pairs, "bundles"):
        name, bundle, drafter = pair.split("=")
        device = Device.load(bundle, variant=_VARIANT, threads=1)
        with verifier("--slots=4", pair=Pair(options.target, drafter)) as running:
            lab, length = Lab(running.url, device, examples, pieces), options.tokens
            if not truth:
                truth = [answer.ids for answer in await lab.answers(draft="none", sync="off", max_new_tokens=length)]
            plan = Plan("device", TreeShape.chain(options.depth))
            with mock.patch.object(Controller, "plan", return_value=plan):
                answers = await lab.answers(draft="device", foresee=False, max_new_tokens=length)
        won = [len(answer.ids) / max(1, answer.stats["rounds"]) for answer in answers]
        runs.append(
            {
                "name": name,
                "same": sum(answer.ids == ids for answer, ids in zip(answers, truth, strict=True)),
                "pieces": len(pieces),
                "tokens_a_round": sum(len(a.ids) for a in answers) / sum(a.stats["rounds"] for a in answers),
                "standard_error": statistics.stdev(won) / len(won) ** 0.5 if len(won) > 1 else 0.0,
            }
        )
    faults = sum(run["pieces"] - run["same"] for run in runs)
    return {
        "tokens": options.tokens,
        "depth": options.depth,
        "variant": _VARIANT,
        "faults": faults,
        "runs": runs,
    }


def tables(result: Mapping[str, Any]) -> str:
    """A row for each drafter."""
    return listing(
        result["runs"],
        {
            "drafter": "{name}",
            f"tokens a round, chain of {result['depth']}": "{tokens_a_round:.2f} ± {standard_error:.2f}",
            "texts the target's own": "{same} of {pieces}",
        },
    )
