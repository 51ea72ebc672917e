"""The `cloud-verifier` command: serve, token, check."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from cloud_verifier import logs, tokens
from cloud_verifier.logs import log
from cloud_verifier.serving import event_loop as loop
from cloud_verifier.serving import secured
from cloud_verifier.serving.auth import Authenticator, TokenFile
from cloud_verifier.settings import Settings
from moa import __version__
from moa.cli.command_line import CommandParser
from moa.cli.settings_flags import add_flags, given_fields
from moa.errors import MoaError, run_cli
from moa.process.listening import Port
from moa.wire.limits import Limits

_SERVE_FLAGS = (
    "slots",
    "kv_tokens",
    "max_batch_rows",
    "max_batch_tokens",
    "prefill_tokens",
    "project_rows",
    "batch_wait_ms",
)


ApiEndpoint = Callable[[Any], contextlib.AbstractAsyncContextManager[str]]
"""Starts another listener beside the verifier's port; yields its address."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    arguments = parser().parse_args(argv)
    tells = arguments.run is not _serve
    sys.exit(run_cli("cloud-verifier", lambda: arguments.run(arguments), extra="verifier", stdout_needed=tells))


def parser(kind: type[CommandParser] = CommandParser) -> CommandParser:
    """The command line."""
    top = kind(prog="cloud-verifier", description="Verify drafts of many edges with one large language model.")
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="load the target and serve it", description=_serve.__doc__)
    _add_model_flags(serve)
    serve.add_argument(
        "--server-drafter",
        default="",
        metavar="ID_OR_DIR",
        help="a published EAGLE-3 drafter of the target, to draft streams with; --drafter still makes records",
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=int, default=8765, help="port to listen on, 0 picks one (default: %(default)s)")
    serve.add_argument(
        "--auth-tokens", type=Path, metavar="FILE", help="who may connect: token file with lines of `token new`"
    )
    serve.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain, PEM")
    serve.add_argument("--tls-key", type=Path, metavar="FILE", help="its private key, PEM")
    serve.add_argument("--origin", action="append", default=[], metavar="URL", help="browser origin that may connect")
    serve.add_argument(
        "--openai",
        default="",
        metavar="[HOST:]PORT",
        help="also serve OpenAI's API and the operator's page, on this port",
    )
    serve.add_argument("--model-name", default="", metavar="NAME", help="the target's name in that API")
    serve.add_argument(
        "--openai-host", action="append", default=[], metavar="NAME", help="a DNS name that requests may use"
    )
    serve.add_argument("--app", type=Path, metavar="DIR", help="a web app of `edge-client page`, to serve below /app/")
    serve.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="info: start, connections and sessions, never their text (default: %(default)s)",
    )
    add_flags(serve.add_argument_group("batching"), Settings, dict.fromkeys(_SERVE_FLAGS, "N"))
    add_flags(serve.add_argument_group("limits"), Limits, {f.name: "N" for f in dataclasses.fields(Limits)})
    serve.set_defaults(run=_serve)

    tokens.add(commands.add_parser("token", help="bearer tokens: new, list, revoke"))

    check = commands.add_parser("check", help="load, run, and say what this machine can do", description=_check.__doc__)
    _add_model_flags(check)
    add_flags(check.add_argument_group("batching"), Settings, {"slots": "N", "kv_tokens": "N"})
    add_flags(check.add_argument_group("limits"), Limits, {"max_context_tokens": "N", "max_prompt_tokens": "N"})
    check.add_argument("--json", action="store_true", help="print the figures as JSON")
    check.set_defaults(run=_check)
    return top


def settings_from(arguments: argparse.Namespace) -> Settings:
    """Settings from parsed flags. Limits that depend on the context's size are derived from it unless they are
    given."""
    limits = given_fields(arguments, Limits)
    if (context := limits.get("max_context_tokens")) is not None:
        limits.setdefault("max_prompt_tokens", context)
        limits.setdefault("max_frame_bytes", max(Limits.max_frame_bytes, Limits.least_frame_bytes(context)))
    origins, hosts = (tuple(getattr(arguments, name, ())) for name in ("origin", "openai_host"))
    return Settings(limits=Limits(**limits), origins=origins, openai_hosts=hosts, **given_fields(arguments, Settings))


def _serve(arguments: argparse.Namespace) -> int:
    """Load the target (the embedded pair without --target) and serve it until SIGTERM or Ctrl-C, then drain."""
    settings = settings_from(arguments)
    auth = TokenFile(settings.auth_tokens) if settings.auth_tokens else Authenticator()
    logs.configure(arguments.log_level, settings.limits)
    secured.tls(settings)  # that it cannot be used is said before anything is loaded
    if settings.app is not None:
        from moa.api.pages import app_policy

        app_policy(settings.app)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(Port(settings.host, settings.port))
        api_port = stack.enter_context(Port(*settings.openai_address, flag="--openai")) if settings.openai else None
        from cloud_verifier.app import Verifier
        from cloud_verifier.model import load

        logs.take_over_libraries()
        served = load(settings)
        beside = _no_endpoint
        if api_port is not None:
            from cloud_verifier.openai.endpoint import endpoint

            tokenizer = served.target.tokenizer
            beside = functools.partial(
                endpoint, port=api_port, tokenizer=tokenizer, settings=settings, principals=auth.principal
            )
        loop.run(_until_stopped(Verifier(served, settings, auth), port, beside))
    return 0


@contextlib.asynccontextmanager
async def _no_endpoint(verifier: Any) -> AsyncIterator[str]:
    yield ""


async def _until_stopped(verifier: Any, port: Port, beside: ApiEndpoint) -> None:
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    async with verifier.open(port), beside(verifier) as address:
        log.info("listening", extra={"event": "listening", "url": verifier.transport.url})
        print(f"listening on {verifier.transport.url}", flush=True)
        if address:
            print(f"API at {address}/v1, operator's page at {address}/ui", flush=True)
        waiting = [asyncio.ensure_future(event.wait()) for event in (stop, verifier.died)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()
        if verifier.died.is_set():
            raise MoaError("the engine has stopped", hint="the log says why")
        await verifier.drain()


def _check(arguments: argparse.Namespace) -> int:
    """Load the target, verify trees of several sizes, and print capacity and speed."""
    settings = settings_from(arguments)
    from cloud_verifier.check import measure, show

    show(measure(settings), as_json=arguments.json)
    return 0


def _add_model_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--target", default="", metavar="ID_OR_DIR", help="target model; the embedded pair when absent"
    )
    command.add_argument("--drafter", default="", metavar="DIR", help="its MoA drafter, for activation records")
    command.add_argument(
        "--bundle", default="", metavar="DIR", help="the drafter as exported, to draft streams with on a CPU"
    )
    command.add_argument(
        "--device", default="auto", help="auto, cpu, cuda, cuda:N or, untested, mps (default: %(default)s)"
    )
    add_flags(
        command.add_argument_group("weights"),
        Settings,
        {"quantize": "int8", "inexact": ""},
    )
    command.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16 (default: %(default)s)")
