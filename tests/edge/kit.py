"""Helpers of the edge's tests: a tiny random drafter as a real bundle, an oracle drafter."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import fcntl
import functools
import math
import os
import random
import shutil
import tempfile
from collections.abc import AsyncIterator, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cloud_verifier.app import Verifier
from cloud_verifier.serving.auth import Authenticator
from cloud_verifier.settings import Settings
from edge_client.client import EdgeClient
from edge_client.conversation import Conversation
from edge_client.device import Device
from edge_client.tools.emulated_network import LinkProxy, Profile
from export.build import BuildSettings, build
from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import AttentionDrafter, new_attention
from moa.grammar.matcher import TextMask
from moa.graph.cache import RecordBuffer
from moa.model.checkpoint import save_drafter
from moa.sampling import SamplingSettings
from moa.speculation.guess_tree import GuessTreeGrower
from moa.target.loading import load_model
from moa.tree import DraftTree, TreeGrower, TreeShape, path_of
from testing.tiny import save_tiny
from tests.edge.reader import Reader
from tests.verifier import kit as verifier_kit


@functools.cache
def pair() -> Path:
    """A folder with `target`, `drafter` and `bundle` of the verifier kit's tiny pair; made once for
    all workers."""
    folder = Path(os.environ.get("EDGE_TEST_PAIR") or tempfile.mkdtemp(prefix="edge-pair-"))
    if "EDGE_TEST_PAIR" not in os.environ:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "bundle").exists():
            make_pair(folder)
    return folder


def make_pair(folder: Path, **shape: Any) -> None:
    """Save the pair, its drafter of this shape, and export its bundle."""
    save_tiny("llama", folder / "target")
    loaded = load_model(folder / "target")
    torch.manual_seed(0)
    export_drafter(
        new_attention(AttentionConfig.for_target(loaded.facts, **shape), loaded.model), folder
    )


def export_drafter(drafter: AttentionDrafter, folder: Path) -> None:
    """Save a drafter of the folder's target, and export its bundle."""
    save_drafter(drafter, folder / "drafter")
    settings = BuildSettings(
        target=str(folder / "target"),
        drafter=str(folder / "drafter"),
        out=folder / "bundle",
        variants=("cpu-fp32",),
        time_steps=False,
    )
    build(settings)


@contextlib.asynccontextmanager
async def verifier(
    settings: Settings = verifier_kit.SETTINGS,
    auth: Authenticator | None = None,
    *,
    drafter: bool = True,
) -> AsyncIterator[Verifier]:
    """The pair's verifier, in this process; without a drafter it makes no records."""
    served = verifier_kit.served(settings, drafter=drafter)
    manifest = device().bundle.manifest
    facts = dataclasses.replace(
        served.facts,
        drafter=manifest.drafter.weights_id,
        tokenizer=manifest.tokenizer.hash,
        target="",
    )
    async with Verifier(dataclasses.replace(served, facts=facts), settings, auth).open() as running:
        yield running


@contextlib.asynccontextmanager
async def linked(
    other: Device | None = None,
    profile: Profile | None = None,
    settings: Settings = verifier_kit.SETTINGS,
    *,
    drafter: bool = True,
    **how: Any,
) -> AsyncIterator[tuple[EdgeClient, Verifier, LinkProxy]]:
    """A client of this device with these settings, its verifier, and the link between them."""
    async with (
        verifier(settings, drafter=drafter) as running,
        LinkProxy("127.0.0.1", running.transport.port, profile) as link,
        EdgeClient(verifier=link.url, device=other or device(), **how) as client,
    ):
        yield client, running, link


class OracleDrafter:
    """A drafter that knows the target's text and is right with a given rate, deterministically."""

    def __init__(
        self,
        truth: Sequence[int],
        right: float,
        *,
        seed: int = 0,
        records: RecordBuffer | None = None,
    ) -> None:
        self.truth = list(truth)
        self.right = right
        self.seed = seed
        self.records = records
        self.run_tokens = 1
        self._growth: GuessTreeGrower | None = None
        self._grown_after: list[int] = []

    def _top(self, ids: Sequence[int]) -> list[int]:
        rng = random.Random(f"{self.seed} {list(ids[-4:])} {len(ids)}")
        known = len(ids) < len(self.truth) and list(ids) == self.truth[: len(ids)]
        others = [rng.randrange(4, 128) for _ in range(3)]
        if known and rng.random() < self.right:
            others.insert(0, self.truth[len(ids)])
        elif known and rng.random() < 0.5:
            others.insert(1, self.truth[len(ids)])
        return others[:3]

    def draft(
        self,
        ids: Sequence[int],
        shape: TreeShape,
        sampling: SamplingSettings,
        grammar: TextMask | None = None,
    ) -> Generator[None, None, DraftTree]:
        grower = TreeGrower(ids[-1], shape)
        while grower.frontier:
            top = []
            for node in grower.frontier:
                top.append(self._top([*ids, *path_of(grower.tokens, grower.parents, node)]))
            grower.expand(
                np.array(top), np.log(np.tile([[0.7, 0.2, 0.1]], (len(top), 1))).astype(np.float32)
            )
            yield
        return grower.tree()

    def grow(
        self,
        ids: Sequence[int],
        breadth: int,
        least: float,
        sampling: SamplingSettings,
        grammar: TextMask | None = None,
    ) -> Generator[None, None, GuessTreeGrower]:
        yield from ()
        if self._growth is None or self._grown_after != list(ids):
            self._growth = GuessTreeGrower(ids[-1])
            self._grown_after = list(ids)
        growth = self._growth
        nodes = growth.best(breadth)
        top = [
            self._top([*ids, *path_of(growth.tree.tokens, growth.tree.parents, node)])
            for node in nodes
        ]
        growth.expand(nodes, top, [[math.log(p) for p in (0.7, 0.2, 0.1)]] * len(nodes))
        return growth

    def guess(
        self, ids: Sequence[int], sampling: SamplingSettings, grammar: TextMask | None = None
    ) -> Generator[None, None, int]:
        yield from ()
        return self._top(ids)[0]


@functools.cache
def device() -> Device:
    """The bundle of the random drafter, loaded."""
    return Device.load(pair() / "bundle", threads=1)


def oracle(truth: Sequence[int], right: float = 0.8, *, seed: int = 0) -> Device:
    """The same device with a drafter that is right at this rate."""
    real = device()

    def drafter() -> OracleDrafter:
        records = real.new_drafter().records
        assert records is not None
        return OracleDrafter(truth, right, seed=seed, records=RecordBuffer(records.heads))

    return dataclasses.replace(real, new_drafter=drafter)


FAST: dict[str, Any] = {
    "offline_after": 0.15,
    "reconnect_seconds": 0.05,
    "settle_seconds": 20.0,
    "max_offline_tokens": 24,
}
"""Settings with short timeouts, for links that are cut many times a second."""


async def transcribe(
    client: EdgeClient | Conversation, ids: Sequence[int], **changes: Any
) -> Reader:
    """Run a turn to its end."""
    transcript = Reader()
    async for event in client.generate(ids=ids, **changes):
        transcript.take(event)
    assert transcript.done is not None
    # What programs are told of it must be what they were sent.
    assert transcript.done.stats["unverified_tokens"] == transcript.verified.count(False)
    return transcript
