"""How the verifier behaves under load, over real websockets, against a `cloud-verifier serve` in its own process.

    python -m benchmarks.server_load batching --clients 1 4 16
    python -m benchmarks.server_load all --random 1024x8 --json results.json

Without --target or --random the embedded pair is served. Drafts are chains whose tokens are right with a stated
probability (`--rate`), for it is the verifier that is measured; every text is compared with the target's own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import shlex
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.provenance import write_result
from benchmarks.server import batching, lifetimes, overload, prompts, stopping, verdicts, wire
from benchmarks.server.options import Options
from benchmarks.server_kit import Pair, folder_of, random_pair
from moa.errors import UsageError, run_cli

Figures = dict[str, Any]


@dataclass(frozen=True)
class Scenario:
    """Something that is measured, and how it is told."""

    says: str
    measure: Callable[[Pair, Options], Coroutine[Any, Any, Figures]]
    tables: Callable[[Figures], str]


SCENARIOS = {
    "batching": Scenario("Throughput by concurrent clients", batching.measure, batching.tables),
    "verdicts": Scenario("Verdicts and activation records", verdicts.measure, verdicts.tables),
    "prompts": Scenario("Verdicts beside a long prompt", prompts.measure, prompts.tables),
    "bytes": Scenario("Bytes on the wire", wire.measure, wire.tables),
    "sessions": Scenario("Sessions opened and dropped", lifetimes.measure, lifetimes.tables),
    "overload": Scenario("Ten times over capacity", overload.measure, overload.tables),
    "sigterm": Scenario("Stopping under load", stopping.measure, stopping.tables),
}


def main() -> int:
    """Run what was asked for; tables on stdout, progress on stderr, and the figures in a file."""
    arguments = _parser().parse_args()
    given = vars(arguments)
    values = {field.name: given[field.name] for field in dataclasses.fields(Options)}
    options = Options(**(values | {"clients": tuple(sorted(set(arguments.clients))), "flags": tuple(arguments.flags)}))
    if min(options.clients) < 1 or options.tokens < 2 or options.nodes < 1 or options.repeats < 1:
        raise UsageError("--clients, --nodes and --repeats must be at least 1, --tokens at least 2")
    names = list(SCENARIOS) if arguments.scenario == "all" else [arguments.scenario]
    served = arguments.random or (arguments.target.name if arguments.target else "the embedded target")
    result: Figures = {"target": served, "options": dataclasses.asdict(options), "server_load": {}}
    with contextlib.ExitStack() as stack:
        pair = Pair(folder_of(arguments.target), folder_of(arguments.drafter))
        if arguments.random:
            pair = stack.enter_context(random_pair(*_sizes(arguments.random)))
        for name in names:
            print(f"{SCENARIOS[name].says}, {served}", file=sys.stderr, flush=True)
            figures = asyncio.run(SCENARIOS[name].measure(pair, options))
            result["server_load"][name] = figures
            print(f"**{SCENARIOS[name].says}** ({served})\n\n{SCENARIOS[name].tables(figures)}\n", flush=True)
            write_result(arguments.json, result)  # after each: a long run that is stopped keeps what it has
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.server_load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Options()
    parser.add_argument("scenario", choices=[*SCENARIOS, "all"])
    parser.add_argument("--target", type=Path, metavar="DIR")
    parser.add_argument("--drafter", type=Path, metavar="DIR")
    parser.add_argument("--random", default="", metavar="HIDDENxLAYERS", help="a random target instead")
    parser.add_argument("--clients", type=int, nargs="+", default=default.clients, metavar="N", help="at once")
    for name, says in (
        ("prompt", "prompt tokens, about"),
        ("tokens", "output tokens of a client"),
        ("nodes", "tokens in a draft"),
        ("repeats", "of batching and verdicts, interleaved"),
        ("sessions", "of the scenario of that name"),
        ("threads", "of the verifier's process; 0 leaves them to it"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=getattr(default, name), metavar="N", help=f"{says} (default: %(default)s)"
        )
    parser.add_argument(
        "--rate", type=float, default=default.rate, help="probability that a drafted token is right (%(default)s)"
    )
    parser.add_argument("--think", type=float, default=default.think, help="seconds between rounds (sigterm)")
    parser.add_argument("--flags", type=shlex.split, default=[], help="more flags of cloud-verifier serve, in quotes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with its provenance")
    return parser


def _sizes(text: str) -> tuple[int, int]:
    try:
        hidden, layers = map(int, text.split("x"))
    except ValueError:
        raise UsageError(f"--random is HIDDENxLAYERS, not {text!r}") from None
    return hidden, layers


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.server_load", main))
