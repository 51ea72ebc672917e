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
from moa.config import TargetFacts
from moa.errors import UsageError, run_cli
from moa.process.user_folders import cache_folder
from moa.target.tokenizer_files import refuse_other_tokenizer
from moa.wire.limits import Limits

_LONGEST_NAME = 40
"""Characters of a model's name in that of its bundle."""
# What a verifier serves unless it is told otherwise.
_SLOTS = 256
_KV_TOKENS = 131072


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan of a pair, a target and a small sibling or its bundle, as JSON."""
    parser = CommandParser(prog="moa-edge up")
    parser.add_argument("target")
    parser.add_argument("sibling", nargs="?", default="")
    parser.add_argument("--bundle", default="", help="in place of the sibling: its bundle")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--again", action="store_true", help="a bundle that is there is made anew")
    parser.add_argument("--dry-run", action="store_true", help="unpack nothing")
    arguments = parser.parse_args(argv)
    extra = "verifier" if arguments.bundle else "export"
    return run_cli("moa-edge up", lambda: _print(arguments), extra=extra)


def _print(arguments: argparse.Namespace) -> None:
    """Print the plan. Unless nothing is to be made, a sibling in a GGUF file is unpacked first."""
    if arguments.bundle:
        plan = plan_bundle(
            arguments.target,
            arguments.bundle,
            dtype=arguments.dtype,
            refuses=not arguments.dry_run,
        )
        json.dump(plan, sys.stdout)
        return
    plan = plan_pair(
        arguments.target, arguments.sibling, dtype=arguments.dtype, refuses=not arguments.dry_run
    )
    if not arguments.dry_run and (arguments.again or not plan["made"]):
        from moa.target.loading import locate

        # A file in GGUF is unpacked here, not while the bundle is made: it says so.
        locate(
            arguments.sibling,
            say=lambda line: print(f"moa-edge up: {line}", file=sys.stderr, flush=True),
        )
    json.dump(plan, sys.stdout)


def plan_bundle(
    target: str, bundle: str, *, dtype: str = "auto", refuses: bool = True
) -> dict[str, Any]:
    """Returns what is known of a target and a bundle that is there, before anything starts: what the
    verifier takes. Raises for a bundle of another tokenizer, of which two files tell in a second. Of
    too little memory the plan says so itself unless it `refuses`."""
    refuse_other_tokenizer(
        bundle,
        target,
        hint="give the bundle that was made for this target, or --device-model with a small model of"
        " its tokenizer",
    )
    problem = ""
    memory = None
    try:
        memory = _verifier_memory(target, dtype)
    except UsageError as error:
        if refuses:
            raise
        problem = error.line()
    return {
        "bundle": bundle,
        "made": True,
        "memory": None if memory is None else memory.figures,
        "lines": [] if memory is None else [f"the verifier {memory}"],
        "problem": problem,
    }


def plan_pair(
    target: str, sibling: str, *, dtype: str = "auto", refuses: bool = True
) -> dict[str, Any]:
    """Returns what is known of a target and a small sibling before anything starts, from their
    files' headers alone: sizes, times, and the folder of their bundle. Raises for what cannot work:
    another tokenizer, an unsupported family, too little memory or disk. Unless it `refuses`, the plan
    says itself what this machine has too little of, as its `problem`."""
    from export.plan import check_memory
    from export.setup import Setup, make_setup_plan
    from moa.target.loading import read_facts, tokenizer_hash_of

    facts, folder = read_facts(target, identify=False)
    bundle = cache_folder("bundles") / _bundle_name(target, folder, sibling, facts)
    plan = make_setup_plan(Setup(target, sibling, bundle))
    is_made = (bundle / MANIFEST).is_file()
    bundle.parent.mkdir(parents=True, exist_ok=True)
    problem = ""
    memory = None
    try:
        if not is_made:
            _check_disk(bundle.parent, plan.export.disk)
            check_memory(plan.export)
        memory = _verifier_memory(target, dtype)
    except UsageError as error:
        if refuses:
            raise
        problem = error.line()
    told = dataclasses.replace(
        facts,
        tie_embeddings=plan.target_ties_head,
        tokenizer_hash=tokenizer_hash_of(folder),
    )
    lines = plan.lines(is_made=is_made)
    if memory is not None:
        lines.append(f"the verifier {memory}")
    return {
        "bundle": str(bundle),
        "made": is_made,
        "seconds": plan.export.seconds,
        "disk_bytes": plan.export.disk,
        "bundle_bytes": plan.export.variant_bytes,
        "target": {
            "weights": plan.target_weights,
            **{name: value for name, value in dataclasses.asdict(told).items() if value != ""},
        },
        "memory": None if memory is None else memory.figures,
        "lines": lines,
        "problem": problem,
    }


def _bundle_name(target: str, target_folder: Path, sibling: str, facts: TargetFacts) -> str:
    """Returns the name of the folder of a pair's bundle. It has a hash of all that the bundle is
    made of: a bundle that was made of anything else gets another name."""
    from moa.gguf.reader import is_gguf
    from moa.target.loading import read_facts, tokenizer_hash_of

    _, sibling_folder = read_facts(sibling, identify=False)
    made_of = [
        json.dumps(dataclasses.asdict(facts)),
        tokenizer_hash_of(target_folder),
        _stamp(Path(sibling).expanduser() if is_gguf(sibling) else sibling_folder),
        str(SCHEMA),
        __version__,
    ]
    key = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:12]
    return f"{_short(target)}+{_short(sibling)}-{key}"


def _check_disk(folder: Path, needed: int) -> None:
    """Raise a `UsageError` if the disk of this folder has fewer than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UsageError(
            f"the bundle takes {needed / 1e9:.1f} GB of disk while it is made, and"
            f" {folder} has {free / 1e9:.1f} GB free",
            hint="set XDG_CACHE_HOME to a folder on another disk",
        )


def _verifier_memory(target: str, dtype: str) -> Any:
    """Returns the plan of the memory that a verifier with default settings takes; None where that
    cannot be told. Raises if this machine has too little."""
    from moa.gguf.reader import is_gguf
    from moa.llama import memory_plan as llama_memory
    from moa.target.contract import LoadOptions
    from moa.target.memory_plan import plan_memory

    capacity = Limits.max_context_tokens + Limits.max_tree_nodes
    options = LoadOptions(slots=_SLOTS, kv_tokens=_KV_TOKENS, capacity=capacity)
    if is_gguf(target):
        return llama_memory.plan_memory(Path(target).expanduser(), options)
    return plan_memory(target, dataclasses.replace(options, dtype=dtype))


def _stamp(model: Path) -> str:
    """Returns what tells a model's files from others without reading them: names, sizes and
    times."""
    files = [model] if model.is_file() else sorted(model.iterdir())
    about = [file.stat() for file in files]
    return json.dumps(
        [
            [file.name, found.st_size, found.st_mtime_ns]
            for file, found in zip(files, about, strict=True)
        ]
    )


def _short(source: str) -> str:
    """The last part of where a model comes from, as a name of a folder."""
    name = Path(source).expanduser().name.removesuffix(".gguf") or "model"
    return re.sub(r"[^\w.-]", "-", name)[:_LONGEST_NAME]


if __name__ == "__main__":
    raise SystemExit(main())
