"""The command line of `moa-train`, and its settings. Only making settings imports torch."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moa import __version__
from moa.cli.command_line import CommandParser, given_fields
from moa.drafters.attention.config import AttentionConfig
from moa.errors import UsageError

if TYPE_CHECKING:
    from moa.drafters.attention.training import DistillSettings
    from moa.training.loop import LoopSettings
    from moa.training.masks import AnchorRule

EXAMPLES = """\
examples:
  moa-train meta-llama/Llama-3.1-8B-Instruct --data chats.jsonl --generate --out drafter
  moa-train ./target --data texts/ notes.txt --out drafter --steps 2000 --length 512
  moa-train ./target --data HuggingFaceH4/ultrachat_200k:train_sft --out drafter --paper --tli 1
  moa-train ./target --data chats.jsonl --out drafter --init published-drafter/ --learning-rate 3e-4
  moa-train ./target --data chats.jsonl --out drafter --states
  moa-train Qwen/Qwen3-32B --data chats.jsonl --out drafter --body Qwen/Qwen3-0.6B --freeze-body
  torchrun --nproc-per-node 8 -m moa.training.cli ./target --data chats.jsonl --out drafter --device cuda

Repeat the command to continue a stopped run.
"""

PAPER_LOOP: dict[str, Any] = {"optimizer": "adam", "learning_rate": 6e-4}
SHAPE = (
    *(
        f"{part}_{what}"
        for part in ("self_attention", "cross_attention", "layer_self_attention")
        for what in ("intermediate_size", "num_key_value_heads")
    ),
    "num_attention_heads",
    "layers",
    "final_norm",
    "final_state",
)
USEFUL_TOKENS = 5_000_000
"""Tokens that a run sees unless asked otherwise: several hundred steps, fewer make no drafter."""
MOST_EPOCHS = 20.0
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Torch's names of them."""
_SHORT = {"self_attention": "sa", "cross_attention": "ca", "layer_self_attention": "lsa"}


def parser() -> argparse.ArgumentParser:
    """All options; a default of None means the settings' own default, or that of `--paper`."""
    top = CommandParser(
        prog="moa-train",
        description="Train a Mixture-of-Attentions drafter beside a frozen target.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    top.add_argument("target", help="folder or hub id of the target model")
    top.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="SOURCE",
        help="jsonl, text files, folders, dataset ids",
    )
    top.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="the drafter's folder, and checkpoints",
    )
    top.add_argument(
        "--states",
        action="store_true",
        help="train a drafter of the target's states, for server and device; without it a Mixture of Attentions",
    )
    top.add_argument(
        "--init", type=Path, metavar="DIR", help="start from this drafter: ours or the paper's"
    )
    top.add_argument(
        "--body",
        metavar="MODEL",
        help="the body is this small model of the same tokenizer (folder or hub id)",
    )
    top.add_argument(
        "--freeze-body",
        action="store_true",
        help="with --body MODEL: train only the attention to records",
    )
    top.add_argument(
        "--paper",
        action="store_true",
        help="losses, masks, optimiser, rate of the paper's public code",
    )
    top.add_argument(
        "--dry-run",
        action="store_true",
        help="sizes, and the measured memory and time of eight steps; no training",
    )
    top.add_argument(
        "--json", action="store_true", help="print the result as one JSON object on stdout"
    )
    top.add_argument("--quiet", action="store_true", help="no progress")
    _add_generate(top.add_argument_group("answers of the target's own"))
    _add_shape(top.add_argument_group("shape (sizes default to a share of the target's)"))
    _add_run(top.add_argument_group("the run"))
    return top


def _add_generate(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--generate", action="store_true", help="the target answers the data's prompts first, once"
    )
    group.add_argument(
        "--generate-only", action="store_true", help="stop after that (before a run under torchrun)"
    )
    group.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    group.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")


def _add_shape(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tli", type=int, metavar="N", help="borrowed target layers after CA (default 0)"
    )
    group.add_argument(
        "--layers", type=int, metavar="N", help="layers of the body (default 1, the paper's)"
    )
    group.add_argument("--heads", type=int, dest="num_attention_heads", metavar="N")
    for part, short in _SHORT.items():
        group.add_argument(
            f"--{short}-intermediate", type=int, dest=f"{part}_intermediate_size", metavar="N"
        )
        group.add_argument(
            f"--{short}-kv-heads", type=int, dest=f"{part}_num_key_value_heads", metavar="N"
        )
    yes_or_no = argparse.BooleanOptionalAction
    group.add_argument(
        "--final-norm", action=yes_or_no, help="a norm of the drafter's own before the head"
    )
    group.add_argument(
        "--final-state",
        action=yes_or_no,
        help="give activations the target's final hidden state too",
    )


def _add_run(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--spacing",
        metavar="LOW-HIGH[:SHARE],...",
        help="tokens between anchors, and the share of documents: 6-14:0.6,32-64:0.1,cold:0.2; cold ones see no"
        " activation at all, the rest their prompt's alone",
    )
    length = group.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int)
    length.add_argument(
        "--epochs",
        type=float,
        help="default: 1, and more of little data, until 5M tokens are seen, 20 at most",
    )
    group.add_argument("--batch", type=int, help="rows per process and micro-step (default 16)")
    group.add_argument("--accumulate", type=int, help="micro-steps per step (default 1)")
    group.add_argument("--length", type=int, default=512, help="tokens in a row (default 512)")
    group.add_argument("--learning-rate", type=float)
    group.add_argument("--optimizer", choices=["muon", "adam"])
    group.add_argument(
        "--precision",
        choices=["bf16", "fp32"],
        help="default: bf16 where the device computes in it, else fp32",
    )
    group.add_argument(
        "--weights",
        choices=sorted(PRECISIONS),
        default="fp32",
        help="precision of the written file",
    )
    group.add_argument(
        "--gradient-checkpointing", action="store_true", help="less memory, about a third more time"
    )
    group.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    group.add_argument("--seed", type=int)
    group.add_argument("--checkpoint-every", type=int, metavar="STEPS")


def loop_settings(args: argparse.Namespace, rows: int, world: int) -> LoopSettings:
    """The loop's settings; `rows` of data turn epochs into steps."""
    from moa.training.loop import LoopSettings

    chosen: dict[str, Any] = (PAPER_LOOP if args.paper else {}) | given_fields(args, LoopSettings)
    if "steps" not in chosen:
        few = USEFUL_TOKENS / (rows * args.length)
        epochs = min(max(1.0, few), MOST_EPOCHS) if args.epochs is None else args.epochs
        if not 0 < epochs < float("inf"):
            raise UsageError(f"--epochs must be above 0, not {epochs}")
        settings = LoopSettings(**chosen, steps=1)
        chosen["steps"] = max(
            1, round(epochs * rows / (settings.batch * settings.accumulate * world))
        )
    return LoopSettings(**chosen)


def distill_settings(args: argparse.Namespace) -> DistillSettings:
    """Losses and masks."""
    from moa.drafters.attention.training import PAPER, DistillSettings

    settings = PAPER if args.paper else DistillSettings()
    anchors = settings.anchors if args.spacing is None else parse_spacings(args.spacing)
    return dataclasses.replace(
        settings, anchors=dataclasses.replace(anchors, strict=settings.anchors.strict)
    )


def shape_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """The dimensions that were given, by their name in the drafter's config."""
    return {name: value for name in SHAPE if (value := getattr(args, name)) is not None}


def server_shape(args: argparse.Namespace) -> dict[str, int]:
    """The shape of a `StateDrafter`; what only the device's drafter has is refused."""
    theirs = {
        "num_attention_heads": "num_attention_heads",
        "self_attention_intermediate_size": "intermediate_size",
        "self_attention_num_key_value_heads": "num_key_value_heads",
    }
    others = {
        "init",
        "body",
        "freeze_body",
        "paper",
        "tli",
        "spacing",
        "gradient_checkpointing",
        *SHAPE,
    } - set(theirs)
    for action in parser()._actions:
        if action.dest in others and getattr(args, action.dest) != action.default:
            raise UsageError(
                f"{action.option_strings[0]} is not for --states", hint="leave one of them out"
            )
    return {
        own: value for name, own in theirs.items() if (value := getattr(args, name)) is not None
    }


def check_body(args: argparse.Namespace) -> None:
    """Refuse a body that does not fit the other options."""
    if args.body is not None and args.init is not None:
        raise UsageError("--init brings its own body: --body cannot be given beside it")
    if args.freeze_body and args.body is None:
        raise UsageError("--freeze-body is for --body MODEL: no other body is worth freezing")


def initial_config(args: argparse.Namespace, config: AttentionConfig) -> AttentionConfig:
    """The shape of `--init`'s drafter. The number of borrowed layers may be changed: they are not
    part of its weights."""
    if given := sorted(shape_overrides(args)):
        raise UsageError(
            f"--init brings its own shape, {given[0].replace('_', ' ')} cannot be changed"
        )
    return dataclasses.replace(config, **({} if args.tli is None else {"tli": args.tli}))


def parse_spacings(text: str) -> AnchorRule:
    """`6-14:0.6,32-64:0.2,cold:0.1`; one number is both ends, and one share may be left out: it is
    the rest."""
    from moa.training.masks import AnchorRule, Spacing

    found: list[tuple[str, float | None]] = []
    for piece in text.split(","):
        span, colon, share = piece.partition(":")
        try:
            found.append((span, float(share) if colon else None))
        except ValueError:
            raise UsageError(f"--spacing {piece!r}: its share must be a number") from None
    left = 1.0 - sum(given for _, given in found if given is not None)
    if sum(given is None for _, given in found) > 1:
        raise UsageError(f"--spacing {text!r}: only one spacing may leave its share out")
    spacings = []
    cold = 0.0
    for span, given in found:
        part = left if given is None else given
        if span == "cold":
            cold += part
            continue
        low, _, high = span.partition("-")
        try:
            spacings.append(Spacing(int(low), int(high or low), part))
        except ValueError:
            raise UsageError(
                f"--spacing {span!r} is not LOW-HIGH or LOW-HIGH:SHARE, nor cold:SHARE"
            ) from None
    return AnchorRule(tuple(spacings), cold=cold)
