"""What `check` says of memory is what a pool really holds."""

from __future__ import annotations

import numpy as np
import torch

from cloud_verifier.check import unlike
from moa.errors import FullError
from moa.model.pages import PAGE, PagePool


def test_as_many_sessions_of_unlike_lengths_fit_as_it_says_and_four_times_whole_contexts() -> None:
    capacity, tokens, slots = 8192, 262144, 1024
    how = {"layers": 1, "kv_heads": 1, "head_dim": 2, "dtype": torch.float32, "device": torch.device("cpu")}
    pool = PagePool(slots=slots, capacity=capacity, tokens=tokens, **how)  # type: ignore[arg-type]
    said = unlike(slots, pool.pages, capacity)
    assert said["whole_contexts"] == tokens // capacity
    assert said["sessions"] >= 4 * said["whole_contexts"]
    rng, fitted = np.random.default_rng(0), []
    for _ in range(20):
        taken = []
        try:
            while True:
                length = int(np.exp(rng.uniform(np.log(said["shortest"]), np.log(capacity))))
                taken.append(pool.acquire())
                pool.begin([taken[-1]], [length])
        except FullError:
            fitted.append(len(taken) - 1)
        for slot in taken:
            pool.release(slot)
    assert abs(np.mean(fitted) / said["sessions"] - 1) < 0.1
    assert pool.free_pages == pool.pages == -(-tokens // PAGE)
