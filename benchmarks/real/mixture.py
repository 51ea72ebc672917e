"""A mixture of experts of a published model's shapes, with random weights: does the policy see what a
forward costs that touches more experts with each token, and is `auto` never slower than the better
of drafting and not drafting?

The drafter is an oracle: it knows the target's own text, and guesses each token right with a given
chance. So any share of right guesses can be had beside random weights. Verifier, engine, policy and
wire are the product's.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from benchmarks.kit.figures import listing, titled
from benchmarks.kit.progress import say
from benchmarks.real.lines import Lines
from benchmarks.real.timing import Work, milliseconds_in_turn
from cloud_verifier.app import Verifier
from cloud_verifier.model import Served, SmallModel, serve_model
from cloud_verifier.settings import Settings
from moa.drafters.contract import DraftRequest
from moa.errors import UsageError
from moa.llama.target import LlamaTarget
from moa.speculation.policy import Policy
from moa.target.contract import LoadOptions
from moa.target.rows import Row
from moa.tree import DraftTree
from moa.wire.limits import Limits
from testing.client import client

_VOCAB = 151936
_WIDTH = 2048
_HEADS = 32
_KV_HEADS = 4
_HEAD = 128
_EXPERTS = 128
_USED = 8
_EXPERT_WIDTH = 768
"""A layer of Qwen3-30B-A3B, of which there are 48."""
_CONTEXT = 1024
_PROMPT = 32
_TEXTS = 3
"""The first one is not timed: a verifier learns from it what forwards and drafts cost."""
_SLOTS = _TEXTS + 1
"""A session keeps its slot behind its answer, and a verifier looks at one token with one more."""
_COUNTS = (1, 2, 4, 8, 16, 32)
CHANCES = (0.0, 0.6, 0.9)
"""Of a guess to be right."""
_DEPTH = 4
"""Levels of a draft in every round."""


# ---- the file


def make(path: Path, *, layers: int) -> Path:
    """Write it, in Q4_K and Q6_K; blocks of random codes, each expert with others."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    writer.add_block_count(layers)
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_WIDTH)
    writer.add_feed_forward_length(6144)
    writer.add_head_count(_HEADS)
    writer.add_head_count_kv(_KV_HEADS)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(_VOCAB)
    writer.add_expert_count(_EXPERTS)
    writer.add_expert_used_count(_USED)
    writer.add_expert_feed_forward_length(_EXPERT_WIDTH)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    letters = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 324))]
    pieces = [*letters, *(f"<{n}>" for n in range(len(letters), _VOCAB - 1)), "!!"]
    writer.add_token_list(pieces)
    writer.add_token_types([1] * _VOCAB)
    writer.add_token_merges(["! !"])
    writer.add_eos_token_id(_VOCAB - 2)
    rng = np.random.default_rng(0)
    blocks = {kinds.Q4_K: _four_bits(rng), kinds.Q6_K: _six_bits(rng)}
    writing: list[tuple[str, tuple[int, ...], Any]] = [
        ("token_embd.weight", (_VOCAB, _WIDTH), kinds.Q6_K),
        ("output_norm.weight", (_WIDTH,), kinds.F32),
    ]
    for layer in range(layers):
        writing += [(f"blk.{layer}.{name}.weight", shape, kind) for name, shape, kind in _layer()]
    for name, shape, kind in writing:
        if kind == kinds.F32:
            floats = np.dtype(np.float32)
            writer.add_tensor_info(name, shape, floats, math.prod(shape) * floats.itemsize)
            continue
        block, size = gguf.GGML_QUANT_SIZES[kind]
        stored = (*shape[:-1], shape[-1] // block * size)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), math.prod(stored), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, shape, kind in writing:
        if kind == kinds.F32:
            is_norm = len(shape) == 1
            weights = np.ones(shape) if is_norm else rng.normal(size=shape) * _WIDTH**-0.5
            writer.write_tensor_data(weights.astype(np.float32))
            continue
        block, _ = gguf.GGML_QUANT_SIZES[kind]
        source = blocks[kind]
        count = math.prod(shape) // block
        # Each tensor begins at another block, so that no two experts are alike.
        first = int(rng.integers(len(source)))
        chosen = (first + np.arange(count) * 17) % len(source)
        writer.write_tensor_data(source[chosen])
    writer.close()
    return path


def _layer() -> list[tuple[str, tuple[int, ...], Any]]:
    import gguf

    kinds = gguf.GGMLQuantizationType
    queries = _HEADS * _HEAD
    keys = _KV_HEADS * _HEAD
    return [
        ("attn_norm", (_WIDTH,), kinds.F32),
        ("attn_q", (queries, _WIDTH), kinds.Q4_K),
        ("attn_k", (keys, _WIDTH), kinds.Q4_K),
        ("attn_v", (keys, _WIDTH), kinds.Q6_K),
        ("attn_output", (_WIDTH, queries), kinds.Q4_K),
        ("attn_q_norm", (_HEAD,), kinds.F32),
        ("attn_k_norm", (_HEAD,), kinds.F32),
        ("ffn_norm", (_WIDTH,), kinds.F32),
        ("ffn_gate_inp", (_EXPERTS, _WIDTH), kinds.F32),
        ("ffn_gate_exps", (_EXPERTS, _EXPERT_WIDTH, _WIDTH), kinds.Q4_K),
        ("ffn_up_exps", (_EXPERTS, _EXPERT_WIDTH, _WIDTH), kinds.Q4_K),
        ("ffn_down_exps", (_EXPERTS, _WIDTH, _EXPERT_WIDTH), kinds.Q4_K),
    ]


_BLOCKS = 40_009
"""Different blocks of random codes: a prime number, so that steps through them meet all."""


def _four_bits(rng: np.random.Generator) -> NDArray[np.uint8]:
    """Blocks of Q4_K whose weights are around 0, and about as large as a layer wants them."""
    blocks = rng.integers(0, 256, size=(_BLOCKS, 144), dtype=np.uint8)
    step = np.float16(0.0048 / 32)
    least = np.float16(7.5 * 0.0048 / 32)
    blocks[:, :4] = np.array([step, least]).view(np.uint8)
    # All eight parts have the factor 32, of six bits.
    blocks[:, 4:12] = 32 | (32 >> 4) << 6
    blocks[:, 12:16] = 0
    return blocks


def _six_bits(rng: np.random.Generator) -> NDArray[np.uint8]:
    """Blocks of Q6_K, likewise."""
    blocks = rng.integers(0, 256, size=(_BLOCKS, 210), dtype=np.uint8)
    blocks[:, 192:208] = 1
    blocks[:, 208:] = np.array([np.float16(0.0012)]).view(np.uint8)
    return blocks


# ---- what is measured


class Oracle:
    """A drafter that knows the texts, and is right with a given chance: a chain, as deep as it is
    asked for. The same place of a text has the same guess each time. Where a target goes on with
    another text, as a mixture may in another batch, all guesses are wrong from there on.
    `moa.drafters.contract.RecordReader`."""

    reads_records = False
    record_lag = 0

    def __init__(self, texts: Sequence[Sequence[int]], chance: float) -> None:
        self._texts = texts
        self._chance = chance
        self._read: dict[int, list[int]] = {}
        self.levels = 0
        """Guesses so far."""

    @property
    def free(self) -> bool:
        """There is always room."""
        return True

    def open(self) -> int:
        """Take a slot."""
        slot = len(self._read)
        while slot in self._read:
            slot += 1
        self._read[slot] = []
        return slot

    def close(self, slot: int) -> None:
        """Give it back."""
        del self._read[slot]

    def known(self, slot: int) -> int:
        """Tokens that were read."""
        return len(self._read[slot])

    def observe(self, slot: int, tokens: Sequence[int], committed: object) -> None:
        """Read."""
        self._read[slot] += tokens

    def read(self, slot: int, tokens: Sequence[int]) -> None:
        """Read."""
        self._read[slot] += tokens

    def missing(self, slot: int, start: int, stop: int) -> None:
        """It wants no records."""

    def give(self, slot: int, start: int, keys: object, values: object) -> None:
        """It reads no records."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftTree]:
        """A chain after each pending token."""
        return [self._chain(request) for request in requests]

    def _chain(self, request: DraftRequest) -> DraftTree:
        log = [*self._read[request.slot], request.pending]
        text = next((one for one in self._texts if list(one[: len(log)]) == log), ())
        tokens = [request.pending]
        depth = min(request.shape.depth, request.shape.nodes)
        for place in range(len(log), len(log) + depth):
            right = random.Random(place).random() < self._chance
            tokens.append(text[place] if right and place < len(text) else 1)
        self.levels += depth
        score = float(np.log(max(self._chance, 0.01)))
        scores = [level * score for level in range(len(tokens))]
        return DraftTree(tokens, list(range(-1, len(tokens) - 1)), scores)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How streams are drafted."""

    name: str
    plan: Callable[..., list[int]] | None
    """In place of the policy's; None: its own."""


def _never(policy: Policy, texts: Sequence[Any], *_: Any) -> list[int]:
    return [0] * len(texts)


def _always(policy: Policy, texts: Sequence[Any], *_: Any) -> list[int]:
    return [_DEPTH] * len(texts)


WAYS = (
    Way(name="plain", plan=_never),
    Way(name=f"drafts of {_DEPTH}", plan=_always),
    Way(name="auto", plan=None),
)


def measure(
    path: Path,
    out: Lines,
    *,
    tokens: int,
    threads: int,
    chances: Sequence[float] = CHANCES,
    passes: int = 1,
) -> None:
    """Forwards by their tokens, and streams in every way, as far as `out` lacks them. The ways take
    turns, `passes` times: where memory does not hold the weights, each finds in memory what the one
    before it has left there. A folder's lines are of one file."""
    size = path.stat().st_size
    if "forwards" in out and out.found["forwards"]["bytes"] != size:
        raise UsageError(
            f"{out.path} is of another file than {path.name}", hint="take another folder as WORK"
        )
    missing = [chance for chance in chances if f"{chance}" not in out]
    if "forwards" in out and not missing:
        return
    options = LoadOptions(slots=_SLOTS, capacity=512, threads=threads)
    target = LlamaTarget.open(str(path), options)
    mapped = target.runtime.shape.mapped
    if "forwards" not in out:
        by_tokens = _forwards(target)
        out.add("forwards", mapped=mapped, bytes=size, milliseconds=by_tokens)
        say(f"forwards: {by_tokens}")
    texts = [_said(target, _some(target, number, _PROMPT), tokens) for number in range(_TEXTS)]
    for chance in missing:
        runs: dict[str, list[dict[str, float]]] = {way.name: [] for way in WAYS}
        for _, way in itertools.product(range(passes), WAYS):
            oracle = Oracle(texts, chance)
            served = _with_drafter(serve_model(target), oracle)
            with _planned(way.plan):
                found = asyncio.run(_streams(served, texts, tokens))
            runs[way.name].append(found | {"guesses": oracle.levels})
            say(f"{chance}, {way.name}: {runs[way.name][-1]}")
            _release_all(target)
        ways = {name: _together(several) for name, several in runs.items()}
        out.add(f"{chance}", chance=chance, ways=ways)
        say(f"{chance}: {ways}")
    target.close()


def _some(target: LlamaTarget, seed: int, count: int) -> list[int]:
    """Tokens as they come."""
    rng = np.random.default_rng(seed)
    found: list[int] = rng.integers(4, target.facts.vocab_size, count).tolist()
    return found


def _forwards(target: LlamaTarget) -> dict[str, float]:
    """Milliseconds by the number of tokens."""
    slot = target.cache.acquire()
    ids = _some(target, 9, _PROMPT)
    target.commit(target.forward([Row.chain(slot, ids, "none")]), 0, range(len(ids)))
    more = _some(target, 7, max(_COUNTS))

    def forward(tokens: list[int]) -> None:
        target.forward([Row.chain(slot, tokens, "all")]).argmax(0)

    works: dict[str, Work] = {f"{count}": partial(forward, more[:count]) for count in _COUNTS}
    found = milliseconds_in_turn(works, 4)
    target.cache.release(slot)
    return found


def _said(target: LlamaTarget, ids: list[int], count: int) -> list[int]:
    """Prompt and answer, a token at a time."""
    slot = target.cache.acquire()
    log = list(ids)
    waiting = log
    for _ in range(count):
        step = target.forward([Row.chain(slot, waiting)])
        target.commit(step, 0, range(len(waiting)))
        waiting = [int(step.argmax(0)[-1])]
        log = log + waiting
    target.cache.release(slot)
    return log


def _release_all(target: LlamaTarget) -> None:
    """Give back the slots that a verifier's sessions held when it ended."""
    for slot in range(target.cache.slots):
        with suppress(UsageError):  # it is free
            target.cache.release(slot)


def _with_drafter(served: Served, oracle: Oracle) -> Served:
    drafting: Any = oracle
    return replace(served, small=SmallModel(name="oracle", drafting=drafting))


@contextmanager
def _planned(plan: Callable[..., list[int]] | None) -> Iterator[None]:
    if plan is None:
        yield
        return
    with mock.patch.object(Policy, "plan", plan):
        yield


async def _streams(served: Served, texts: Sequence[Sequence[int]], tokens: int) -> dict[str, float]:
    """Tokens a second of one session after another, by processor time, which other programs change
    little: client and verifier are this process. The reading of the prompt is not counted. Beside
    it the same by the clock, and how often a page of the weights had to be read from the disk."""
    limits = Limits(max_context_tokens=512, max_prompt_tokens=256, max_tree_nodes=64)
    settings = Settings(slots=_SLOTS, port=0, limits=limits)
    seconds = []
    clock = []
    faults = []
    same = 0
    async with Verifier(served, settings).open() as running, client(running.transport.url) as edge:
        for text in texts:
            session = await edge.start(list(text[:_PROMPT]), max_new_tokens=tokens, ignore_eos=True)
            began = time.process_time(), time.perf_counter(), _page_faults()
            await edge.stream(session)
            seconds.append(time.process_time() - began[0])
            clock.append(time.perf_counter() - began[1])
            faults.append(_page_faults() - began[2])
            same += list(session.log) == list(text)
    timed = tokens * len(seconds[1:])
    return {
        "tokens_a_second": timed / sum(seconds[1:]),
        "by_the_clock": timed / sum(clock[1:]),
        "page_faults_a_token": sum(faults[1:]) / timed,
        "first": tokens / seconds[0],
        "same": same,
        "texts": len(texts),
    }


def _page_faults() -> int:
    """Pages that this process has waited for while they were read from a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _together(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One way's runs as one: means of rates, of speeds harmonic ones, and sums of counts."""
    speeds = ("tokens_a_second", "by_the_clock", "first")
    together: dict[str, float] = {
        name: statistics.harmonic_mean([run[name] for run in runs]) for name in speeds
    }
    together["page_faults_a_token"] = statistics.fmean(run["page_faults_a_token"] for run in runs)
    for name in ("same", "texts", "guesses"):
        together[name] = sum(run[name] for run in runs)
    return together


# ---- tables


def figures(out: Lines) -> dict[str, Any]:
    """As they were found."""
    found = list(out.found.values())
    return {
        "runs": [line for line in found if "ways" in line],
        "forwards": [line for line in found if "milliseconds" in line],
    }


def tables(result: dict[str, Any]) -> str:
    """Forwards by tokens, and speeds by the chance of a guess to be right."""
    parts = []
    for line in result["forwards"]:
        one = line["milliseconds"]
        first = next(iter(one.values()))
        rows = [{"tokens": count, "ms": ms, "times": ms / first} for count, ms in one.items()]
        columns: dict[str, str | Callable[[Mapping[str, Any]], str]] = {
            "tokens of a forward": "{tokens}",
            "time": "{ms:.0f} ms",
            "times one token": "{times:.2f}",
        }
        title = f"A forward, {line['bytes'] / 1e9:.1f} GB of weights"
        parts.append((title, listing(rows, columns)))
    lines = []
    for run in result["runs"]:
        speeds = {name: way["tokens_a_second"] for name, way in run["ways"].items()}
        clock = {name: way["by_the_clock"] for name, way in run["ways"].items()}
        faults = [way["page_faults_a_token"] for way in run["ways"].values()]
        guesses = run["ways"]["auto"]["guesses"]
        lines.append(
            {
                "chance": run["chance"],
                "guesses": guesses,
                "first": run["ways"]["auto"]["first"],
                "beside": _beside_the_better(speeds),
                "beside_by_the_clock": _beside_the_better(clock),
                "faults": ", ".join(f"{count:.0f}" for count in faults),
                "known": ", ".join(f"{way['same']}" for way in run["ways"].values()),
                "texts": run["ways"]["auto"]["texts"],
                **speeds,
            }
        )
    if lines:
        shown: dict[str, str | Callable[[Mapping[str, Any]], str]] = {
            "guesses are right": "{chance:.0%}"
        }
        for way in WAYS:
            shown[f"{way.name}, tokens/s"] = f"{{{way.name}:.1f}}"
        shown["auto in its first text"] = "{first:.1f}"
        shown["guesses that auto asked for"] = "{guesses}"
        shown["auto, times the better of the others"] = "{beside:.2f}"
        shown["the same by the clock"] = "{beside_by_the_clock:.2f}"
        shown["waits for the disk a token, in each way"] = "{faults}"
        shown["texts that were guessed to their ends, in each way"] = "{known} of {texts}"
        parts.append(("Streams", listing(lines, shown)))
    return titled(*parts)


def _beside_the_better(speeds: Mapping[str, float]) -> float:
    """The speed of `auto`, in multiples of that of the better way beside it."""
    return speeds["auto"] / max(speed for name, speed in speeds.items() if name != "auto")
