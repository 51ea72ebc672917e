"""`edge-client serve`: an OpenAI-compatible endpoint and a chat page on this device."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from types import ModuleType

from edge_client.cli import options
from edge_client.client import EdgeClient
from edge_client.link.dialling import is_refusal
from edge_client.link.retry import Retry
from edge_client.link.websocket import VerifierLink
from edge_client.screen.words import toy_of
from edge_client.serve.settings import ServeSettings
from edge_client.settings import ClientSettings
from moa.cli.command_line import add_flags, given_fields
from moa.errors import MoaError, UsageError, how_to_install
from moa.process.listening import Port
from moa.process.memory import leave_out_what_is_loaded
from moa.process.peers import shown_peer
from moa.safe_text import safe_line

_KEY = "MOA_API_KEY"
_FLAGS = {
    "host": "ADDRESS",
    "port": "N",
    "api_keys": "KEY",
    "mode": "MODE",
    "patience": "S",
    "most_answers": "N",
    "keep_seconds": "S",
    "allowed_hosts": "NAME",
    "origins": "URL",
    "app": "DIR",
    "model_name": "NAME",
    "also_called": "NAME",
}


_FIRST_SECONDS = 2.0
"""In which most verifiers answer at the start; one that comes later is told of then."""
_LOOK_SECONDS = 1.0
"""How often it is looked whether the link is still up, for a line on the screen."""
_LONGEST_PAUSE = 60.0
"""Seconds. A verifier that refuses this device is asked no less often than so: somebody has to change
something, and each attempt is a line of the verifier's log. A turn asks at once."""
_NAMED_SECONDS = 2.0
"""For so long the start waits to learn the upstream's model."""
_ALONE = "until {}, all text is this device's own, and none of it is verified"
"""What is said while nobody verifies: till when, as far as that is known."""


def add(command: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    command.description = (
        "Serve /v1/chat/completions, /v1/completions, /v1/responses and /v1/models to every program that speaks "
        "OpenAI's API, and a chat page at /. Answers go on when the network does not."
    )
    add_flags(command.add_argument_group("endpoint"), ServeSettings, _FLAGS)
    options.add_connection(command)
    options.add_generation(command)


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    settings = options.settings_from(arguments)
    keys = {"api_keys": (key,)} if (key := os.environ.get(_KEY)) else {}
    serve = ServeSettings(**{**keys, **given_fields(arguments, ServeSettings)})
    _log_with_times()
    try:
        with options.waiting("importing the libraries"):
            from edge_client.serve import endpoint
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed", hint=how_to_install("serve")) from None
    asyncio.run(_serve(settings, serve, endpoint))
    return 0


async def _serve(settings: ClientSettings, serve: ServeSettings, endpoint: ModuleType) -> None:
    """Serve the endpoint until Ctrl-C or SIGTERM, and print its address."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(
            NotImplementedError
        ):  # not on every system; there Ctrl-C ends the program
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with Port(serve.host, serve.port) as port:
        async with options.opened(settings) as client:
            if settings.upstream:
                # Its model is told with the first welcome; that it is away is told further below.
                with contextlib.suppress(MoaError):
                    await client.wait_online(_NAMED_SECONDS)
            async with endpoint.endpoint(client, serve, serve.model_name, port) as address:
                model = endpoint.EdgeAnswerer(client, serve.model_name).model
                leave_out_what_is_loaded()  # the garbage collector need not look at it again
                _print(f"chat page and API at {address} (model {safe_line(model)}); Ctrl-C ends")
                looks = [
                    asyncio.create_task(_tell_of_the_toy(client)),
                    asyncio.create_task(tell_of_the_verifier(client)),
                ]
                await stop.wait()
                _print("ending ...")  # what is being written and read is ended first
                for look in looks:
                    look.cancel()
                await asyncio.gather(*looks, return_exceptions=True)
    _print("ended")


async def _tell_of_the_toy(client: EdgeClient) -> None:
    """Print what the device's model is, if that is the embedded toy. What it is good for depends on
    what answers beside it, which is waited for a moment."""
    if client.link is not None and not client.shared.has_engine_behind:
        with contextlib.suppress(MoaError):
            await client.wait_online(_NAMED_SECONDS)
    remark = toy_of(client)
    if remark:
        _tell(remark)


async def tell_of_the_verifier(client: EdgeClient, look_seconds: float = _LOOK_SECONDS) -> None:
    """Print whether the verifier is there, at the start and whenever that has changed, for ever:
    without it answers are the device's own. An outage is told of after one look, however soon it
    ends: texts of that time are not verified. A verifier that refuses this device is asked again
    after pauses that grow."""
    link = client.link
    if link is None:
        _tell("no verifier\nall text is this device's own, and none of it is verified")
        return
    told = ""
    """The state that was told last."""
    refusals = Retry(look_seconds, _LONGEST_PAUSE)
    while True:
        trouble = ""
        is_refused = False
        try:
            await client.wait_online({"": _FIRST_SECONDS, "online": look_seconds}.get(told))
            trouble = link.away
        except MoaError as error:
            trouble = error.line()
            is_refused = is_refusal(error)
        state = "refused" if is_refused else _state(link, trouble)
        if state != told:
            _tell(f"{state}: {safe_line(trouble or f'text is verified by {link.endpoint.name}')}")
            if trouble and told in ("", "online"):  # else it was said
                # One that refuses is there: it waits for nothing but that somebody changes something.
                _tell(_ALONE.format("that is changed" if is_refused else "it is there"))
        told = state
        if is_refused:
            refusals.failed(0.0)
            await until_up(link, refusals.not_before)
            continue
        refusals.progressed()
        # The link may come up in this pause: the next look says so.
        await asyncio.sleep(look_seconds)
        while link.up and _state(link, link.away) == told:
            await asyncio.sleep(look_seconds)


async def until_up(link: VerifierLink, seconds: float) -> None:
    """Wait until the link is up, which a turn may have asked for, for so many seconds at most."""
    with contextlib.suppress(TimeoutError), link.mailbox() as box:
        async with asyncio.timeout(seconds):
            while not link.up:
                await box.wait(None)  # until the state of the link changes


def _state(link: VerifierLink, trouble: str) -> str:
    """What to say of a link: whether it is online, or what it is instead because of this trouble."""
    if not trouble:
        return "online"
    if link.up and link.unanswered:
        return "not online yet"
    is_engine_away = link.up and link.away  # a verifier stands before it, and is there
    return "offline" if link.endpoint.upstream or is_engine_away else "no verifier now"


class _WithPeer(logging.Formatter):
    """Writes at a line's end whose request or connection it is about, where that is known."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Returns a line."""
        peer = shown_peer(getattr(record, "peer", ""))
        return super().formatMessage(record) + (f" [{safe_line(peer)}]" if peer else "")


def _log_with_times() -> None:
    """Begin each line of the log with its time."""
    handler = logging.StreamHandler()
    handler.setFormatter(_WithPeer("%(asctime)s %(message)s", _time_format()))
    logging.getLogger().addHandler(handler)


def _tell(what: str) -> None:
    """Print lines with the time in front of them."""
    stamp = time.strftime(_time_format())
    for line in what.splitlines():
        _print(f"{stamp} {line}")


def _print(line: str) -> None:
    """Print a line on standard error; a full disk under it ends no endpoint."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _time_format() -> str:
    """How times are written: with the date where a file or a service keeps the lines for days."""
    return "%H:%M:%S" if sys.stderr.isatty() else "%Y-%m-%d %H:%M:%S"
