"""Parameters of a simulation: the verifier's times, the devices' requests, and the links."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean, linear_regression

import numpy as np

from benchmarks.kit.lab import mean_over
from benchmarks.kit.options import one_of
from edge_client.tools.emulated_network import PROFILES, Condition

_DRAWN = 8192
"""So many random numbers are drawn in advance, and used again and again: a simulation needs millions."""


@dataclass(frozen=True)
class Service:
    """A verifier: how long a forward of so many rows takes, and how many sessions it holds. Seconds."""

    name: str
    base: float
    """A forward of any size: reading the weights, and what the process adds."""
    per_row: float
    """Seconds of each draft in a forward."""
    per_prompt_token: float
    slots: int = 64
    max_rows: int = 64
    prompt_chunk: int = 256
    handshake: float = 0.001
    """Seconds of the event loop for a new connection."""

    def forward(self, rows: int, prompt_tokens: int = 0) -> float:
        """Seconds of a forward of drafts, and of one of prompt tokens beside it if there are any."""
        seconds = self.base + self.per_row * rows if rows else 0.0
        return seconds + (self.base + self.per_prompt_token * prompt_tokens if prompt_tokens else 0.0)

    @classmethod
    def measured(cls, path: Path, **keywords: float) -> Service:
        """From a result of `python -m benchmarks server_load`: a line through its rounds by rows in a batch.

        Its clients send without a pause, so a round as they see it is a forward and its overhead.
        """
        result = json.loads(path.read_text(encoding="utf-8"))
        found = result["server_load"]["batching"]["rows"]
        times = [(row["batch_rows"], row["client_ms"]["p50"]) for row in found]
        per_row, base = linear_regression(*zip(*times, strict=True)) if len(times) > 1 else (0.0, times[0][1])
        nodes = result["options"]["nodes"]
        return cls(result["target"], base / 1000, per_row / 1000, per_row / 1000 / nodes, **keywords)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The behaviour of devices. An idle device costs only its connection."""

    turns_per_hour: float = 6.0
    """Turns of a device an hour."""
    tokens: int = 96
    """Tokens of an answer."""
    prompt: int = 64
    """Tokens of a prompt."""
    nodes: int = 8
    """Tokens in a draft."""
    acceptance: float = 0.7
    """Probability that a drafted token is the target's, given that those before it were."""
    draft: float = 0.06
    """Seconds that a device drafts between a verdict and its next draft."""
    links: tuple[str, ...] = one_of(("wifi",) * 5 + ("5g",) * 2 + ("4g",) * 2 + ("4g-weak",), PROFILES)
    """Link profiles; a device has one of them, each as likely as the others."""
    round_bytes: int = 110
    """Bytes of a round, up and down."""

    @property
    def tau(self) -> float:
        """Tokens won by a round, on average."""
        p, n = self.acceptance, self.nodes
        return float(n) if p >= 1 else (1 - p**n) / (1 - p)

    @property
    def away(self) -> float:
        """Seconds between a verdict's leaving and the next draft's arrival, on average."""
        return self.draft + fmean(map(self.link, self.links))

    def link(self, name: str) -> float:
        """Seconds of a round on a link, both ways."""

        def seconds(condition: Condition) -> float:
            rates = [1e6 * mbps for mbps in (condition.up_mbps, condition.down_mbps) if mbps]
            return condition.rtt_ms / 1000 + sum(4 * self.round_bytes / rate for rate in rates)

        return mean_over(PROFILES[name], seconds)


class Draws:
    """Random numbers for one simulation: `won()`, tokens that a round wins; `away()`, seconds until the next draft."""

    def __init__(self, work: Work, seed: int) -> None:
        self.rng, rng = random.Random(seed), np.random.default_rng(seed)
        won = rng.geometric(max(1e-9, 1 - work.acceptance), _DRAWN).clip(max=work.nodes)
        rounds = rng.choice([work.link(name) for name in work.links], _DRAWN)
        # A link's delay varies from round to round, and so does a device's drafting.
        away = rng.normal(1.0, 0.1, _DRAWN) * (rounds + work.draft)
        self.won, self.away = cycle(won.tolist()).__next__, cycle(away.tolist()).__next__
