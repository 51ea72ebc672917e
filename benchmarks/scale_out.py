"""Several verifiers behind one address, over real websockets: exactness, affinity, throughput, and the loss of one.

    python -m benchmarks.scale_out workers --json benchmarks/results/scale_workers.json
    python -m benchmarks.scale_out predict --json benchmarks/results/scale_predict.json

The embedded pair is served. Devices draft chains whose tokens are right with a stated probability; every text is
compared with what one plain verifier says by plain streaming. `predict` compares the simulation of `benchmarks.fleet`
with verifiers whose forwards are emulated: they take a stated time, as on accelerators of their own.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from benchmarks.provenance import write_result
from benchmarks.scaling import losing, predicting
from moa.errors import run_cli

_SAYS = {
    "workers": "`cloud-verifier serve --workers` against one process",
    "predict": "The simulation against emulated verifiers",
}


def main() -> int:
    """Measure; the table on stdout, the figures in a file."""
    arguments = _parser().parse_args()
    figures: dict[str, Any]
    if arguments.what == "predict":
        figures = asyncio.run(predicting.measure(arguments.step_ms))
        text = predicting.table_of(figures)
    else:
        figures = asyncio.run(losing.measure(arguments.count, arguments.devices, arguments.tokens))
        text = losing.table_of(figures)
    print(f"**{_SAYS[arguments.what]}**\n\n{text}")
    write_result(arguments.json, {"scale_out": {"what": arguments.what, **figures}})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale_out", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=_SAYS)
    parser.add_argument("--count", type=int, default=2, metavar="N", help="workers (default: %(default)s)")
    parser.add_argument("--devices", type=int, default=40, metavar="N", help="at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="of an answer (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=60.0, metavar="MS", help="of an emulated forward (predict)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with its provenance")
    return parser


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.scale_out", main))
