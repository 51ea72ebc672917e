"""`edge-client generate`: one prompt, one answer."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import msgspec

from edge_client.cli import options
from edge_client.client import EdgeClient
from edge_client.events import Adopt, Confirm, Done, Event, Prompt, Retract, Token
from edge_client.screen.terminal import make_view, rescue
from edge_client.settings import ClientSettings
from edge_client.tools.trace import Trace


def add(command: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    command.description = "Answer one prompt."
    command.add_argument("prompt", nargs="*", help="the prompt; without it, or as -, standard input is read")
    command.add_argument("--raw", action="store_true", help="no chat template: go on from the text as it is")
    command.add_argument(
        "--json", action="store_true", help="print one JSON object with ids, statuses, events and figures"
    )
    options.add_connection(command)
    options.add_generation(command)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Answer one prompt."""
    prompt = options.read_prompt(arguments.prompt)
    settings = options.settings_from(arguments)
    trace = Trace(enabled=arguments.trace is not None)
    report = asyncio.run(_answer(settings, prompt, raw=arguments.raw, quiet=arguments.json, trace=trace))
    if arguments.json:
        answer = msgspec.json.encode(report)
        try:
            sys.stdout.buffer.write(answer + b"\n")
            sys.stdout.flush()
        except BrokenPipeError:
            raise  # nobody reads
        except OSError as error:
            rescue(answer.decode(), error)
    if arguments.trace is not None:
        _write_trace(trace, arguments.trace)
    return 0


async def _answer(settings: ClientSettings, prompt: str, *, raw: bool, quiet: bool, trace: Trace) -> dict[str, Any]:
    record = Record()
    async with EdgeClient(settings, trace=trace) as client:
        with make_view(quiet=quiet) as view:
            async for event in client.generate(prompt, raw=raw):
                record.take(event)
                view.take(event)
    return record.report()


class Record:
    """An answer as one JSON object."""

    def __init__(self) -> None:
        self._prompt: list[int] = []
        self._ids: list[int] = []
        self._status: list[str] = []
        self._events: list[Event] = []
        self._done: Done | None = None

    def take(self, event: Event) -> None:
        """Take in the next event."""
        start = len(self._prompt)
        match event:
            case Prompt():
                self._prompt = event.ids
            case Token():
                self._ids.append(event.id)
                self._status.append(event.status)
            case Confirm():
                self._status[event.start - start : event.stop - start] = ["verified"] * (event.stop - event.start)
            case Retract():
                del self._ids[event.start - start :], self._status[event.start - start :]
            case Done():
                self._done = event
            case _:
                pass
        # Single tokens are in `token_ids` already; the rest tells the story.
        if not isinstance(event, Prompt | Token | Done) or isinstance(event, Adopt):
            self._events.append(event)

    def report(self) -> dict[str, Any]:
        """The object."""
        done = self._done
        return {
            "text": done.text if done else "",
            "reason": done.reason if done else "link",
            "verified": bool(done and done.verified),
            "prompt_ids": self._prompt,
            "token_ids": self._ids,
            "status": self._status,
            "events": [msgspec.to_builtins(event) for event in self._events],
            "stats": done.stats if done else {},
        }


def _write_trace(trace: Trace, path: Path) -> None:
    try:
        trace.write(path)
    except OSError as error:
        # The answer is out already: a timeline that cannot be saved must not look like a failed answer.
        print(f"edge-client: warning: no trace at {path}: {error.strerror}", file=sys.stderr)
