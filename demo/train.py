"""`python -m demo.train`: makes the embedded pair, each stage from where it was left.

tokenizer   a few seconds target      a Llama of 7M parameters on exercises, code and English, from
the weights it already has (--init) drafter     its MoA drafter, with this project's own trainer
prompts     the held-out and training prompts that `moa-export` measures the embedded pair with rows
only the packed text of all courses, for training other drafters on it; with --own the target's own
text

What each is trained on, and for how long, is in `demo/recipe.py`; --dry-run prints it. Under
torchrun several processes share the rows of a step.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from demo import corpus, natural
from demo import tokenizer as demo_tokenizer
from demo.everyday import EVERYDAY
from demo.inherit import CALIBRATION_ROWS, inherit
from demo.newcomers import NEWCOMERS
from demo.pretraining import Pretraining
from demo.recipe import (
    COURSES,
    DRAFTER_COURSES,
    DRAFTER_LAYERS,
    DRAFTER_SHAPE,
    LONGEST_CHAT,
    MIXED,
    ROW,
    Course,
    DrafterCourse,
    Mix,
    plan,
)
from demo.skills import Example
from demo.strangers import STRANGERS
from moa.demo import paths
from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import load_attention, new_attention
from moa.drafters.attention.training import Distillation
from moa.errors import run_cli
from moa.model.checkpoint import save_drafter
from moa.target.loading import load_model, load_tokenizer
from moa.target.torch_target import Target
from moa.training.data import Document, PackedRows, pack, pieces
from moa.training.generate import PROMPT_TOKENS, GeneratedAnswers
from moa.training.loop import Loop, join_process_group
from moa.training.sources import DocumentReader, examples
from moa.training.teacher import Teacher

NAMES = tuple(dict.fromkeys(course.name for course in (*COURSES, *DRAFTER_COURSES)))
SLOTS = 32
"""Prompts that the target answers at a time."""
MOST_PROMPTS = 128
"""Held-out prompts that `moa/demo/prompts.json` holds."""


def chat_document(tokens: PreTrainedTokenizerBase, examples: list[Example]) -> Document:
    """Exercises as one conversation in the tokenizer's chat template; the answers, and where they
    end, are wanted."""
    ids: list[int] = []
    wanted: list[bool] = []
    for turn, example in enumerate(examples):
        question = f"<|user|>\n{example.prompt}<|end|>\n<|assistant|>\n"
        prompt = tokens.encode(("" if turn else "<|bos|>") + question, add_special_tokens=False)
        answer = tokens.encode(f"{example.answer}<|end|>", add_special_tokens=False)
        newline = tokens.encode("\n", add_special_tokens=False)
        ids += prompt + answer + newline
        wanted += [False] * len(prompt) + [True] * len(answer) + [False] * len(newline)
    return Document(ids, wanted)


def turns(mix: Mix) -> Iterator[Example]:
    """What a user may say next: an exercise as a rule."""
    rng = random.Random(f"turns-{mix.seed}")
    streams = [corpus.talk(mix.seed), corpus.mixed("train", mix.seed)]
    streams += [
        corpus.examples("train", mix.seed, mix.more, times=2),
        corpus.plain(mix.seed),
        corpus.wider(mix.seed),
    ]
    people = mix.plain + mix.wider
    shares = (
        mix.talk,
        MIXED,
        1 - mix.talk - MIXED,
        mix.plain / (1 - people),
        mix.wider / (1 - people),
    )
    held_out = (
        {question.prompt for question in (*EVERYDAY, *STRANGERS, *NEWCOMERS)} if people else set()
    )
    while True:
        turn = next(rng.choices(streams, shares)[0])
        if turn.prompt not in held_out:
            yield turn


def _chats(tokens: PreTrainedTokenizerBase, mix: Mix, longest: int) -> Iterator[Document]:
    rng = random.Random(mix.seed)
    said = turns(mix)
    while True:
        count = rng.choice([1, 1, 1, *range(2, longest + 1)])
        yield chat_document(tokens, [next(said) for _ in range(count)])


def _plain(tokens: PreTrainedTokenizerBase, texts: Iterator[str]) -> Iterator[Document]:
    return (
        Document.text(tokens.encode("<|bos|>" + text, add_special_tokens=False)) for text in texts
    )


def _up_to(documents: Iterator[Document], count: int) -> Iterator[Document]:
    for document in documents:
        yield document
        count -= len(document.ids)
        if count <= 0:
            return


def documents(
    tokens: PreTrainedTokenizerBase, mix: Mix, longest_chat: int = LONGEST_CHAT
) -> Iterator[Document]:
    """The mix's text, kind by kind; packed rows are shuffled when read."""
    yield from _up_to(_chats(tokens, mix, longest_chat), mix.exercises)
    yield from _up_to(_plain(tokens, natural.code("train")), mix.code)
    yield from _up_to(_plain(tokens, natural.english("train")), mix.english)


def packed(tokens: PreTrainedTokenizerBase, course: Course, work: Path) -> PackedRows:
    """A course's rows, made once."""
    folder = work / course.name / "data"
    if not (folder / "marks.npy").exists():
        pack(documents(tokens, course.mix), ROW, folder)
    return PackedRows(folder)


def own_rows(
    target: Path,
    course: Course,
    work: Path,
    temperature: float,
    *,
    slots: int = SLOTS,
    quiet: bool = False,
) -> PackedRows:
    """Rows of a course's prompts with the target's own answers, and of the beginnings of its texts
    with the target's own continuations; made once, and an interrupted run is continued."""
    folder = work / f"{course.name}-own"
    loaded = load_model(target)
    made_with = {
        "mix": asdict(course.mix),
        "target": loaded.facts.weights_id,
        "max_new_tokens": ROW - PROMPT_TOKENS,
        "temperature": temperature,
        "seed": course.mix.seed,
    }
    answers = GeneratedAnswers(folder, made_with)
    reader = DocumentReader(load_tokenizer(loaded.folder), loaded.facts.vocab_size)
    if not answers.complete():
        # One question in a chat: after another the target would answer to text that is not its own.
        text = pieces(documents(reader.tokenizer, course.mix, longest_chat=1), ROW)
        engine = Target(
            loaded.model, loaded.facts, slots=slots, capacity=2 * ROW, folder=loaded.folder
        )
        answers.write(engine, (document.prompt(PROMPT_TOKENS) for document in text), quiet=quiet)
    if not (folder / "data" / "marks.npy").exists():
        lines = examples([str(answers.path)])
        pack(
            (document for line in lines for document in reader.documents(line)),
            ROW,
            folder / "data",
        )
    return PackedRows(folder / "data")


def target_config(vocabulary: int) -> LlamaConfig:
    """The demo's target: 7.1M parameters."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=4,
        pad_token_id=0,
    )


def train_target(start: Path, out: Path, work: Path, courses: Sequence[Course] = COURSES) -> None:
    """Train on from the weights in `start`, or from nothing where it has none, and write half
    precision to `out`."""
    join_process_group(torch.device("cpu"))
    world = dist.get_world_size() if dist.is_initialized() else 1
    tokens = AutoTokenizer.from_pretrained(start)
    torch.manual_seed(0)
    if (start / "model.safetensors").exists():
        model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    else:
        model = LlamaForCausalLM(target_config(len(tokens)))
    for course in courses:
        settings = replace(course.settings, batch=course.settings.batch // world)
        Loop(Pretraining(model), packed(tokens, course, work), settings, work / course.name).run()
    if not dist.is_initialized() or dist.get_rank() == 0:
        # float16 keeps three more bits of every weight than bfloat16, and the range is not needed.
        model.half().save_pretrained(out)
        tokens.save_pretrained(out)


def train_drafter(
    target: Path,
    out: Path,
    work: Path,
    courses: Sequence[DrafterCourse] = DRAFTER_COURSES,
    start: Path | None = None,
) -> None:
    """Train the target's MoA drafter course by course, each from the weights of the one before, and
    write it to `out` in half precision. It goes on from the weights in `start`, or begins as layers
    of its target."""
    join_process_group(torch.device("cpu"))
    world = dist.get_world_size() if dist.is_initialized() else 1
    loaded = load_model(target)
    torch.manual_seed(courses[0].settings.seed)
    teacher, tokens = Teacher(loaded.model, torch.bfloat16), AutoTokenizer.from_pretrained(target)
    if start:
        drafter = load_attention(start, loaded.model, loaded.facts, torch.float32).train()
    else:
        drafter = new_attention(
            AttentionConfig.for_target(loaded.facts, **DRAFTER_SHAPE), loaded.model
        )
        first = packed(tokens, courses[0].rows, work)
        inherit(drafter, teacher, DRAFTER_LAYERS, first.batch(0, 0, CALIBRATION_ROWS))
    for course in courses:
        task = Distillation(drafter, teacher, course.distill)
        settings = replace(course.settings, batch=course.settings.batch // world)
        Loop(
            task, packed(tokens, course.rows, work), settings, work / f"drafter-{course.name}"
        ).run()
    if not dist.is_initialized() or dist.get_rank() == 0:
        save_drafter(drafter, out, torch.float16)


def write_prompts(out: Path) -> None:
    """Held-out prompts, and eight training prompts for each."""
    counts: dict[natural.Split, int] = {"heldout": MOST_PROMPTS, "train": 8 * MOST_PROMPTS}
    prompts = {
        split: [e.prompt for e in islice(corpus.examples(split, 1234), n)]
        for split, n in counts.items()
    }
    out.write_text(json.dumps(prompts, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


def _write_rows(args: argparse.Namespace) -> None:
    tokens = AutoTokenizer.from_pretrained(args.target)
    for course in {
        course.name: course for course in (*COURSES, *(lesson.rows for lesson in DRAFTER_COURSES))
    }.values():
        if args.course in (None, course.name):
            chosen = course if args.tokens is None else course.of(args.tokens)
            if args.own is None:
                rows, name = packed(tokens, chosen, args.work), chosen.name
            else:
                rows, name = (
                    own_rows(args.target, chosen, args.work, args.own),
                    f"{chosen.name}-own",
                )
            print(f"{name}: {len(rows):,} rows in {args.work / name / 'data'}")


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", choices=["tokenizer", "target", "drafter", "prompts", "rows"])
    parser.add_argument(
        "--target", type=Path, default=paths().target, help="folder of the target and its tokenizer"
    )
    parser.add_argument(
        "--init",
        type=Path,
        help="folder of the weights to go on from (target's default: --target; drafter's: none)",
    )
    parser.add_argument(
        "--drafter", type=Path, default=paths().drafter, help="folder of the finished drafter"
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("work"),
        help="folder for data and checkpoints (default: ./work)",
    )
    parser.add_argument(
        "--own", type=float, metavar="T", help="rows of the target's own text at this temperature (0: greedy): its"
        " answers to the exercises, and its continuations of the texts' beginnings",
    )  # fmt: skip
    parser.add_argument("--course", choices=NAMES, help="only this course, or its rows")
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="rows of about N tokens a course, in the same mix"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the plan of both trainings, and train nothing"
    )
    args = parser.parse_args()
    if args.stage != "rows" and (args.own, args.tokens) != (None, None):
        parser.error("--own and --tokens are for rows")
    courses = [course for course in COURSES if args.course in (None, course.name)]
    lessons = [course for course in DRAFTER_COURSES if args.course in (None, course.name)]
    if not (lessons if args.stage == "drafter" else courses):
        parser.error(f"the {args.stage} has no course {args.course}")
    if args.dry_run:
        print(plan())
        return 0
    if args.stage == "tokenizer":
        demo_tokenizer.train(args.target)
        return 0
    if args.stage == "prompts":
        write_prompts(paths().prompts)
    elif args.stage == "rows":
        _write_rows(args)
    elif args.stage == "target":
        train_target(args.init or args.target, args.target, args.work, courses)
    else:
        train_drafter(args.target, args.drafter, args.work, lessons, args.init)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("demo.train", main))
