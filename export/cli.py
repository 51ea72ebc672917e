"""`moa-export`: build, setup. Progress on stderr; results (`--json`: as JSON) on stdout."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from export.atomic_folder import clean_up_when_ended, new_folder
from export.kinds import choose_kinds
from moa.bundle import Bundle
from moa.cli.command_line import CommandParser, given_fields
from moa.cli.working import CLEAR, Tell, working
from moa.demo import paths
from moa.errors import UsageError, run_cli
from moa.process.model_places import check_place
from moa.safe_text import safe_text
from moa.version import running_version

if TYPE_CHECKING:
    from export.build import BuildSettings

PROGRAM = "moa-export"
_PAUSE_SECONDS = 10.0
"""Least time between two lines within a part where they are kept."""
_INT8_CPUS = ("avx512_vnni", "avx2")
"""optimum's configurations. The first is for processors with 8-bit dot products; `avx2` avoids the
overflow of older ones."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    args = parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int | None] = args.run
    return run_cli(PROGRAM, lambda: command(args), extra="export")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = CommandParser(
        prog=PROGRAM, description="From a trained drafter to a bundle that a device runs."
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {running_version()}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    _add_build_options(
        commands.add_parser("build", help="export, quantize, check and pack a drafter")
    )
    _add_setup_options(
        commands.add_parser(
            "setup",
            help="a target and a small sibling: everything that server and device need",
            description="Makes the bundle of a small model of the target's family, as it is or with an attention to the"
            " target's activation records that is trained here, and prints the commands for server and device.",
        )
    )
    return top


def _add_build_options(build: argparse.ArgumentParser) -> None:
    """Add the options of `moa-export build`."""
    build.add_argument(
        "-t", "--target", help="hub id or folder of the target (default: the embedded pair's)"
    )
    build.add_argument(
        "-d",
        "--drafter",
        help="the drafter's folder, or independent:ID_OR_DIR for a small causal LM",
    )
    build.add_argument(
        "-o", "--out", type=Path, help="folder of the bundle, which must not exist yet"
    )
    build.add_argument(
        "-v",
        "--variant",
        action="append",
        default=[],
        metavar="NAME",
        help="may be repeated; the first is the default",
    )
    build.add_argument(
        "--draft-vocab", type=int, metavar="N", help="draft only the N most frequent tokens"
    )
    build.add_argument(
        "--vocab-text",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="text to choose them by",
    )
    build.add_argument(
        "--calibration",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help='held-out prompts: .jsonl with "prompt", or one a line; the target must fit in memory',
    )
    build.add_argument(
        "--int8-cpu", choices=_INT8_CPUS, help=f"int8 recipe (default {_INT8_CPUS[0]})"
    )
    build.add_argument(
        "--npu-shape",
        type=int,
        nargs=3,
        default=(8, 512, 512),
        metavar=("T", "P", "R"),
        help="tokens, past rows and records of the static variants (default 8 512 512)",
    )
    build.add_argument(
        "--no-step-times",
        help="do not time the variants on this machine",
        action="store_false",
        dest="time_steps",
    )
    build.add_argument("--force", action="store_true", help="replace the bundle at --out")
    build.add_argument(
        "--dry-run", action="store_true", help="print shapes, sizes and time, and stop"
    )
    build.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    build.set_defaults(run=_build)


def _add_setup_options(setup: argparse.ArgumentParser) -> None:
    """Add the options of `moa-export setup`."""
    setup.add_argument("target", help="hub id or folder of the target")
    setup.add_argument(
        "--sibling", required=True, metavar="MODEL", help="small model of the same tokenizer"
    )
    setup.add_argument(
        "-o", "--out", type=Path, required=True, help="folder for bundle, and drafter if trained"
    )
    setup.add_argument(
        "-v", "--variant", action="append", default=[], metavar="NAME", help="may be repeated"
    )
    setup.add_argument(
        "--records",
        nargs="+",
        default=[],
        metavar="SOURCE",
        help="train the attention on these chats",
    )
    setup.add_argument(
        "--calibration",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="held-out prompts, one a line: how far the device can be trusted alone is measured on"
        " them, and it stops there; the target must fit in memory (a GGUF file is the smallest)",
    )
    setup.add_argument(
        "--steps", type=int, metavar="N", help="steps of that training (default: moa-train's)"
    )
    setup.add_argument(
        "--dry-run", action="store_true", help="print sizes and least times, and stop"
    )
    setup.add_argument("--force", action="store_true", help="replace the bundle in --out")
    setup.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    setup.set_defaults(run=_setup)


def _build(args: argparse.Namespace) -> None:
    """Run `moa-export build`: print the plan with --dry-run, or build the bundle and describe it."""
    # Mistakes come first: torch and the exporter take seconds to import.
    _check_build(args)
    with _importing():
        from export.build import build
        from export.plan import make_plan

    clean_up_when_ended()
    is_embedded = not args.target
    target, drafter = embedded_sources() if is_embedded else (args.target, args.drafter)
    if args.dry_run:
        plan = make_plan(target, drafter, args.variant, args.draft_vocab)
        _show(plan.as_dict(), args.json, plan.lines())
        return
    settings = _build_settings(args, target, drafter, with_embedded_prompts=is_embedded)
    with _ProgressLines() as lines:
        bundle = build(settings, say=lines.say, show=lines.show)
    _show_bundle(bundle, args.json)


def _check_build(args: argparse.Namespace) -> None:
    """Raise a `UsageError` for options of `moa-export build` that contradict each other, and for
    files and folders that cannot be read or written."""
    if bool(args.target) != bool(args.drafter):
        raise UsageError(
            "--target and --drafter belong together", hint="leave out both for the embedded pair"
        )
    check_place("--target", args.target or "")
    check_place("--drafter", (args.drafter or "").removeprefix("independent:"))
    _check_files((*args.calibration, *args.vocab_text))
    if args.out is None and not args.dry_run:
        raise UsageError("--out is missing", hint="--out DIR for the new bundle, or --dry-run")
    _check_place(args, args.out)


def _build_settings(
    args: argparse.Namespace, target: str, drafter: str, *, with_embedded_prompts: bool
) -> BuildSettings:
    """Returns the settings of a build from its options. The embedded pair brings prompts to measure
    with, unless files with others are given, and prompts to choose a draft vocabulary by."""
    from export.build import BuildSettings
    from export.static_forms import StaticShape

    prompts: tuple[str, ...] = ()
    vocab_prompts: tuple[str, ...] = ()
    if with_embedded_prompts:
        prompts, vocab_prompts = embedded_prompts()
    if args.calibration:
        prompts = ()  # the given ones are in files
    fields = given_fields(args, BuildSettings)
    fields |= {
        "target": target,
        "drafter": drafter,
        "variants": tuple(args.variant),
        "vocab_prompts": vocab_prompts,
        "prompts": prompts,
        "static_shape": StaticShape(*args.npu_shape),
    }
    return BuildSettings(**fields)


def _setup(args: argparse.Namespace) -> None:
    """Run `moa-export setup`: train and build unless --dry-run, then print the commands for server
    and device."""
    if args.steps is not None and not args.records:
        raise UsageError(
            "--steps is for the training of --records", hint="give --records, or leave out --steps"
        )
    check_place("TARGET", args.target, besides=args.sibling)
    check_place("--sibling", args.sibling, besides=args.target)
    _check_files(args.calibration)
    _check_place(args, args.out / "bundle")
    with _importing():
        from export.plan import check_memory
        from export.setup import (
            NOT_CALIBRATED,
            VARIANTS,
            Setup,
            make_setup_plan,
            next_commands,
            run_setup,
        )
        from moa.training.cli import main as train

    variants = tuple(args.variant) or VARIANTS
    setup = Setup(
        target=args.target,
        sibling=args.sibling,
        out=args.out,
        variants=variants,
        records=tuple(args.records),
        calibration=tuple(args.calibration),
        steps=args.steps,
        force=args.force,
    )
    plan = make_setup_plan(setup)
    if not args.dry_run:
        check_memory(plan.export)
        with _ProgressLines() as lines:
            if not plan.calibrates:
                lines.say(NOT_CALIBRATED)
            run_setup(setup, train, lines.say, lines.show)
    commands = next_commands(setup)
    result = {
        "bundle": str(setup.bundle),
        "plan": asdict(plan) | {"export": plan.export.as_dict(), "disk_bytes": plan.export.disk},
        "commands": commands,
    }
    plan_lines = plan.lines() if args.dry_run else []
    _show(result, args.json, plan_lines + commands)


def _importing() -> AbstractContextManager[Tell]:
    """Says that the libraries are imported, where that lasts: half a minute on a busy machine."""
    return working(PROGRAM, "importing the libraries", at_once=False)


def _check_files(files: Sequence[Path]) -> None:
    """A `UsageError` for a file that is not there."""
    for file in files:
        if not file.is_file():
            raise UsageError(f"no file at {file}")


def _check_place(args: argparse.Namespace, out: Path) -> None:
    """Refuse unknown variants, and a folder that cannot be written to, now and not after minutes of
    building. With --dry-run nothing will be written."""
    choose_kinds(args.variant)
    if not args.dry_run:
        with new_folder(out, force=args.force, trial=True):
            pass


class _ProgressLines:
    """Lines of progress on stderr. On a terminal those within a part are one that changes; elsewhere
    one of them is printed every few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changes = sys.stderr is not None and sys.stderr.isatty()
        """Whether a line can be replaced."""
        self._is_open = False
        """Whether the last line is one that changes."""
        self._printed_at = clock()

    def say(self, line: str) -> None:
        """Print a line that stays."""
        end = CLEAR if self._is_open else ""
        self._is_open = False
        self._print(f"{end}{PROGRAM}: {line}\n")

    def show(self, line: str) -> None:
        """Print a line that the next one replaces."""
        if self._changes:
            self._is_open = True
            columns = shutil.get_terminal_size().columns - 1
            self._print(CLEAR + _fitting(f"{PROGRAM}: {line}", columns))
        elif self._clock() - self._printed_at >= _PAUSE_SECONDS:
            self._print(f"{PROGRAM}: {line}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the line that changes: what follows has one of its own."""
        if self._is_open:
            self._is_open = False
            self._print("\n")

    def _print(self, text: str) -> None:
        self._printed_at = self._clock()
        print(text, end="", file=sys.stderr, flush=True)


def _fitting(line: str, columns: int) -> str:
    """A line of progress in one row, for of two only the last could be cleared. Its figures, which
    are at its end in parentheses, stay."""
    if len(line) <= columns:
        return line
    doing, mark, figures = line.rpartition(" (")
    end = f"…{mark}{figures}" if mark else "…"
    return (doing or line)[: max(0, columns - len(end))] + end


def _show_bundle(bundle: Bundle, as_json: bool) -> None:
    """Print where the bundle is and what it has; as JSON, its whole manifest."""
    import msgspec

    variants = ", ".join(sorted(bundle.manifest.variants))
    lines = [safe_text(f"{bundle.folder}: {variants}; its README.md says what was measured")]
    _show({"bundle": str(bundle.folder), **msgspec.to_builtins(bundle.manifest)}, as_json, lines)


def _show(result: dict[str, Any], as_json: bool, lines: Sequence[str]) -> None:
    """Print a result to stdout: as JSON for programs, or these lines for people."""
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print("\n".join(lines))


def embedded_sources() -> tuple[str, str]:
    """Returns the folders of the target and the drafter that this installation comes with; a
    `UsageError` if it has none."""
    found = paths()
    for folder in (found.target, found.drafter):
        if not any(folder.glob("*.safetensors")):
            raise UsageError(
                f"this installation has no embedded pair: {folder.name} has no weights",
                hint="make it with `python -m demo.train` in a checkout, or give --target and --drafter",
            )
    return str(found.target), str(found.drafter)


def embedded_prompts(count: int = 32) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Held-out prompts to measure with, and training prompts to choose a draft vocabulary by."""
    prompts = json.loads(paths().prompts.read_text(encoding="utf-8"))
    return tuple(prompts["heldout"][:count]), tuple(prompts["train"][: 8 * count])


if __name__ == "__main__":
    raise SystemExit(main())
