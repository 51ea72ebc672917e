"""Every experiment: its module, its title, and its approximate time on two idle cores.

An experiment is a module with `Options` (a dataclass, each field a flag), `measure` (options in, a
result out; it may be a coroutine) and `tables` (a result in, Markdown out). `faults` in a result
counts texts that are not the target's own; any is an error.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Experiment:
    """Something that is measured."""

    name: str
    says: str
    module: str
    minutes: float
    preset: Mapping[str, Any] = field(default_factory=dict)
    """Defaults that differ from the module's."""

    def load(self) -> ModuleType:
        """Its module."""
        return importlib.import_module(f"benchmarks.{self.module}")


_ON_REQUEST = (
    Experiment(
        "acceptance_long",
        "tokens won per verification, with room for sixteen",
        "drafters.acceptance",
        2,
        {"shapes": ["long-chain"], "temperatures": [0.0]},
    ),
    Experiment(
        "drafters_witness",
        "drafters of equal training on a real model: see benchmarks.witness",
        "drafters.witness",
        5,
    ),
    Experiment(
        "cuts",
        "an answer is cut at a random byte: what readers of four clients get",
        "device.cuts",
        10,
    ),
    Experiment(
        "cuts_llama_server",
        "the same in front of a llama.cpp server (--gguf), whose replay is a client more",
        "device.cuts",
        15,
        {"sampled": False, "places": 4, "at_once": 1},
    ),
    Experiment(
        "upstreams",
        "greedy answers of other engines, cut and resumed: their own text?",
        "device.upstreams",
        10,
    ),
    Experiment(
        "upstream_overhead",
        "first token and throughput through --upstream, beside the bare engine",
        "device.upstream_overhead",
        5,
    ),
    Experiment(
        "families",
        "siblings of every family, with random weights: export, memory, steps",
        "device.families",
        60,
    ),
    Experiment("server_load", "the verifier under load", "server.load", 3),
    Experiment("masks", "what a grammar costs, and what it wins", "server.masks", 1),
    Experiment(
        "client_slow",
        "the same as client_links with a slow target: who wins where",
        "device.grid",
        12,
        {"steps": [10.0, 30.0, 60.0, 120.0]},
    ),
    Experiment(
        "client_loopback",
        "drafts of the server beside plain streams, without a link",
        "device.grid",
        6,
        {
            "links": ["loopback"],
            "temperatures": [0.0, 0.7, 1.0],
            "lanes": 1,
            "repeats": 3,
            "prompts": 24,
            "ways": ["plain API streaming", "server-drafted"],
        },
    ),
    Experiment(
        "client_everyday",
        "one-digit sums and everyday questions, online and offline",
        "device.everyday",
        3,
    ),
)
_USUAL = (
    Experiment("acceptance", "tokens won per verification, by category", "drafters.acceptance", 5),
    Experiment("client_links", "speed, calls and bytes by link", "device.grid", 5),
    Experiment("client_offline", "right answers after the link is cut", "device.offline", 0.5),
    Experiment("client_reconnect", "the link returns after 1, 5, 20 s", "device.reconnect", 1),
    Experiment("capacity", "readers that one verifier holds", "server.capacity", 4),
)

ON_REQUEST = frozenset(experiment.name for experiment in _ON_REQUEST)
"""Run only when named: all the others together stay below half an hour."""
EXPERIMENTS = {experiment.name: experiment for experiment in (*_USUAL, *_ON_REQUEST)}
"""By name, in the order in which they run."""
