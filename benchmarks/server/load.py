"""How the verifier behaves under load, over real websockets, against a `cloud-verifier serve` in
its own process.

Without --target or --random the embedded pair is served. Without --drafter a target of your own
makes no activation records, and is measured without. Drafts are chains whose tokens are right
with a stated probability (`--rate`), because the verifier is measured; every text is compared with
the target's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kit.options import one_of
from benchmarks.kit.progress import steps
from benchmarks.server import latency, throughput, wire_bytes
from moa.errors import UsageError
from moa.process.model_places import check_place
from testing.verifier import Pair, random_pair

Figures = dict[str, Any]


@dataclass(frozen=True)
class Scenario:
    """Something that is measured, and how it is told."""

    says: str
    measure: Callable[[Pair, Any], Coroutine[Any, Any, Figures]]
    tables: Callable[[Figures], str]


SCENARIOS = {
    "batching": Scenario("Throughput by concurrent clients", throughput.measure, throughput.tables),
    "verdicts": Scenario(
        "Verdicts and activation records", latency.measure_records, latency.record_tables
    ),
    "prompts": Scenario(
        "Verdicts beside a long prompt", latency.measure_prompt, latency.prompt_tables
    ),
    "bytes": Scenario("Bytes on the wire", wire_bytes.measure, wire_bytes.tables),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is done, and to which target."""

    scenarios: tuple[str, ...] = one_of(tuple(SCENARIOS), SCENARIOS)
    """Scenarios, in this order."""
    target: str = ""
    """Folder, hub id or GGUF file of the target; by default the embedded one."""
    drafter: str = ""
    """Folder of its drafter, for activation records."""
    random: str = ""
    """A random target instead, HIDDENxLAYERS."""
    clients: tuple[int, ...] = (1, 4, 16)
    """Clients at a time."""
    prompt: int = 64
    """Prompt tokens, about: each client's differs."""
    tokens: int = 192
    """Tokens of an answer."""
    nodes: int = 8
    """Tokens in a draft."""
    rate: float = 0.7
    """Probability that a drafted token is right."""
    repeats: int = 5
    """Of batching, verdicts and prompts, interleaved."""
    long: int = 8000
    """Tokens of the prompt that others wait beside; fewer if the target holds fewer."""

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise UsageError("--tokens must be at least 2")
        check_place("--target", self.target)
        check_place("--drafter", self.drafter)


async def measure(options: Options) -> Figures:
    """One scenario after another, each with a verifier of its own."""
    shown = options.random or (
        Path(options.target).name if options.target else "the embedded target"
    )
    figures: Figures = {}
    with contextlib.ExitStack() as stack:
        own = Pair(options.target, options.drafter)
        pair = stack.enter_context(random_pair(options.random)) if options.random else own
        for name in steps(options.scenarios, "scenarios"):
            figures[name] = await SCENARIOS[name].measure(pair, options)
    return {"target": shown, "options": dataclasses.asdict(options), "server_load": figures}


def tables(result: Mapping[str, Any]) -> str:
    """The tables of every scenario below its title."""
    return "\n\n".join(
        f"**{SCENARIOS[name].says}** ({result['target']})\n\n{SCENARIOS[name].tables(figures)}"
        for name, figures in result["server_load"].items()
    )
