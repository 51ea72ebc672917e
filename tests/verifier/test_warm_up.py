"""What the verifier does before it listens."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from cloud_verifier.model import warm_up
from moa.model.products import can_pack
from moa.model.target import Target
from tests.verifier import kit

pytestmark = pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.float32), reason="torch is without oneDNN"
)
SCRIPT = """
import torch
from cloud_verifier.model import warm_up
from moa.model.layout import Row
from tests.verifier.test_warm_up import packed

target = packed()
for most, sizes in (64, (13, 50, 64, 300)), (512, (700, 2000)):
    warm_up(target, most, seconds=1000)
    for tokens in sizes:
        with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
            print("tokens", tokens, flush=True)
            slots = [target.pool.acquire() for _ in range(1 + tokens // 500)]
            target.forward([Row.chain(slot, [5] * (tokens // len(slots))) for slot in slots]).argmax(0)
            for slot in slots:
                target.pool.release(slot)
"""


def packed() -> Target:
    """A tiny target whose products oneDNN computes."""
    return Target.from_model(kit.model(), slots=5, capacity=512, pack_weights=True)


def test_no_request_waits_for_kernels_of_onednn() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, check=True
    )
    made = {}
    for part in ran.stdout.split("tokens ")[1:]:
        tokens, _, lines = part.partition("\n")
        assert "cache_hit" in lines
        made[int(tokens)] = lines.count("create:cache_miss")
    assert made[13] == made[50] == made[64] == 0
    assert made[300] > 0, "more tokens than were asked for"
    assert made[700] == made[2000] == 0, (
        "the memory of kernels is bounded whatever one forward holds"
    )


def test_a_slow_machine_does_not_wait_for_them_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    target = packed()
    ran = list[int]()
    run = target.run_first_layer
    monkeypatch.setattr(
        target, "run_first_layer", lambda rows: ran.append(len(rows[0].tokens)) or run(rows)
    )
    for seconds in (1000, -1):
        warm_up(target, 4, seconds=seconds)
        assert ran == [1, 2, 3, 4]
    assert target.pool.free == 5
