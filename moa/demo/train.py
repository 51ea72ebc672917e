"""`python -m moa.demo.train`: makes the embedded pair, each stage from where it was left.

tokenizer   a few seconds
target      a Llama of 7M parameters on exercises, code and English, from the weights it already has (--init)
drafter     its MoA drafter, with this project's own trainer
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from moa.config import DrafterConfig
from moa.demo import corpus, natural, paths
from moa.demo import tokenizer as demo_tokenizer
from moa.demo.skills import Example
from moa.errors import run_cli
from moa.model.checkpoint import new_drafter, save_drafter
from moa.model.loading import load_model
from moa.training.data import Document, PackedRows, pack
from moa.training.distill import Distillation, DistillSettings
from moa.training.inherit import CALIBRATION_ROWS, inherit
from moa.training.loop import Loop, LoopSettings, join_process_group
from moa.training.masks import AnchorRule, Spacing
from moa.training.pretrain import Pretraining
from moa.training.teacher import Teacher

ROW = 256
DRAFTER_LAYERS = (0, 1, 4, 7)
"""The target's layers that the drafter's body starts from: the four that say most of its text without the others."""
DRAFTER_SHAPE = {
    "layers": len(DRAFTER_LAYERS),
    "num_attention_heads": 8,
    "self_attention_num_key_value_heads": 2,
    "self_attention_intermediate_size": 128,
    "cross_attention_num_key_value_heads": 2,
    "cross_attention_intermediate_size": 32,
    "layer_self_attention_num_key_value_heads": 2,
    "layer_self_attention_intermediate_size": 64,
    "final_norm": True,
    "final_state": True,
}
DRAFTER_TRAINING = DistillSettings(anchors=AnchorRule(spacings=(Spacing(4, 12, 0.45), Spacing(32, 64, 0.08)), cold=0.4))
"""Nearly half a few tokens behind, as in drafting; nearly half with nothing, as without a network; the others far
behind, or with the prompt alone."""
LONGEST_CHAT = 3
"""Exercises in one conversation, so that the target learns to go on after an answer."""


@dataclass(frozen=True)
class Mix:
    """How many tokens of what; the skills in `more` come twice as often."""

    exercises: int
    code: int
    english: int
    more: tuple[str, ...]
    seed: int


TALK, MIXED = 0.08, 0.08
"""Shares of the turns that are small talk, or ask for two skills at once."""


@dataclass(frozen=True)
class Course:
    """A stretch of the target's training: one learning-rate schedule over one mix."""

    name: str
    mix: Mix
    settings: LoopSettings


COURSES = (
    Course(
        "widen",
        Mix(5_000_000, 1_900_000, 1_500_000, ("arithmetic", "word_problem", "filter", "table", "sort", "function"), 7),
        LoopSettings(steps=560, batch=32, learning_rate=2e-3, warmup=30, checkpoint_every=50),
    ),
    Course(
        "sharpen",
        Mix(760_000, 140_000, 120_000, ("edit", "count", "function", "story", "word_problem", "compare"), 8),
        LoopSettings(steps=120, batch=32, learning_rate=1e-3, warmup=10, checkpoint_every=30),
    ),
    Course(
        "practice",
        Mix(2_080_000, 110_000, 110_000, ("edit", "count", "function", "story", "word_problem", "sort"), 9),
        LoopSettings(steps=180, batch=32, learning_rate=1.5e-3, warmup=8, checkpoint_every=30),
    ),
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


def _turns(mix: Mix) -> Iterator[Example]:
    """What a user may say next: an exercise as a rule."""
    rng = random.Random(f"turns-{mix.seed}")
    streams = [corpus.talk(mix.seed), corpus.mixed("train", mix.seed)]
    streams.append(corpus.examples("train", mix.seed, mix.more, times=2))
    while True:
        yield next(rng.choices(streams, (TALK, MIXED, 1 - TALK - MIXED))[0])


def _chats(tokens: PreTrainedTokenizerBase, mix: Mix) -> Iterator[Document]:
    rng = random.Random(mix.seed)
    turns = _turns(mix)
    while True:
        count = rng.choice([1, 1, 1, *range(2, LONGEST_CHAT + 1)])
        yield chat_document(tokens, [next(turns) for _ in range(count)])


def _plain(tokens: PreTrainedTokenizerBase, texts: Iterator[str]) -> Iterator[Document]:
    return (Document.text(tokens.encode("<|bos|>" + text, add_special_tokens=False)) for text in texts)


def _up_to(documents: Iterator[Document], count: int) -> Iterator[Document]:
    for document in documents:
        yield document
        count -= len(document.ids)
        if count <= 0:
            return


def documents(tokens: PreTrainedTokenizerBase, mix: Mix) -> Iterator[Document]:
    """The mix's text, kind by kind; packed rows are shuffled when read."""
    yield from _up_to(_chats(tokens, mix), mix.exercises)
    yield from _up_to(_plain(tokens, natural.code("train")), mix.code)
    yield from _up_to(_plain(tokens, natural.english("train")), mix.english)


def packed(tokens: PreTrainedTokenizerBase, course: Course, work: Path) -> PackedRows:
    """A course's rows, made once."""
    folder = work / course.name / "data"
    if not (folder / "marks.npy").exists():
        pack(documents(tokens, course.mix), ROW, folder)
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


def train_target(start: Path, out: Path, work: Path) -> None:
    """Train on from the weights in `start`, or from nothing where it has none, and write half precision to `out`."""
    join_process_group(torch.device("cpu"))
    world = dist.get_world_size() if dist.is_initialized() else 1
    tokens = AutoTokenizer.from_pretrained(start)
    torch.manual_seed(0)
    if (start / "model.safetensors").exists():
        model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    else:
        model = LlamaForCausalLM(target_config(len(tokens)))
    for course in COURSES:
        settings = replace(course.settings, batch=course.settings.batch // world)
        Loop(Pretraining(model), packed(tokens, course, work), settings, work / course.name).run()
    if not dist.is_initialized() or dist.get_rank() == 0:
        # float16 keeps three more bits of every weight than bfloat16, and the range is not needed.
        model.half().save_pretrained(out)
        tokens.save_pretrained(out)


def train_drafter(target: Path, out: Path, work: Path, settings: LoopSettings) -> None:
    """Train the target's MoA drafter on the target's own training text and write it to `out` in half precision."""
    loaded = load_model(target)
    torch.manual_seed(settings.seed)
    drafter = new_drafter(DrafterConfig.for_target(loaded.facts, **DRAFTER_SHAPE), loaded.model)
    teacher = Teacher(loaded.model, torch.bfloat16)
    task = Distillation(drafter, teacher, DRAFTER_TRAINING)
    rows = packed(AutoTokenizer.from_pretrained(target), COURSES[-1], work)
    inherit(drafter, teacher, DRAFTER_LAYERS, rows.batch(0, 0, CALIBRATION_ROWS))
    Loop(task, rows, settings, work / "drafter").run()
    save_drafter(drafter, out, torch.float16)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m moa.demo.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=["tokenizer", "target", "drafter"])
    parser.add_argument("--target", type=Path, default=paths().target, help="folder of the target and its tokenizer")
    parser.add_argument(
        "--init", type=Path, help="folder of the weights that the target goes on from (default: --target)"
    )
    parser.add_argument("--drafter", type=Path, default=paths().drafter, help="folder of the finished drafter")
    parser.add_argument(
        "--work", type=Path, default=Path("work"), help="folder for data and checkpoints (default: ./work)"
    )
    parser.add_argument("--steps", type=int, default=1000, help="of the drafter (default: %(default)s)")
    args = parser.parse_args()
    if args.stage == "tokenizer":
        demo_tokenizer.train(args.target)
        return 0
    if args.stage == "target":
        train_target(args.init or args.target, args.target, args.work)
    else:
        settings = LoopSettings(steps=args.steps, batch=16, learning_rate=2e-3, warmup=30)
        train_drafter(args.target, args.drafter, args.work, settings)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("moa.demo.train", main))
