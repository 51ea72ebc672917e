"""`cloud-verifier serve --workers N`: starts the front and its workers, and ends them."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import socket
import sys
from multiprocessing.process import BaseProcess

from cloud_verifier.launching import share_cores
from cloud_verifier.serving.auth import Credentials
from cloud_verifier.settings import Settings
from cloud_verifier.workers.control import StartFailed, send
from cloud_verifier.workers.front import Front
from moa.errors import UsageError, how_to_install

MOST_WORKERS = 64


async def serve(settings: Settings, auth: Credentials, count: int, log_level: str) -> None:
    """Serve with `count` workers until SIGTERM or Ctrl-C, then drain."""
    if sys.platform != "linux":
        raise UsageError("--workers hands sockets from process to process as only Linux can", hint="leave it out")
    if count > MOST_WORKERS:
        raise UsageError(f"--workers must be 1..{MOST_WORKERS}, not {count}")
    share_cores(count)
    fresh = multiprocessing.get_context("spawn")  # without our threads and sockets

    def start(index: int, line: socket.socket) -> BaseProcess:
        process = fresh.Process(target=_work, args=(settings, auth, index, line, log_level), name=f"worker {index}")
        process.start()
        return process

    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    async with Front(settings, count, start).open() as front:
        print(f"listening on {front.url}", flush=True)
        await stop.wait()
        await front.drain()


def _work(settings: Settings, auth: Credentials, index: int, line: socket.socket, log_level: str) -> None:
    try:
        from cloud_verifier.workers.process import main  # imported here: the front does not need torch
    except ModuleNotFoundError as error:
        send(line, StartFailed(f"{error.name} is not installed ({how_to_install('verifier')})", UsageError.exit_code))
        return
    main(settings, auth, index, line, log_level)
