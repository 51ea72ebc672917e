"""Layers on other machines: two of llama.cpp's `rpc-server` on loopback say what one process says.

Most needs a build of llama.cpp with that backend, which wheels for processors do not have: the file
that `MOA_LLAMA_RPC_LIBRARY` names, made with `cmake -DGGML_RPC=ON -DBUILD_SHARED_LIBS=ON`."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from moa.errors import UsageError
from moa.llama.library import _check_that_one_listens
from moa.llama.target import LlamaTarget
from moa.target.contract import LoadOptions, Node
from moa.target.registry import open_target
from moa.target.rows import Row
from testing import gguf_tiny, rpc_server
from testing.tiny import tiny
from tests.verifier import kit

LIBRARY = os.environ.get("MOA_LLAMA_RPC_LIBRARY", "")
with_rpc = pytest.mark.skipif(
    not LIBRARY, reason="MOA_LLAMA_RPC_LIBRARY names no build of llama.cpp with the RPC backend"
)


def said(target: LlamaTarget, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    """Its text, a token at a time, and the logit of each token."""
    slot = target.cache.acquire()
    log, waiting, logits = list(ids), list(ids), []
    for _ in range(count):
        step = target.forward([Row.chain(slot, waiting)])
        target.commit(step, 0, range(len(waiting)))
        found = step.host_logits([Node(0, -1)])[0]
        waiting = [int(found.argmax())]
        logits.append(float(found.max()))
        log += waiting
    target.cache.release(slot)
    return log[len(ids) :], logits


@with_rpc
def test_two_servers_say_what_one_process_says(tmp_path: Path) -> None:
    file = gguf_tiny.save(tiny("llama"), tmp_path / "tiny.gguf")
    # Of its own kernels, and of none that are laid out for a processor alone.
    alone = open_target(
        str(file), LoadOptions(slots=2, capacity=200, threads=1, exact=False, library=LIBRARY)
    )
    assert isinstance(alone, LlamaTarget)
    texts = {seed: kit.prompt(seed, 20 + 10 * seed) for seed in range(4)}
    truths = {seed: said(alone, ids, 24) for seed, ids in texts.items()}
    with rpc_server.running(Path(LIBRARY), 2) as addresses:
        options = LoadOptions(
            slots=2, capacity=200, threads=1, rpc=tuple(addresses), library=LIBRARY
        )
        spread = open_target(str(file), options)
        assert isinstance(spread, LlamaTarget)
        assert not spread.runtime.on_cpu
        assert sum("RPC" in name or "127.0.0.1" in name for name in spread.runtime.devices()) == 2
        for seed, ids in texts.items():
            tokens, logits = said(spread, ids, 24)
            assert tokens == truths[seed][0]
            assert logits == pytest.approx(truths[seed][1], abs=0.05)
        spread.close()
    alone.close()


NOTHING_THERE = ["127.0.0.1:9", "127.0.0.1", "127.0.0.1:99999", ":50052"]
REFUSED = r"--rpc: (no rpc-server answers at|.* is no HOST:PORT)"


@with_rpc
@pytest.mark.parametrize("address", NOTHING_THERE)
def test_an_address_at_which_nothing_answers_is_one_line(address: str, tmp_path: Path) -> None:
    """llama.cpp itself ends the process."""
    file = gguf_tiny.save(tiny("llama"), tmp_path / "tiny.gguf")
    with pytest.raises(UsageError, match=REFUSED):
        open_target(str(file), LoadOptions(rpc=(address,), library=LIBRARY))


@pytest.mark.parametrize("address", NOTHING_THERE)
def test_an_address_is_tried_before_llama_cpp_is_told_of_it(address: str) -> None:
    with pytest.raises(UsageError, match=REFUSED):
        _check_that_one_listens(address)
    with socket.create_server(("127.0.0.1", 0)) as server:
        _check_that_one_listens(f"127.0.0.1:{server.getsockname()[1]}")
