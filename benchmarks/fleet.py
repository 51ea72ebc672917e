"""A fleet of 1 to 10,000 verifiers and up to 10 million devices, simulated from measured service times.

    python -m benchmarks.fleet --json benchmarks/results/fleet.json
    python -m benchmarks.fleet --forward-ms 30 --row-ms 0.2 --slots 128 --devices 1000000

Service times come from a result of `python -m benchmarks.server_load batching` (`--measured`), or are stated. What a
device does (turns, tokens, acceptance, links) are flags. `docs/scaling.md` has the formulas beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.fleet_sim import scenarios
from benchmarks.fleet_sim.model import Service, Work
from benchmarks.fleet_sim.scenarios import World
from benchmarks.provenance import write_result
from benchmarks.report import table
from moa.errors import UsageError, run_cli

_MEASURED = Path(__file__).parent / "results" / "server_load.json"
_DEVICES = (100, 10_000, 100_000, 1_000_000, 10_000_000)


def main() -> int:
    """Run every scenario, print the tables, write the figures."""
    arguments = _parser().parse_args()
    service = _service(arguments)
    work = Work(
        turns_per_hour=arguments.turns,
        tokens=arguments.tokens,
        prompt=arguments.prompt,
        acceptance=arguments.acceptance,
        draft=arguments.draft_ms / 1000,
    )
    if not 0 < arguments.load < 1:
        raise UsageError(f"--load must be between 0 and 1, not {arguments.load}")
    world = World(service, work, arguments.seed)
    began = time.process_time()
    _say("how many devices one verifier serves well")
    users = scenarios.capacity(world)
    figures: dict[str, Any] = {
        "service": dataclasses.asdict(service),
        "work": dataclasses.asdict(work) | {"tau": round(work.tau, 3), "away": round(work.away, 4)},
        "load": arguments.load,
        "price": arguments.price,
        "users": users,
    }
    for name, run in {
        "queues": lambda: scenarios.queues(world, users),
        "acceptances": lambda: scenarios.acceptances(world, arguments.price),
        "sizes": lambda: scenarios.sizes(world, users, arguments.load, tuple(arguments.devices)),
        "zone": lambda: scenarios.zone(world, users, arguments.load),
        "rolling": lambda: scenarios.rolling(world, users, arguments.load),
        "thundering": lambda: scenarios.thundering(world, users, arguments.load),
    }.items():
        _say(name)
        figures[name] = run()
    figures["cpu_seconds"] = round(time.process_time() - began, 1)
    print(tables({"fleet": figures}))
    write_result(arguments.json, {"fleet": figures})
    return 0


def _service(arguments: argparse.Namespace) -> Service:
    if arguments.forward_ms is None:
        return Service.measured(arguments.measured, slots=arguments.slots, handshake=arguments.handshake_ms / 1000)
    base, row = arguments.forward_ms / 1000, arguments.row_ms / 1000
    return Service(
        f"stated: {arguments.forward_ms:g} ms + {arguments.row_ms:g} ms a row",
        base,
        row,
        row / Work.nodes,
        slots=arguments.slots,
        handshake=arguments.handshake_ms / 1000,
    )


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def tables(result: dict[str, Any]) -> str:
    """Everything as Markdown."""
    fleet = result["fleet"]
    service, work, zone = fleet["service"], fleet["work"], fleet["zone"]
    head = (
        f"Service times: {service['name']}; a forward of B drafts takes {1000 * service['base']:.1f} + "
        f"{1000 * service['per_row']:.2f} B ms, {service['slots']} slots. Devices: {work['turns_per_hour']:g} turns an "
        f"hour of {work['tokens']} tokens, acceptance {work['acceptance']:g} (tau {work['tau']:.2f}), "
        f"{1000 * work['away']:.0f} ms from a verdict to the next draft. "
        f"**One verifier serves {fleet['users']:,} devices well**: 95 of 100 answers at {scenarios.READING:g} tokens/s "
        "or more, 95 of 100 first tokens within a second."
    )
    common = ("busy", "rows a forward", "wait p50 / p95 ms", "first token p95 ms", "slowest 5 % of readers, tokens/s")
    parts = [
        head,
        "**Where the queue forms, one verifier**\n",
        table(
            ("load", "devices", *common),
            [[f"{r['share']:.0%}", f"{r['devices']:,}", *_cells(r)] for r in fleet["queues"]],
        ),
        f"**What acceptance is worth** (at {fleet['price']:g} an hour and verifier, an assumption)\n",
        table(
            ("acceptance", "tau", "devices a verifier", "tokens an hour", "a million tokens"),
            [
                [
                    f"{r['acceptance']:g}",
                    f"{r['tau']:.2f}",
                    f"{r['devices']:,}",
                    f"{r['tokens_per_hour']:,}",
                    f"{r['price_per_million']}",
                ]
                for r in fleet["acceptances"]
            ],
        ),
        f"**Fleets at {fleet['load']:.0%} of that**\n",
        table(
            ("devices", "verifiers (simulated)", "tokens/s", *common, "CPU s"),
            [
                [
                    f"{r['devices']:,}",
                    f"{r['verifiers']:,} ({r['simulated']:,})",
                    f"{r['tokens_per_second']:,.0f}",
                    *_cells(r),
                    f"{r['cpu_seconds']:g}",
                ]
                for r in fleet["sizes"]
            ],
        ),
        f"**One zone of three is lost** ({zone['verifiers']} verifiers, {zone['moved']} answers move)\n",
        table(
            ("seconds after", "tokens/s", *common),
            [["before", f"{zone['before']['tokens_per_second']:,.0f}", *_cells(zone["before"])]]
            + [[f"{r['until']:g}", f"{r['tokens_per_second']:,.0f}", *_cells(r)] for r in zone["after"]],
        ),
        f"**A rolling update**, a tenth at a time, {fleet['rolling']['restart']:g} s each\n",
        table(("answers moved", *common), [[f"{fleet['rolling']['moved']:,}", *_cells(fleet["rolling"])]]),
        "**Everybody returns after two minutes without a network**\n",
        table(
            ("longest back-off s", "devices, with work, a verifier", "all connected after s", "seconds after", *common),
            [
                [
                    f"{case['back_off']:g}",
                    f"{case['devices_per_verifier']:,}, {case['returning_with_work_per_verifier']:g}",
                    f"{case['all_connected_after']:g}",
                    f"{r['until']:g}",
                    *_cells(r),
                ]
                for case in fleet["thundering"]
                for r in case["after"]
            ],
        ),
        f"{fleet['cpu_seconds']:g} s of one core in all.",
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts)


def _cells(row: dict[str, Any]) -> list[str]:
    wait = row["wait_ms"]
    return [
        f"{row['busy']:.0%}",
        f"{row['rows_per_forward']:.1f}",
        f"{wait['p50']:.0f} / {wait['p95']:.0f}",
        f"{row['first_token_ms']['p95']:.0f}",
        f"{row['reader_tokens_per_second_p5']:.1f}",
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    work = Work()
    parser.add_argument(
        "--measured", type=Path, default=_MEASURED, metavar="JSON", help="a result of server_load batching"
    )
    parser.add_argument("--forward-ms", type=float, metavar="MS", help="of a forward, instead of a measured one")
    parser.add_argument("--row-ms", type=float, default=0.0, metavar="MS", help="of each draft in it")
    parser.add_argument(
        "--handshake-ms", type=float, default=1.0, metavar="MS", help="of the event loop (default: %(default)s)"
    )
    parser.add_argument("--slots", type=int, default=64, metavar="N", help="of a verifier (default: %(default)s)")
    parser.add_argument("--devices", type=int, nargs="+", default=_DEVICES, metavar="N", help="fleets to size")
    parser.add_argument(
        "--load", type=float, default=0.7, metavar="X", help="of what a verifier can (default: %(default)s)"
    )
    parser.add_argument(
        "--turns", type=float, default=work.turns_per_hour, metavar="N", help="an hour (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=work.tokens, metavar="N", help="of an answer (default: %(default)s)"
    )
    parser.add_argument("--prompt", type=int, default=work.prompt, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument(
        "--acceptance", type=float, default=work.acceptance, metavar="P", help="of a token (default: %(default)s)"
    )
    parser.add_argument(
        "--draft-ms", type=float, default=1000 * work.draft, metavar="MS", help="of a device (default: %(default)s)"
    )
    parser.add_argument(
        "--price", type=float, default=2.0, metavar="X", help="of a verifier's hour (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with its provenance")
    return parser


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.fleet", main))
