"""What an honest schema pays for the process that compiles it first: each of the schemas that others
wrote, with that process and without it, by turns.

Two times are taken: to compile alone, and of a whole answer of the embedded pair through a verifier,
which is what a user waits for. A schema is never compiled twice from one text: a comment that is new
each time keeps it out of what was compiled before.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from cloud_verifier.app import Verifier
from cloud_verifier.model import load
from cloud_verifier.settings import Settings
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.text.chat import prompt_ids
from moa.grammar import matcher
from moa.grammar.children import Children
from moa.grammar.spec import Grammar, GrammarError
from tests.grammar.corpus import compiler, schemas
from tests.torture.tally import Found

_PROMPT = (
    "Can you find name, age and city and answer in JSON: At the age of 32, Sofia moved to Denver."
)
_TOKENS = 32
"""The most that an answer may have: as many as the embedded model needs for a short object."""
_LONGER = 1.10
"""How much longer an answer may take than without the process."""
_MORE_SECONDS = 0.005
"""That a compilation may take more."""
_CALM = 1.0
"""Load a core, from which the times say more of the machine than of the process."""
_MEMORY = 4096
"""Bytes that a grammar is said to take where no process says it."""


class _NoChildren(Children):
    """Accepts every grammar at once, as it was before there were processes."""

    def check(self, grammar: Grammar) -> int:
        return _MEMORY


@contextmanager
def _without_process() -> Iterator[None]:
    with mock.patch.object(matcher, "_CHILDREN", _NoChildren()):
        yield


@contextmanager
def _with_process() -> Iterator[None]:
    yield


_WAYS = {"with the process": _with_process, "without it": _without_process}


class _Fresh:
    """Makes grammars of schemas, each with a text that was never seen."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def grammar(self, schema: dict[str, Any]) -> Grammar:
        """The grammar of this schema with a new comment in it."""
        return Grammar.of_schema({**schema, "$comment": f"number {next(self._numbers)}"})


async def honest(options: argparse.Namespace) -> Found:
    """As many schemas as the options say; all 861 at most."""
    order = random.Random(options.seed)
    known = schemas()
    chosen = order.sample(known, min(options.schemas, len(known)))
    fresh = _Fresh()
    compiling: dict[str, list[float]] = {way: [] for way in _WAYS}
    answering: dict[str, list[float]] = {way: [] for way in _WAYS}
    refused = 0
    settings = Settings(port=0, slots=8, kv_tokens=8192, device="cpu")
    device = Device.load(threads=1)
    ids = prompt_ids(device.codec, _PROMPT)[0]
    async with (
        Verifier(load(settings), settings).open() as running,
        EdgeClient(
            device=device,
            verifier=running.transport.url,
            draft="server",
            max_new_tokens=_TOKENS,
            offline_after=60.0,
        ) as client,
    ):

        async def answer(grammar: Grammar) -> None:
            async for _ in client.generate(ids=ids, grammar=grammar):
                pass

        # The first grammar of a program prepares the tokenizer and starts the processes.
        compiler().compile(fresh.grammar({"type": "boolean"}))
        await answer(fresh.grammar({"type": "boolean"}))
        for one in chosen:
            ways = list(_WAYS)
            order.shuffle(ways)
            for way in ways:
                with _WAYS[way]():
                    began = time.perf_counter()
                    try:
                        compiler().compile(fresh.grammar(one.schema))
                    except GrammarError:
                        refused += 1
                        break
                    compiled = time.perf_counter()
                    await asyncio.sleep(0)
                    asked = time.perf_counter()
                    await answer(fresh.grammar(one.schema))
                    answering[way].append(time.perf_counter() - asked)
                    compiling[way].append(compiled - began)
    return _found(compiling, answering, refused)


def _found(
    compiling: dict[str, list[float]], answering: dict[str, list[float]], refused: int
) -> Found:
    """Both times of both ways, and what is beyond a limit on a machine that is calm enough to say."""
    load_of_a_core = os.getloadavg()[0] / (os.cpu_count() or 1)
    with_it, without = _WAYS
    more = statistics.median(compiling[with_it]) - statistics.median(compiling[without])
    longer = statistics.median(answering[with_it]) / statistics.median(answering[without])
    found = {
        "schemas": len(answering[without]),
        "refused": refused,
        "compile ms": {way: _milliseconds(times) for way, times in compiling.items()},
        "answer ms": {way: _milliseconds(times) for way, times in answering.items()},
        "answers take times": round(longer, 3),
        "load of a core": round(load_of_a_core, 2),
    }
    wrong = [f"{refused} honest schemas refused"] if refused else []
    if load_of_a_core < _CALM:
        if more > _MORE_SECONDS:
            wrong.append(f"compiling takes {1000 * more:.1f} ms more at the median")
        if longer > _LONGER:
            wrong.append(f"an answer takes {longer:.2f} times as long at the median")
    return found, wrong


def _milliseconds(times: list[float]) -> dict[str, float]:
    """Median and 90th percentile."""
    return {
        "median": round(1000 * statistics.median(times), 2),
        "nine tenths": round(1000 * statistics.quantiles(times, n=10)[-1], 2),
    }
