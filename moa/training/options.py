"""The command line of `moa-train`, and its settings. Only making settings imports torch."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moa.cli.command_line import CommandParser, given_fields
from moa.errors import UsageError
from moa.version import running_version

if TYPE_CHECKING:
    from moa.training.config import TrainingConfig

EXAMPLES = """\
examples:
  moa-train meta-llama/Llama-3.1-8B-Instruct --data chats.jsonl --generate --out drafter
  moa-train ./target --data texts/ notes.txt --out drafter --steps 2000 --length 512
  moa-train ./target --data HuggingFaceH4/ultrachat_200k:train_sft --out drafter --paper --tli 1
  moa-train ./target --data chats.jsonl --out drafter --init published-drafter/ --learning-rate 3e-4
  moa-train Qwen/Qwen3-32B --data chats.jsonl --out drafter --attention --body Qwen/Qwen3-0.6B --freeze-body
  torchrun --nproc-per-node 8 -m moa.training.cli ./target --data chats.jsonl --out drafter --device cuda

Repeat the command to continue a stopped run.
"""

SHAPE = (
    "self_attention_intermediate_size",
    "self_attention_num_key_value_heads",
    "cross_attention_intermediate_size",
    "cross_attention_num_key_value_heads",
    "layer_self_attention_intermediate_size",
    "layer_self_attention_num_key_value_heads",
    "num_attention_heads",
    "layers",
    "final_norm",
    "final_state",
)
"""Options that are dimensions of a drafter."""
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Precisions of the written file, and torch's names of them."""
_SHORT = {"self_attention": "sa", "cross_attention": "ca", "layer_self_attention": "lsa"}
"""Parts of a drafter, as the beginnings of their options."""


def parser() -> argparse.ArgumentParser:
    """All options; a default of None means the settings' own default, or that of `--paper`."""
    top, _ = _parser()
    return top


def _parser() -> tuple[argparse.ArgumentParser, list[argparse.Action]]:
    """The parser of the command line, and those of its options that are for a Mixture of Attentions
    alone: others are refused with them."""
    top = CommandParser(
        prog="moa-train",
        description="Train a drafter beside a frozen target: of its states, for both ends.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {running_version()}")
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
    # The default, said aloud.
    top.add_argument("--states", action="store_true", help=argparse.SUPPRESS)
    top.add_argument(
        "--init", type=Path, metavar="DIR", help="start from this drafter: ours or the paper's"
    )
    top.add_argument(
        "--dry-run",
        action="store_true",
        help="sizes, and the measured memory and time of a few steps; no training",
    )
    top.add_argument(
        "--json", action="store_true", help="print the result as one JSON object on stdout"
    )
    top.add_argument("--quiet", action="store_true", help="no progress")
    _add_generate(top.add_argument_group("answers of the target's own"))
    _add_shape(top.add_argument_group("shape (sizes default to a share of the target's)"))
    of_attention = _add_attention(
        top.add_argument_group("a Mixture of Attentions, as in the paper, in place of the default")
    )
    _add_run(top.add_argument_group("the run"))
    return top, of_attention


def _add_generate(group: argparse._ArgumentGroup) -> None:
    """Add the flags for answers that the target writes before the training."""
    group.add_argument(
        "--generate", action="store_true", help="the target answers the data's prompts first, once"
    )
    group.add_argument(
        "--generate-only", action="store_true", help="stop after that (before a run under torchrun)"
    )
    group.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    group.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")


def _add_shape(group: argparse._ArgumentGroup) -> None:
    """Add the flags for the shape of a drafter's layer."""
    group.add_argument("--heads", type=int, dest="num_attention_heads", metavar="N")
    _add_dimensions(group, "self_attention")


def _add_dimensions(group: argparse._ArgumentGroup, part: str) -> list[argparse.Action]:
    """Add and return the flags for the dimensions of one attention of the drafter."""
    short = _SHORT[part]
    return [
        group.add_argument(
            f"--{short}-intermediate", type=int, dest=f"{part}_intermediate_size", metavar="N"
        ),
        group.add_argument(
            f"--{short}-kv-heads", type=int, dest=f"{part}_num_key_value_heads", metavar="N"
        ),
    ]


def _add_attention(group: argparse._ArgumentGroup) -> list[argparse.Action]:
    """Add the flags for a drafter that reads keys and values; returns those that are of no use for
    any other."""
    yes_or_no = argparse.BooleanOptionalAction
    group.add_argument(
        "--attention", action="store_true", help="train one: a drafter that reads keys and values"
    )
    group.add_argument(
        "--paper",
        action="store_true",
        help="train one with losses, masks, optimiser and rate of the paper's public code",
    )
    return [
        group.add_argument(
            "--body",
            metavar="MODEL",
            help="the body is this small model of the same tokenizer (folder or hub id)",
        ),
        group.add_argument(
            "--freeze-body",
            action="store_true",
            help="with --body MODEL: train only the attention to records",
        ),
        group.add_argument(
            "--tli", type=int, metavar="N", help="borrowed target layers after CA (default 0)"
        ),
        group.add_argument(
            "--layers", type=int, metavar="N", help="layers of the body (default 1, the paper's)"
        ),
        *_add_dimensions(group, "cross_attention"),
        *_add_dimensions(group, "layer_self_attention"),
        group.add_argument(
            "--final-norm", action=yes_or_no, help="a norm of the drafter's own before the head"
        ),
        group.add_argument(
            "--final-state",
            action=yes_or_no,
            help="give activations the target's final hidden state too",
        ),
        group.add_argument(
            "--spacing",
            metavar="LOW-HIGH[:SHARE],...",
            help="tokens between anchors, and the share of documents: 6-14:0.6,32-64:0.1,cold:0.2;"
            " cold ones see no activation at all, the rest their prompt's alone",
        ),
        group.add_argument(
            "--gradient-checkpointing",
            action="store_true",
            help="less memory, about a third more time",
        ),
    ]


def _add_run(group: argparse._ArgumentGroup) -> None:
    """Add the flags for how long, on what and how a drafter is trained."""
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
        "--head-words",
        type=int,
        metavar="N",
        help="compare over the words of a step's rows and N others, drawn by frequency; 0: over all"
        " (default: all of up to 32768, 8192 of more)",
    )
    group.add_argument(
        "--teacher",
        choices=["auto", "disk", "memory"],
        default="auto",
        help="keep the target's states of all rows in OUT, or run the target in every step (default:"
        " keep them where rows are seen more than once and half of the free disk is enough)",
    )
    group.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    group.add_argument("--seed", type=int)
    group.add_argument("--checkpoint-every", type=int, metavar="STEPS")


def parse(argv: Sequence[str]) -> TrainingConfig:
    """Parse the command line into a configuration; a `UsageError` for flags that do not go
    together."""
    from moa.training.config import TrainingConfig
    from moa.training.loop import LoopSettings

    top, of_attention = _parser()
    args = top.parse_args(argv)
    _refuse_contradictions(args, of_attention)
    attention = args.attention or args.paper
    given = vars(args)
    names = {field.name for field in dataclasses.fields(TrainingConfig)}
    values = {name: value for name, value in given.items() if name in names}
    values["data"] = tuple(args.data)
    values["kind"] = "attention" if attention else "states"
    values["shape"] = {name: given[name] for name in SHAPE if given[name] is not None}
    values["loop"] = given_fields(args, LoopSettings)
    return TrainingConfig(**values)


def _refuse_contradictions(
    args: argparse.Namespace, of_attention: Sequence[argparse.Action]
) -> None:
    """Raise a `UsageError` for flags that do not go together; those in `of_attention` are for a
    Mixture of Attentions alone."""
    attention = args.attention or args.paper
    if attention and args.states:
        raise UsageError("--states and --attention are two kinds of drafter: give one of them")
    if not attention and args.init is None:
        for action in of_attention:
            if getattr(args, action.dest) != action.default:
                flag = action.option_strings[0]
                raise UsageError(f"{flag} is for --attention", hint="add it, or leave this out")
    if args.body is not None and args.init is not None:
        raise UsageError("--init brings its own body: --body cannot be given beside it")
    if args.freeze_body and args.body is None:
        raise UsageError("--freeze-body is for --body MODEL: no other body is worth freezing")
