"""`edge-client chat`: a conversation that continues while the network comes and goes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from edge_client.cli import options
from edge_client.cli.dialogue import Ask, Dialogue, DialogueMessage, Quit
from edge_client.client import EdgeClient
from edge_client.conversation import Conversation
from edge_client.events import AnswerSoFar, Done, Link
from edge_client.screen.ctrl_c import CtrlC, Interrupted
from edge_client.screen.pipe import refused
from edge_client.screen.reader import Reader, make_reader
from edge_client.screen.views import make_console, make_view
from moa.errors import LinkError, MoaError, UsageError
from moa.grammar.spec import Grammar
from moa.safe_text import safe_text

_HINT = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends"
_RETRY_SECONDS = 1.0


def add(command: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    command.description = f"A conversation. {_HINT}."
    command.add_argument(
        "--system", default="", metavar="TEXT", help="system message for the assistant"
    )
    command.add_argument("--no-history", action="store_true", help="keep no file of what you type")
    options.add_connection(command)
    options.add_generation(command)
    options.add_structure(command)


def run(arguments: argparse.Namespace) -> int:
    """Chat until the end of the input. If that is no terminal, exit code 2 if it held a mistake, 1
    if the verifier refused."""
    seed = options.draw_seed()
    # A correction comes while the next message is typed, so an answer need not wait for it.
    settings = options.settings_from(arguments, seed=seed, settle_seconds=1.0)
    options.tell_seed(settings, seed)
    schema = options.read_schema(arguments.json_schema)
    talk = _talk(
        Dialogue(settings, arguments.system),
        schema,
        arguments.json_schema,
        history=not arguments.no_history,
    )
    return asyncio.run(talk)


async def _talk(
    dialogue: Dialogue, schema: Grammar | None, file: Path | None, *, history: bool
) -> int:
    reader = make_reader(dialogue.completions, history=history)
    console = make_console()
    dialogue.keys = reader.keys
    async with EdgeClient(dialogue.settings) as client, client.conversation() as conversation:
        if not client.device.codec.can_chat:
            raise UsageError("this bundle has no chat template", hint="use `generate --raw`")
        options.check_schema(schema, file, client.device)
        if reader.interactive:
            console.print(_HINT, style="dim")
            if client.link is None:
                console.print(
                    "no verifier: this device answers alone, and nothing is verified",
                    style="yellow",
                )
        chat = ChatLoop(client, conversation, dialogue, reader, console, schema)
        await chat.run()
        if reader.interactive:
            return 0
        if chat.refused and not chat.mistakes:
            raise refused(chat.refused)
        return 2 if chat.mistakes else 0


class ChatLoop:
    """Reads messages, asks, shows answers; between answers, offline text is checked."""

    def __init__(
        self,
        client: EdgeClient,
        conversation: Conversation,
        dialogue: Dialogue,
        reader: Reader,
        console: Console,
        schema: Grammar | None = None,
    ) -> None:
        self._client = client
        self._conversation = conversation
        self._dialogue = dialogue
        self._reader = reader
        self._console = console
        self._ctrl_c = CtrlC()
        self._schema = schema
        self._latest: DialogueMessage | None = None
        """The message of the conversation's latest turn, which a check corrects; None if that turn
        has no message."""
        self.mistakes = 0
        """Lines that could not be asked or done."""
        self.refused = ""
        """Why the verifier has refused an answer, if it did."""

    async def run(self) -> None:
        """Until the user ends it."""
        with self._ctrl_c.heard():
            await self._run()

    async def _run(self) -> None:
        leaving = False
        while True:
            try:
                async with self._checking_meanwhile():
                    line = await self._ctrl_c.stoppable(self._reader.read())
            except Interrupted:
                if self._reader.begun():  # it discards the line, as in a shell
                    leaving = False
                elif leaving:
                    return
                else:
                    leaving = True
                    self._console.print("Ctrl-C once more, or Ctrl-D, to leave", style="dim")
                continue
            leaving = False
            if line is None:
                return
            try:
                step = self._dialogue.take(line)
                if isinstance(step, Quit):
                    return
                if isinstance(step, Ask):
                    await self._answer()
                elif step is not None:
                    self._console.print(safe_text(step), style="dim")
            except UsageError as error:
                # The conversation continues: only this answer failed.
                self.mistakes += 1
                self._console.print(f"edge-client: {error.line()}", style="red")

    async def _answer(self) -> None:
        """One answer; Ctrl-C stops it."""
        dialogue = self._dialogue
        told = AnswerSoFar()
        client = self._client

        async def show() -> None:
            events = self._conversation.generate(
                dialogue.to_send(), grammar=self._schema, **dialogue.changes
            )
            with make_view(console=self._console, context=client.shared.max_context) as view:
                async with contextlib.aclosing(events):
                    async for event in events:
                        self._latest = None  # from here on the conversation's turn is this one
                        view.take(event)
                        told.take(event)
                        if isinstance(event, Link) and event.state == "refused":
                            self.refused = event.detail

        try:
            await self._ctrl_c.stoppable(show())
        except Interrupted:
            self._console.print("stopped", style="dim")
        except MoaError:
            dialogue.unanswered()
            raise
        text = told.done.text if told.done is not None else told.text_of()
        self._latest = dialogue.answered(text)

    # ---- what was written offline

    @contextlib.asynccontextmanager
    async def _checking_meanwhile(self) -> AsyncIterator[None]:
        """While the user types, provisional text is checked as soon as the verifier is back."""
        begun = asyncio.Event()
        task = asyncio.create_task(self._check(begun))
        try:
            yield
        finally:
            if not begun.is_set():
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _check(self, begun: asyncio.Event) -> None:
        link = self._client.link
        message = self._latest
        if link is None or message is None or not self._dialogue.holds(message):
            return
        if not self._conversation.unverified:
            return
        while not link.up:
            try:
                await self._client.wait_online()
            except LinkError:
                await asyncio.sleep(_RETRY_SECONDS)
            except MoaError:  # it refuses: the text stays as it is
                return
        begun.set()
        done: Done | None = None
        try:
            async for event in self._conversation.recheck():
                done = event if isinstance(event, Done) else done
        except MoaError:  # the answer stays as it is, and unverified; the chat goes on
            return
        if done is None or not done.verified:
            return
        changed = done.text != message["content"]
        if not self._dialogue.correct(message, done.text):
            return  # the user went on to something else
        with self._reader.above():
            if changed:
                self._console.print(
                    "the verifier is back, and corrects the last answer:", style="yellow"
                )
                self._console.print(Text(safe_text(done.text)))
            else:
                self._console.print(
                    "the verifier is back: the last answer is the target's own", style="dim"
                )
