"""How many readers Hugging Face's continuous batching holds: by the rules of benchmarks.capacity, without a network.

python -m benchmarks.capacity_hf moa/demo/target < TEXTS

transformers 4.57 asks an accelerator how much memory there is and fails without one; that one question is answered here
by the machine's memory. It runs in this process, its tokens cross no socket, and each reader's clock starts with his
first token, whenever that comes: all in its favour. Texts come as JSON on standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.continuous_batching import cache

from benchmarks.capacity import largest
from benchmarks.capacity_readers import BUFFER, PATIENCE, RAMP, SPEED, TOKENS, Trial
from moa.errors import MoaError, UsageError, run_cli

_BLOCK = 32
NOTE = (
    "Hugging Face runs in one process with its readers, without sockets, and a reader's clock starts with his first "
    "token. On a CPU it runs only when its question for the accelerator's memory is answered for it."
)


def _memory(share: float = 1.0) -> int:
    return int(share * psutil.virtual_memory().available)


class Readers:
    """Requests to one continuous-batching manager, and when their tokens came."""

    def __init__(self, model: Any, texts: list[dict[str, list[int]]], most: int) -> None:
        longest = max(len(text["ids"]) for text in texts) + TOKENS + 1
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
        self.texts = texts
        self.manager = model.init_continuous_batching(generation_config=config, streaming=True)
        self.manager.start()

    async def trial(self, readers: int) -> Trial:
        """All ask within a second, as everywhere else; token 0 is part of the answer here."""
        began = time.perf_counter()
        until = began + RAMP + PATIENCE + BUFFER + TOKENS / SPEED
        arrivals: dict[str, list[float]] = {}
        texts: dict[str, dict[str, list[int]]] = {}
        asked = 0
        while time.perf_counter() < until:
            while asked < readers and time.perf_counter() >= began + RAMP * asked / readers:
                text = self.texts[asked % len(self.texts)]
                name = self.manager.add_request(text["ids"], request_id=f"{began}-{asked}", max_new_tokens=TOKENS)
                arrivals[name], texts[name] = [], text
                asked += 1
            if (result := self.manager.get_result(timeout=0.005)) is None:
                if not self.manager.is_running():
                    raise MoaError("continuous batching ended by itself: what it said is above")
                continue
            if result.request_id not in arrivals:
                continue  # of the trial before
            if result.error:
                raise MoaError(f"continuous batching failed: {result.error}")
            mine = arrivals[result.request_id]
            if result.generated_tokens != texts[result.request_id]["truth"][: len(result.generated_tokens)]:
                raise MoaError("continuous batching says something else than the target")
            mine += [time.perf_counter()] * (len(result.generated_tokens) - len(mine))
            if asked == readers and all(len(came) >= TOKENS for came in arrivals.values()):
                break
        late = []
        for name, came in arrivals.items():
            if len(came) < TOKENS:
                self.manager.cancel_request(name)
            begins = (came[0] if came else until) + BUFFER
            padded = [*came, *([until] * (TOKENS - len(came)))]
            late += [1000 * (at - begins - k / SPEED) for k, at in enumerate(padded)]
        return Trial(readers, late, 0.0)


def main() -> int:
    """Print the largest number of readers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="ID_OR_DIR")
    parser.add_argument("--start", type=int, default=16)
    parser.add_argument("--most", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    try:
        texts = json.load(sys.stdin)
    except json.JSONDecodeError:
        raise UsageError("standard input holds no texts as JSON") from None
    torch.set_num_threads(options.threads)
    # It asks the class, as a static method.
    setattr(cache.PagedAttentionMemoryHandler, "get_available_memory", staticmethod(_memory))  # noqa: B010
    model = AutoModelForCausalLM.from_pretrained(options.target, attn_implementation="sdpa_paged").eval()
    readers = Readers(model, texts, options.most)
    asyncio.run(readers.trial(2))  # warm
    users, trials = asyncio.run(largest(readers.trial, options.start, options.most))
    found = [{"readers": one.readers, "p95_late_ms": round(one.p95, 1)} for one in trials]
    print(json.dumps({"users": users, "trials": found, "note": NOTE}))
    readers.manager.stop(block=True, timeout=10)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_cli("benchmarks.capacity_hf", main))
