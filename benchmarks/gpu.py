"""Everything that only a card can show, in at most 8 minutes: `make gpu`, or `python -m
benchmarks.gpu --out FILE`.

Checks and measures the accelerator's decoder, sampling, drafting, serving and training, prints a
table a step, and writes FILE.json and FILE.md with card and versions. Exit code 1 if anything
failed or differed, 2 without a card. --rehearse runs every step at tiny sizes on a CPU, the kernels
in Triton's interpreter, and writes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.provenance import write_result
from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import new_attention
from moa.drafters.body_drafting import BodyDrafting
from moa.drafters.contract import DraftRequest
from moa.errors import UsageError, run_cli
from moa.sampling import SamplingSettings
from moa.sampling import choose as choose_on_host
from moa.target.contract import Draw
from moa.target.cuda.runner import Accelerator
from moa.target.cuda.sampling import choose
from moa.target.loading import LoadedModel
from moa.target.rows import Row
from moa.target.torch_target import Target
from moa.training import options
from moa.training.run import TrainingRun, parameter_count
from moa.tree import TreeShape
from moa.wire import Limits
from testing.client import client as connected
from testing.tiny import FAMILIES, save_tiny, tiny

Line = dict[str, Any]
_SECONDS = 480.0
_ROOT = Path(__file__).parents[1]
_MIXTURES = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "moe_intermediate_size": 48,
}
_TRAINING: tuple[list[str], ...] = (
    [],
    ["--paper"],
    ["--tli", "1"],
)


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    hidden: int
    layers: int
    heads: tuple[int, int]
    inner: int
    vocabulary: int
    sessions: tuple[int, ...]
    contexts: tuple[int, ...]
    piece: int
    repeats: int
    answers: int
    """Tokens of a text."""
    ways: int
    """Flavours of training."""


LARGE = Scale(
    4096, 32, (32, 8), 14336, 128256, (1, 8, 32, 64), (256, 4000), 512, 15, 64, len(_TRAINING)
)
SMALLER = Scale(
    2048, 16, (32, 8), 8192, 128256, (1, 8, 32), (256, 2000), 512, 15, 64, len(_TRAINING)
)
TINY = Scale(32, 1, (2, 1), 48, 64, (1, 2), (20,), 12, 1, 4, 1)


class Bench:
    """The device, the large random target, and how to time things on it."""

    def __init__(self, device: torch.device, scale: Scale, accelerator: Accelerator | None) -> None:
        self.device = device
        self.scale = scale
        self.accelerator = accelerator
        self.rehearsal = device.type == "cpu"
        self._taken: list[int] = []
        self.dtype = torch.float32 if self.rehearsal else torch.bfloat16
        heads, kv_heads = scale.heads
        config = LlamaConfig(
            hidden_size=scale.hidden,
            num_hidden_layers=scale.layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=scale.inner,
            vocab_size=scale.vocabulary,
            max_position_embeddings=8448,
            tie_word_embeddings=False,
        )
        torch.manual_seed(0)
        with device:
            model: Any = LlamaForCausalLM(config)
        model = model.to(self.dtype).eval().requires_grad_(False)
        longest = 7000 + 2 * scale.piece if not self.rehearsal else 128
        sessions = max(scale.sessions)
        self.target = Target.from_model(
            model,
            slots=sessions,
            capacity=longest,
            kv_tokens=8 * longest + sessions * 512,
            accelerator=accelerator,
        )

    def time(self, call: Callable[[], Any]) -> float:
        """Median milliseconds, the first call left out."""
        times = []
        for _ in range(self.scale.repeats + 1):
            began = time.perf_counter()
            call()
            self.wait()
            times.append(1000 * (time.perf_counter() - began))
        return median(times[1:])

    def wait(self) -> None:
        """For the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def slots(self, count: int, context: int) -> list[int]:
        """Sessions of so many tokens of context; what they hold does not matter for time."""
        pool = self.target.cache
        taken = [pool.acquire() for _ in range(count)]
        self._taken += taken
        for slot in taken:
            pool.begin([slot], [context])
            pool.commit(slot, range(context))
        return taken

    def release(self) -> None:
        """Give these sessions back."""
        while self._taken:
            self.target.cache.release(self._taken.pop())

    def prepare(self) -> None:
        """Capture the graphs of the sizes that were just met."""
        while self.target.unprepared:
            self.target.prepare_more()


def agreement(bench: Bench) -> Iterator[Line]:
    """Tiny models of every family on the card, beside the library's float32 on the CPU."""
    families = [*FAMILIES, "mixtral", "qwen3_moe"] if not bench.rehearsal else ["qwen2"]
    ids = list(range(5, 17))
    for family in families:
        overrides = _MIXTURES if family in ("mixtral", "qwen3_moe") else {}
        plain = tiny(family, **overrides)
        plain.set_attn_implementation("eager")
        with torch.inference_mode():
            wanted = plain(torch.tensor([ids]), use_cache=False).logits[0].float()
        for dtype in (
            (torch.float32,) if bench.rehearsal else (torch.float32, torch.bfloat16, torch.float16)
        ):
            model: Any = tiny(family, **overrides)
            model = model.to(bench.device, dtype)
            target = Target.from_model(model, slots=1, capacity=32, accelerator=bench.accelerator)
            found = (
                target.forward([Row.chain(target.cache.acquire(), ids)])
                .logits(0, range(len(ids)))
                .cpu()
            )
            error = float((found - wanted).norm() / wanted.norm())
            limit = 1e-4 if dtype == torch.float32 else 0.1
            yield {
                "family": family,
                "dtype": str(dtype),
                "relative error": error,
                "ok": error < limit,
            }


def bits(bench: Bench) -> Iterator[Line]:
    """The same token alone, in crowds, with drafts of other lengths, and a prompt in other pieces:
    equal bits."""
    target, pool, piece = bench.target, bench.target.cache, bench.scale.piece
    rng = np.random.default_rng(1)
    text = rng.integers(4, bench.scale.vocabulary, piece + 17).tolist()

    def read(sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        slot = pool.acquire()
        states = []
        start = 0
        for size in sizes:
            step = target.forward([Row.chain(slot, text[start : start + size], judged="none")])
            states.append(step.hidden(0))
            target.commit(step, 0, range(size))
            start += size
        keys = pool.read(slot, 0, start)[0].clone()
        pool.release(slot)
        return torch.cat(states), keys

    whole, keys = read([piece])
    for name, sizes in {
        "eights": [8] * (piece // 8) + [piece % 8] * (piece % 8 > 0),
        "ones": [1] * piece,
    }.items():
        states, theirs = read(sizes)
        yield {"prompt in": name, "ok": torch.equal(states, whole) and torch.equal(theirs, keys)}
    slots = bench.slots(max(bench.scale.sessions), 0)
    for slot in slots:
        step = target.forward([Row.chain(slot, text[:piece], judged="none")])
        target.commit(step, 0, range(piece))
    alone = target.forward([Row.chain(slots[0], text[piece : piece + 1])]).hidden(0)[0]
    for beside in sorted({count - 1 for count in bench.scale.sessions}):
        for draft in (1, 8, 17):
            rows = [Row.chain(slot, text[piece : piece + draft]) for slot in slots[: beside + 1]]
            rows = [*rows[1:], rows[0]]
            found = target.forward(rows)
            same = torch.equal(found.hidden(len(rows) - 1)[0], alone)
            yield {"beside": beside, "draft": draft, "path": found.path, "ok": same}
    bench.release()


def forwards(bench: Bench) -> Iterator[Line]:
    """Sessions x tokens x context, greedy acceptance read back, beside the time to read the
    weights."""
    target = bench.target
    weights = sum(one.numel() * one.element_size() for one in target.model.parameters())
    block = torch.empty(
        2**28 if not bench.rehearsal else 2**10, dtype=torch.int32, device=bench.device
    )
    copy = torch.empty_like(block)
    rate = 2 * block.nbytes / bench.time(lambda: copy.copy_(block))
    library = bench.time(
        lambda: target.model(
            torch.ones(1, 1, dtype=torch.long, device=bench.device), use_cache=False
        )
    )
    yield {
        "weights GiB": weights / 2**30,
        "ms to read them": weights / rate,
        "library ms, one token": library,
    }
    for context in bench.scale.contexts:
        for sessions in bench.scale.sessions:
            if sessions * (context + 32) > 8 * target.cache.capacity:
                continue
            slots = bench.slots(sessions, context)
            for tokens in (1, 8, 17):
                rows = [Row.chain(slot, [5] * tokens, judged="all") for slot in slots]
                target.forward(rows)
                bench.prepare()
                ms = bench.time(partial(_choose, target, rows))
                path = target.forward(rows).path
                yield {
                    "sessions": sessions,
                    "tokens": tokens,
                    "context": context,
                    "ms": ms,
                    "path": path,
                    "ok": True,
                }
            bench.release()


def _choose(target: Target, rows: Sequence[Row]) -> None:
    target.forward(rows).argmax(0)  # reading it waits for the device


def growing(bench: Bench) -> Iterator[Line]:
    """Lengths that grow by each round, as all do."""
    target = bench.target
    for sessions in bench.scale.sessions:
        slots = bench.slots(sessions, bench.scale.contexts[0])
        rows = [Row.chain(slot, [5] * 8, judged="all") for slot in slots]

        def go_on(rows: Sequence[Row] = tuple(rows)) -> None:
            step = target.forward(rows)
            for b in range(len(rows)):
                step.argmax(b)
                target.commit(step, b, range(3))

        go_on()
        bench.prepare()
        yield {"sessions": sessions, "ms a round": bench.time(go_on), "ok": True}
        bench.release()


def prompts(bench: Bench) -> Iterator[Line]:
    """A piece of a prompt behind contexts of several lengths."""
    target = bench.target
    piece = bench.scale.piece
    for context in (0, 1000, 4000, 7000) if not bench.rehearsal else (0, 24):
        slots = bench.slots(1, context)
        row = Row.chain(slots[0], [5] * piece, judged="none")
        target.forward([row])
        bench.prepare()
        yield {
            "piece": piece,
            "context": context,
            "ms": bench.time(partial(target.forward, [row])),
            "ok": True,
        }
        bench.release()


def sampling(bench: Bench) -> Iterator[Line]:
    """Sampling on the device: the host's tokens, and milliseconds for all nodes of a forward."""
    kinds = {
        "T=1": SamplingSettings(temperature=1.0, seed=3),
        "top-k, top-p": SamplingSettings(temperature=0.8, top_k=50, top_p=0.95, seed=3),
        "penalty": SamplingSettings(temperature=0.8, repetition_penalty=1.2, seed=3),
    }
    torch.manual_seed(1)
    for name, settings in kinds.items():
        for nodes in [8 * count for count in bench.scale.sessions]:
            logits = 4 * torch.randn(nodes, bench.scale.vocabulary, device=bench.device)
            draws = [Draw(settings, position, [5, 6, 7]) for position in range(nodes)]
            found = choose(logits, draws)
            host = logits.cpu().numpy()
            some = range(0, nodes, max(1, nodes // 8))
            same = all(
                found[at] == choose_on_host(host[at], settings, at, [5, 6, 7]) for at in some
            )
            ms = bench.time(partial(choose, logits, draws))
            yield {"sampling": name, "nodes": nodes, "ms": ms, "ok": same}


def drafting(bench: Bench) -> Iterator[Line]:
    """The default drafter: a chain of 6, and activation records."""
    target = bench.target
    drafter = new_attention(AttentionConfig.for_target(target.facts), target.model).eval()
    drafter = drafter.to(bench.device, bench.dtype)
    graphs = target.graphs
    assert graphs is not None
    most = max(bench.scale.sessions)
    plain = BodyDrafting(drafter, slots=most, capacity=64, scratch=32)
    ours = BodyDrafting(drafter, slots=most, capacity=64, scratch=32, graphs=graphs)
    for sessions in bench.scale.sessions:
        requests = [
            DraftRequest(ours.open(), 5, TreeShape.chain(6), SamplingSettings())
            for _ in range(sessions)
        ]
        slots = [plain.open() for _ in requests]
        same = [tree.tokens for tree in plain.draft(requests)] == [
            tree.tokens for tree in ours.draft(requests)
        ]
        ms = bench.time(partial(ours.draft, requests)), bench.time(partial(plain.draft, requests))
        yield {
            "drafts of 6, sessions": sessions,
            "ms": ms[0],
            "without graphs": ms[1],
            "same": same,
            "ok": True,
        }
        for request, slot in zip(requests, slots, strict=True):
            ours.close(request.slot)
            plain.close(slot)
    slots = bench.slots(1, bench.scale.piece)
    keys, values = target.cache.read(slots[0], 0, bench.scale.piece)
    hidden = torch.zeros(
        bench.scale.piece, target.facts.hidden_size, dtype=bench.dtype, device=bench.device
    )
    for count in sorted({1, 8, min(64, bench.scale.piece), bench.scale.piece}):
        part = (
            keys[:, :count],
            values[:, :count],
            hidden[:count],
            torch.arange(count, device=bench.device),
        )
        with torch.inference_mode():
            yield {"records": count, "ms": bench.time(partial(drafter.project, *part)), "ok": True}
    bench.release()


def serving(bench: Bench) -> Iterator[Line]:
    """The embedded pair over sockets: speed by sessions, temperature and drafter; texts must not
    differ."""
    yield from asyncio.run(_serving(bench))


async def _serving(bench: Bench) -> list[Line]:
    from cloud_verifier.app import Verifier
    from cloud_verifier.model import load
    from cloud_verifier.settings import Settings
    from edge_client import EdgeClient, Token

    settings = Settings(
        port=0,
        device=str(bench.device),
        dtype="float32" if bench.rehearsal else "bfloat16",
        slots=64,
    )
    lines: list[Line] = []
    known: dict[tuple[float, int], list[int]] = {}
    served = await asyncio.to_thread(load, settings)
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(Verifier(served, settings).open())
        client = await stack.enter_async_context(EdgeClient(verifier=running.transport.url))

        async def answer(at: int, draft: Any, temperature: float) -> list[int]:
            ids: list[int] = []
            turn = client.generate(
                f"What is {at} plus {at + 3}?",
                max_new_tokens=bench.scale.answers,
                temperature=temperature,
                draft=draft,
                ignore_eos=True,
            )
            async with aclosing(turn) as events:
                async for event in events:
                    if isinstance(event, Token) and event.status == "verified":
                        ids.append(event.id)
            return ids

        for temperature in (0.0, 1.0):
            for draft in ("none", "device", "server"):
                for sessions in (1, 8, 32) if not bench.rehearsal else (1, 2):
                    began = time.perf_counter()
                    texts = await asyncio.gather(
                        *(answer(at, draft, temperature) for at in range(sessions))
                    )
                    took = time.perf_counter() - began
                    same = [
                        known.setdefault((temperature, at), text) == text
                        for at, text in enumerate(texts)
                    ]
                    tokens = sum(map(len, texts))
                    lines.append(
                        {
                            "draft": draft,
                            "T": temperature,
                            "sessions": sessions,
                            "tokens/s": tokens / took,
                            "texts that differ": same.count(False),
                            "ok": all(same) and tokens == sessions * bench.scale.answers,
                        }
                    )
    return lines


def crowd(bench: Bench) -> Iterator[Line]:
    """The large target over sockets: streams without drafts beside what its forwards allow, then a
    long prompt too."""
    yield from asyncio.run(_crowd(bench))


async def _crowd(bench: Bench) -> list[Line]:
    from cloud_verifier.app import Verifier
    from cloud_verifier.model import serve_model
    from cloud_verifier.settings import Settings

    target = bench.target
    answer = bench.scale.answers
    piece = bench.scale.piece
    lines: list[Line] = []
    room = target.cache.capacity - 32
    limits = Limits(max_context_tokens=room, max_prompt_tokens=room, max_tree_nodes=32)
    settings = Settings(port=0, slots=target.cache.slots, limits=limits)
    async with Verifier(serve_model(target), settings).open() as running:
        url = running.transport.url
        for sessions in sorted(
            {min(count, 32, target.cache.slots - 1) for count in bench.scale.sessions}
        ):
            alone = bench.time(
                partial(
                    _choose, target, [Row.chain(slot, [5]) for slot in bench.slots(sessions, 64)]
                )
            )
            bench.release()
            for prompt in (0, room - 2 * piece):
                async with AsyncExitStack() as stack:
                    clients = [
                        await stack.enter_async_context(connected(url)) for _ in range(sessions + 1)
                    ]
                    texts = [
                        await one.start([5] * 64, max_new_tokens=answer, ignore_eos=True)
                        for one in clients[1:]
                    ]
                    began = time.perf_counter()
                    streams = [
                        one.stream(text, speculate=False)
                        for one, text in zip(clients[1:], texts, strict=True)
                    ]
                    beside = [clients[0].start([6] * prompt, max_new_tokens=1)] if prompt else []
                    both = asyncio.gather(*streams), asyncio.gather(*beside)
                    await both[0]
                    took = time.perf_counter() - began
                    await both[1]
                    tokens = sum(len(text.log) - 64 for text in texts)
                lines.append(
                    {
                        "streams": sessions,
                        "prompt beside": prompt,
                        "tokens/s": tokens / took,
                        "share of forwards": tokens * alone / sessions / took / 1000,
                        "ok": tokens == sessions * answer,
                    }
                )
    return lines


def training(bench: Bench) -> Iterator[Line]:
    """Three steps of each flavour of `moa-train` on the embedded target, and a pair of 214M and 7M
    parameters with the memory that `--dry-run` foresees; then the drafter of the large target."""
    steps = (
        ["--steps", "1", "--length", "48", "--batch", "1"] if bench.rehearsal else ["--steps", "3"]
    )
    for flags in _TRAINING[: bench.scale.ways]:
        yield _moa_train(bench, _ROOT / "moa" / "demo" / "target", [*flags, *steps])
    with tempfile.TemporaryDirectory() as folder:
        middle = _middle(bench, Path(folder) / "target")
        for flags in ([], ["--dry-run"]):
            yield {"pair": "214M, 7M"} | _moa_train(bench, middle, [*flags, *steps])
        if not bench.rehearsal:
            yield {"pair": "the large target's"} | _train_beside(bench, middle, Path(folder))


def _moa_train(bench: Bench, target: Path, flags: Sequence[str]) -> Line:
    with tempfile.TemporaryDirectory() as folder:
        program = "from moa.cli.console_scripts import moa_train; moa_train()"
        command = [
            sys.executable,
            "-c",
            program,
            str(target),
            "--data",
            str(_ROOT / "docs"),
            "--out",
            f"{folder}/out",
        ]
        command += [*flags, "--device", str(bench.device), "--quiet", "--json"]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    line: Line = {
        "moa-train": " ".join(flags),
        "seconds": time.perf_counter() - began,
        "ok": done.returncode == 0,
    }
    if done.returncode:
        return line | {"says": done.stderr.strip()[-120:]}
    figures = json.loads(done.stdout)
    return line | {name: figures[name] for name in ("tokens_per_s", "peak_memory_mib")}


def _middle(bench: Bench, folder: Path) -> Path:
    """A random target of 214M parameters; a tiny one in a rehearsal."""
    sizes = {
        "hidden_size": 1024,
        "num_hidden_layers": 16,
        "intermediate_size": 2816,
        "head_dim": 64,
    }
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 16384}
    return save_tiny("llama", folder, **({} if bench.rehearsal else sizes))


def _train_beside(bench: Bench, tokenizer: Path, folder: Path) -> Line:
    """Three steps of the large target's drafter in this process, without writing the target to a
    disk."""
    flags = [
        str(tokenizer),
        "--data",
        str(_ROOT / "docs"),
        "--out",
        str(folder),
        "--steps",
        "3",
        "--precision",
        "bf16",
    ]
    loaded = LoadedModel(bench.target.model, bench.target.facts, tokenizer)
    run = TrainingRun(options.parse([*flags, "--quiet"]), loaded)
    rows = run.rows(folder / "data", {}, [str(_ROOT / "docs")])
    run.sample_the_head(rows)
    run.objective.start(rows.first(4))
    loop = run.loop(rows, folder, identity={}, quiet=True)
    speed = loop.run(stop_after=3)[-1]["tokens_per_s"]
    return {"parameters": parameter_count(run.drafter), "tokens_per_s": speed, "ok": True}


def weights(bench: Bench) -> Iterator[Line]:
    """Quantized weights run, as does a target of 214M."""
    with tempfile.TemporaryDirectory() as folder:
        source = _middle(bench, Path(folder) / "model")
        for quantize in ("", "int8"):
            try:
                target = Target.load(
                    source, device=bench.device, dtype=bench.dtype, quantize=quantize, capacity=32
                )
                row = [Row.chain(target.cache.acquire(), [5])]
                finite = target.forward(row).hidden(0).isfinite().all()
                library = partial(
                    target.model, torch.full((1, 1), 5, device=bench.device), use_cache=False
                )
                figures = {
                    "ms": bench.time(partial(_choose, target, row)),
                    "library ms": bench.time(library),
                }
                held = (
                    sum(one.nbytes for one in [*target.model.parameters(), *target.model.buffers()])
                    / 2**20
                )
                yield {"quantize": quantize, **figures, "MiB": held, "ok": bool(finite)}
            except UsageError as refusal:
                yield {"quantize": quantize, "says": str(refusal), "ok": True}


STEPS = (
    agreement,
    bits,
    forwards,
    growing,
    prompts,
    sampling,
    drafting,
    serving,
    crowd,
    weights,
    training,
)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="where to write the result, without a suffix")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny sizes on a CPU; writes nothing"
    )
    arguments = parser.parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        raise UsageError(
            "no CUDA device here: this measures a card", hint="--rehearse runs its steps on the CPU"
        )
    if (
        arguments.rehearse and "TRITON_INTERPRET" not in os.environ
    ):  # Triton reads it when it is imported
        again = [sys.executable, "-m", "benchmarks.gpu", "--rehearse"]
        return subprocess.run(
            again, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False
        ).returncode
    bench = rehearsal() if arguments.rehearse else on_card()
    results = run(bench)
    if not arguments.rehearse:
        write_result(
            arguments.out,
            {"steps": results},
            "\n\n".join(table(name, found) for name, found in results.items()),
        )
    return 0 if all(line.get("ok", True) for lines in results.values() for line in lines) else 1


def on_card() -> Bench:
    """The first card, and the largest target that fits."""
    device = torch.device("cuda")
    accelerator = Accelerator.of(device, library_products=False)
    memory = torch.cuda.get_device_properties(device).total_memory
    torch.backends.cuda.enable_cudnn_sdp(False)
    return Bench(device, LARGE if memory > 45 * 2**30 else SMALLER, accelerator)


def rehearsal() -> Bench:
    """A CPU, with the kernels in Triton's interpreter."""
    from moa.target.cuda.kernels import TritonKernels

    device = torch.device("cpu")
    return Bench(device, TINY, Accelerator(TritonKernels(device), lambda run: run))


def run(
    bench: Bench, steps: Sequence[Callable[[Bench], Iterator[Line]]] = STEPS
) -> dict[str, list[Line]]:
    """All steps that there is time for; one that raises is a line of its own, and the next goes on."""
    until = time.monotonic() + _SECONDS
    results = dict[str, list[Line]]()
    for step in steps:
        lines = results[step.__name__] = []
        try:
            for line in step(bench):
                lines.append(line)
                if time.monotonic() > until:
                    raise TimeoutError("the 8 minutes are over")
        except Exception as error:
            lines.append({"error": f"{type(error).__name__}: {error}"[:300], "ok": False})
        bench.release()
        print(table(step.__name__, lines) + "\n", flush=True)
    return results


def table(name: str, lines: list[Line]) -> str:
    """Markdown: one line of the step a row."""
    rows = [
        ", ".join(f"{key}: {f'{v:.4g}' if isinstance(v, float) else v}" for key, v in one.items())
        for one in lines
    ]
    return "\n".join([f"**{name}**", "", *(f"* {row}" for row in rows)])


if __name__ == "__main__":
    sys.exit(run_cli("benchmarks.gpu", main))
