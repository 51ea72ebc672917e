"""The check of what the device wrote alone, while the user types and, if a question comes before its
end, in front of it.

Several answers may have been written without the verifier, each to a question that went on from the
one before. They are checked in their order, each behind what the verifier has made of the earlier
ones: so the whole conversation becomes what it would have been without the outage.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Literal

from rich.text import Text

from edge_client.cli.dialogue import Unverified
from edge_client.cli.written_answer import WrittenAnswer
from edge_client.client import EdgeClient
from edge_client.conversation import Conversation
from edge_client.events import OVERDUE, Confirm, Done, Event, Link, Progress, Retract, Token
from edge_client.screen.live import PROVISIONAL
from edge_client.screen.markdown import MarkdownLines
from edge_client.screen.words import not_verified, tokens, waiting
from moa.errors import DeviceError, LinkError
from moa.safe_text import safe_line, safe_text

_TICK_SECONDS = 0.2
"""How often it is said that a check still runs."""
_RETRY_SECONDS = 1.0
"""Pause between two looks for a verifier that is away."""
Phase = Literal["waits", "checks", "goes on", "over"]


class OfflineCheck:
    """Has the verifier check answers, oldest first, and says above the prompt what becomes of them.

    It waits for the verifier for as long as that takes, also for one that refuses for now. While the
    verifier works, no clock ends the check: it ends when everything is verified, when the verifier
    is silent for `answer_seconds` or refuses for good, or when the user leaves it.
    """

    def __init__(
        self,
        client: EdgeClient,
        conversation: Conversation,
        answers: Sequence[WrittenAnswer],
        *,
        is_latest_turn: bool = False,
        say: Callable[[Text], None],
        changed: Callable[[], None] = lambda: None,
        markdown: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a check of these answers, which is not started yet; it is over if none of them can be
        checked. `is_latest_turn` says that there is one, and that the conversation's latest turn is
        that answer's. `say` prints a line; `changed` is called when `status` may have changed. With
        `markdown` the text is drawn so."""
        self._client = client
        self._who_verifies = client.settings.who_verifies
        self._conversation = conversation
        self._answers = list(answers)
        self._is_latest_turn = is_latest_turn
        self._say = say
        self._changed = changed
        self._markdown = markdown
        self._clock = clock
        self._begin(self._answers[0])
        can_check = client.link is not None and self._unverified_of(self._wanted) > 0
        self.phase: Phase = "waits" if can_check else "over"
        self.task: asyncio.Task[None] | None = None
        """The check, once it was started."""

    def _begin(self, answer: WrittenAnswer) -> None:
        """Begin with an answer, of which nothing was corrected yet."""
        self._current = answer
        self._told = answer.told.copy()
        """The answer as the check has told it so far; the dialogue has it once it is whole."""
        self._same = len(self._told.ids)
        """Tokens from the beginning that were not withdrawn: the device wrote them."""
        self.phase = "waits"
        self._heard_at = self._clock()
        """When the verifier last brought something."""
        self._before = answer.message["content"]
        """The message as the user has seen it."""
        self._reading: Progress | None = None
        """How far the verifier has read, while it does."""
        self._again: Progress | None = None
        """How far it has read what was verified before, while it does."""
        self._is_cut_off = False
        """Whether the verifier is away again, in the middle of the check."""
        self._late = ""
        """Why the verifier does not answer although it is there; empty where it does, or is away."""
        self._printed: int | None = None
        """Characters of the corrected answer that are on the screen; None: it stands as it was."""

    def start(self) -> None:
        """Begin the check, in the background."""
        self.task = asyncio.create_task(self._run())

    @property
    def is_of_the_dialogue(self) -> bool:
        """Whether all of its answers are still in the dialogue: later ones are taken back first."""
        return self._answers[-1].is_held

    @property
    def open_answers(self) -> list[WrittenAnswer]:
        """Those that are in the dialogue and not verified yet, oldest first. An answer behind one of
        them goes on from text that may be withdrawn: it is among them, verified or not."""
        held = [one for one in self._answers if one.is_held]
        while held and not held[0].unverified:
            del held[0]
        return held

    def to_save(self) -> list[Unverified]:
        """Returns what a file says of the open answers. One that is being corrected is saved as it
        was written until the correction is whole, for the verifier may not come back."""
        self._note_what_is_confirmed()
        found = [answer.saved for answer in self.open_answers]
        if self.phase != "goes on":
            return found
        return [
            dataclasses.replace(one, is_being_corrected=one.message is self._current.message)
            for one in found
        ]

    @property
    def unverified(self) -> int:
        """Tokens in the dialogue that are not verified."""
        self._note_what_is_confirmed()
        return self._unverified_of(self.open_answers)

    @property
    def status(self) -> str:
        """What the check does now, in one line for the user; empty when it is over."""
        told = self._told
        name = self._name
        verified = f"{tokens(told.final)} verified"
        match self.phase:
            case "over":
                return ""
            case "waits":
                unverified = tokens(self._unverified_of(self._wanted))
                if self._late:
                    return f"{unverified} not verified: {self._late}"
                return f"{unverified} not verified: checked when {self._who_verifies} is back"
            case "checks" if self._reading is not None:
                done, total = self._reading.done, self._reading.total
                status = f"checking {name}: reading, {done:,} of {total:,}"
            case "checks":
                status = f"checking {name}: {told.final:,} of {tokens(len(told.ids))}"
            case "goes on" if self._is_cut_off:  # what comes now is the device's own
                return f"correcting {name}: {verified}, and {self._who_verifies} is away"
            case "goes on":
                status = f"correcting {name}: {verified}"
        return status + waiting(self._clock() - self._heard_at)

    @property
    def is_working(self) -> bool:
        """Whether the verifier is checking or correcting an answer now."""
        return self.phase in ("checks", "goes on")

    async def leave(self, *, tells: bool = False) -> None:
        """End the check where it is: the answers stay as they are now, and one that is not wholly
        corrected as it was written. It `tells` what is then not verified, whatever it has begun."""
        if self.task is not None and not self.task.done():
            is_cut = self.phase == "goes on" and self._current.is_held
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
            self._note_what_is_confirmed()
            if is_cut:
                self._print_rest()
                self._say(Text(f"stopped: {self._as_it_was}", style="dim"))
            elif tells:
                self._say(Text(f"stopped: {not_verified(self.unverified)}", style="dim"))
        self.phase = "over"
        self._changed()

    async def finish(self, away_seconds: float) -> bool:
        """Wait for the end of the check, or until the verifier was away for so long in one piece;
        returns whether it has ended. To stop waiting does not stop it."""
        here_at = self._clock()
        while self.task is not None and not self.task.done():
            await asyncio.wait([self.task], timeout=_TICK_SECONDS)
            if not self._is_away:
                here_at = self._clock()
            elif self._clock() - here_at >= away_seconds:
                return False
        return True

    # ---- inside

    @property
    def _wanted(self) -> list[WrittenAnswer]:
        """The answers that may be checked."""
        return [one for one in self._answers if one.is_wanted and one.is_held]

    @staticmethod
    def _unverified_of(answers: Sequence[WrittenAnswer]) -> int:
        return sum(one.unverified for one in answers)

    async def _run(self) -> None:
        """Check the answers, and tell of whatever ends that."""
        ticking = asyncio.create_task(self._tick())
        try:
            await self._check_in_order()
        except Exception as error:
            self._note_what_is_confirmed()
            if self._current.is_held:
                self._print_rest()
            stays = self._as_it_was if self.phase == "goes on" else f"{self._name} stays unverified"
            why = DeviceError.of("the check", error).line()
            self._say(Text(f"{stays}: {why}", style="yellow"))
        finally:  # also where nothing could be said of it
            ticking.cancel()
            self.phase = "over"
            self._changed()

    def _note_what_is_confirmed(self) -> None:
        """Note which tokens of the answer as it was written the check has confirmed so far."""
        self._current.confirm(self._told, min(self._told.final, self._same))

    @property
    def _as_it_was(self) -> str:
        """That an answer stays as it was written, because its correction is not whole."""
        count = not_verified(self._current.unverified)
        return f"{self._name} stays as this device wrote it, and {count}"

    async def _check_in_order(self) -> None:
        """Check the answers, as far as they are not verified or go on from one that was changed. One
        that cannot be verified ends it: those behind it would be checked behind text that is not the
        target's. One that the user has stopped is passed over."""
        is_changed = False
        for answer in self._wanted:
            if not answer.unverified and not is_changed:
                continue
            before = answer.message["content"]
            self._begin(answer)
            if not await self._check():
                return
            if answer.message["content"] == before:
                continue
            is_changed = True
            for later in self._answers[self._answers.index(answer) + 1 :]:
                later.stands_behind_another()

    @property
    def _name(self) -> str:
        """What the user may call it."""
        return self._current.name

    async def _check(self) -> bool:
        """Have the verifier check the answer, by as many attempts as it takes, and say how that
        ended; returns whether it is verified."""
        is_latest_turn = self._is_latest_turn
        while True:
            await self._online()
            self.phase = "checks"
            self._heard_at = self._clock()
            self._changed()
            if is_latest_turn:
                done = await self._follow(self._conversation.recheck(persists=True))
            else:
                done = await self._follow(self._current.asked_again(self._conversation, self._told))
            if done is not None and done.verified:
                self._over(done)
                return True
            if self._is_away:
                self._late = ""
                self.phase = "waits"
                self._changed()
            elif is_latest_turn:
                self._stays()
                return False
            # It was asked for again, and waited for as long as for an answer; a recheck waits on.
            is_latest_turn = True

    async def _follow(self, attempt: AsyncGenerator[Event, None]) -> Done | None:
        """Take in the events of an attempt; returns its end, if it came to one."""
        done: Done | None = None
        async with contextlib.aclosing(attempt) as events:
            async for event in events:
                self._take(event)
                done = event if isinstance(event, Done) else done
        self._note_what_is_confirmed()
        if done is not None and not self._told.unverified:
            self._current.replace(self._told, done.text)
        return done

    async def _tick(self) -> None:
        """Show that the check still waits, because a slow verifier says nothing for long."""
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._changed()

    @property
    def _is_away(self) -> bool:
        """Whether the verifier is not connected."""
        link = self._client.link
        return link is not None and not link.up

    async def _online(self) -> None:
        """Wait for the verifier. Raises its refusal."""
        while self._is_away:
            self._told.was_away = True
            try:
                await self._client.wait_online()
            except LinkError:
                await asyncio.sleep(_RETRY_SECONDS)

    def _take(self, event: Event) -> None:
        """Take in an event of the check, and print the lines of the answer that it has changed."""
        # A verifier may be there and yet refuse for now, as one whose upstream is away.
        is_away = isinstance(event, Link) and event.state != "online"
        if self.phase in ("waits", "checks"):
            self.phase = "waits" if is_away else "checks"
        if isinstance(event, Link):
            self._is_cut_off = event.state not in ("online", *OVERDUE)
            is_late = event.state in OVERDUE
            not_yet = event.detail or f"{self._who_verifies} does not get to it yet"
            self._late = safe_line(not_yet) if is_late else ""
            self._note_what_is_confirmed()
        if isinstance(event, Token) and event.text:  # an end token alone changes nothing
            self._goes_on(f"goes on with {self._name}", len(self._told.text_of()))
        self._told.take(event)
        self._note_reading(event)
        if isinstance(event, Retract):
            self._same = min(self._same, len(self._told.ids))
            self._goes_on(f"corrects {self._name}", event.characters)
        self._print_lines()
        self._changed()

    def _note_reading(self, event: Event) -> None:
        """Note that the verifier was heard, and how far it has read if this event says so."""
        reading = self._progress_of(event)
        match event:
            case Progress() if reading == self._reading:
                pass  # a verifier that is at work says so again and again
            case (
                Token(status="provisional") | Link(state="late" | "limited" | "offline" | "refused")
            ):
                pass  # the device goes on alone, for nothing is heard of the verifier
            case _:
                self._heard_at = self._clock()
        if not isinstance(event, Done):
            self._reading = reading

    def _progress_of(self, event: Event) -> Progress | None:
        """How far the verifier has still to read by this event. An answer that is asked for again
        is checked from its beginning: of what was verified before, too, nothing but this changes."""
        told = self._told
        match event:
            case Progress():  # of all: it is at work
                return event if event.done < event.total else self._again
            case Confirm():
                done = event.stop - len(told.prompt)
                is_again = done < told.final
                self._again = Progress(done=done, total=told.final) if is_again else None
                return self._again
            case _:
                return None

    def _goes_on(self, what: str, characters: int) -> None:
        """Note that from so many characters on the answer is another one than the screen shows. The
        first time the user is told, and the answer is printed again from the beginning of that
        line."""
        self.phase = "goes on"
        if self._printed is None:
            back = " is back, and" if self._told.was_away else ""
            self._say(Text(f"{self._who_verifies}{back} {what}:", "yellow"))
            self._printed = self._told.text_of()[:characters].rfind("\n") + 1

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
            before = self._current.begun + self._told.text_of()[: self._printed]
            text = MarkdownLines(safe_text(before)).drawn(text)
        self._say(text)

    def _over(self, done: Done) -> None:
        """Say that all of the answer is verified now: as it was, or as it was corrected."""
        if self._printed is None and self._current.begun + done.text == self._before:
            back = f"{self._who_verifies} is back" if self._told.was_away else "checked"
            self._say(Text(f"{back}: {self._name} is the target's own", "dim"))
            return
        if self._printed is None:
            self._goes_on(f"corrects {self._name}", 0)
        self._print_rest(done.text)
        self._say(Text(f"checked · {tokens(len(self._told.ids))} · verified", "dim"))

    def _stays(self) -> None:
        """Say that a part of the answer stays unverified, although the verifier is there."""
        self._print_rest()
        stays = f"{self._who_verifies} has not checked all of {self._name}: it stays so"
        if self.phase == "goes on":
            stays = f"{self._who_verifies} has not ended its correction: {self._as_it_was}"
        self._say(Text(stays, style="yellow"))
