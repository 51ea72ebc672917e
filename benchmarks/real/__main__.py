"""A real pair, measured: `python -m benchmarks.real VERB WORK`, verb by verb.

    prepare WORK --data HumanEval.jsonl.gz question.jsonl BFCL_v4_multiple.json
    answers WORK TARGET                     # the target's own answers: hours on two cores
    cuts WORK --bundle BUNDLE               # the link dies after m tokens, the device goes on alone
    cuts WORK --bundle B --target TARGET --drafter DRAFTER  # of a drafter that reads the target
    guesses WORK --bundle BUNDLE            # what the sibling guesses at every place of the answers
    exact WORK TARGET.gguf                  # is its text the same alone and among others?
    forwards WORK TARGET.gguf               # beside llama.cpp's own calls: times and memory
    beside WORK TARGET.gguf --bundle BUNDLE # a long prompt beside another session's answer
    crowd WORK TARGET.gguf --bundle BUNDLE  # clients that come and go: does memory grow?
    peers WORK TARGET.gguf SIBLING.gguf --bundle BUNDLE
    faults WORK TARGET --bundle BUNDLE      # answers through cuts and kills
    everyday WORK TARGET --bundle BUNDLE    # many rounds, a long prompt, JSON, tools: with faults
    links WORK --bundle BUNDLE              # who drafts best over which link, for which target
    split WORK                              # train.jsonl for `moa-train`, held.jsonl for `trained`
    trained WORK TARGET DRAFTER --bundle B  # what a trained drafter guesses; one after another
    drafts WORK TARGET DRAFTER              # what it drafts at a server, for `links --drafter NAME`
    mixture WORK                            # experts: a file of random weights, drafted and not
    tables WORK --out benchmarks/results

WORK is a folder of lines that every verb appends to: a run that was killed goes on where it was, but
of `crowd`, which begins anew. A model is a folder, a hub id or a GGUF file; BUNDLE is what
`moa-export setup` has made of the sibling.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.provenance import write_result
from benchmarks.real import (
    acceptance,
    answers,
    assisted,
    cuts,
    everyday,
    exact,
    faults,
    forwards,
    links,
    mixture,
    peers,
    serving,
    trained,
)
from benchmarks.real.lines import Lines, read
from benchmarks.real.prompts import KINDS, Prompt, all_prompts, as_line, encoded, problems
from benchmarks.real.sibling import Sibling
from benchmarks.real.writing import Task
from edge_client.text.codec import TextCodec
from moa.bundle import Bundle
from moa.errors import UsageError, run_cli
from moa.graph.load import LoadedGraph
from moa.target.registry import open_target

_SHORT = 120
"""Most tokens of a prompt for `faults` and `crowd`: what is compared is the answer."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, and run a verb."""
    args = parser().parse_args(argv)
    with _ends_in_order():
        args.run(args)
    return 0


@contextlib.contextmanager
def _ends_in_order() -> Iterator[None]:
    """Let SIGTERM end an experiment as Ctrl-C does: its verifiers end with it."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
    written.add_argument("--longest", type=int, default=0, help="tokens of a prompt; 0: any")
    written.add_argument(
        "--held-out", action="store_true", help="only to prompts that `split` holds out"
    )
    written.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    written.add_argument("--tokens", type=int, default=cuts.TOKENS, help="most of an answer")
    written.add_argument("--sessions", type=int, default=32, help="written side by side")
    written.add_argument("--dtype", default="bfloat16", help="of a folder's weights")
    written.add_argument(
        "--exact", action="store_true", help="of a GGUF file, numbers that no batch changes"
    )

    cut = _verb(verbs, "cuts", _cuts, "go on alone behind each cut, and run HumanEval's tests")
    cut.add_argument("--bundle", type=Path, help="the drafter as the device has it")
    cut.add_argument(
        "--target",
        help="folder, hub id or GGUF file, for a bundle that reads the target: behind a cut it has"
        " records; without it such a bundle begins at the prompt alone",
    )
    cut.add_argument("--drafter", type=Path, help="folder of which that bundle was made")
    cut.add_argument("--model", help="the sibling's folder, for what its bundle loses")
    cut.add_argument("--humaneval", type=Path, metavar="FILE", help="the problems with their tests")
    cut.add_argument("--after", type=int, nargs="+", default=list(cuts.CUTS), metavar="M")
    cut.add_argument("--share", type=float, default=1.0, help="of the problems, at random")
    cut.add_argument("--threads", type=int, default=0)
    cut.add_argument("--sessions", type=int, default=32)

    guessed = _verb(verbs, "guesses", _guesses, "the sibling's guess at every place")
    guessed.add_argument("--bundle", type=Path, required=True)
    guessed.add_argument("--threads", type=int, default=0)

    same = _verb(verbs, "exact", _exact, "a GGUF target's answers alone, and among others")
    same.add_argument("target", help="GGUF file")
    same.add_argument("--answers", type=int, default=300, help="of each temperature")
    same.add_argument("--tokens", type=int, default=32, help="of an answer")
    same.add_argument("--sessions", type=int, default=8, help="side by side")
    same.add_argument("--prompt", type=int, default=120, help="most tokens of a prompt")
    same.add_argument(
        "--cut", action="store_true", help="cut longer prompts instead of leaving them"
    )
    same.add_argument("--default-alone", action="store_true", help="leave --inexact out")

    timed = _verb(verbs, "forwards", _forwards, "beside llama.cpp's own calls: times and memory")
    timed.add_argument("target", help="GGUF file")
    timed.add_argument("--threads", type=int, default=1)
    timed.add_argument("--library", default="", metavar="FILE", help="another build of llama.cpp")

    long = _verb(verbs, "beside", _beside, "a long prompt beside another session's answer")
    long.add_argument("target", help="GGUF file")
    long.add_argument("--bundle", type=Path, required=True, help="of a sibling")
    long.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt")
    long.add_argument("--threads", type=int, default=1)

    many = _verb(verbs, "crowd", _crowd, "clients that come and go: does memory grow?")
    many.add_argument("target", help="GGUF file")
    many.add_argument("--bundle", type=Path, required=True, help="of a sibling")
    many.add_argument("--clients", type=int, default=8)
    many.add_argument("--minutes", type=float, default=30.0)
    many.add_argument("--tokens", type=int, default=24, help="of an answer")
    many.add_argument("--threads", type=int, default=1)

    beside = _verb(verbs, "peers", _peers, "beside llama.cpp on the same cores")
    beside.add_argument("target", type=Path, help="GGUF file")
    beside.add_argument("sibling", type=Path, help="GGUF file")
    beside.add_argument("--bundle", type=Path, required=True)
    beside.add_argument("--prompts", type=int, default=20)
    beside.add_argument("--tokens", type=int, default=48, help="of an answer")
    beside.add_argument("--threads", type=int, default=1)
    beside.add_argument(
        "--assisted",
        type=int,
        default=0,
        metavar="N",
        help="of the prompts so many in transformers too, plain and by assisted generation",
    )
    beside.add_argument("--dtype", default="bfloat16", help="of transformers' weights")

    broken = _verb(verbs, "faults", _faults, "through sockets, with cuts and kills")
    broken.add_argument("target", help="folder, hub id or GGUF file")
    broken.add_argument("--bundle", type=Path, required=True, help="of a sibling")
    broken.add_argument(
        "--server-drafter",
        default="",
        metavar="MODEL",
        help="a small model: a GGUF file, or `independent:` and a folder",
    )
    broken.add_argument("--answers", type=int, default=100)
    broken.add_argument("--tokens", type=int, default=32, help="of an answer")
    broken.add_argument("--prompt", type=int, default=_SHORT, help="tokens of a prompt, at most")
    broken.add_argument("--threads", type=int, default=0, help="of each end")

    daily = _verb(
        verbs, "everyday", _everyday, "rounds, a long prompt, JSON and tools, with faults"
    )
    daily.add_argument("target", help="folder, hub id or GGUF file")
    daily.add_argument("--bundle", type=Path, required=True, help="of a sibling")
    daily.add_argument("--prompt", type=int, default=6000, help="tokens of the long prompt")
    daily.add_argument(
        "--scenes",
        nargs="+",
        choices=everyday.SCENES,
        default=list(everyday.SCENES),
        metavar="NAME",
    )
    daily.add_argument(
        "--threads", type=int, default=1, help="of each end; 0: as many as each chooses"
    )

    mixed = _verb(verbs, "mixture", _mixture, "a mixture of experts, drafted and not")
    mixed.add_argument("--layers", type=int, default=10, help="of 0.35 GB each")
    mixed.add_argument("--tokens", type=int, default=64, help="of an answer")
    mixed.add_argument(
        "--chances", type=float, nargs="+", default=list(mixture.CHANCES), help="of right guesses"
    )
    mixed.add_argument("--passes", type=int, default=1, help="through all ways, which take turns")
    mixed.add_argument("--threads", type=int, default=1)

    linked = _verb(verbs, "links", _links, "every way over links and times of a forward")
    linked.add_argument("--bundle", type=Path, required=True)
    linked.add_argument("--prompts", type=int, default=10, help="of a cell")
    linked.add_argument("--tokens", type=int, default=48, help="of an answer")
    linked.add_argument(
        "--drafter",
        default="",
        metavar="NAME",
        help="another drafter for the server, by the name that `drafts` knows it by",
    )

    parted = _verb(verbs, "split", _split, "part answers: some to train with, some held out")
    parted.add_argument("--longest", type=int, default=320, help="tokens of prompt and answer")
    parted.add_argument("--tokens", type=int, default=10**6, help="of all that is trained with")

    learnt = _verb(verbs, "trained", _trained, "a trained drafter along held-out answers")
    learnt.add_argument("target", help="folder, hub id or GGUF file")
    learnt.add_argument("drafter", type=Path, help="its folder, whose name it has in the table")
    learnt.add_argument(
        "--bundle", type=Path, help="of this drafter; without one it drafts as at a server"
    )
    learnt.add_argument("--in-step", action="store_true", help="leave out late records, and none")

    drafted = _verb(verbs, "drafts", _drafts, "a server's drafts by a trained drafter, for `links`")
    drafted.add_argument("target", help="folder, hub id or GGUF file")
    drafted.add_argument("drafter", type=Path, help="its folder, whose name `links` is told")
    drafted.add_argument("--texts", type=int, default=12, help="of all kinds in turn")
    drafted.add_argument("--tokens", type=int, default=48, help="of an answer")

    shown = _verb(verbs, "tables", _tables, "print, and with --out write, the tables")
    shown.add_argument("--out", type=Path, metavar="DIR")
    shown.add_argument(
        "--suffix",
        default="",
        metavar="WORD",
        help="real_faults becomes real_faults_WORD: of another pair, beside the results there are",
    )
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
    target = answers.opened(args.target, settings)
    every = _prompts(args.work)
    if args.held_out:
        every = [one for one in every if trained.is_held_out(one.key)]
    if args.longest:
        longest: int = args.longest
        every = [one for one in every if len(encoded(target.tokenizer, one)) <= longest]
    by_kind = [
        [prompt for prompt in every if prompt.kind == kind][: args.limit or None]
        for kind in args.kinds
    ]
    # Of every kind in turn: a run that is stopped has some of each.
    chosen = [prompt for some in zip_longest(*by_kind) for prompt in some if prompt is not None]
    answers.answer(target, chosen, args.work / "answers.jsonl", settings)


def _cuts(args: argparse.Namespace) -> None:
    known = Lines(args.work / "answers.jsonl")
    out = Lines(args.work / "cuts.jsonl")
    if args.bundle is not None:
        bundle = Bundle.open(args.bundle)
        loaded = LoadedGraph.load(bundle, threads=args.threads)
        tokenizer = _tokenizer(args.bundle)
        if loaded.graph.records is not None or loaded.graph.features:
            records = _records(args, bundle)
            cuts.by_reader(
                loaded,
                args.bundle.name,
                tokenizer,
                known,
                out,
                args.after,
                args.share,
                records=records,
            )
        else:
            sibling = Sibling(args.bundle, threads=args.threads)
            cuts.by_bundle(sibling, tokenizer, known, out, args.after, args.share)
    if args.model is not None:
        settings = answers.Settings(sessions=args.sessions)
        model = answers.opened(args.model, settings)
        way = f"{Path(args.model).name}, {model.machine.dtype}"
        cuts.by_target(way, model, known, out, args.after, args.share)
    if args.humaneval is not None:
        if args.bundle is None:
            raise UsageError("--humaneval reads the tokenizer of --bundle: give both")
        judged = Lines(args.work / "judged.jsonl")
        cuts.judge(problems(args.humaneval), known, out, _tokenizer(args.bundle), judged)


def _records(args: argparse.Namespace, bundle: Bundle) -> cuts.Records | None:
    """What the drafter of a bundle reads behind a cut, if it is to go on there."""
    if args.target is None and args.drafter is None:
        if 0 not in args.after:
            raise UsageError(
                f"{args.bundle} reads the target: behind a cut it has records",
                hint="give --target and --drafter, of which they are made",
            )
        return None
    if args.target is None or args.drafter is None:
        raise UsageError("records are made of --target by --drafter: give both")
    return cuts.Records.of(bundle, args.target, args.drafter, args.work / trained.STATES)


def _guesses(args: argparse.Namespace) -> None:
    sibling = Sibling(args.bundle, threads=args.threads)
    acceptance.guess(
        sibling,
        Lines(args.work / "answers.jsonl"),
        Lines(args.work / "guesses.jsonl"),
    )


_AT_ONCE = 8
"""Answers of which all ways are run before the next ones: a run that is stopped has some of each."""


def _exact(args: argparse.Namespace) -> None:
    out = Lines(args.work / "exact.jsonl")
    targets = {
        shape: answers.opened(
            args.target,
            answers.Settings(sessions=args.sessions, exact=shape == exact.SHAPES[0]),
        )
        for shape in exact.SHAPES[: 1 if args.default_alone else None]
    }
    any_target = targets[exact.SHAPES[0]]
    by_temperature = []
    for temperature in (0.0, 1.0):
        tasks = [
            answers.task_of(any_target, prompt, temperature, args.tokens)
            for prompt in _prompts(args.work)
        ]
        if not args.cut:
            tasks = [task for task in tasks if len(task.ids) <= args.prompt]
        tasks = [
            replace(task, ids=task.ids[-args.prompt :], stop=(), grammar=None) for task in tasks
        ]
        tasks.sort(key=lambda task: zlib.crc32(task.key.encode()))
        by_temperature.append(tasks[: args.answers])
    some = [task for pair in zip(*by_temperature, strict=True) for task in pair]
    for start in range(0, len(some), _AT_ONCE):
        part = some[start : start + _AT_ONCE]
        for shape, target in targets.items():
            exact.alone(target, shape, part, out)
            exact.mixed(target, shape, part, out, sessions=args.sessions)


def _faults(args: argparse.Namespace) -> None:
    asked = Lines(args.work / "faults.jsonl")
    judged = Lines(args.work / "faults_judged.jsonl")
    tasks = _short_tasks(args, args.answers, longest=args.prompt)
    asking = faults.ask(
        args.target,
        args.bundle,
        tasks,
        asked,
        threads=args.threads,
        server_drafter=args.server_drafter,
    )
    asyncio.run(asking)
    if args.threads:
        torch.set_num_threads(args.threads)
    target = open_target(args.target, faults.options_of(args.target, threads=args.threads))
    faults.judge(target, tasks, asked, judged)


def _everyday(args: argparse.Namespace) -> None:
    measuring = everyday.measure(
        args.target,
        args.bundle,
        _prompts(args.work),
        Lines(args.work / "everyday.jsonl"),
        prompt_tokens=args.prompt,
        threads=args.threads,
        scenes=args.scenes,
    )
    asyncio.run(measuring)


def _in_any_order(work: Path) -> list[Prompt]:
    """The prompts of a folder, those of all kinds mixed, the same in every run."""
    return sorted(_prompts(work), key=lambda prompt: zlib.crc32(prompt.key.encode()))


def _short_tasks(args: argparse.Namespace, count: int, *, longest: int = _SHORT) -> list[Task]:
    """So many questions in any order, greedy and sampled in turn."""
    codec = TextCodec.of(Bundle.open(args.bundle))
    tasks: list[Task] = []
    for number, prompt in enumerate(_in_any_order(args.work)):
        if len(tasks) == count:
            break
        temperature = float(number % 2)
        ids = codec.plain(codec.chat(prompt.messages))
        if len(ids) <= longest and not prompt.tools:
            sampling = answers.sampling_of(prompt.key, temperature)
            tasks.append(Task(answers.key_of(prompt, temperature), ids, args.tokens, sampling))
    return tasks


def _forwards(args: argparse.Namespace) -> None:
    out = Lines(args.work / "forwards.jsonl")
    forwards.measure(args.target, out, threads=args.threads, library=args.library)


def _beside(args: argparse.Namespace) -> None:
    codec = TextCodec.of(Bundle.open(args.bundle))
    ids: list[int] = []
    for prompt in _prompts(args.work):
        ids += codec.plain(codec.chat(prompt.messages))
        if len(ids) >= args.prompt:
            break
    asking = serving.beside(
        args.target,
        args.bundle,
        ids[: args.prompt],
        Lines(args.work / "beside.jsonl"),
        threads=args.threads,
    )
    asyncio.run(asking)


_QUESTIONS = 60
"""Different questions of a crowd, which then begins anew: each gets the same answer every time."""


def _crowd(args: argparse.Namespace) -> None:
    asking = serving.crowd(
        args.target,
        args.bundle,
        _short_tasks(args, _QUESTIONS),
        Lines(args.work / "crowd.jsonl"),
        clients=args.clients,
        minutes=args.minutes,
        threads=args.threads,
    )
    asyncio.run(asking)


_PEERS_KINDS = ("code", "chat")
"""HumanEval and questions of a chat."""
_PEERS_PROMPT = 200
"""Tokens of their prompts at most."""


def _peers(args: argparse.Namespace) -> None:
    out = Lines(args.work / "peers.jsonl")
    if "prompt" not in out:
        peers.device_steps(args.bundle, args.sibling, out, threads=args.threads)
    codec = TextCodec.of(Bundle.open(args.bundle))
    some: list[tuple[str, list[int]]] = []
    for prompt in _in_any_order(args.work):
        if prompt.kind in _PEERS_KINDS and len(some) < args.prompts:
            ids = codec.plain(codec.chat(prompt.messages))
            if len(ids) <= _PEERS_PROMPT:
                some.append((answers.key_of(prompt, 0.0), ids))
    peers.speeds(
        args.bundle,
        args.target,
        args.sibling,
        some,
        out,
        tokens=args.tokens,
        threads=args.threads,
    )
    assisted.speeds(
        args.target,
        args.sibling,
        some[: args.assisted],
        out,
        tokens=args.tokens,
        threads=args.threads,
        dtype=args.dtype,
    )


def _mixture(args: argparse.Namespace) -> None:
    path = args.work / f"mixture-{args.layers}.gguf"
    if not path.exists():
        args.work.mkdir(parents=True, exist_ok=True)
        begun = path.with_suffix(".begun")
        mixture.make(begun, layers=args.layers).rename(path)
    out = Lines(args.work / "mixture.jsonl")
    mixture.measure(
        path,
        out,
        tokens=args.tokens,
        threads=args.threads,
        chances=args.chances,
        passes=args.passes,
    )


def _links(args: argparse.Namespace) -> None:
    settings = links.Settings(prompts=args.prompts, tokens=args.tokens, drafter=args.drafter)
    links.measure(args.work, args.bundle, settings)


def _split(args: argparse.Namespace) -> None:
    answered = Lines(args.work / "answers.jsonl")
    parts = trained.split(answered, longest=args.longest, tokens=args.tokens)
    trained.write_split(args.work, parts)
    tokens = sum(len(line["ids"]) for line in parts.train)
    print(
        f"{len(parts.train)} answers of {tokens:,} tokens to train with, {len(parts.held)} held out"
    )


def _need_held(work: Path) -> None:
    if not (work / "held.jsonl").exists():
        raise UsageError(f"no held-out answers in {work}", hint="run the verb `split` first")


def _trained(args: argparse.Namespace) -> None:
    _need_held(args.work)
    trained.measure(args.target, args.drafter, args.bundle, args.work, in_step=args.in_step)


def _drafts(args: argparse.Namespace) -> None:
    _need_held(args.work)
    trained.draft(args.target, args.drafter, args.work, texts=args.texts, tokens=args.tokens)


_Figures = Callable[[Lines], dict[str, Any]]
_Table = Callable[[dict[str, Any]], str]


def _tables(args: argparse.Namespace) -> None:
    @cache
    def lines(name: str) -> Lines:
        return Lines(args.work / f"{name}.jsonl")

    def of_cuts(judged: Lines) -> dict[str, Any]:
        cuts.check(lines("answers"), judged)
        return cuts.figures(lines("answers"), judged)

    def of_drafts(guessed: Lines) -> dict[str, Any]:
        acceptance.check(lines("answers"), guessed)
        return acceptance.figures(lines("answers"), guessed)

    def of_faults(asked: Lines) -> dict[str, Any]:
        return faults.figures(asked, lines("faults_judged"))

    def of_trained(learnt: Lines) -> dict[str, Any]:
        held = list(lines("held").found.values())
        train = list(read(args.work / "train.jsonl"))
        return trained.figures(held, lines("guesses"), learnt, train)

    # By the name of a result: the lines that it is made of, and what makes its figures and tables.
    results: dict[str, tuple[str, _Figures, _Table]] = {
        "real_cuts": ("judged", of_cuts, cuts.tables),
        "real_drafts": ("guesses", of_drafts, acceptance.tables),
        "real_exact": ("exact", exact.figures, exact.tables),
        "real_peers": ("peers", peers.figures, peers.tables),
        "real_forwards": ("forwards", forwards.figures, forwards.tables),
        "real_beside": ("beside", serving.beside_figures, serving.beside_tables),
        "real_crowd": ("crowd", serving.crowd_figures, serving.crowd_tables),
        "real_mixture": ("mixture", mixture.figures, mixture.tables),
        "real_everyday": ("everyday", everyday.figures, everyday.tables),
        "real_faults": ("faults", of_faults, faults.tables),
        "real_links": ("links", links.figures, links.tables),
        "real_trained": ("trained", of_trained, trained.tables),
    }
    for name, (file, figures, table) in results.items():
        if lines(file).found:
            _show(args, name, figures(lines(file)), table)


def _show(
    args: argparse.Namespace,
    name: str,
    result: dict[str, Any],
    table: _Table,
) -> None:
    if result.get("runs") == []:
        return  # nothing of it is whole yet
    text = table(result)
    print(text, file=sys.stdout)
    if args.out is not None:
        if args.suffix:
            name = f"{name}_{args.suffix}"
        write_result(args.out / name, json.loads(json.dumps(result)), text)


def _tokenizer(bundle: Path) -> Tokenizer:
    return Tokenizer.from_file(str(bundle / "shared" / "tokenizer.json"))


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.real", main))
