"""One of two processes of a tensor-parallel target. The first compares it with the whole target, and prints JSON."""

from __future__ import annotations

import functools
import json
import random
import sys
from typing import Any

import torch

from cloud_verifier import launching, tensor_parallel
from cloud_verifier.model import load_target
from cloud_verifier.settings import Settings
from cloud_verifier.tensor_parallel import SharedTarget
from moa.model.target import Row, Target
from moa.wire.limits import Limits
from tests.verifier.kit import decoded, generate, prompt


def memory(target: Target) -> dict[str, int]:
    """Bytes of weights and of keys and values in this process."""
    layers: Any = target.model.get_decoder().layers
    local = [getattr(weight, "_local_tensor", weight) for weight in layers.parameters()]
    return {"layers": sum(one.nbytes for one in local), "keys_and_values": target.pool.k.nbytes + target.pool.v.nbytes}


def compare(folder: str) -> int:
    """Run in this process."""
    torch.set_num_threads(1)
    limits = Limits(max_context_tokens=96, max_prompt_tokens=90, max_chain_tokens=32, max_tree_nodes=32)
    settings = Settings(target=folder, tensor_parallel=2, slots=4, kv_tokens=512, limits=limits)
    if not tensor_parallel.enter():
        return tensor_parallel.follow(functools.partial(load_target, settings))
    shared = load_target(settings, SharedTarget)
    whole = Target.load(folder, slots=4, capacity=128)
    ids = prompt(1, 12)
    truth = generate(whole.model, ids, 16)
    text = decoded(shared, ids, truth, random.Random(1))
    rows = []
    for target in (shared, whole):
        slot = target.pool.acquire()
        target.commit(target.forward([Row.chain(slot, ids)]), 0, range(len(ids)))
        twin = target.pool.share(slot, 9)
        rows.append(target.pool.read(twin, 0, 9))
        target.pool.release(slot)
    near = all(torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in zip(*rows, strict=True))
    print(json.dumps({"same_text": text == truth, "same_rows": near, "shared": memory(shared), "whole": memory(whole)}))
    tensor_parallel.dismiss()
    return 0


if __name__ == "__main__":
    launching.leave(compare(sys.argv[1]))
