"""The check of what the device wrote alone, while the user types and, if a question comes before its
end, in front of it.

Several answers may have been written without the verifier, each to a question that went on from the
one before. They are checked in their order, each behind what the verifier has made of the earlier
ones: so the whole conversation becomes what it would have been without the outage.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Literal

from rich.text import Text

from edge_client.cli.dialogue import Dialogue, DialogueMessage
from edge_client.client import EdgeClient
from edge_client.conversation import Conversation
from edge_client.events import AnswerSoFar, Done, Event, Link, Progress, Retract, Token
from edge_client.screen.live import PROVISIONAL
from edge_client.screen.markdown import MarkdownLines
from edge_client.screen.words import tokens, waiting
from moa.errors import LinkError, MoaError
from moa.grammar.spec import Grammar
from moa.safe_text import safe_line, safe_text

_TICK_SECONDS = 0.2
"""How often it is said that a check still runs."""
_RETRY_SECONDS = 1.0
"""Pause between two looks for a verifier that is away."""
_QUOTED = 30
"""Characters of a question by which its answer is named."""
Phase = Literal["waits", "checks", "goes on", "over"]


class OfflineCheck:
    """Has the verifier check an answer, and says above the prompt what becomes of it. The answers
    before it that are not verified yet are checked first.

    It waits for the verifier for as long as that takes, also for one that refuses for now. While the
    verifier works, no clock ends the check: it ends when everything is verified, when the verifier
    is silent for `answer_seconds` or refuses for good, or when the user leaves it.
    """

    def __init__(
        self,
        client: EdgeClient,
        conversation: Conversation,
        dialogue: Dialogue,
        message: DialogueMessage,
        told: AnswerSoFar,
        *,
        say: Callable[[Text], None],
        changed: Callable[[], None] = lambda: None,
        markdown: bool = False,
        clock: Callable[[], float] = time.monotonic,
        earlier: Sequence[OfflineCheck] = (),
        grammar: Grammar | None = None,
    ) -> None:
        """Make a check of the latest answer, which is not started yet. `message` holds the answer's
        text in the dialogue, and `told` which of its tokens are verified. `say` prints a line;
        `changed` is called when `status` may have changed. With `markdown` the text is drawn so.
        `earlier` are checks of the answers before it, oldest first, that did not come to their end.
        The answer matches the `grammar`."""
        self._client = client
        self._who_verifies = client.settings.who_verifies
        self._conversation = conversation
        self._dialogue = dialogue
        self.message = message
        self._told = told
        self._say = say
        self._changed = changed
        self._markdown = markdown
        self._clock = clock
        self._earlier = list(earlier)
        self._grammar = grammar
        self._is_verified = False
        """Whether a check has verified all of it."""
        self._is_latest_turn = True
        """Whether the conversation's latest turn is this answer's."""
        self.is_wanted = True
        """Whether it is to be checked: not an answer that the user has stopped."""
        self._changes: Mapping[str, Any] = dict(dialogue.changes)
        """The settings that were changed when the answer was written."""
        self._current = self
        """The one that is being checked now: this, or one of the earlier ones."""
        self._heard_at = clock()
        """When the verifier last brought something."""
        self._before = message["content"]
        """The message as the user has seen it."""
        self._begun = self._before.removesuffix(told.done.text if told.done else told.text_of())
        """What an earlier turn had written of the message."""
        self._reading: Progress | None = None
        """How far the verifier has read, while it does."""
        self._printed: int | None = None
        """Characters of the corrected answer that are on the screen; None: it stands as it was."""
        self.phase: Phase = "waits"
        self.task: asyncio.Task[None] | None = None
        """The check, once it was started."""

    def without_the_later(self) -> OfflineCheck | None:
        """Return the check of those of its answers that are still in the dialogue, if some are not
        verified: the user has taken later ones back. It is not started yet."""
        held = self.not_ended
        if not held:
            return None
        last = held.pop()
        last._earlier = held
        last._is_latest_turn = False
        last.task = None
        last._begin("waits")
        return last

    def start(self) -> None:
        """Begin the check, in the background."""
        self.task = asyncio.create_task(self._run())

    @property
    def unverified(self) -> int:
        """Tokens of the answer that are not verified."""
        return 0 if self._is_verified else len(self._told.ids) - self._told.final

    @property
    def not_ended(self) -> list[OfflineCheck]:
        """This check and those before it whose answers are in the dialogue and not verified yet,
        oldest first. An answer behind one of them goes on from text that may be withdrawn: it is
        among them, verified or not."""
        held = [one for one in (*self._earlier, self) if self._dialogue.holds(one.message)]
        while held and not held[0].unverified:
            del held[0]
        return held

    @property
    def all_unverified(self) -> int:
        """Tokens of this answer and of those before it that are not verified."""
        return sum(one.unverified for one in self.not_ended)

    @property
    def status(self) -> str:
        """What the check does now, in one line for the user; empty when it is over."""
        if self.phase == "over":
            return ""
        current = self._current
        told = current._told
        match current.phase:
            case "over":
                return ""
            case "waits":
                unverified = tokens(self.all_unverified)
                return f"{unverified} not verified: checked when {self._who_verifies} is back"
            case "checks" if current._reading is not None:
                done, total = current._reading.done, current._reading.total
                status = f"checking {current._name}: reading, {done:,} of {total:,}"
            case "checks":
                status = f"checking {current._name}: {told.final:,} of {tokens(len(told.ids))}"
            case "goes on":
                status = f"correcting {current._name}: {tokens(len(told.ids))}"
        return status + waiting(self._clock() - current._heard_at)

    @property
    def is_working(self) -> bool:
        """Whether the verifier is checking or correcting an answer now."""
        return self.phase != "over" and self._current.phase in ("checks", "goes on")

    async def leave(self) -> None:
        """End the check where it is: the answers stay as they are now."""
        if self.task is not None and not self.task.done():
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
            self._current._keep()
            self._current._print_rest()
        self.phase = "over"
        self._changed()

    async def finish(self) -> None:
        """Wait for the end of the check; to stop waiting does not stop it."""
        if self.task is not None:
            await asyncio.shield(self.task)

    def cut_to_verified(self) -> list[int]:
        """Take the unverified end out of the message; returns its tokens. Call it when the check
        is over."""
        told = self._told
        self._dialogue.correct(self.message, self._begun + told.text_of(0, told.final))
        return told.ids[told.final :]

    # ---- inside

    async def _run(self) -> None:
        """Have the verifier check the answers again and again, until all of them are verified or
        another attempt makes no sense."""
        ticking = asyncio.create_task(self._tick())
        try:
            if self._earlier or not self._is_latest_turn:
                await self._check_in_order()
            else:
                await self._check(self._conversation.recheck)
        except MoaError as error:
            stays = f"{self._current._name} stays unverified: {error.line()}"
            self._say(Text(stays, style="yellow"))
        finally:
            ticking.cancel()
        self.phase = "over"
        self._changed()

    async def _check_in_order(self) -> None:
        """Check the earlier answers and then this one, as far as they are not verified or go on
        from one that was changed. An answer that cannot be verified ends it: those behind it would
        be checked behind text that is not the target's."""
        is_changed = False
        for one in (*self._earlier, self):
            if not one.is_wanted or not self._dialogue.holds(one.message):
                continue
            if not one.unverified and not is_changed:
                continue
            before = one.message["content"]
            self._current = one
            one._begin("waits")
            if not await one._check(one._asked_again):
                return
            is_changed = is_changed or one.message["content"] != before

    def _begin(self, phase: Phase) -> None:
        """Begin in this phase, with the message as it is: nothing of it was corrected yet."""
        self.phase = phase
        self._before = self.message["content"]
        self._printed = None

    async def _check(self, attempt: Callable[[], AsyncGenerator[Event, None]]) -> bool:
        """Have the verifier check this answer, by as many attempts as it takes; returns whether it
        is verified now."""
        while await self._online():
            self.phase = "checks"
            self._heard_at = self._clock()
            self._changed()
            is_verified = await self._check_once(attempt)
            if is_verified is not None:
                return is_verified
        return False

    async def _asked_again(self) -> AsyncGenerator[Event, None]:
        """Ask for the answer once more, behind the dialogue as it is now, with the tokens that were
        written as its beginning: the verifier checks them. Yields what changes in them. None of them
        counts as verified at first, for what is before them may have changed."""
        told = self._told
        written = list(told.ids)
        self._is_verified = False
        told.final = 0
        told.statuses = ["provisional"] * len(written)
        known = len(written)
        events = self._conversation.generate(
            self._dialogue.before(self.message, self._begun),
            written=written,
            grammar=self._grammar,
            **self._changes,
        )
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, Token) and known:
                    known -= 1  # it is told once more what was written
                    continue
                if isinstance(event, Retract):
                    known = 0
                yield event

    @property
    def _name(self) -> str:
        """What the user may call the answer: the last one, or by its question."""
        messages = self._dialogue.messages
        if not messages or messages[-1] is self.message:
            return "the last answer"
        question = self._dialogue.before(self.message)[-1]["content"]
        words = " ".join(question.split())
        quoted = words if len(words) <= _QUOTED else words[: _QUOTED - 1] + "…"
        return f'the answer to "{safe_line(quoted)}"'

    async def _tick(self) -> None:
        """Show that the check still waits, because a slow verifier says nothing for long."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._changed()

    async def _online(self) -> bool:
        """Wait for the verifier; returns False if there is none. Raises its refusal."""
        link = self._client.link
        while link is not None and not link.up:
            try:
                await self._client.wait_online()
            except LinkError:
                await asyncio.sleep(_RETRY_SECONDS)
        return link is not None

    async def _check_once(self, attempt: Callable[[], AsyncGenerator[Event, None]]) -> bool | None:
        """Let the verifier check the answer once, and say how that ended; returns whether it is
        verified, or None if another attempt makes sense."""
        done: Done | None = None
        async with contextlib.aclosing(attempt()) as events:
            async for event in events:
                self._take(event)
                done = event if isinstance(event, Done) else done
        self._keep(done)
        if done is None:
            return False
        if done.verified:
            self._is_verified = True
            self._over(done)
            return True
        link = self._client.link
        if link is not None and not link.up:
            self.phase = "waits"
            self._changed()
            return None
        self._print_rest()
        self._say(
            Text(
                f"{self._who_verifies} has not checked all of {self._name}: it stays so",
                style="yellow",
            )
        )
        return False

    def _take(self, event: Event) -> None:
        """Take in an event of the check, and print the lines of the answer that it has changed."""
        if self.phase in ("waits", "checks"):
            # A verifier may be there and yet refuse for now, as one whose upstream is away.
            is_away = isinstance(event, Link) and event.state != "online"
            self.phase = "waits" if is_away else "checks"
        if isinstance(event, Token):
            self._goes_on(f"and goes on with {self._name}", len(self._told.text_of()))
        self._told.take(event)
        self._note_reading(event)
        if isinstance(event, Retract):
            self._goes_on(f"and corrects {self._name}", event.characters)
            self._keep()
        self._print_lines()
        self._changed()

    def _note_reading(self, event: Event) -> None:
        """Note that the verifier was heard, and how far it has read if this event says so."""
        # A verifier that reads says so again and again, though it has not come further.
        if not isinstance(event, Progress) or event != self._reading:
            self._heard_at = self._clock()
        if not isinstance(event, Done):
            self._reading = event if isinstance(event, Progress) else None
        if self._reading is not None and self._reading.done >= self._reading.total:
            self._reading = None

    def _goes_on(self, what: str, characters: int) -> None:
        """Note that from so many characters on the answer is another one than the screen shows. The
        first time the user is told, and the answer is printed again from the beginning of that
        line."""
        self.phase = "goes on"
        if self._printed is None:
            self._say(Text(f"{self._who_verifies} is back, {what}:", "yellow"))
            self._printed = self._told.text_of()[:characters].rfind("\n") + 1

    def _keep(self, done: Done | None = None) -> None:
        """Let the conversation go on from the text as it is now."""
        text = self._told.text_of() if done is None else done.text
        self._dialogue.correct(self.message, self._begun + text)

    def _print_lines(self) -> None:
        """Print the lines of a corrected answer that are complete and will not change any more."""
        if self._printed is None:
            return
        final = self._told.text_of(0, self._told.final)
        end = final.rfind("\n") + 1
        if end > self._printed:
            self._say_answer(Text(safe_text(final[self._printed : end - 1])))
            self._printed = end

    def _print_rest(self, text: str | None = None) -> None:
        """Print what is not printed yet of a corrected answer, with its unverified end in another
        style; `text` is the whole answer, once that is final."""
        if self._printed is None:
            return
        final = self._told.text_of(0, self._told.final) if text is None else text
        rest = Text(safe_text(final[self._printed :]))
        if text is None:
            rest += Text(safe_text(self._told.text_of(self._told.final)), PROVISIONAL)
        if rest.plain:
            self._say_answer(rest)
        self._printed = len(final)

    def _say_answer(self, text: Text) -> None:
        """Print a part of the answer, which follows what of it is on the screen."""
        if self._markdown:
            before = self._begun + self._told.text_of()[: self._printed]
            text = MarkdownLines(safe_text(before)).drawn(text)
        self._say(text)

    def _over(self, done: Done) -> None:
        """Say that all of the answer is verified now: as it was, or as it was corrected."""
        if self._printed is None and self._begun + done.text == self._before:
            self._say(
                Text(f"{self._who_verifies} is back: {self._name} is the target's own", "dim")
            )
            return
        if self._printed is None:
            self._goes_on(f"and corrects {self._name}", 0)
        self._print_rest(done.text)
        self._say(Text(f"checked · {tokens(len(self._told.ids))} · verified", "dim"))
