"""`edge-client chat`: a conversation that continues while the network comes and goes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.text import Text

from edge_client.cli import options
from edge_client.cli.dialogue import (
    Ask,
    Continue,
    Dialogue,
    Edit,
    Loaded,
    NextStep,
    Quit,
    Unverified,
)
from edge_client.cli.offline_check import OfflineCheck
from edge_client.cli.written_answer import WrittenAnswer
from edge_client.client import EdgeClient
from edge_client.conversation import Conversation
from edge_client.events import AnswerSoFar, Done, Link
from edge_client.link.state import LinkWatch
from edge_client.screen.ctrl_c import CtrlC, Interrupted
from edge_client.screen.live import summary_of_stopped
from edge_client.screen.pipe import refused
from edge_client.screen.reader import Reader, make_reader
from edge_client.screen.typing_ahead import unshown
from edge_client.screen.views import draws_markdown, make_console, make_view
from edge_client.screen.words import (
    last_words,
    named,
    not_verified,
    tokens,
    toy_of,
    whose_tokens,
)
from moa.errors import MoaError, UsageError
from moa.grammar.spec import Grammar
from moa.safe_text import safe_line, safe_text

_DEFAULTS = {"settle_seconds": 1.0}
"""A correction comes while the next message is typed, so an answer need not wait for it."""
_LOOK_SECONDS = 1.0
"""How long a chat waits for the verifier before it says that it is not there."""
_WATCH_SECONDS = 0.5
"""Between two looks whether the verifier is still there, while nothing is asked."""
_GONE_SECONDS = 1.0
"""How long the verifier may be away before what waits for its check goes on without."""
_QUOTED = 40
"""Characters of the verified text that a continuation quotes."""
_LEAVING = "Ctrl-C goes on without"
"""How a check is left that a question waits for."""
_STOPPING = "Ctrl-C stops it"
"""How one is stopped beside the prompt."""
_HINT = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D ends"


def add(command: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    command.description = f"A conversation. {_HINT}."
    command.add_argument(
        "--system", default="", metavar="TEXT", help="system message for the assistant"
    )
    command.add_argument("--no-history", action="store_true", help="keep no file of what you type")
    options.add_connection(command)
    options.add_generation(command, **_DEFAULTS)
    options.add_structure(command)


def run(arguments: argparse.Namespace) -> int:
    """Chat until the end of the input, and return the exit code. From a script it is 2 if a line
    could not be asked or done, and 1 if the verifier refused an answer."""
    seed = options.draw_seed()
    settings = options.settings_from(arguments, seed=seed, **_DEFAULTS)
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
    """Hold the conversation until the user ends it; returns the exit code. At a terminal mistakes
    are shown and cost nothing; a script is told of them, and of a refusal, by the code."""
    reader = make_reader(dialogue.completions, history=history)
    console = make_console()
    dialogue.keys = reader.keys
    async with (
        options.opened(dialogue.settings) as client,
        client.conversation() as conversation,
    ):
        if not client.device.codec.can_chat:
            raise UsageError("this bundle has no chat template", hint="use `generate --raw`")
        options.check_schema(schema, file, client.device)
        trouble = ""
        if reader.interactive:
            trouble = await _welcome(client, console)
            if reader.warning:
                console.print(reader.warning, style="dim")
        chat = ChatLoop(client, conversation, dialogue, reader, console, schema, trouble)
        await chat.run()
        if reader.interactive:
            return 0
        if chat.refused and not chat.mistakes:
            raise refused(chat.refused, client.settings.who_verifies)
        return 2 if chat.mistakes else 0


async def _welcome(client: EdgeClient, console: Console) -> str:
    """Print whose text the answers will be, and whether the verifier is there. Returns what was told
    of the link, if it is down."""
    device = client.device
    manifest = device.bundle.manifest
    drafter = f"{named(manifest.drafter.source)} ({device.variant})"
    console.print(_HINT, style="dim")
    if client.link is None:
        alone = f"no verifier: {drafter} answers alone on this device, and nothing is verified"
        console.print(safe_text(alone), style="yellow")
        _tell_of_the_toy(client, console)
        return ""
    endpoint = client.link.endpoint
    # The bundle does not know whose model answers behind an upstream's address.
    model = "" if endpoint.upstream else f"{named(manifest.target.source)} at "
    console.print(safe_text(f"{model}{endpoint.name}, with {drafter} on this device"), style="dim")
    trouble = ""
    try:
        await client.wait_online(_LOOK_SECONDS)
    except MoaError as error:
        trouble = error.line()
    _tell_of_the_toy(client, console)  # what it is good for depends on what answers beside it
    if not trouble:
        console.print("online", style="green")
        return ""
    alone = "not online yet, this device answers alone till then"
    if client.link.dialling.refused is not None:  # by itself that does not change
        alone = "not online, this device answers alone"
    console.print(safe_text(f"{alone}: {trouble}"), style="yellow")
    return trouble


def _tell_of_the_toy(client: EdgeClient, console: Console) -> None:
    """Print that the model is the embedded toy, if it is."""
    remark = toy_of(client)
    if remark:
        console.print(remark, style="yellow")


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
        trouble: str = "",
    ) -> None:
        """Make a loop that reads lines from `reader`, asks `client` within one conversation, and
        prints to `console`. `schema` is what all answers must match, if anything, and
        `trouble` what the user was told of a link that is down."""
        self._client = client
        self._conversation = conversation
        self._dialogue = dialogue
        self._reader = reader
        self._console = console
        self._ctrl_c = CtrlC()
        self._schema = schema
        self._check: OfflineCheck | None = None
        """The verifier's check of the latest answer, and of those before it, if the device wrote a
        part of them alone."""
        self._typing = False
        """Whether the user is being asked for a line."""
        self._status: Status | None = None
        """The line below a check that the user waits for."""
        self.mistakes = 0
        """Lines that could not be asked or done."""
        self.refused = ""
        """Why the verifier has refused an answer, if it did."""
        self._trouble = trouble
        """What the user was last told of a link that is down; empty once it was up."""

    async def run(self) -> None:
        """Read and answer messages until the user ends the chat."""
        with self._ctrl_c.heard():
            try:
                await self._run()
            finally:
                await self._stop_check()

    async def _run(self) -> None:
        """Read a line and do what it asks, again and again."""
        while True:
            line = await self._next_line()
            if line is None:
                self._say_what_is_left()
                return
            self._dialogue.unverified = self._check.to_save() if self._check is not None else []
            try:
                step = self._dialogue.take(line)
                if isinstance(step, Quit):
                    self._say_what_is_left()
                    return
                await self._do(step)
            except UsageError as error:
                # The conversation continues: only this answer failed.
                self.mistakes += 1
                self._console.print(f"edge-client: {error.line()}", style="red")

    @property
    def _unverified(self) -> int:
        """Tokens of the dialogue's answers that are not verified."""
        return self._check.unverified if self._check is not None else 0

    def _say_what_is_left(self) -> None:
        """Say at the end of a chat what of it was never verified. A script is told by each answer."""
        if self._unverified and self._reader.interactive and self._client.link is not None:
            self._console.print(not_verified(self._unverified), style="yellow")

    async def _next_line(self) -> str | None:
        """Returns the next line that the user types; None at the end of the input. Ctrl-C discards
        what is typed. Twice in a row on an empty line, it is the end, too."""
        pressed_before = False  # Ctrl-C, and nothing was typed since
        while True:
            try:
                async with self._checking_meanwhile():
                    return await self._ctrl_c.stoppable(self._reader.read())
            except Interrupted:
                if self._reader.begun():
                    pressed_before = False
                    continue
            if await self._left_check():
                continue
            if pressed_before:
                return None
            pressed_before = True
            self._console.print("Ctrl-C once more, or Ctrl-D, to leave", style="dim")

    async def _left_check(self) -> bool:
        """End a check that works, which Ctrl-C has stopped; returns whether there was one."""
        check = self._check
        if check is None or not check.is_working:
            return False
        await check.leave(tells=True)
        return True

    async def _do(self, step: NextStep | None) -> None:
        """Do what a line has asked for; None was an empty line."""
        if self._check is not None and not self._check.is_of_the_dialogue:
            await self._check.leave()  # nobody sees its last answer any more
            self._check = self._check_of(self._check.open_answers)
        match step:
            case Ask() | Continue():
                await self._ask(step)
            case Edit(text):
                self._reader.prefill(text)
            case Loaded(text, unverified):
                self._console.print(safe_text(text), style="dim")
                self._take_up(unverified)
            case str():
                self._console.print(safe_text(step), style="dim")

    def _take_up(self, unverified: Sequence[Unverified]) -> None:
        """Go on with the answers of a conversation that was loaded: what is not verified of them is
        counted, and checked when the verifier is there."""
        codec = self._client.device.codec
        answers = [
            WrittenAnswer.loaded(self._dialogue, one, codec, self._schema) for one in unverified
        ]
        self._check = self._check_of(answers)

    async def _ask(self, step: Ask | Continue) -> None:
        """Answer the question, or go on with the last answer. First the check of what the device
        wrote alone is waited for; Ctrl-C stops either."""
        check = self._check if isinstance(step, Continue) else None
        if check is not None and check.phase == "waits" and self._is_complete(check):
            return
        is_away = not await self._settle()
        if check is not None and is_away and self._is_complete(check):
            self._check = self._check_of(check.open_answers)  # it waits below the next line
            return
        unread: list[int] = []
        earlier = self._check.open_answers if self._check is not None else []
        if earlier and isinstance(step, Continue) and self._client.link is not None:
            last = earlier.pop()
            if last.unverified:
                step, unread = self._go_on_after_verified(last)
        if earlier:
            which = "an answer" if len(earlier) == 1 else "answers"
            count = not_verified(sum(one.unverified for one in earlier))
            self._console.print(f"this goes on from {which} of which {count}", style="yellow")
        await self._answer(step, unread, earlier)

    def _is_complete(self, check: OfflineCheck) -> bool:
        """Whether the last of the answers that wait for the verifier is at its end. Then it is told
        so: without the verifier the device would write the same once more."""
        answers = check.open_answers
        if not answers or not answers[-1].is_complete or not answers[-1].unverified:
            return False
        count = not_verified(answers[-1].unverified)
        self._console.print(f"the answer is complete: {count}", style="dim")
        return True

    def _go_on_after_verified(self, last: WrittenAnswer) -> tuple[Ask | Continue, list[int]]:
        """Cut the last answer to its verified tokens, so that nothing unverified becomes a part of
        the prompt. Returns what to ask for now, and the tokens that were cut: the verifier reads
        them as text that probably follows."""
        count = tokens(last.unverified)
        unread = last.cut_to_verified()
        verified = last.message["content"]
        if not verified:
            self._console.print(f"asked again: nothing of it was verified, {count}", style="dim")
            self._dialogue.remove(last.message)
            return Ask(), unread
        # The screen shows what was cut, too: so where it goes on is quoted.
        end = safe_line(last_words(verified, _QUOTED))
        # No count of what is not verified now: they are no part of the answer any more.
        told = f'goes on after "{end}": what stood behind it, {count}, is asked again'
        self._console.print(Text(told, style="dim"))
        return Continue(), unread

    async def _answer(
        self, step: Ask | Continue, prediction: Sequence[int], earlier: list[WrittenAnswer]
    ) -> None:
        """Ask for an answer, or for more of the last one, and show it as it comes; then keep it in
        the dialogue. `prediction` are tokens that the answer probably begins with. `earlier` are
        answers before it that are not verified, and what follows them."""
        dialogue = self._dialogue
        told = AnswerSoFar()
        begun = dialogue.messages[-1] if isinstance(step, Continue) else None
        shown = "" if begun is None else begun["content"]
        stopped = False
        try:
            await self._ctrl_c.stoppable(self._show_answer(told, prediction, shown))
        except Interrupted:
            stopped = True
            if begun is None and not told.ids:
                self._console.print(
                    "stopped: the question is taken back, for nothing of it was answered",
                    style="dim",
                )
                dialogue.unanswered()
                self._check = self._check_of(earlier)
                return
            line = summary_of_stopped(told.statuses, goes_on=bool(shown))
            self._console.print(line, style="dim")
        except MoaError:
            dialogue.unanswered()
            self._check = self._check_of(earlier)
            raise
        if told.done is not None:
            self._tell_whose_tokens(told.done)
        text = told.done.text if told.done is not None else told.text_of()
        if begun is not None and told.done is not None and not text:
            self._console.print("the answer is at its end: nothing was added", style="dim")
        message = dialogue.answered(text) if begun is None else dialogue.extended(begun, text)
        answer = WrittenAnswer(
            dialogue,
            message,
            told,
            grammar=self._schema,
            is_wanted=not stopped,  # the user did not want more of it
        )
        self._check = None
        if answer.unverified or earlier:
            self._check = self._check_of([*earlier, answer], is_latest_turn=not earlier)

    def _tell_whose_tokens(self, done: Done) -> None:
        """Say it where a limit that has cut the answer does not count the target's own tokens."""
        shared = self._client.shared
        remark = whose_tokens(
            done.reason,
            self._client.settings.bundle,
            beside_an_engine=shared.has_engine_behind,
        )
        if remark and self._reader.interactive:
            self._console.print(remark, style="dim")
        elif remark:
            options.say(remark)

    async def _show_answer(self, told: AnswerSoFar, prediction: Sequence[int], shown: str) -> None:
        """Ask for an answer to the dialogue, show it as it comes, and collect it in `told`. `shown`
        is the text that it goes on from."""
        dialogue = self._dialogue
        events = self._conversation.generate(
            dialogue.to_send(),
            grammar=self._schema,
            prediction=prediction,
            **dialogue.changes,
        )
        with make_view(
            console=self._console,
            context=self._known_context,
            more="/continue goes on",
            markdown_after=shown,
            who_verifies=self._client.settings.who_verifies,
            trouble=self._trouble,
        ) as view:
            async with contextlib.aclosing(events):
                async for event in events:
                    self._check = None  # from here on the conversation's turn is this one
                    view.take(event)
                    told.take(event)
                    if isinstance(event, Link):
                        self._hear(event)

    def _hear(self, link: Link) -> None:
        """Note what an answer has told of the link."""
        if link.state in ("offline", "refused"):
            self._trouble = link.detail or self._trouble
        elif link.state == "online":
            self._trouble = ""
        if link.state == "refused":
            self.refused = link.detail

    def _check_of(
        self, answers: list[WrittenAnswer], *, is_latest_turn: bool = False
    ) -> OfflineCheck | None:
        """Returns the check of these answers; None if there is none."""
        if not answers:
            return None
        return OfflineCheck(
            self._client,
            self._conversation,
            answers,
            is_latest_turn=is_latest_turn,
            say=self._say,
            changed=self._tell_status,
            markdown=draws_markdown(self._console),
        )

    @property
    def _known_context(self) -> int:
        """Tokens that the context holds; 0 while only the verifier knows."""
        shared = self._client.shared
        known = shared.link is None or shared.welcome is not None
        return shared.max_context if known else 0

    # ---- what was written offline

    @contextlib.asynccontextmanager
    async def _checking_meanwhile(self) -> AsyncIterator[None]:
        """A context in which the user types. Meanwhile the verifier checks what the device wrote
        alone, as soon as it is back; and where it refuses this device, the user is told."""
        check = self._check
        if check is not None and check.phase != "over" and check.task is None:
            check.start()
        self._typing = True
        self._tell_status()
        watching = asyncio.create_task(self._watch_link())
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self._typing = False
            self._reader.show("")

    async def _watch_link(self) -> None:
        """Tell a person who asks nothing when the verifier is lost or refuses this device, as where
        its token is revoked, and when it is back, until it is cancelled. A script is told by its next
        answer."""
        link = self._client.link
        if link is None or not self._reader.interactive:
            return
        watch = LinkWatch(link, self._client.settings.who_verifies, self._trouble)
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            if self._check_tells and link.dialling.refused is not None:
                continue
            news = watch.look(time.perf_counter())
            self._trouble = watch.trouble
            if news:
                self._say(Text(news, style="yellow" if watch.trouble else "green"))

    @property
    def _check_tells(self) -> bool:
        """Whether a check runs, which says by itself what ends it."""
        task = self._check.task if self._check is not None else None
        return task is not None and not task.done()

    async def _settle(self) -> bool:
        """Wait for the check of the last answer before the next question, so that the question is
        asked about the corrected text. The user may leave the check with Ctrl-C. It is left, too,
        where the verifier has gone meanwhile: then it returns False."""
        check = self._check
        if check is None:
            return True
        is_here = True
        if check.task is None and check.phase != "over":
            # Its predecessor was left, because the user has taken back the last question.
            check.start()
            await asyncio.sleep(0)  # where the verifier is there, it works now
        if check.task is not None and check.is_working:
            self._console.print(f"{check.status}; {_LEAVING}", style="dim")
            with self._following(check), contextlib.suppress(Interrupted):
                is_here = await self._ctrl_c.stoppable(check.finish(_GONE_SECONDS))
        await check.leave()
        return is_here

    @contextlib.contextmanager
    def _following(self, check: OfflineCheck) -> Iterator[None]:
        """A context in which the status of a check is shown below what it prints."""
        if not self._console.is_terminal:
            yield
            return
        with unshown(), self._console.status(Text(check.status, style="dim")) as status:
            self._status = status
            try:
                yield
            finally:
                self._status = None

    async def _stop_check(self) -> None:
        if self._check is not None:
            await self._check.leave()

    def _tell_status(self) -> None:
        check = self._check
        told = check.status if check is not None else ""
        if self._status is not None:
            self._status.update(Text(told and f"{told}; {_LEAVING}", style="dim"))
        elif self._typing:
            can_be_stopped = check is not None and check.is_working
            self._reader.show(f"{told} · {_STOPPING}" if can_be_stopped else told)

    def _say(self, line: Text) -> None:
        """Print a line, above what is being typed."""
        with self._reader.above() if self._typing else contextlib.nullcontext():
            self._console.print(line)
