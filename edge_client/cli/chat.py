"""`edge-client chat`: a conversation that goes on while the network comes and goes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import threading

from rich.console import Console

from edge_client.cli import options
from edge_client.client import EdgeClient
from edge_client.events import Done
from edge_client.screen.terminal import make_view
from edge_client.settings import ClientSettings
from moa.errors import MoaError, UsageError

_HELP = "/new starts a new conversation, /quit (or Ctrl-D) ends, Ctrl-C stops an answer"


def add(command: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    command.description = f"A conversation. {_HELP}."
    command.add_argument("--system", metavar="TEXT", help="what the assistant is told first")
    options.add_connection(command)
    options.add_generation(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Talk until the end of the input."""
    settings = options.settings_from(arguments)
    with contextlib.suppress(ImportError):  # line editing and history, where there is such a library
        import readline  # noqa: F401
    asyncio.run(_talk(settings, arguments.system))
    return 0


async def _talk(settings: ClientSettings, system: str | None) -> None:
    first = [{"role": "system", "content": system}] if system else []
    messages = list(first)
    console = Console(highlight=False)
    interactive = sys.stdin.isatty()
    async with EdgeClient(settings) as client:
        if not client.device.codec.can_chat:
            raise UsageError("this bundle has no chat template", hint="use `generate --raw`")
        if interactive:
            console.print(_HELP, style="dim")
        while (line := await _read_line("> " if interactive else "")) is not None:
            if line in ("/quit", "/exit"):
                break
            if line == "/new":
                messages = list(first)
                continue
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line})
            try:
                answer = await _turn(client, messages, console)
            except UsageError as error:
                # The conversation stands: only this turn could not be had.
                console.print(f"edge-client: {error.line()}", style="red")
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer})


async def _turn(client: EdgeClient, messages: list[dict[str, str]], console: Console) -> str:
    """One answer; Ctrl-C ends it where it is."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    text = ""
    with contextlib.suppress(NotImplementedError):  # not on every system; there Ctrl-C ends the program
        loop.add_signal_handler(signal.SIGINT, task.cancel)
    events = client.generate(messages)
    try:
        with make_view(console=console) as view:
            async with contextlib.aclosing(events):
                async for event in events:
                    view.take(event)
                    text = event.text if isinstance(event, Done) else text + getattr(event, "text", "")
    except asyncio.CancelledError:
        task.uncancel()
        console.print("stopped", style="dim")
    finally:
        with contextlib.suppress(NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)
    return text


async def _read_line(prompt: str) -> str | None:
    """A line of input, or None at its end. In a thread that may be left behind, so that the link stays alive."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[str | None] = loop.create_future()

    def settle(line: str | None, error: Exception | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(line)

    def read() -> None:
        line: str | None = None
        problem: MoaError | None = None
        try:
            line = input(prompt)
        except EOFError:
            pass
        except UnicodeDecodeError:
            problem = UsageError("standard input is not text (UTF-8)")
        except (OSError, ValueError) as error:
            problem = MoaError(f"cannot read the input: {error}")
        with contextlib.suppress(RuntimeError):  # the program has ended meanwhile
            loop.call_soon_threadsafe(settle, line, problem)

    threading.Thread(target=read, daemon=True).start()
    return await result
