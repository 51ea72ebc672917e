"""`edge-client serve`: an OpenAI-compatible endpoint and a chat page on this device."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client.cli import options
from edge_client.client import EdgeClient
from edge_client.settings import ClientSettings
from moa.errors import MoaError, UsageError, how_to_install
from moa.process.gc_freeze import leave_out_what_is_loaded
from moa.process.listening import Port

if TYPE_CHECKING:
    from edge_client.serve.app import ServeSettings

_KEY = "MOA_API_KEY"


def add(command: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    command.description = (
        "Serve /v1/chat/completions, /v1/completions, /v1/responses and /v1/models to every program that speaks "
        "OpenAI's API, and a chat page at /. Answers go on when the network does not."
    )
    group = command.add_argument_group("endpoint")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8080, help="port to listen on, 0 picks one (default: %(default)s)")
    group.add_argument(
        "--api-key", action="append", metavar="KEY", help=f"API key of a client; may be repeated; better in {_KEY}"
    )
    group.add_argument(
        "--mode",
        choices=("hold", "provisional", "keep"),
        default="keep",
        help="text that the device writes without the verifier: send it, marked; or hold it back; or send it and "
        "correct it later, for clients that can (default: %(default)s)",
    )
    group.add_argument(
        "--patience",
        type=float,
        metavar="S",
        help="how long a complete answer waits for a lost link (default: 1 in mode keep, 5 provisional, 20 hold)",
    )
    group.add_argument(
        "--most-answers", type=int, default=64, metavar="N", help="answers at once (default: %(default)s)"
    )
    group.add_argument(
        "--keep-seconds",
        type=float,
        default=900.0,
        metavar="S",
        help="how long streams and responses are kept (default: %(default)s)",
    )
    group.add_argument(
        "--allowed-host", action="append", default=[], metavar="NAME", help="a DNS name that requests may use"
    )
    group.add_argument(
        "--origin", action="append", default=[], metavar="URL", help="a website whose pages may use it (default: none)"
    )
    group.add_argument("--app", type=Path, metavar="DIR", help="a web app of `edge-client page`, to serve below /app/")
    group.add_argument(
        "--model-name", default="", metavar="NAME", help="the model's name for clients (default: the target's own)"
    )
    options.add_connection(command)
    options.add_generation(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    settings = options.settings_from(arguments, max_new_tokens=1024)
    asyncio.run(_serve(settings, _serve_settings(arguments), arguments.model_name))
    return 0


def _serve_settings(arguments: argparse.Namespace) -> ServeSettings:
    try:
        from edge_client.serve.app import ServeSettings
        from moa.api.app import ApiLimits
        from moa.api.requests import Defaults
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed", hint=how_to_install("serve")) from None
    keys = arguments.api_key or [key for key in (os.environ.get(_KEY),) if key]
    return ServeSettings(
        host=arguments.host,
        port=arguments.port,
        api_keys=tuple(keys),
        allowed_hosts=tuple(arguments.allowed_host),
        origins=tuple(arguments.origin),
        app=arguments.app,
        limits=ApiLimits(max_running=arguments.most_answers, keep_seconds=arguments.keep_seconds),
        defaults=Defaults(mode=arguments.mode, patience=arguments.patience),
    )


async def _serve(settings: ClientSettings, serve: ServeSettings, name: str) -> None:
    from edge_client.serve.app import endpoint, model_name

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # not on every system; there Ctrl-C ends the program
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with Port(serve.host, serve.port) as port:
        async with EdgeClient(settings) as client:
            model = name or model_name(client.device.bundle.manifest.target.source)
            async with endpoint(client, serve, model, port) as address:
                leave_out_what_is_loaded()
                print(f"chat page and API at {address} (model {model}); Ctrl-C ends", file=sys.stderr, flush=True)
                look = asyncio.create_task(tell_of_the_verifier(client))
                await stop.wait()
                look.cancel()


async def tell_of_the_verifier(client: EdgeClient) -> None:
    """Say at the start if it is not there: then answers are the device's own."""
    try:
        if client.link is not None:
            await client.wait_online()
            return
        missing = "no verifier"
    except MoaError as error:
        missing = f"no verifier now: {error.line()}"
    print(f"{missing}\nall text is this device's own, and none of it is verified", file=sys.stderr, flush=True)
