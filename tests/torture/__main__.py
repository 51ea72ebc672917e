"""`make torture`: every part, as long as it is told to take. Each part prints what it found, and
fails when it must.

python -m tests.torture                                  minutes: a bit of everything
python -m tests.torture --full                           the counts of docs/reliability.md: hours
python -m tests.torture fuzz --frames 100000 --seed 7
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tests.torture.fuzz import seed_from_clock
from tests.torture.parts import PARTS

_FULL = {
    "frames": 2_000_000,
    "messages": 200_000,
    "kills": 1000,
    "cuts": 10_000,
    "seconds": 20.0,
    "hours": 2.0,
}
_SHORT = {
    "frames": 20_000,
    "messages": 2_000,
    "kills": 20,
    "cuts": 200,
    "seconds": 5.0,
    "hours": 0.05,
}
_FULL["guesses"] = 200_000
_SHORT["guesses"] = 4_000
_FULL["schemas"] = 1000
_SHORT["schemas"] = 40
_FULL["grammars"] = 2000
_SHORT["grammars"] = 200
_FULL["draws"] = 5_000_000
_SHORT["draws"] = 40_000
_FULL["clients"] = 1000
_SHORT["clients"] = 60
_FULL["minutes"] = 10.0
_SHORT["minutes"] = 0.2
_FULL["stops"] = 200
_SHORT["stops"] = 10
_FULL["damaged"] = 500
_SHORT["damaged"] = 25


def main() -> None:
    """Run the parts that are named, or all."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument(
        "--full", action="store_true", help="the counts of docs/reliability.md: hours"
    )
    parser.add_argument("--seed", type=int, default=None, help="repeat a run")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep counts there, and go on where they stand"
    )
    parser.add_argument("--out", type=Path, default=None, help="write what was found as JSON")
    for name, value in _SHORT.items():
        parser.add_argument(f"--{name}", type=type(value), default=None)
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    for name, value in (_FULL if options.full else _SHORT).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.seed = seed_from_clock() if options.seed is None else options.seed
    print(f"seed {options.seed}", flush=True)
    found, wrong = asyncio.run(_run(options))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1, default=vars) + "\n")
    sys.exit("\n".join(wrong) if wrong else 0)


async def _run(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    found: dict[str, Any] = {"seed": options.seed}
    wrong: list[str] = []
    for part in options.parts or PARTS:
        began = time.monotonic()
        try:
            result, problems = await PARTS[part](options)
        except Exception as error:  # the other parts are run all the same
            traceback.print_exception(error)
            result = {}
            problems = [repr(error)]
        found[part] = result | {"seconds": round(time.monotonic() - began, 1)}
        wrong += [f"{part}: {problem}" for problem in problems]
        print(part, json.dumps(found[part], default=vars), *problems, sep="\n  ", flush=True)
    return found, wrong


if __name__ == "__main__":
    main()
