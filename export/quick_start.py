"""What `moa-edge up` must know of a pair before it starts anything: sizes, times, and the name under
which its bundle is kept. As a program of its own, it prints that as JSON: its parent stays small."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moa import __version__
from moa.bundle import MANIFEST, SCHEMA
from moa.cli.command_line import CommandParser
from moa.errors import UsageError, run_cli
from moa.process.user_folders import cache_folder

_LONGEST_NAME = 40
"""Characters of a model's name in that of its bundle."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan of a pair; downloads show their own progress."""
    parser = CommandParser(prog="moa-edge up")
    parser.add_argument("target")
    parser.add_argument("sibling")
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args(argv)
    return run_cli("moa-edge up", lambda: _print(arguments), extra="export")


def _print(arguments: argparse.Namespace) -> None:
    plan = plan_pair(arguments.target, arguments.sibling, dtype=arguments.dtype)
    json.dump(plan, sys.stdout)


def plan_pair(target: str, sibling: str, *, dtype: str = "auto") -> dict[str, Any]:
    """The plan of a pair. Raises for what cannot work: other tokenizers, families that are not
    supported, too little memory or disk."""
    from export.setup import Setup, make_setup_plan
    from moa.gguf.reader import is_gguf
    from moa.target.contract import LoadOptions
    from moa.target.loading import locate, read_facts
    from moa.target.memory_plan import plan_memory

    facts, _ = read_facts(target)
    sibling_facts, _ = read_facts(sibling)
    made_of = [facts.weights_id, sibling_facts.weights_id, str(SCHEMA), __version__]
    key = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:12]
    name = f"{_short(target)}+{_short(sibling)}-{key}"
    bundle = cache_folder("bundles") / name
    setup = Setup(target, sibling, bundle)
    plan = make_setup_plan(setup)
    made = (bundle / MANIFEST).is_file()
    bundle.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(bundle.parent).free
    if not made and free < plan.export.disk:
        raise UsageError(
            f"the bundle takes {plan.export.disk / 1e9:.1f} GB of disk while it is made, and"
            f" {bundle.parent} has {free / 1e9:.1f} GB free",
            hint="set XDG_CACHE_HOME to a folder on another disk",
        )
    memory = None
    if not is_gguf(target):
        memory = plan_memory(target, LoadOptions(dtype=dtype, slots=256, kv_tokens=131072))
    lines = list(plan.lines())
    if memory is not None:
        lines.append(f"the verifier {memory}")
    # A file in GGUF is unpacked here, not while the bundle is made: it says so.
    locate(sibling, say=lambda line: print(f"moa-edge up: {line}", file=sys.stderr, flush=True))
    return {
        "bundle": str(bundle),
        "made": made,
        "seconds": plan.export.seconds,
        "disk_bytes": plan.export.disk,
        "bundle_bytes": plan.export.variant_bytes,
        "target": dataclasses.asdict(facts),
        "memory": None if memory is None else memory.figures,
        "lines": lines,
    }


def _short(source: str) -> str:
    """The last part of where a model comes from, as a name of a folder."""
    name = Path(source).expanduser().name.removesuffix(".gguf") or "model"
    return re.sub(r"[^\w.-]", "-", name)[:_LONGEST_NAME]


if __name__ == "__main__":
    raise SystemExit(main())
