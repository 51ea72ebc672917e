"""The `cloud-verifier` command: serve, token, check."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import sys
import time
from collections.abc import Coroutine, Sequence
from typing import Any, get_args

from cloud_verifier import bearer_tokens, logs
from cloud_verifier.certificate import Certificate
from cloud_verifier.logs import log
from cloud_verifier.serving.auth import Authenticator
from cloud_verifier.settings import Settings
from cloud_verifier.stopping import Stopping, say
from moa.api.access import is_loopback
from moa.cli.command_line import CommandParser, add_flags, given_fields
from moa.cli.installed import check_installed
from moa.cli.working import working
from moa.errors import MoaError, run_cli
from moa.process.listening import Port
from moa.process.memory import leave_out_what_is_loaded
from moa.process.model_places import check_place
from moa.process.user_folders import expanded
from moa.version import running_version
from moa.wire.limits import Limits

_MODEL = {
    "target": "ID_OR_PATH",
    "drafter": "DIR",
    "bundle": "DIR",
    "device": "DEVICE",
    "dtype": "DTYPE",
    "quantize": "int8",
    "gpu_layers": "N",
    "kv_type": "TYPE",
    "cpu_moe": "",
    "rpc": "HOST:PORT",
    "threads": "N",
    "llama_library": "FILE",
    "inexact": "",
}
_SERVED = _MODEL | {"server_drafter": "ID_DIR_OR_FILE", "emulate": "TIME"}
_UPSTREAM = {
    "upstream": "URL",
    "upstream_model": "NAME",
    "upstream_api": "API",
    "upstream_key_file": "FILE",
    "upstream_price_in": "MONEY",
    "upstream_price_out": "MONEY",
    "upstream_budget": "MONEY",
}
_ADDRESS = {
    "host": "HOST",
    "port": "PORT",
    "auth_tokens": "FILE",
    "tls_cert": "FILE",
    "tls_key": "FILE",
    "origins": "URL",
    "openai": "[HOST:]PORT",
    "model_name": "NAME",
    "also_called": "NAME",
    "openai_hosts": "NAME",
    "app": "DIR",
}
_MEMORY = dict.fromkeys(("slots", "kv_tokens"), "N")
_BATCHES = ("max_batch_rows", "max_batch_tokens", "prefill_tokens", "batch_wait_ms")
_BATCHING = _MEMORY | dict.fromkeys(_BATCHES, "N")
SWITCH_SECONDS = 0.0005
"""A verdict should not wait the default 5 ms for the engine's thread to yield."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command of these words, by default those of the command line, and exit with its
    code."""
    arguments = parser().parse_args(argv)
    prints_results = arguments.run is not _serve
    sys.exit(
        run_cli(
            "cloud-verifier",
            lambda: arguments.run(arguments),
            extra="verifier",
            stdout_needed=prints_results,
        )
    )


def parser(kind: type[CommandParser] = CommandParser) -> CommandParser:
    """Returns the parser of the command line: `serve`, `token` and `check` with their flags."""
    top = kind(
        prog="cloud-verifier",
        description="Verify drafts of many edges with one large language model.",
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {running_version()}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve", help="load the target and serve it", description=_serve.__doc__
    )
    add_flags(serve.add_argument_group("model"), Settings, _SERVED)
    add_flags(serve.add_argument_group("somebody else's engine"), Settings, _UPSTREAM)
    add_flags(serve.add_argument_group("address"), Settings, _ADDRESS)
    serve.add_argument(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning", "error"),
        help="info: start, connections and sessions, never their text (default: %(default)s)",
    )
    serve.add_argument(
        "--log-format",
        default="auto",
        choices=get_args(logs.LogFormat),
        help="text: lines for people; auto: those on a terminal, else JSON (default: %(default)s)",
    )
    add_flags(serve.add_argument_group("batching"), Settings, _BATCHING)
    add_flags(
        serve.add_argument_group("limits"),
        Limits,
        {f.name: "SECONDS" if _is_time(f.name) else "N" for f in dataclasses.fields(Limits)},
    )
    serve.set_defaults(run=_serve)

    bearer_tokens.add(commands.add_parser("token", help="bearer tokens: new, list, revoke"))

    check = commands.add_parser(
        "check", help="load, run, and say what this machine can do", description=_check.__doc__
    )
    add_flags(check.add_argument_group("model"), Settings, _MODEL)
    add_flags(check.add_argument_group("batching"), Settings, _MEMORY)
    add_flags(
        check.add_argument_group("limits"),
        Limits,
        {"max_context_tokens": "N", "max_prompt_tokens": "N"},
    )
    check.add_argument("--json", action="store_true", help="print the figures as JSON")
    check.set_defaults(run=_check)
    return top


def settings_from(arguments: argparse.Namespace) -> Settings:
    """Returns the settings of the parsed flags. Limits that depend on the length of the context
    follow from it unless they are given."""
    limits = given_fields(arguments, Limits)
    if (context := limits.get("max_context_tokens")) is not None:
        limits.setdefault("max_prompt_tokens", context)
        limits.setdefault(
            "max_frame_bytes", max(Limits.max_frame_bytes, Limits.least_frame_bytes(context))
        )
    return Settings(limits=Limits(**limits), **given_fields(arguments, Settings))


def _serve(arguments: argparse.Namespace) -> int:
    """Load the target (the embedded pair without --target) and serve it until SIGTERM or Ctrl-C,
    then drain."""
    settings = settings_from(arguments)
    auth = Authenticator(settings.auth_tokens)
    logs.configure(arguments.log_level, settings.limits, arguments.log_format)
    # What cannot be used is said before anything is loaded, torch included.
    _ = settings.tls
    if settings.tls_cert is not None:
        Certificate(settings.tls_cert).warn_of_its_end(time.time())
    _check_paths(settings)
    _warn_of_clear_text(settings)
    if settings.app is not None:
        from moa.api.pages import app_policy

        app_policy(settings.app)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(Port(settings.host, settings.port))
        api_port = None
        if settings.openai:
            api_port = stack.enter_context(Port(*settings.openai_address, flag="--openai"))
        if settings.upstream:
            run_loop(_serve_upstream(settings, auth, port))
        else:
            _serve_target(settings, auth, port, api_port)
    return 0


def _is_time(name: str) -> bool:
    """Whether a limit of this name is a time, which all are in seconds."""
    return name.endswith(("_timeout", "_interval", "_seconds"))


def _warn_of_clear_text(settings: Settings) -> None:
    """Log a warning if others can reach a port and nothing is encrypted."""
    hosts = [settings.host]
    if settings.openai:
        hosts.append(settings.openai_address[0])
    if not settings.tls_cert and not all(map(is_loopback, hosts)):
        log.warning(
            "not encrypted: tokens and text can be read on the way", extra={"event": "in_clear"}
        )


def _log_the_start(**of: object) -> None:
    """Log which version begins to serve what."""
    log.info("starting", extra={"event": "start", "version": running_version(), **of})


def _serve_target(
    settings: Settings, auth: Authenticator, port: Port, api_port: Port | None
) -> None:
    """Load the target and serve it, at `api_port` as an API too if there is one."""
    _check_hub(settings)
    check_installed(["verifier"] if api_port is None else ["verifier", "serve"])
    # Before torch is imported, which takes half a minute on a busy machine.
    _log_the_start(target=settings.target or "embedded")
    with logs.told_while_it_lasts("importing the libraries"):
        from cloud_verifier.app import Verifier
        from cloud_verifier.model import load

    logs.take_over_libraries()
    if not settings.target:
        log.info(
            "the target is the embedded toy model, which knows sixteen exercises: --target MODEL"
            " serves yours",
            extra={"event": "toy"},
        )
    served = load(settings)
    verifier = Verifier(served, settings, auth)
    beside: contextlib.AbstractAsyncContextManager[str] = contextlib.nullcontext("")
    if api_port is not None:
        from cloud_verifier.openai.endpoint import endpoint

        beside = endpoint(
            verifier,
            port=api_port,
            tokenizer=served.target.tokenizer,
            settings=settings,
            auth=auth,
        )
    run_loop(_until_stopped(verifier, port, beside))


def _check_paths(settings: Settings) -> None:
    """Refuse a model's place that reads like a path or a file and is not there; others may be hub
    ids."""
    named = {
        "--target": settings.target,
        "--drafter": settings.drafter,
        "--server-drafter": settings.server_drafter.removeprefix("independent:"),
        "--bundle": settings.bundle,
    }
    for flag, place in named.items():
        check_place(flag, place)


def _check_hub(settings: Settings) -> None:
    """Refuse a target that neither this machine nor the hub has: torch need not be imported for
    that, which takes seconds."""
    if settings.target and not expanded(settings.target).exists():
        from moa.target import hub

        hub.copy_of(settings.target, ["config.json"])


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` to its end, on uvloop if that is installed. Everything that it needs must have
    been loaded: from here on the garbage collector leaves that out."""
    sys.setswitchinterval(SWITCH_SECONDS)  # how soon the model's thread lets the event loop run
    leave_out_what_is_loaded()
    try:
        import uvloop
    except ImportError:  # uvloop is optional
        asyncio.run(main)
    else:
        uvloop.run(main)


async def _serve_upstream(settings: Settings, auth: Authenticator, port: Port) -> None:
    """Serve what an engine behind HTTP answers."""
    from cloud_verifier.upstream.app import UpstreamVerifier, upstreams_of

    upstreams = upstreams_of(settings)  # which refuses an address with a key in it
    _log_the_start(target=", ".join(settings.upstream), api=settings.upstream_api)
    verifier = UpstreamVerifier(settings, upstreams, auth)
    await _until_stopped(verifier, port, contextlib.nullcontext(""))


async def _until_stopped(
    verifier: Any, port: Port, beside: contextlib.AbstractAsyncContextManager[str]
) -> None:
    """Serve until a signal or the engine's own end. `beside` is another listener that runs
    meanwhile, and gives its address; empty without one."""
    stopping = Stopping()
    async with verifier.open(port), beside as address:
        addresses = {"url": verifier.transport.url, "api": address}
        log.info("listening", extra={"event": "listening", **addresses})
        say(f"listening on {verifier.transport.url}")
        if address:
            say(f"API at {address}/v1, operator's page at {address}/ui")
        verifier.service.prepare_grammars()
        waiting = [asyncio.ensure_future(event.wait()) for event in (stopping.asked, verifier.died)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for one in waiting:
            one.cancel()
        if verifier.died.is_set():
            raise MoaError("the engine has stopped", hint="the log says why")
        await verifier.drain()
    log.info("stopped", extra={"event": "stopped"})


def _check(arguments: argparse.Namespace) -> int:
    """Load the target, verify trees of several sizes, and print capacity and speed."""
    settings = settings_from(arguments)
    _check_paths(settings)
    _check_hub(settings)
    # A real model takes minutes, and the imports alone ten seconds and more.
    with working("cloud-verifier", "importing the libraries") as tell:
        from cloud_verifier.check import measure, show

        figures = measure(settings, tell)
    show(figures, as_json=arguments.json)
    return 0
