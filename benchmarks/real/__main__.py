"""A real pair, measured: `python -m benchmarks.real VERB WORK`, verb by verb.

    prepare WORK --data HumanEval.jsonl.gz question.jsonl BFCL_v4_multiple.json
    answers WORK TARGET                     # the target's own answers: hours on two cores
    cuts WORK --bundle BUNDLE               # the link dies after m tokens, the sibling goes on alone
    guesses WORK --bundle BUNDLE            # what the sibling guesses at every place of the answers
    tables WORK --out benchmarks/results

WORK is a folder of lines that every verb appends to: a run that was killed goes on where it was. A
model is a folder, a hub id or a GGUF file; BUNDLE is what `moa-export setup` has made of the sibling.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.provenance import write_result
from benchmarks.real import acceptance, answers, cuts
from benchmarks.real.lines import Lines, read
from benchmarks.real.prompts import KINDS, Prompt, all_prompts, as_line, problems
from benchmarks.real.sibling import Sibling
from moa.errors import UsageError, run_cli


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, and run a verb."""
    args = parser().parse_args(argv)
    args.run(args)
    return 0


def parser() -> argparse.ArgumentParser:
    """The verbs."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.real",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = made.add_subparsers(dest="verb", required=True)

    prepare = _verb(verbs, "prepare", _prepare, "keep the prompts of published data in WORK")
    prepare.add_argument("--data", type=Path, nargs="+", required=True, metavar="FILE")
    prepare.add_argument("--per-kind", type=int, default=0, help="so many of each kind; 0: all")

    written = _verb(verbs, "answers", _answers, "let the target answer")
    written.add_argument("target", help="folder, hub id or GGUF file")
    written.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    written.add_argument("--limit", type=int, default=0, help="prompts of each kind; 0: all")
    written.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    written.add_argument("--tokens", type=int, default=cuts.TOKENS, help="most of an answer")
    written.add_argument("--sessions", type=int, default=32, help="written side by side")
    written.add_argument("--dtype", default="bfloat16", help="of a folder's weights")
    written.add_argument(
        "--exact", action="store_true", help="of a GGUF file, numbers that no batch changes"
    )

    cut = _verb(verbs, "cuts", _cuts, "go on alone behind each cut, and run HumanEval's tests")
    cut.add_argument("--bundle", type=Path, help="the sibling as the device has it")
    cut.add_argument("--model", help="the sibling's folder, for what its bundle loses")
    cut.add_argument("--humaneval", type=Path, metavar="FILE", help="the problems with their tests")
    cut.add_argument("--after", type=int, nargs="+", default=list(cuts.CUTS), metavar="M")
    cut.add_argument("--limit", type=int, default=0, help="problems, at random; 0: all")
    cut.add_argument("--threads", type=int, default=0)
    cut.add_argument("--sessions", type=int, default=32)

    guessed = _verb(verbs, "guesses", _guesses, "the sibling's guess at every place")
    guessed.add_argument("--bundle", type=Path, required=True)
    guessed.add_argument("--threads", type=int, default=0)

    shown = _verb(verbs, "tables", _tables, "print, and with --out write, the tables")
    shown.add_argument("--out", type=Path, metavar="DIR")
    return made


def _verb(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], None], says: str
) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = verbs.add_parser(name, help=says)
    made.add_argument("work", type=Path, metavar="WORK", help="folder of the lines")
    made.set_defaults(run=run)
    return made


def _prompts(work: Path) -> list[Prompt]:
    path = work / "prompts.jsonl"
    if not path.exists():
        raise UsageError(f"no prompts in {work}", hint="run the verb `prepare` first")
    return [Prompt(**line) for line in read(path)]


def _prepare(args: argparse.Namespace) -> None:
    found = all_prompts(args.data, args.per_kind)
    args.work.mkdir(parents=True, exist_ok=True)
    text = "".join(as_line(prompt) + "\n" for prompt in found)
    (args.work / "prompts.jsonl").write_text(text, encoding="utf-8")
    for kind in KINDS:
        print(f"{kind:8} {sum(prompt.kind == kind for prompt in found)} prompts")


def _answers(args: argparse.Namespace) -> None:
    settings = answers.Settings(
        temperatures=args.temperatures,
        tokens=args.tokens,
        sessions=args.sessions,
        dtype=args.dtype,
        exact=args.exact,
    )
    every = _prompts(args.work)
    chosen = []
    for kind in args.kinds:
        chosen += [prompt for prompt in every if prompt.kind == kind][: args.limit or None]
    target = answers.opened(args.target, settings)
    answers.answer(target, chosen, args.work / "answers.jsonl", settings)


def _cuts(args: argparse.Namespace) -> None:
    known = Lines(args.work / "answers.jsonl")
    out = Lines(args.work / "cuts.jsonl")
    if args.bundle is not None:
        sibling = Sibling(args.bundle, threads=args.threads)
        tokenizer = _tokenizer(args.bundle)
        cuts.by_bundle(sibling, tokenizer, known, out, args.after, args.limit)
    if args.model is not None:
        settings = answers.Settings(sessions=args.sessions)
        model = answers.opened(args.model, settings)
        way = f"{Path(args.model).name}, {model.machine.dtype}"
        cuts.by_target(way, model, known, out, args.after, args.limit)
    if args.humaneval is not None:
        if args.bundle is None:
            raise UsageError("--humaneval reads the tokenizer of --bundle: give both")
        judged = Lines(args.work / "judged.jsonl")
        cuts.judge(problems(args.humaneval), known, out, _tokenizer(args.bundle), judged)


def _guesses(args: argparse.Namespace) -> None:
    sibling = Sibling(args.bundle, threads=args.threads)
    acceptance.guess(
        sibling,
        _prompts(args.work),
        Lines(args.work / "answers.jsonl"),
        Lines(args.work / "guesses.jsonl"),
    )


def _tables(args: argparse.Namespace) -> None:
    known = Lines(args.work / "answers.jsonl")
    judged = Lines(args.work / "judged.jsonl")
    guessed = Lines(args.work / "guesses.jsonl")
    if judged.found:
        _show(args, "real_cuts", cuts.figures(known, judged), cuts.tables)
    if guessed.found:
        _show(args, "real_drafts", acceptance.figures(known, guessed), acceptance.tables)


def _show(
    args: argparse.Namespace,
    name: str,
    result: dict[str, Any],
    tables: Callable[[dict[str, Any]], str],
) -> None:
    text = tables(result)
    print(text, file=sys.stdout)
    if args.out is not None:
        write_result(args.out / name, json.loads(json.dumps(result)), text)


def _tokenizer(bundle: Path) -> Tokenizer:
    return Tokenizer.from_file(str(bundle / "shared" / "tokenizer.json"))


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.real", main))
