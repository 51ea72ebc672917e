"""Helpers of the verifier's tests: tiny models in memory, a verifier on loopback, and a small
client."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from websockets.asyncio.client import connect

from cloud_verifier.app import Verifier
from cloud_verifier.model import Served, serve_model
from cloud_verifier.serving.auth import Authenticator, new_token, token_line
from cloud_verifier.settings import Settings
from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import new_attention
from moa.sampling import SamplingSettings, choose
from moa.speculation.policy import Policy
from moa.target.torch_target import Row, Target
from moa.wire import Limits, decode_server
from testing import client as wire_client
from testing.client import Client
from testing.tiny import tiny

__all__ = ["Client", "Row", "Verifier", "decode_server"]

VOCAB = 128
LIMITS = Limits(
    max_context_tokens=160, max_prompt_tokens=150, max_guess_tokens=32, max_tree_nodes=32
)
SETTINGS = Settings(port=0, slots=8, limits=LIMITS)
LOGPROB_ROUNDING = 1e-4
"""How far a log-probability may be from that of `logits`, by the order of sums."""
PATIENCE = 100.0  # seconds; much longer than anything takes, so that only a hang reaches it


def limited(**limits: Any) -> Settings:
    """The tests' settings with other limits."""
    return replace(SETTINGS, limits=replace(LIMITS, **limits))


def principals(folder: Path, *names: str) -> tuple[Authenticator, *tuple[str, ...]]:
    """A token file of these principals, and the token of each."""
    tokens = [new_token() for _ in names]
    file = folder / "tokens"
    file.write_text("".join(f"{token_line(*pair)}\n" for pair in zip(names, tokens, strict=True)))
    return Authenticator(file), *tokens


@contextlib.contextmanager
def held_forward(
    running: Verifier, *, behind: int = -1
) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The next forward stops before it runs: the first event is set when it does, the second lets
    it go on. With `behind`, it is the next one of a slot that holds more tokens than that: behind
    the prompt it is in the middle of an answer."""
    entered = threading.Event()
    release = threading.Event()
    target = running.engine.target
    real = target.forward

    def slow(rows: Any) -> Any:
        if max(target.cache.lengths[row.slot] for row in rows) > behind:
            entered.set()
            release.wait(PATIENCE)
        return real(rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "forward", slow)
        try:
            yield entered, release
        finally:
            release.set()  # a test that fails does not keep the engine


target_options: dict[str, Any] = {}
"""How targets are made beside that; a test that sets an accelerator here runs the same verifier on
it."""


_shared_models: list[nn.Module] = []


@cache
def model(family: str = "llama") -> Any:
    """A tiny random model, fp32, which all tests of a process share: a target that packs weights
    takes them from its model, and needs one of its own."""
    torch.set_num_threads(1)
    made = tiny(family)
    _shared_models.append(made)
    return made


def assert_shared_models_are_whole() -> None:
    """No target has taken weights from a model that the next test reads."""
    for shared in _shared_models:
        products = [module for module in shared.modules() if hasattr(module, "out_features")]
        assert all(type(product) is nn.Linear for product in products), "a target has packed it"
        assert not any(weight.is_meta for weight in shared.parameters()), "a target gave it back"


def served(
    settings: Settings = SETTINGS,
    *,
    own: Any = None,
    family: str = "llama",
    drafter: bool = True,
    decode: Any = None,
) -> Served:
    """A tiny target with slots of its own, or `own` weights, and a random drafter."""
    target = Target.from_model(
        own or model(family),
        slots=settings.slots,
        capacity=settings.slot_capacity,
        kv_tokens=settings.kv_cache_tokens,
        **target_options,
    )
    random_drafter = None
    if drafter:
        torch.manual_seed(0)
        random_drafter = new_attention(
            AttentionConfig.for_target(target.facts), target.model
        ).eval()
    return serve_model(target, random_drafter, decode=decode, drafter_name="d" if drafter else "")


@contextlib.asynccontextmanager
async def verifier(
    settings: Settings = SETTINGS, *, auth: Authenticator | None = None, **how: Any
) -> AsyncIterator[Verifier]:
    """A verifier that listens on loopback."""
    made = Verifier(served(settings, **how), settings, auth)
    made.transport._pace["close_timeout"] = 0.1  # an end that is broken on purpose answers no close
    async with made.open() as running:
        yield running


def client(running: Verifier, **how: Any) -> AbstractAsyncContextManager[Client]:
    """A client that has been welcomed."""
    return wire_client.client(running.transport.url, **how)


def connection(running: Verifier, *, token: str = "", **options: Any) -> connect:
    """A bare websocket to the verifier."""
    return wire_client.connection(running.transport.url, token=token, **options)


def loops() -> list[Any]:
    """What runs a verifier's event loop: uvloop where there is one, and asyncio's own."""
    found = [pytest.param(asyncio.run, id="asyncio")]
    with contextlib.suppress(ImportError):
        import uvloop

        found.append(pytest.param(uvloop.run, id="uvloop"))
    return found


async def get(url: str, path: str, token: str = "") -> tuple[int, str]:
    """Status and text of a plain HTTP request to a websocket's port."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(timeout=PATIENCE, trust_env=False) as browser:
        answer = await browser.get(url.replace("ws://", "http://") + path, headers=headers)
    return answer.status_code, answer.text


async def until(condition: Callable[[], Any]) -> None:
    """Wait until it is true."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.01)


def metric(running: Verifier, name: str) -> float:
    """A sample of the metrics page, by its name with its labels."""
    lines = running.metrics.page().decode().splitlines()
    return float(next(line for line in lines if line.startswith(name + " ")).split()[-1])


def generated(
    ids: Sequence[int], count: int, sampling: SamplingSettings | None = None
) -> list[int]:
    """The library's own text, computed once."""
    return list(_generated(tuple(ids), count, sampling))


@cache
def _generated(ids: tuple[int, ...], count: int, sampling: SamplingSettings | None) -> list[int]:
    return generate(model(), ids, count, sampling)


def generate(
    model: Any, ids: Sequence[int], count: int, sampling: SamplingSettings | None = None
) -> list[int]:
    """The result of `model.generate`; with sampling, the sampler's choice on its logits."""

    def chosen(log: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        """Leaves `generate` only the token that the sampler takes."""
        assert sampling is not None
        only = torch.full_like(scores, -torch.inf)
        text = log[0].tolist()
        answer = text[len(ids) :]
        token = choose(scores[0].numpy(), sampling, len(text), text, answer=answer)
        only[0, token] = 0.0
        return only

    with torch.inference_mode():
        out = model.generate(
            torch.tensor([list(ids)]),
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=count,
            do_sample=False,
            logits_processor=[] if sampling is None or sampling.plain_greedy else [chosen],
        )
    return [int(token) for token in out[0, len(ids) :]]


def logits(ids: Sequence[int]) -> NDArray[np.float32]:
    """The library's own after each of these tokens, `[tokens, vocabulary]`."""
    with torch.inference_mode():
        found: NDArray[np.float32] = model()(torch.tensor([list(ids)])).logits[0].float().numpy()
    return found


def draft_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it costs."""

    def plan(self: Policy, texts: Any, unread: Iterable[int | None], *_: Any) -> list[int]:
        return [0 if tokens is None else 4 for tokens in unread]

    monkeypatch.setattr(Policy, "plan", plan)


def random_draft(
    rng: random.Random, truth: Sequence[int], pending: int, nodes: int, vocab: int = VOCAB
) -> tuple[list[int], list[int]]:
    """A random tree whose nodes are right about half of the time."""
    tokens = [pending]
    parents = [-1]
    depth = [0]
    for node in range(1, nodes):
        parent = rng.randrange(node)
        right = depth[parent] < len(truth) and rng.random() < 0.6
        tokens.append(truth[depth[parent]] if right else rng.randrange(4, vocab))
        parents.append(parent)
        depth.append(depth[parent] + 1)
    return tokens, parents


def decoded(target: Target, ids: list[int], truth: list[int], rng: random.Random) -> list[int]:
    """As many tokens as `truth`, by trees that are right about half of the time, the prompt in
    unlike pieces."""
    slot = target.cache.acquire()
    step = target.forward([Row.chain(slot, ids[:-1], judged="none")])
    target.commit(step, 0, range(len(ids) - 1))
    out: list[int] = []
    pending = ids[-1]
    while len(out) < len(truth):
        tokens, parents = random_draft(rng, truth[len(out) :], pending, 6)
        step = target.forward([Row(slot, tokens, parents)])
        best = step.argmax(0).tolist()
        path = [0]
        while (
            child := next(
                (n for n in range(6) if parents[n] == path[-1] and tokens[n] == best[path[-1]]),
                None,
            )
        ) is not None:
            path.append(child)
        target.commit(step, 0, path)
        pending = best[path[-1]]
        out += [*(tokens[node] for node in path[1:]), pending]
    target.cache.release(slot)
    return out[: len(truth)]


def prompt(seed: int, length: int, vocab: int = VOCAB) -> list[int]:
    """Random ids that are no special tokens."""
    return [int(t) for t in np.random.default_rng(seed).integers(4, vocab, size=length)]
