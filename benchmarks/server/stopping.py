"""SIGTERM under load: everybody gets a goaway, resumes on another replica, and ends with the same text."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from websockets.exceptions import ConnectionClosed

from benchmarks.report import table
from benchmarks.server.crowd import Speech, speeches
from benchmarks.server.options import Options
from benchmarks.server_kit import Pair, client, server
from moa.wire import ClientSession
from moa.wire.events import Recovered, Refused

Figures = dict[str, Any]
_CLIENTS = 8
_HEARD = 0.3  # of its text, by the first client to have so much: then comes the signal


async def measure(pair: Pair, options: Options) -> Figures:
    """Two replicas; the first is told to stop while all of its clients are in the middle of their texts."""
    with (
        server(pair, *options.flags, threads=options.threads) as first,
        server(pair, *options.flags, threads=options.threads) as second,
    ):
        said = await speeches(second.url, _CLIENTS, length=options.prompt, tokens=options.tokens, rate=options.rate)
        middle = asyncio.Event()

        async def stop() -> None:
            await middle.wait()
            first.terminate()

        stopping = asyncio.create_task(stop())
        ends = await asyncio.gather(*(_move((first.url, second.url), one, middle, options) for one in said))
        await stopping
        code = await asyncio.to_thread(first.process.wait, 60)
        return {
            "clients": len(ends),
            "goaway": sum(end["goaway"] for end in ends),
            "moved": sum(end["moved"] for end in ends),
            "identical": sum(end["identical"] for end in ends),
            "exit_code": code,
        }


async def _move(urls: tuple[str, str], said: Speech, middle: asyncio.Event, options: Options) -> dict[str, bool]:
    session = ClientSession(list(said.ids), max_new_tokens=options.tokens, ignore_eos=True)
    goaway = moved = False
    session.open()
    for url in urls:
        async with client(url) as edge:
            try:
                await edge.send(*session.recover())
                while not session.finish:
                    event = await edge.event(session)
                    if isinstance(event, Refused):
                        break  # draining: go elsewhere
                    if isinstance(event, Recovered):
                        moved = True
                        await edge.send(*event.resend)
                    done = len(session.log) - len(said.ids)
                    if done > _HEARD * options.tokens:
                        middle.set()
                    if not session.unsettled and not session.finish:
                        chain = [session.log[-1], *said.guesses[done : done + options.nodes - 1]]
                        await edge.send(session.verify(chain))
                        await asyncio.sleep(options.think)
            except ConnectionClosed:
                with contextlib.suppress(ConnectionClosed):
                    while True:  # what came before the end and was not read yet
                        await edge.event(session)
            goaway |= edge.goaway
    return {"goaway": goaway, "moved": moved, "identical": session.log[len(said.ids) :] == said.truth}


def tables(figures: Figures) -> str:
    """How many came through."""
    names = {"goaway": "got a goaway", "moved": "went on elsewhere", "identical": "ended with the target's own text"}
    rows = [[says, f"{figures[name]} of {figures['clients']}"] for name, says in names.items()]
    return table(["SIGTERM under load", ""], [*rows, ["exit code of the stopped verifier", f"{figures['exit_code']}"]])
