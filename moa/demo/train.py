"""`python -m moa.demo.train`: makes the embedded pair from nothing, each stage from where it was left.

tokenizer   a few seconds
target      a Llama of 7M parameters on the exercises and the standard library
drafter     its MoA drafter, with this project's own trainer
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from moa.config import DrafterConfig
from moa.demo import corpus, paths
from moa.demo import tokenizer as demo_tokenizer
from moa.demo.skills import Example
from moa.errors import run_cli
from moa.model.checkpoint import new_drafter, save_drafter
from moa.model.loading import load_model
from moa.training.data import Document, PackedRows, pack
from moa.training.distill import Distillation, DistillSettings
from moa.training.loop import Loop, LoopSettings
from moa.training.masks import AnchorRule, Spacing
from moa.training.pretrain import Pretraining
from moa.training.teacher import Teacher

ROW = 256
DRAFTER_SHAPE = {
    "num_attention_heads": 8,
    "self_attention_num_key_value_heads": 4,
    "self_attention_intermediate_size": 512,
    "cross_attention_num_key_value_heads": 4,
    "cross_attention_intermediate_size": 512,
    "layer_self_attention_num_key_value_heads": 8,
    "layer_self_attention_intermediate_size": 256,
    "final_state": True,
}
DRAFTER_TRAINING = DistillSettings(anchors=AnchorRule(spacings=(Spacing(4, 12, 0.75), Spacing(32, 64, 0.15))))
"""Mostly a few tokens behind, as in drafting; now and then far behind or with the prompt alone, as when offline."""
LONGEST_CHAT = 3
"""Exercises in one conversation, so that the target learns to go on after an answer."""


@dataclass(frozen=True)
class Phase:
    """A stretch of the target's training: up to step `until`; the skills in `more` come `times` as often."""

    name: str
    until: int
    exercise_tokens: int
    library_tokens: int
    more: tuple[str, ...] = ()
    times: int = 3


@dataclass(frozen=True)
class Course:
    """One learning-rate schedule, over one or more phases."""

    name: str
    learning_rate: float
    phases: tuple[Phase, ...]


# What takes working out is learned last: by the end of a phase the other skills are there.
WORKED_OUT = ("arithmetic", "word_problem", "units", "date", "table", "filter", "function", "edit")
HARDEST = ("table", "filter", "function")
TARGET_COURSES = (
    Course(
        "learn",
        3e-3,
        (Phase("general", 2000, 10_000_000, 7_500_000), Phase("practice", 3000, 4_500_000, 2_500_000, WORKED_OUT)),
    ),
    Course("polish", 1.5e-3, (Phase("polish", 500, 8_000_000, 2_500_000, HARDEST),)),
    Course("sharpen", 2e-3, (Phase("sharpen", 450, 2_600_000, 400_000, HARDEST, times=8),)),
)


def chat_document(tokens: PreTrainedTokenizerBase, examples: list[Example]) -> Document:
    """Exercises as one conversation in the tokenizer's chat template; the answers, and where they end, are wanted."""
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


def documents(tokens: PreTrainedTokenizerBase, phase: Phase, seed: int) -> Iterator[Document]:
    """A phase's text, exercises first; packed rows are shuffled when read."""
    rng = random.Random(seed)
    stream = corpus.examples("train", seed, phase.more, phase.times)
    count = 0
    while count < phase.exercise_tokens:
        turns = rng.choice([1, 1, 1, *range(2, LONGEST_CHAT + 1)])
        document = chat_document(tokens, [next(stream) for _ in range(turns)])
        count += len(document.ids)
        yield document
    count = 0
    for number in itertools.count():
        for text in corpus.stdlib_text("train"):
            if count >= phase.library_tokens:
                return
            ids = tokens.encode("<|bos|>" + text, add_special_tokens=False)
            cut = 1 + 85 * number % ROW  # each pass cuts the files into rows at other places
            yield Document.text(ids[:cut])
            yield Document.text(ids[cut:])
            count += len(ids)


def packed(tokens: PreTrainedTokenizerBase, phase: Phase, work: Path, seed: int) -> PackedRows:
    """A phase's rows, made once."""
    folder = work / "data" / phase.name
    if not (folder / "marks.npy").exists():
        pack(documents(tokens, phase, seed), ROW, folder)
    return PackedRows(folder)


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


def train_target(folder: Path, work: Path) -> None:
    """Train the target and write it to `folder` in half precision."""
    tokens = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(target_config(len(tokens)))
    for course in TARGET_COURSES:
        steps = course.phases[-1].until
        settings = LoopSettings(steps=steps, batch=16, learning_rate=course.learning_rate, warmup=steps // 30)
        for number, phase in enumerate(course.phases):
            loop = Loop(Pretraining(model), packed(tokens, phase, work, number), settings, work / course.name)
            loop.resume()
            loop.run(stop_after=max(0, phase.until - loop.step))
    # float16 keeps three more bits of every weight than bfloat16, and the range is not needed.
    model.half().save_pretrained(folder)


def train_drafter(target: Path, out: Path, work: Path, settings: LoopSettings) -> None:
    """Train the target's MoA drafter on the target's own training text and write it to `out` in half precision."""
    loaded = load_model(target)
    torch.manual_seed(settings.seed)
    drafter = new_drafter(DrafterConfig.for_target(loaded.facts, **DRAFTER_SHAPE), loaded.model)
    rows = packed(AutoTokenizer.from_pretrained(target), TARGET_COURSES[-1].phases[-1], work, 0)
    task = Distillation(drafter, Teacher(loaded.model, torch.bfloat16), DRAFTER_TRAINING)
    Loop(task, rows, settings, work / "drafter").run()
    save_drafter(drafter, out, torch.float16)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m moa.demo.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["tokenizer", "target", "drafter"])
    parser.add_argument("--target", type=Path, default=paths().target, help="folder of the target and its tokenizer")
    parser.add_argument("--drafter", type=Path, default=paths().drafter, help="folder of the finished drafter")
    parser.add_argument(
        "--work", type=Path, default=Path("work"), help="folder for data and checkpoints (default: ./work)"
    )
    parser.add_argument("--steps", type=int, default=3000, help="of the drafter (default: %(default)s)")
    args = parser.parse_args()
    if args.stage == "tokenizer":
        demo_tokenizer.train(args.target)
        return 0
    if args.stage == "target":
        train_target(args.target, args.work)
    else:
        settings = LoopSettings(steps=args.steps, batch=16, learning_rate=3e-3, warmup=100)
        train_drafter(args.target, args.drafter, args.work, settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("moa.demo.train", main))
