"""A verifier of the embedded pair, in this process: the one that the embedded bundle was made for."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import cache

from cloud_verifier.app import Verifier
from cloud_verifier.model import Served, load
from cloud_verifier.settings import Settings
from moa.target.torch_target import Target

SETTINGS = Settings(port=0, slots=8, device="cpu", dtype="float32")


@cache
def embedded() -> Served:
    """The pair, loaded once."""
    return load(SETTINGS)


def served(settings: Settings = SETTINGS) -> Served:
    """The pair with slots of its own."""
    known = embedded().target
    target = Target.from_model(
        known.model, slots=settings.slots, capacity=settings.slot_capacity, folder=known.folder
    )
    facts = replace(embedded().facts, slots=target.cache.slots, capacity=target.cache.capacity)
    return replace(embedded(), target=target, facts=facts)


@contextlib.asynccontextmanager
async def verifier(settings: Settings = SETTINGS) -> AsyncIterator[str]:
    """Its address."""
    async with Verifier(served(settings), settings).open() as running:
        yield running.transport.url
