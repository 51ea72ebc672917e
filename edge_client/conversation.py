"""One conversation: its caches, records and log. Many of them share a device, a connection and its
budget."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from time import perf_counter
from typing import NamedTuple, Unpack

from edge_client.events import Done, Event, Notice, Prompt
from edge_client.link.mailbox import Mailbox
from edge_client.link.record_flow import RecordFlow
from edge_client.settings import OF_THE_CLIENT, ClientSettings, TurnChanges, changed
from edge_client.shared import Shared
from edge_client.text.chat import ChatLog, Messages, empty_prompt, prompt_ids
from edge_client.turn.deadlines import Deadlines
from edge_client.turn.guard import OfflineGuard
from edge_client.turn.machine import TurnMachine
from edge_client.turn.reachability import Reachability
from edge_client.turn.records import Records
from edge_client.turn.session_state import SessionState
from edge_client.turn.shell import TurnShell
from edge_client.turn.stats import Stats
from edge_client.turn.transcript import Transcript
from edge_client.turn.worker import DrafterWorker
from moa.chat_window import left_out_notice, prompt_room
from moa.errors import DeviceError, UsageError
from moa.grammar.spec import Grammar
from moa.speculation.prediction import Prediction
from moa.text_stream import TextStream, common_prefix
from moa.wire import ClientSession
from moa.wire.finish import TurnRules
from moa.wire.messages import ChatMessage
from moa.wire_sampling import wire_sampling


class _Question(NamedTuple):
    """What a turn is to answer."""

    ids: list[int]
    """All text before the answer, earlier turns included."""
    messages: Messages
    """The chat that this text was made of; empty if it is no chat."""
    left_out: int = 0
    """Messages of the chat that the context has no room for."""

    def chat(self) -> list[ChatMessage]:
        """The chat in the protocol's form."""
        return [ChatMessage(message["role"], message["content"]) for message in self.messages]


class Conversation:
    """Made by `EdgeClient.conversation`. One turn at a time."""

    def __init__(
        self, shared: Shared, closed: Callable[[Conversation], object] = lambda _: None
    ) -> None:
        """Begin an empty conversation over what the client's conversations share. `closed` is
        called with it at its end."""
        self._shared = shared
        self._tell_closed = closed
        self._take_drafter()
        self.ids: list[int] = []
        """All ids so far, prompts included."""
        self.chat = ChatLog(shared.device.codec)
        self._chatting = False
        """Whether the latest turn is part of `chat`, and not ids or a raw text."""
        self._session_state: SessionState | None = None
        """The verifier's session that the next turn may go on with."""
        self._left: list[bytes] = []
        """Ids of sessions at the verifier that are no longer needed."""
        self._last: TurnShell | None = None
        """The latest turn."""
        self._busy = self._closed = False

    # ---- use

    async def generate(
        self,
        prompt: str | Messages | None = None,
        *,
        ids: Sequence[int] | None = None,
        messages: Messages = (),
        raw: bool = False,
        prediction: str | Sequence[int] = (),
        written: Sequence[int] = (),
        rechecks: bool = False,
        grammar: Grammar | None = None,
        **changes: Unpack[TurnChanges],
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of the answer to a prompt: a text, chat messages, or token ids as they
        are. The last one is `Done`; closing the generator cancels the turn.

        A chat that outgrows the context loses its oldest messages, with a `Notice`; too many `ids`
        are refused. Ids that begin with the conversation so far continue it, with the KV caches of
        both ends. `messages` is the chat that the ids were made of, which some upstream engines
        need. `prediction` is a text, or its ids, that the answer is expected to resemble, used as a
        draft.
        `written` is the answer, or its beginning, as this device has written it before: it is
        checked, and not written again; `rechecks` says that this goes on for as long as a `recheck`
        that persists.
        The answer matches the `grammar`, also without a verifier.
        """
        settings = self._shared.settings
        if changes:
            settings = changed(settings, changes, fixed=OF_THE_CLIENT)
        self._check_free()
        _check_kinds(ids, messages, grammar)
        with _named("the tokenizer"):
            if isinstance(prediction, str):
                prediction = self._shared.device.codec.encode(prediction)
            if ids is not None:
                self._chatting = False
                question = _Question(list(ids), messages)
            else:
                question = self._encode(prompt or "", settings.max_new_tokens, raw=raw)
        self._check(question.ids)
        # A verifier's context may be longer than this device's: what it wrote there could neither be
        # gone on with by the device, nor be asked about.
        room = self._shared.max_context - len(question.ids)
        longest = min(room, self._shared.longest_answer(settings.max_new_tokens))
        settings = dataclasses.replace(settings, max_new_tokens=longest)
        if grammar is not None and settings.ignore_eos:
            raise UsageError(
                "a grammar says where the text ends: it cannot be used with ignore_eos"
            )
        with self._turn():
            shell = await self._prepare(question, settings, prediction, grammar)
            _begin_with(shell.machine.transcript, written)
            if rechecks:
                shell.machine.continue_settling(perf_counter(), persists=True)
            yield Prompt(ids=question.ids)
            if question.left_out:
                yield Notice(message=left_out_notice(question.left_out))
            async with self._running(shell) as events:
                async for event in events:
                    yield event
        # Behind the turn: whoever reads no further may ask the next question.
        yield _done(shell)

    def _encode(self, prompt: str | Messages, max_new_tokens: int, *, raw: bool) -> _Question:
        """Returns a prompt in tokens, with the chat before it if it is a part of one. `raw` is for
        a text that is sent as it is. Room is left for an answer of so many tokens."""
        shared = self._shared
        codec = shared.device.codec
        room = prompt_room(shared.max_context, max_new_tokens)
        self._chatting = not isinstance(prompt, str) or (codec.can_chat and not raw)
        ids, left_out = prompt_ids(codec, prompt, raw=raw, chat=self.chat, room=room)
        return _Question(ids, self.chat.sent if self._chatting else (), left_out)

    async def recheck(self, *, persists: bool = False) -> AsyncGenerator[Event, None]:
        """Have the verifier check the provisional text of the latest answer, which the device wrote
        alone. Yields the events of that, the last of them another `Done`.

        It ends when all is verified; after `settle_seconds` while nobody can check it: the verifier
        or the upstream is away, or refuses for now; after `answer_seconds` of silence of one that
        is at work. Ask again while `unverified` is true. `persists` is for programs in which nobody
        waits for the end: a verifier that is there is asked again for as long as it refuses.
        """
        shell = self._last
        if shell is None or not shell.machine.transcript.provisional:
            return
        self._check_free()
        session = shell.machine.session.id
        if session in self._left:  # a request had no answer; the check asks it once more
            self._left.remove(session)
        with self._turn():
            shell.machine.continue_settling(perf_counter(), persists=persists)
            async with self._running(shell) as events:
                async for event in events:
                    yield event
        # Behind the turn: whoever reads no further may ask the next question.
        yield _done(shell)

    @property
    def closed(self) -> bool:
        """Whether it can answer no more."""
        return self._closed

    @property
    def unverified(self) -> bool:
        """Whether the latest answer has tokens that the verifier may still confirm or correct."""
        return self._last is not None and bool(self._last.machine.transcript.provisional)

    async def aclose(self) -> None:
        """End the conversation: the verifier can drop its sessions."""
        self._closed = True
        self._tell_closed(self)
        self._abandon()
        while self._left and self._shared.link is not None:
            await self._shared.link.close_session(self._left.pop())

    async def __aenter__(self) -> Conversation:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # ---- a turn

    @contextmanager
    def _turn(self) -> Iterator[None]:
        self._busy = True
        try:
            with _named("the answer"):
                yield
        finally:
            self._busy = False

    @asynccontextmanager
    async def _running(self, shell: TurnShell) -> AsyncIterator[AsyncGenerator[Event, None]]:
        """The events of a turn, for a body that reads them. If the body ends before they do, the
        turn is cancelled. In any case the conversation is ready for the next turn afterwards."""
        shared = self._shared
        machine = shell.machine
        read_all = False
        try:
            if shared.link is not None:
                shared.link.new_turn()
            with (
                shared.link.mailbox() if shared.link is not None else nullcontext(Mailbox()) as box
            ):
                async with aclosing(shell.events(box)) as events:
                    yield events
            read_all = True
        finally:
            self._last = shell
            self.ids = machine.transcript.ids
            if not read_all:
                await self._cancel(machine)
            self._keep_session(machine)
            await shell.worker.finish()
            if shell.worker.failed:
                self._take_drafter()
                self._abandon()
            machine.transcript.stream.flush()
            if self._chatting:
                self.chat.answered(self.ids, machine.transcript.stream.text)

    async def _cancel(self, machine: TurnMachine) -> None:
        """Have the verifier stop writing an answer that nobody reads any more."""
        link = self._shared.link
        if link is not None:
            cancel = machine.session.cancel()
            if cancel is not None:
                await link.send(cancel)
        self._left += machine.unsent_closes()

    def _keep_session(self, machine: TurnMachine) -> None:
        """Keep the session of a turn that has ended for the next turn, if all of its requests were
        answered. Else nobody knows what the verifier's log holds now, and the next turn begins
        another session, which shares this one's cached prefix."""
        self._session_state = machine.session_state
        if machine.session.unsettled:
            self._abandon()

    def _take_drafter(self) -> None:
        """Give this conversation a drafter with caches of its own, and an empty store for the
        activation records that the drafter reads."""
        link = self._shared.link
        with _named("the drafter"):
            self.drafter = self._shared.device.new_drafter()
        self.records = Records(
            self.drafter.records, link.flow if link is not None else RecordFlow()
        )

    def _abandon(self) -> None:
        if self._session_state is not None:
            self._left.append(self._session_state.session.id)
            self._session_state = None

    def _check_free(self) -> None:
        if self._closed or not self._shared.is_open:
            raise UsageError("the conversation is closed", hint="use `async with EdgeClient(...)`")
        if self._busy:
            raise UsageError(
                "this conversation is answering already",
                hint="wait, or use `client.conversation()`",
            )

    def _check(self, context: Sequence[int]) -> None:
        """A `UsageError` for a prompt that is empty, has ids that are no tokens, or leaves no room
        for an answer."""
        if not context:
            raise empty_prompt()
        vocabulary = self._shared.device.bundle.manifest.vocabulary.target
        foreign = next((token for token in context if not 0 <= token < vocabulary), None)
        if foreign is not None:
            raise UsageError(
                f"token id {foreign} is outside the vocabulary",
                hint=f"ids are 0 to {vocabulary - 1}",
            )
        most = self._shared.max_context
        if len(context) >= most:
            raise UsageError(
                f"the prompt has {len(context)} tokens, and the context holds {most}",
                hint=self._shared.whose_context or "shorten it, or start anew",
            )

    async def _prepare(
        self,
        question: _Question,
        settings: ClientSettings,
        prediction: Sequence[int],
        grammar: Grammar | None,
    ) -> TurnShell:
        """Returns what runs one turn: a shell around the machine that decides and the worker that
        drafts. The previous turn's session is gone on with if that is possible, else a new one
        begins."""
        shared = self._shared
        length = len(question.ids)
        matcher = None
        if grammar is not None:
            matcher = await shared.device.grammars.matcher(grammar, length)
        self.records.precision = settings.sync
        shared.spending.max_kbps = settings.max_kbps
        session_state = self._continue(question, settings, grammar)
        if session_state is None:
            session_state = self._begin(question, settings, grammar)
        machine = self._machine(session_state, length, settings, prediction)
        self.drafter.answer_at = length
        worker = DrafterWorker(
            self.drafter, settings.sampling, shared.controller, shared.device.thread, matcher
        )
        return TurnShell(machine, worker, shared.link, shared.news)

    def _machine(
        self,
        session_state: SessionState,
        start: int,
        settings: ClientSettings,
        prediction: Sequence[int],
    ) -> TurnMachine:
        """Returns the machine that decides what a turn does, whose answer begins behind `start`
        tokens."""
        shared = self._shared
        calibration = shared.device.bundle.manifest.calibration
        # Not `self.records`: the turn would hold the conversation, which holds the turn, and the
        # drafter's caches would stay in memory until the garbage collector looks for such circles.
        records = self.records
        now = perf_counter()
        unread = start - session_state.session.settled
        return TurnMachine(
            self._transcript(session_state.session, start, settings),
            session_state,
            shared.controller,
            shared.spending,
            records,
            OfflineGuard.of(
                calibration,
                settings.max_offline_tokens,
                lambda: bool(records.held()),
                structured=session_state.session.grammar is not None,
                decode=shared.device.codec.decode,
            ),
            Deadlines(
                settings.patience,
                shared.controller,
                waiting_since=now,
                unread=unread,
                text_stays=settings.on_reconnect == "keep",
            ),
            Stats(started=now),
            Reachability(shared.link is not None),
            self._left,
            who_drafts=settings.draft,
            guesses=settings.guess_ahead,
            prediction=Prediction(prediction) if prediction else None,
        )

    def _transcript(
        self, session: ClientSession, start: int, settings: ClientSettings
    ) -> Transcript:
        """Returns the text of an answer that begins behind `start` tokens, still empty."""
        codec = self._shared.device.codec
        return Transcript(
            session=session,
            rules=TurnRules(
                start=start,
                max_new_tokens=settings.max_new_tokens,
                max_context=self._shared.max_context,
                eos_ids=frozenset() if settings.ignore_eos else codec.eos_ids,
                stop=settings.stop,
            ),
            decode=codec.decode,
            stream=TextStream(codec, settings.stop),
            on_reconnect=settings.on_reconnect,
        )

    def _continue(
        self, question: _Question, settings: ClientSettings, grammar: Grammar | None
    ) -> SessionState | None:
        """Append this turn's new tokens to the session of the previous turn, so that the verifier
        reads only those, and return it. None if the session cannot be gone on with: then it is
        abandoned."""
        if self._session_state is None:
            return None
        session = self._session_state.session
        log = session.log
        same_sampling = (session.sampling, session.penalties) == wire_sampling(settings.sampling)
        # The verifier is known to have all of the log, and no request is without an answer.
        is_settled = session.settled == len(log) and not session.unsettled
        goes_on = len(question.ids) > len(log) and question.ids[: len(log)] == log
        if not (same_sampling and is_settled and goes_on):
            self._abandon()
            return None
        session.append(
            question.ids[len(log) :],
            max_new_tokens=settings.max_new_tokens,
            stop=settings.stop,
            ignore_eos=settings.ignore_eos,
            logprobs=settings.logprobs,
            grammar=grammar,
            messages=question.chat(),
        )
        return self._session_state

    def _begin(
        self, question: _Question, settings: ClientSettings, grammar: Grammar | None
    ) -> SessionState:
        """Returns a new session with this prompt. Activation records are kept of the tokens that
        the prompt has in common with the text before."""
        sampling, penalties = wire_sampling(settings.sampling)
        session = ClientSession(
            log=list(question.ids),
            max_new_tokens=settings.max_new_tokens,
            sampling=sampling,
            penalties=penalties,
            stop=list(settings.stop),
            ignore_eos=settings.ignore_eos,
            records=self.records.dtype,
            record_rate=settings.record_rate,
            logprobs=settings.logprobs,
            grammar=grammar,
            messages=question.chat(),
        )
        # Records depend on tokens: those of the common prefix stay valid.
        self.records.truncate(common_prefix(self.ids, question.ids))
        for start, stop in self.records.held():
            session.held.add(start, stop)  # the verifier need not send these again
        return SessionState(session)


def _check_kinds(ids: Sequence[int] | None, messages: Messages, grammar: Grammar | None) -> None:
    """A `UsageError` for arguments that a program mixes up, where none of them would be used, or
    whose mistake would show deep inside of the turn."""
    if messages and ids is None:
        raise UsageError(
            "`messages` says of which chat `ids` were made, and there are no ids",
            hint="give the chat as the prompt: generate([...])",
        )
    if grammar is not None and not isinstance(grammar, Grammar):
        raise UsageError(
            f"a grammar is a `Grammar`, not a {type(grammar).__name__}",
            hint="make one: Grammar.of_schema({...})",
        )


def _begin_with(transcript: Transcript, written: Sequence[int]) -> None:
    """Let the answer begin with these tokens, which the device has written before; not with those
    behind its end."""
    for token in written:
        if not transcript.finish:
            transcript.extend(token)


def _done(shell: TurnShell) -> Done:
    """The last event of a turn that has ended."""
    transcript = shell.machine.transcript
    return Done(
        reason=shell.reason,
        verified=transcript.verified and bool(transcript.statuses),
        text=transcript.stream.text,
        stats=shell.report(),
    )


@contextmanager
def _named(part: str) -> Iterator[None]:
    """Whatever a part of the device raises is one line that names it."""
    try:
        yield
    except Exception as error:
        raise DeviceError.of(part, error) from error
