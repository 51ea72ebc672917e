"""Tokens per second on one device: plain, speculative, Hugging Face generate and assisted, interleaved in one run.

python -m benchmarks.speed OUT/moa0 OUT/eagle2 --target moa/demo/target --independent OUT/independent --json speed.json
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks import prompts as held_out
from benchmarks import report
from benchmarks.acceptance import SHAPES
from benchmarks.baselines.independent import as_llama
from benchmarks.baselines.presets import moa_config
from benchmarks.baselines.registry import load_independent, load_target, open_drafting
from benchmarks.baselines.replay import ReplayDrafting, ReplayLlama
from benchmarks.provenance import write_result
from benchmarks.race import PLAIN, Way, race
from moa.errors import UsageError, run_cli
from moa.model.checkpoint import new_drafter
from moa.model.loading import locate
from moa.model.target import Target
from moa.sampling import SamplingSettings
from moa.speculate import Generation, GenerationSettings, Speculator
from moa.tree import TreeShape


def speculating(
    speculator: Speculator, tokens: int, shape: TreeShape | None, t: float = 0.0
) -> Callable[[list[int]], Generation]:
    """Our engine, one prompt at a time, as a single user has it."""
    settings = GenerationSettings(
        max_new_tokens=tokens, shape=shape, sampling=SamplingSettings(temperature=t), adapt=False
    )
    return lambda prompt: speculator.generate([prompt], settings)[0]


@torch.inference_mode()
def generate(model: Any, tokens: int, assistant: PreTrainedModel | None, prompt: list[int]) -> Generation:
    """Hugging Face, with its own defaults; assisted where an assistant is given."""
    ids = torch.tensor([prompt], device=model.device)
    extra = {} if assistant is None else {"assistant_model": assistant}
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0, **extra
    )
    return Generation(ids=out[0, len(prompt) :].tolist())


def embedded_pair(args: argparse.Namespace) -> dict[str, Any]:
    """The trained pair: real drafters on real prompts."""
    target = Target.load(args.target, capacity=args.capacity, device=args.device)
    examples = held_out.skill_prompts(1, args.seed) + held_out.code_prompts(2)
    asked = [(example.skill, held_out.encode(target.tokenizer, example)) for example in examples]
    asked = [(skill, prompt) for skill, prompt in asked if len(prompt) + args.tokens <= args.capacity]
    categories, prompts = [skill for skill, _ in asked], [prompt for _, prompt in asked]
    speculators = []
    for folder in args.drafters:
        own = load_target(args.target, slots=1, capacity=args.capacity, drafter=folder, device=args.device)
        speculators.append((folder.name, Speculator(own, open_drafting(folder, own))))
    races = []
    for t in args.temperatures:
        plain = speculating(Speculator(target), args.tokens, None, t)
        ways = [Way(PLAIN, "our engine, no drafter", plain)]
        if t == 0:
            # Sampled, its texts are others than ours, and there is nothing to compare.
            ways = [*hugging_face(args), *ways]
        for name, speculator in speculators:
            for kind, shape in SHAPES.items():
                run = speculating(speculator, args.tokens, shape, t)
                ways.append(Way(f"{name}-{kind}", f"our engine, {name}, {kind}", run))
        races.append(race(ways, target, prompts, categories, repeats=args.repeats, t=t))
    return {
        "says": f"Trained pair ({target.model.num_parameters() / 1e6:.1f}M target)",
        "races": races,
        "notes": [
            f"{len(prompts)} held-out prompts one by one, up to {args.tokens} new tokens, float32, prefill counted."
        ],
    }


def hugging_face(args: argparse.Namespace) -> list[Way]:
    """The library's own generation, plain and assisted."""
    model = AutoModelForCausalLM.from_pretrained(locate(args.target), dtype=torch.float32).to(args.device).eval()
    model.generation_config.use_cache = True
    ways = [Way("generate", "Hugging Face generate", partial(generate, model, args.tokens, None))]
    if args.independent:
        drafter, facts = load_independent(args.independent, args.target)
        assistant = as_llama(drafter, facts.max_positions, facts.eos_ids).to(args.device)
        run = partial(generate, model, args.tokens, assistant)
        ways.append(Way("assisted", "Hugging Face assisted generation, independent drafter", run))
    return ways


def random_pair(args: argparse.Namespace) -> dict[str, Any]:
    """A larger target of random weights, with a drafter whose luck is stated."""
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=args.random_vocabulary,
        hidden_size=args.random_hidden,
        intermediate_size=args.random_hidden * 11 // 4,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).to(args.device).eval().requires_grad_(False)
    # `Target` gives its model an attention of its own; the library's generate keeps the library's.
    for_generate = LlamaForCausalLM(config).to(args.device).eval().requires_grad_(False)
    for_generate.load_state_dict(model.state_dict())
    target = Target.from_model(model, capacity=args.capacity)
    prompts = torch.randint(0, config.vocab_size, (2, 64)).tolist()
    plain = speculating(Speculator(target), args.tokens, None)
    texts = [prompt + plain(prompt).ids for prompt in prompts]
    drafter = new_drafter(moa_config(target.facts, {}), model).eval()
    one_layer = LlamaConfig.from_dict({**config.to_dict(), "num_hidden_layers": 1})
    assistant = ReplayLlama(one_layer, texts, args.right_chain).to(args.device).eval().requires_grad_(False)
    ways = [
        Way("generate", "Hugging Face generate", partial(generate, for_generate, args.tokens, None)),
        Way(PLAIN, "our engine, no drafter", plain),
        Way(
            "assisted",
            f"Hugging Face assisted generation, 1-layer assistant, right {args.right_chain:.0%} by assumption",
            partial(generate, for_generate, args.tokens, assistant),
        ),
    ]
    for (name, shape), right in zip(SHAPES.items(), (args.right_chain, args.right_tree), strict=True):
        speculator = Speculator(target, ReplayDrafting(drafter, texts, right, capacity=target.pool.capacity))
        # A stated luck says nothing of the drafter's doubts, so no draft may end early by them.
        run = speculating(speculator, args.tokens, replace(shape, min_score=-1e9))
        ways.append(
            Way(f"replay-{name}", f"our engine, MoA-sized drafter, {name}, right {right:.0%} by assumption", run)
        )
    return {
        "says": f"Random target, 8 layers, hidden {args.random_hidden} ({model.num_parameters() / 1e6:.0f}M)",
        "races": [race(ways, target, prompts, ["random"] * len(prompts), repeats=args.repeats)],
        "notes": [
            "Random weights have no drafter that means anything: the drafters' and the assistant's compute is real, "
            "their luck is the stated assumption."
        ],
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both pairs."""
    if not args.drafters and not args.random:
        raise UsageError("nothing to measure: name drafter folders, or ask for --random")
    result: dict[str, Any] = {"max_new_tokens": args.tokens, "repeats": args.repeats, "pairs": []}
    if args.drafters:
        result["pairs"].append(embedded_pair(args))
        write_result(args.json, result)
    if args.random:
        result["pairs"].append(random_pair(args))
        write_result(args.json, result)
    return result


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafters", nargs="*", type=Path, metavar="FOLDER", help="drafters of the trained pair")
    parser.add_argument("--target", help="the trained pair's target; needed with drafters")
    parser.add_argument("--independent", type=Path, help="independent drafter for assisted generation")
    parser.add_argument("--random", action="store_true", help="also a larger target of random weights")
    parser.add_argument("--random-hidden", type=int, default=1024)
    parser.add_argument("--random-vocabulary", type=int, default=32000)
    parser.add_argument("--right-chain", type=float, default=0.7, help="assumed luck per drafted token (default 0.7)")
    parser.add_argument("--right-tree", type=float, default=0.85, help="the same, with eight guesses (default 0.85)")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0], metavar="T")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--capacity", type=int, default=640)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the result here")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the tables."""
    args = parser().parse_args(argv)
    if args.drafters and not args.target:
        raise UsageError("drafters need --target")
    logging.getLogger("transformers").setLevel(logging.ERROR)  # generate's advice about settings is not ours to take
    print(report.speed_table(measure(args)))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.speed", main))
