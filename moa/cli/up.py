"""`moa-edge up`: a verifier, an endpoint and a chat page on this machine, with one command.

The programs run as children of this one: each is what it would be on a machine of its own, and
Ctrl-C ends all of them. A verifier that dies is started again. No torch here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import glob
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import webbrowser
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from rich.console import Console
from rich.status import Status
from rich.text import Text

from moa.cli.installed import check_installed
from moa.cli.programs import (
    USUAL_PORT,
    Verifier,
    clean,
    ended_after,
    line_with,
    usual_port,
    why_ended,
)
from moa.cli.working import roughly
from moa.errors import MoaError, UsageError, run_cli
from moa.process.busy import slowdown
from moa.process.children import start_child
from moa.process.files import lock_now
from moa.process.listening import Port
from moa.process.model_places import check_place

PROGRAM = "moa-edge up"
# The programs, as `module:function`.
_PLAN = "export.quick_start:main"
_BUILD = "export.cli:main"
_PAGES_PORT = 8080
"""The port of page and API if it is free."""
_VERIFY = "cloud_verifier.cli:main"
_SERVE = "edge_client.cli:main"
_PAGE = "chat page and API at "
"""How `edge-client serve` begins the line with its address."""
_BUNDLE_IS_DONE = " is done after "
"""What is in the last line of the program that makes a bundle."""
_TOLD_TIME = re.compile(
    r"(?P<doing>.*) \((?P<share>\d+%), \d+ s, about (?P<seconds>\d+) s left\)", re.DOTALL
)
"""A line of that program which says how much is done, and how long the rest may take."""
_LOCKED_SECONDS = 0.5
"""Between two looks whether another process has made its bundle."""
_BUILD_END_SECONDS = 1.0
"""Seconds that what makes a bundle has to end: it has nothing to save, and may compute for long."""
_SAY_SECONDS = 10.0
"""Without a terminal: seconds between two lines on what lasts."""
_LEAST_SECONDS_LEFT = 5
"""Below this the time that is left is not shown: the estimate was too low."""

_COSTS = {"seconds", "disk_bytes"}
"""What a plan says of the making of a bundle: nothing where that was made before."""


@dataclass(frozen=True)
class Place:
    """What runs where."""

    page: str
    verifier: str
    bundle: str
    """Empty for the embedded one."""
    chats: bool = True
    """Whether the models have a chat template: a base model has none, and continues texts."""


DESCRIPTION = (
    "Start everything on this machine: a verifier of TARGET, an endpoint whose device model drafts and answers alone"
    " when the verifier is gone, and its chat page. A bundle of the device model is made at the first start and kept."
    " A verifier that dies is started again. Ctrl-C ends all."
)


def add(top: argparse.ArgumentParser) -> None:
    """Add the flags of `moa-edge up` to its parser."""
    top.add_argument(
        "target",
        nargs="?",
        default="",
        help="the model whose text it is: a hub id, a folder or a GGUF file (default: the embedded pair)",
    )
    top.add_argument(
        "--device-model",
        default="",
        metavar="MODEL",
        help="a small model of the same tokenizer: a hub id, a folder or a GGUF file",
    )
    top.add_argument(
        "--bundle",
        default="",
        metavar="DIR",
        help="in place of --device-model: its bundle, if one was made before",
    )
    top.add_argument(
        "--dtype", default="auto", help="the target's precision (default: %(default)s)"
    )
    top.add_argument(
        "--port",
        type=int,
        metavar="N",
        help=f"of page and API (default: {_PAGES_PORT} if it is free, else any)",
    )
    top.add_argument(
        "--verifier-port",
        type=int,
        metavar="N",
        help=f"of the verifier (default: {USUAL_PORT} if it is free, else any)",
    )
    top.add_argument("--again", action="store_true", help="make the bundle anew")
    top.add_argument("--no-browser", action="store_true", help="do not open the page")
    top.add_argument(
        "--dry-run", action="store_true", help="say what would be made and what it takes, and stop"
    )
    top.add_argument("--json", action="store_true", help="plan and addresses as JSON on stdout")


def run(options: argparse.Namespace) -> int:
    """Run it; returns the exit code."""
    return run_cli(PROGRAM, lambda: asyncio.run(_up(options)))


class _ChildFailed(Exception):
    """A child has failed, and what it said of that was shown."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


async def _up(options: argparse.Namespace) -> int:
    """Start everything, and run until the endpoint ends or a signal comes; returns the exit code.
    After a signal all programs are ended first."""
    _check_models(options)
    check_installed(_extras(options))
    _check_ports(options)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # not on every system
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    work = asyncio.ensure_future(_start_and_watch(options))
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():
        _say("ending ...")
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        _say("ended")
        return 0
    stopped.cancel()
    try:
        return work.result()
    except _ChildFailed as failure:
        return failure.code


def _check_models(options: argparse.Namespace) -> None:
    """Raise a `UsageError` for models that do not make a pair, or are not there."""
    if options.device_model and options.bundle:
        raise UsageError(
            "--device-model and --bundle are two ways to name the device's model",
            hint="--bundle takes a bundle that was made before, --device-model makes it",
        )
    if bool(options.target) != bool(options.device_model or options.bundle):
        raise UsageError(
            "TARGET and --device-model belong together",
            hint="a small model of the target's family, of the same tokenizer, or --bundle DIR with"
            " its bundle; leave out both for the embedded pair",
        )
    check_place("TARGET", options.target, besides=options.device_model)
    check_place("--device-model", options.device_model, besides=options.target)
    from moa.bundle import MANIFEST, Bundle

    if options.bundle:
        Bundle.open(options.bundle)
    elif options.device_model and (Path(options.device_model) / MANIFEST).is_file():
        raise UsageError(
            f"--device-model: {options.device_model} is a bundle, not a model",
            hint=f"--bundle {options.device_model}",
        )
    if options.target and options.target == options.device_model:
        raise UsageError(
            f"--device-model {options.device_model} is the target itself",
            hint="a smaller model of its family drafts for it",
        )


def _check_ports(options: argparse.Namespace) -> None:
    """Raise a `UsageError` for a port that cannot be had: before the bundle is made, which takes
    minutes."""
    if options.port and options.port == options.verifier_port:
        raise UsageError(f"--port and --verifier-port are both {options.port}: give another one")
    for flag, number in (("--port", options.port), ("--verifier-port", options.verifier_port)):
        if number is None:
            continue
        if not 0 <= number <= 65535:
            raise UsageError(f"{flag} {number}: a port is a number from 0 to 65535")
        with Port("127.0.0.1", number, flag=flag):
            pass


def _extras(options: argparse.Namespace) -> list[str]:
    """The extras that hold what will be run."""
    extras = [] if options.dry_run else ["verifier", "serve"]
    if options.bundle and options.dry_run:
        extras.append("verifier")  # it tells what memory that takes
    if options.device_model:
        extras.append("export")
    if options.target.lower().endswith(".gguf"):
        extras.append("gguf")
    return extras


async def _start_and_watch(options: argparse.Namespace) -> int:
    """Make the device's bundle if there is none yet, then run verifier and endpoint. Returns 0
    after a dry run; else it raises when the endpoint ends, which it should not do by itself."""
    plan = await _plan(options) if options.target else None
    if options.dry_run:
        _show_plan(plan, options)
        if plan is not None and plan["problem"]:
            raise UsageError(plan["problem"])
        return 0
    bundle = options.bundle
    if plan is not None:
        bundle = str(plan["bundle"])
        is_to_be_made = options.device_model and (options.again or not plan["made"])
        if is_to_be_made:
            await _build(options, plan)
        _say_memory(plan)
    async with contextlib.AsyncExitStack() as stack:
        with tempfile.TemporaryFile() as log:
            verifier = _verifier(options, log)
            stack.push_async_callback(verifier.end)
            await _load(verifier)
            device, page = await _endpoint(stack, options, bundle, verifier.address)
            _show_addresses(
                options,
                Place(
                    page=page,
                    verifier=verifier.address,
                    bundle=bundle,
                    chats=_has_chat_template(bundle),
                ),
            )
            _say(
                "to try a cut: turn off the switch Verifier on the page, or kill the verifier,"
                f" which is started again: kill -9 {verifier.process_id}"
            )
            await _watch(verifier, device)


def _has_chat_template(bundle: str) -> bool:
    """Whether a conversation can be rendered as a text; the embedded bundle's can."""
    from moa.bundle import Bundle

    return not bundle or Bundle.open(bundle).manifest.tokenizer.chat_template is not None


async def _watch(verifier: Verifier, device: asyncio.subprocess.Process) -> NoReturn:
    """Start the verifier again whenever it dies; a `MoaError` when the endpoint has ended."""
    keeping = asyncio.ensure_future(verifier.keep())
    ending = asyncio.ensure_future(device.wait())
    try:
        await asyncio.wait({keeping, ending}, return_when=asyncio.FIRST_COMPLETED)
        if keeping.done():
            keeping.result()
        raise MoaError(f"the endpoint {why_ended(ending.result())}")
    finally:
        keeping.cancel()
        ending.cancel()
        await asyncio.gather(keeping, ending, return_exceptions=True)


def _say_memory(plan: dict[str, Any]) -> None:
    """Say what the verifier takes, if that was planned."""
    memory = plan["memory"]
    if memory is None:
        return
    _say(
        f"the verifier takes {memory['at_start_mb'] / 1000:.1f} GB of memory, and"
        f" up to {memory['at_most_mb'] / 1000:.1f} GB with many long chats"
    )


# ---- plan and bundle


async def _plan(options: argparse.Namespace) -> dict[str, Any]:
    """The plan of the programs: which bundle is made of the models or is there already, and what time
    and memory that and the verifier take. A child process computes it, so that the libraries that
    read models stay out of this one."""
    flags = [f"--dtype={options.dtype}"]
    if options.bundle:
        flags.append(f"--bundle={options.bundle}")
    if options.dry_run:
        flags.append("--dry-run")
    if options.again:
        flags.append("--again")
    device = options.device_model or options.bundle
    names = f"{Path(options.target).name} and {Path(device).name}"
    async with _counted(f"reading what the files say of {names}") as status:
        child = await start_child(
            _PLAN,
            options.target,
            *filter(None, [options.device_model]),
            *flags,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with ended_after(child):
            assert child.stdout is not None
            assert child.stderr is not None
            said, _ = await asyncio.gather(child.stdout.read(), _pass_on(child.stderr, status))
            code = await child.wait()
    if code:
        raise _ChildFailed(code)
    plan: dict[str, Any] = json.loads(said)
    return plan


def _show_plan(plan: dict[str, Any] | None, options: argparse.Namespace) -> None:
    """Print what would be made, as lines or as JSON. `plan` is None for the pair of models that comes
    with the program."""
    if options.json:
        told = dict(plan or {"bundle": "", "made": True})
        if told["made"] and not options.again:
            told |= dict.fromkeys(_COSTS & told.keys(), 0)
        print(json.dumps(told, indent=2))
        return
    if plan is None:
        print(
            "the embedded pair of toy models: nothing is made; the verifier takes 0.4 GB, the endpoint 0.2 GB"
        )
        return
    for line in plan["lines"]:
        print(line)
    if options.bundle:
        print(f"the bundle {options.bundle} is taken as it is: nothing is made")
    elif plan["made"]:
        print(f"the bundle was made before and is kept: nothing is to be made ({plan['bundle']})")
    else:
        print(f"the bundle will be kept in {plan['bundle']}")


async def _build(options: argparse.Namespace, plan: dict[str, Any]) -> None:
    """Make the device's bundle. While another process makes one here, wait for that: it may be the
    same, and two at once would take the memory twice."""
    from moa.bundle import MANIFEST

    bundle = Path(plan["bundle"])
    async with _alone_in(bundle.parent) as has_waited:
        if has_waited and (bundle / MANIFEST).is_file():
            if not options.again:
                _say(f"the other process has made the bundle: {bundle}")
                return
            plan = plan | {"made": True}
        await _make(options, plan)


@contextlib.asynccontextmanager
async def _alone_in(folder: Path) -> AsyncIterator[bool]:
    """Keep other processes like this one from making bundles in this folder while the body runs;
    yields whether one of them had to be waited for. Where folders cannot be locked nobody waits."""
    if os.name == "nt":
        yield False
        return
    has_waited = False
    held = os.open(folder, os.O_RDONLY)  # closing it, or the end of this process, lets others in
    try:
        while not lock_now(held):
            if not has_waited:
                _say(f"another process makes a bundle in {folder}: waiting for its end")
            has_waited = True
            await asyncio.sleep(_LOCKED_SECONDS)
        yield has_waited
    finally:
        os.close(held)


async def _make(options: argparse.Namespace, plan: dict[str, Any]) -> None:
    """Make the device's bundle in a child process. Meanwhile a line on the terminal shows what it
    is doing, for how long, and how long it may still take."""
    arguments = ["build", "-t", options.target, "-d", f"independent:{options.device_model}"]
    arguments += ["-o", str(plan["bundle"]), "-v", "cpu-int4"]
    if plan["made"]:
        arguments.append("--force")
    started = time.monotonic()
    child = await start_child(
        _BUILD, *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    async with _left_nothing(plan["bundle"], child), ended_after(child, _BUILD_END_SECONDS):
        with _status("making the bundle") as status:
            # As the program counts that makes it, until it says more.
            status.ends_at = started + plan["seconds"] * slowdown()
            clock = asyncio.ensure_future(_show_time(status, started))
            try:
                last_line = await _follow(child, status)
                code = await child.wait()
            finally:
                clock.cancel()
    if code:
        raise MoaError(f"the bundle was not made: {last_line}")
    _say(f"made the bundle in {time.monotonic() - started:.0f} s: {plan['bundle']}")


@contextlib.asynccontextmanager
async def _left_nothing(bundle: str, child: asyncio.subprocess.Process) -> AsyncIterator[None]:
    """Remove what a child that made this bundle has left, gigabytes of a large model, if it was
    killed."""
    try:
        yield
    finally:
        place = Path(bundle)
        for folder in place.parent.glob(f".{glob.escape(place.name)}.building-{child.pid}-*"):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _follow(child: asyncio.subprocess.Process, status: _StatusLine) -> str:
    """Let the status say what a child process writes to its stderr, until that ends; without a
    terminal its lines are printed. Returns the last line."""
    assert child.stderr is not None
    last_line = ""
    async for raw in child.stderr:
        line = clean(raw)
        if line:
            last_line = line
            _take(line, status)
            if not status.is_shown:
                _say(line.removeprefix("moa-export: "))
    return last_line


def _take(line: str, status: _StatusLine) -> None:
    """Let the status say what the program that makes a bundle does, by its latest line, and how long
    the rest takes if the line says so."""
    doing = line.removeprefix("moa-export: ")
    if _BUNDLE_IS_DONE in line:
        doing = "ending"  # it gives its memory back, which takes seconds
    told = _TOLD_TIME.fullmatch(doing)
    if told is not None:
        doing = f"{told['doing']}, {told['share']}"
        status.ends_at = time.monotonic() + float(told["seconds"])
    status.doing = doing


async def _show_time(status: _StatusLine, started: float) -> None:
    """Show every second, until it is cancelled, how long the bundle has taken, and how long it may
    still take: by the plan, until the program that makes it has said more."""
    while True:
        now = time.monotonic()
        rest = _time_left(status.ends_at - now)
        status.show(f"making the bundle: {status.doing} ({now - started:.0f} s, {rest})")
        await asyncio.sleep(1)


def _time_left(seconds: float) -> str:
    """What is said of the time that is left by the estimate, which is made for a machine that has
    nothing else to do."""
    if seconds > _LEAST_SECONDS_LEFT:
        return f"about {roughly(seconds)} s left"
    return "longer than expected: the machine is busy"


# ---- the programs


def _verifier(options: argparse.Namespace, log: IO[bytes]) -> Verifier:
    """Returns the verifier, which does not run yet."""
    arguments = ["serve", "--log-level=warning", "--log-format=text"]
    if options.target:
        arguments += [f"--target={options.target}", f"--dtype={options.dtype}"]
    return Verifier(_VERIFY, arguments, log, port=options.verifier_port, say=_say)


async def _load(verifier: Verifier) -> None:
    """Start the verifier, and wait until it listens."""
    async with _counted("loading the target"):
        await verifier.start()


async def _endpoint(
    stack: contextlib.AsyncExitStack, options: argparse.Namespace, bundle: str, verifier: str
) -> tuple[asyncio.subprocess.Process, str]:
    """Start the endpoint as a child that ends with `stack`, and wait until it listens. Returns it
    and the address of its chat page. It takes the verifier at this address, and the bundle, or
    without one the embedded one."""
    port = usual_port(_PAGES_PORT) if options.port is None else options.port
    arguments = ["serve", f"--verifier={verifier}", f"--port={port}"]
    if bundle:
        arguments.append(f"--bundle={bundle}")
    child = await start_child(
        _SERVE, *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    await stack.enter_async_context(ended_after(child))
    others: list[str] = []
    async with _counted("starting the endpoint"):
        line = await line_with(child.stderr, _PAGE, others=others)
    if not line:
        raise MoaError(f"the endpoint did not start: {others[-1] if others else 'it said nothing'}")
    assert child.stderr is not None
    await stack.enter_async_context(_passed_on(child.stderr))
    return child, line.removeprefix(_PAGE).split()[0]


@contextlib.asynccontextmanager
async def _passed_on(stream: asyncio.StreamReader) -> AsyncIterator[None]:
    """Show what a program says for as long as the body runs."""
    passing_on = asyncio.ensure_future(_pass_on(stream))
    try:
        yield
    finally:
        passing_on.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await passing_on


async def _pass_on(stream: asyncio.StreamReader, status: _StatusLine | None = None) -> None:
    """Show the lines of a program that runs: by this one, which knows what else is on the terminal.
    The line that changes, if there is one, says from then on what the program does."""
    async for raw in stream:
        line = clean(raw)
        if not line:
            continue
        is_error = line.startswith(f"{PROGRAM}: error: ")
        if status is not None and is_error:
            status.end()  # before the error is printed: the program takes seconds to end
        _say(line)
        if status is not None and not is_error:
            status.doing = line.removeprefix(f"{PROGRAM}: ").partition(":")[0]


# ---- the screen


def _show_addresses(options: argparse.Namespace, place: Place) -> None:
    """Tell the user the addresses of page, API and verifier, and how the verifier is run on another
    machine; and open the page in a browser, if this machine has a screen."""
    if options.json:
        addresses = {
            "page": place.page,
            "api": f"{place.page}/v1",
            "verifier": place.verifier,
            "bundle": place.bundle,
        }
        print(json.dumps(addresses), flush=True)
    _say(f"chat page at {place.page}, OpenAI's API at {place.page}/v1; Ctrl-C ends all")
    bundle = f" --bundle {place.bundle}" if place.bundle else ""
    target = f" --target {options.target}" if options.target else ""
    if not place.chats:
        _say(
            "this model has no chat template: it continues texts, and answers no message of a chat"
        )
        _say(f"  {place.page}/v1/completions takes a prompt; the page can ask it nothing")
    command, text = ("chat", "") if place.chats else ("generate --raw", " TEXT")
    _say("in a terminal:")
    _say(f"  edge-client {command}{bundle} --verifier {place.verifier}{text}")
    _say("with the verifier on another machine:")
    _say(
        "  there: cloud-verifier token new --name laptop --append tokens.txt    # prints TOKEN once"
    )
    _say(f"         cloud-verifier serve{target} --host 0.0.0.0 --auth-tokens tokens.txt")
    _say(f"  here:  edge-client serve{bundle} --verifier ws://SERVER:8765 --token TOKEN")
    if not options.no_browser and _has_screen():
        webbrowser.open(place.page)


def _has_screen() -> bool:
    """Whether a browser would have a window of its own: one in this terminal would take it over."""
    if sys.platform in ("win32", "darwin"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


class _StatusLine:
    """A line on a terminal that changes; elsewhere it is not shown."""

    def __init__(self, status: Status | None) -> None:
        self._status = status
        self.doing = "starting"
        """What is being done, in a few words."""
        self.ends_at = 0.0
        """When it is expected to be done, on the monotonic clock."""
        self.has_ended = False
        """Whether nothing more shall be said of it."""

    @property
    def is_shown(self) -> bool:
        """Whether there is a terminal for it."""
        return self._status is not None

    def show(self, line: str) -> None:
        """Change the line."""
        if self._status is not None:
            self._status.update(Text(line))

    def end(self) -> None:
        """Take the line away for good."""
        self.has_ended = True
        if self._status is not None:
            self._status.stop()
            self._status = None


@contextlib.contextmanager
def _status(line: str) -> Iterator[_StatusLine]:
    """Show a line while the body runs. On a terminal the body can change it; elsewhere it is
    printed once."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        _say(line)
        yield _StatusLine(None)
        return
    with console.status(Text(line)) as status:
        yield _StatusLine(status)


@contextlib.asynccontextmanager
async def _counted(doing: str) -> AsyncIterator[_StatusLine]:
    """Show what is being done while the body runs, and for how many seconds: each second on a
    terminal, and now and then elsewhere."""
    started = time.monotonic()

    async def count() -> None:
        while True:
            status.show(f"{status.doing} ({time.monotonic() - started:.0f} s)")
            await asyncio.sleep(1)

    async def say_again() -> None:
        while True:
            await asyncio.sleep(_SAY_SECONDS)
            if status.has_ended:
                return
            _say(f"{status.doing} ({time.monotonic() - started:.0f} s)")

    with _status(doing) as status:
        status.doing = doing
        clock = asyncio.ensure_future(count() if status.is_shown else say_again())
        try:
            yield status
        finally:
            clock.cancel()


def _say(line: str) -> None:
    """Print a line for the user."""
    print(line, file=sys.stderr, flush=True)
