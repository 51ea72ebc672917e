"""Capacity of Hugging Face's continuous batching in readers: by our rules, without a network.

transformers 4.57 asks an accelerator how much memory there is and fails without one; that one question is answered here
by the machine's memory. It runs in one process with its readers, without sockets, and each reader's clock starts with
the first token: all in its favour.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.continuous_batching import cache

from benchmarks.kit.devices import Script
from benchmarks.server.readers import BUFFER, PATIENCE, RAMP, SPEED, TOKENS, Trial, largest, lateness
from moa.errors import MoaError

_BLOCK = 32
NOTE = (
    "Hugging Face runs in one process with its readers, without sockets, and a reader's clock starts with his first "
    "token. On a CPU it runs only when its question for the accelerator's memory is answered for it."
)


def users(target: str, scripts: Sequence[Script], start: int, most: int, threads: int) -> dict[str, Any]:
    """The largest number of readers, in a process of its own; what it said when it does not run."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(hold, target, scripts, start, most, threads).result(600)
        except Exception as error:  # its failure is a result like any other
            return {"failed": str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__}


def hold(target: str, scripts: Sequence[Script], start: int, most: int, threads: int) -> dict[str, Any]:
    """The same, in this process."""
    torch.set_num_threads(threads)
    # It asks the class, as a static method.
    setattr(cache.PagedAttentionMemoryHandler, "get_available_memory", staticmethod(_memory))  # noqa: B010
    model = AutoModelForCausalLM.from_pretrained(target, attn_implementation="sdpa_paged").eval()
    readers = Readers(model, scripts, most)
    try:
        asyncio.run(readers.trial(2))  # warm
        found, trials = asyncio.run(largest(readers.trial, start, most))
    finally:
        readers.manager.stop(block=True, timeout=10)
    rows = [{"readers": one.readers, "p95_late_ms": round(one.p95, 1)} for one in trials]
    return {"users": found, "at_least": all(one.held or one.readers <= found for one in trials), "trials": rows}


def _memory(share: float = 1.0) -> int:
    return int(share * psutil.virtual_memory().available)


class Readers:
    """Requests to one continuous-batching manager, and when their tokens came."""

    def __init__(self, model: Any, scripts: Sequence[Script], most: int) -> None:
        longest = max(len(script.ids) for script in scripts) + TOKENS + 1
        config = GenerationConfig(
            max_new_tokens=TOKENS,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
            num_blocks=most * (longest // _BLOCK + 1) + 8,
            block_size=_BLOCK,
            max_batch_tokens=max(256, most),
            use_cuda_graph=False,
        )
        self.scripts = scripts
        self.manager = model.init_continuous_batching(generation_config=config, streaming=True)
        self.manager.start()

    async def trial(self, readers: int) -> Trial:
        """All ask within a second, as everywhere else; token 0 is part of the answer here."""
        began = time.perf_counter()
        until = began + RAMP + PATIENCE + BUFFER + TOKENS / SPEED
        arrivals: dict[str, list[float]] = {}
        truths: dict[str, list[int]] = {}
        while time.perf_counter() < until:
            while (asked := len(arrivals)) < readers and time.perf_counter() >= began + RAMP * asked / readers:
                script = self.scripts[asked % len(self.scripts)]
                name = self.manager.add_request(script.ids, request_id=f"{began}-{asked}", max_new_tokens=TOKENS)
                arrivals[name], truths[name] = [], script.truth
            if (result := self.manager.get_result(timeout=0.005)) is None:
                if not self.manager.is_running():
                    raise MoaError("continuous batching ended by itself: what it said is above")
                continue
            if result.request_id not in arrivals:
                continue  # of the trial before
            if result.error:
                raise MoaError(f"continuous batching failed: {result.error}")
            mine, told = arrivals[result.request_id], result.generated_tokens
            if told != truths[result.request_id][: len(told)]:
                raise MoaError("continuous batching says something else than the target")
            mine += [time.perf_counter()] * (len(told) - len(mine))
            if len(arrivals) == readers and all(len(came) >= TOKENS for came in arrivals.values()):
                break
        for name, came in arrivals.items():
            if len(came) < TOKENS:
                self.manager.cancel_request(name)
        late = [lateness(came[0] if came else until, came, until) for came in arrivals.values()]
        return Trial(readers, [one for each in late for one in each], 0.0)
