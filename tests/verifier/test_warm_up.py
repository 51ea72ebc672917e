"""What the verifier does before it listens."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from moa.target.contract import ExpectedLoad
from moa.target.packed import PackedDecoder
from moa.target.products import can_pack
from moa.target.rows import Row
from moa.target.torch_target import Target
from testing.tiny import tiny

pytestmark = pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.float32), reason="torch is without oneDNN"
)
SCRIPT = """
import torch
from moa.target.rows import Row
from tests.verifier.test_warm_up import load_of, packed

target = packed()
for most, sizes in (64, (13, 50, 64, 300)), (512, (700, 2000)):
    target.prepare(load_of(most), seconds=1000)
    for tokens in sizes:
        with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON_CREATION):
            print("tokens", tokens, flush=True)
            slots = [target.cache.acquire() for _ in range(1 + tokens // 500)]
            target.forward([Row.chain(slot, [5] * (tokens // len(slots))) for slot in slots]).argmax(0)
            for slot in slots:
                target.cache.release(slot)
"""


def packed() -> Target:
    """A tiny target whose products oneDNN computes. Its model is its own, for its weights are given
    back where a copy in oneDNN's layout computes."""
    return Target.from_model(tiny("llama"), slots=5, capacity=512, pack_weights=True)


def load_of(tokens: int) -> ExpectedLoad:
    return ExpectedLoad(rows=4, tokens=tokens, draft_tokens=8, prompt_tokens=256)


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
    decoder = target.decoder
    assert isinstance(decoder, PackedDecoder)
    ran = list[int]()
    run = decoder.run_first_layer

    def watched(row: Row) -> None:
        ran.append(len(row.tokens))
        run(row)

    monkeypatch.setattr(decoder, "run_first_layer", watched)
    for seconds in (1000, -1):
        target.prepare(load_of(4), seconds=seconds)
        assert ran == [1, 2, 3, 4]
    assert target.cache.free == 5
