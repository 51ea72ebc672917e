"""The public client: one object, one conversation, typed events.

async with EdgeClient(verifier="wss://verifier.example", token=...) as client:
    async for event in client.generate("What is 17 plus 25?"):
        match event:
            case Token(text=text): print(text, end="")
"""

from __future__ import annotations

import contextlib
import dataclasses
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from edge_client.device import Device
from edge_client.drafter.ahead import DraftAhead
from edge_client.events import Done, Event, Notice, Prompt
from edge_client.link.websocket import Endpoint, LinkToVerifier, hello
from edge_client.settings import ClientSettings
from edge_client.text.codec import TextStream
from edge_client.tools.trace import Trace
from edge_client.turn.budget import Spending
from edge_client.turn.controller import Controller
from edge_client.turn.loop import DecodeLoop
from edge_client.turn.reconcile import Turn
from edge_client.turn.sync import RecordSync
from edge_client.turn.uplink import Patience, Uplink
from moa import __version__
from moa.errors import LinkError, MoaError, UsageError
from moa.tree import TreeShape
from moa.wire import ClientSession
from moa.wire.finish import TurnRules
from moa.wire.messages import Close, Sampling, Welcome

Messages = Sequence[Mapping[str, str]]

_TRIED = TreeShape(4, 3, 12)
"""A draft that shows what the drafter's steps take here, over one token and over a few."""


class EdgeClient:
    """Drafts here, verifies there. Settings are those of `ClientSettings`, as keywords or as an object."""

    def __init__(
        self,
        settings: ClientSettings | None = None,
        *,
        device: Device | None = None,
        trace: Trace | None = None,
        **keywords: Any,
    ) -> None:
        self.settings = dataclasses.replace(settings or ClientSettings(), **keywords)
        self._device = device
        self.trace = trace or Trace()
        self.link: LinkToVerifier | None = None
        self.controller: Controller | None = None
        self.sync: RecordSync | None = None
        self.spending = Spending(self.settings.budget)
        self._session: ClientSession | None = None
        self._generation = 0
        self._heard: Welcome | None = None
        self._told: list[str] = []
        self._stack = contextlib.AsyncExitStack()

    # ---- life

    async def __aenter__(self) -> Self:
        settings = self.settings
        if self._device is None:
            self._device = Device.load(settings.bundle, variant=settings.variant, threads=settings.threads)
        self.controller = self._controller()  # tries the drafter: if that fails, nothing has been opened yet
        address = settings.verifier
        if address == "local":
            from edge_client.tools.local import LocalVerifier

            address = await self._stack.enter_async_context(LocalVerifier().running())
        if address and not settings.offline:
            manifest = self.device.bundle.manifest
            endpoint = Endpoint(
                url=address,
                token=settings.token,
                hello=hello(
                    client=f"moa-edge {__version__}",
                    tokenizer=manifest.tokenizer.hash,
                    target=manifest.target.facts.weights_id,
                    drafter=manifest.drafter.weights_id,
                ),
                tls=tls_context(settings.tls_ca) if address.startswith("wss://") else None,
                backoff_seconds=(min(0.1, settings.reconnect_seconds), settings.reconnect_seconds),
            )
            self.link = await self._stack.enter_async_context(LinkToVerifier(endpoint).running())
        self.sync = RecordSync(self.device.drafter.records, settings.sync, settings.budget)
        if self.link is not None:
            self.controller.rtt = self.link.rtt
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None and self.link is not None:
            await self.link.send(Close(self._session.id))
        await self._stack.aclose()

    @property
    def device(self) -> Device:
        """The bundle in use."""
        if self._device is None:
            raise UsageError("the client is not open", hint="use `async with EdgeClient(...)`")
        return self._device

    async def wait_online(self, seconds: float = 10.0) -> None:
        """Until the verifier has welcomed us; an error that says why it has not."""
        if self.link is None:
            raise UsageError("no verifier was given", hint="pass --verifier")
        while not self.link.up:
            if self.link.refused is not None:
                raise self.link.refused
            before = self.link.last_error
            await self.link.wait(seconds)
            if (
                not self.link.up
                and self.link.refused is None
                and (self.link.last_error or before is self.link.last_error)
            ):
                raise self.link.last_error or LinkError(
                    f"no welcome from {self.link.endpoint.url} within {seconds:.0f} s"
                )

    # ---- use

    def encode(self, prompt: str | Messages, *, raw: bool = False) -> list[int]:
        """The ids that a prompt stands for: a plain text is a user's message, unless `raw`."""
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UsageError("the prompt is empty", hint="give it as an argument or on standard input")
            if raw or not self.device.codec.can_chat:
                return self.device.codec.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        return self.device.codec.encode_chat(prompt)

    async def generate(
        self, prompt: str | Messages | None = None, *, ids: Sequence[int] | None = None, raw: bool = False
    ) -> AsyncGenerator[Event, None]:
        """Answer a prompt: a text, chat messages, or ids as they are. Ends with a `Done` event.

        Ids that go on from the conversation so far continue it, and so keep what both ends have cached.
        """
        context = list(ids) if ids is not None else self.encode(prompt or "", raw=raw)
        self._check(context)
        before = self._session
        loop = self._loop(context)
        if self.link is not None and before is not None and before is not loop.turn.session and before.settled:
            await self.link.send(before.close())  # another conversation begins: its slot is of no more use
        yield Prompt(ids=context)
        try:
            async for event in loop.events():
                yield event
                for notice in self._news():
                    yield Notice(message=notice)
        except MoaError as error:
            if not loop.turn.statuses:
                raise
            # What was written is not lost with the error that ended it.
            yield Notice(message=error.line())
        finally:
            self._session = loop.turn.session
            self._generation = loop.uplink.generation if loop.uplink is not None else 0
            await self._leave(loop)
        turn = loop.turn
        turn.stream.flush()
        yield Done(
            reason=loop.reason,
            verified=turn.verified and bool(turn.statuses),
            text=turn.stream.text,
            stats=loop.report(),
        )

    # ---- parts

    def _news(self) -> list[str]:
        """What the verifier remarked in its welcome, once."""
        welcome = self.link.welcome if self.link is not None else None
        if welcome is None or welcome is self._heard:
            return []
        self._heard = welcome
        news = [notice for notice in welcome.notices if notice not in self._told]
        self._told += news
        return news

    def _check(self, context: Sequence[int]) -> None:
        if not context:
            raise UsageError("the prompt is empty", hint="give it as an argument or on standard input")
        most = self._max_context()
        if len(context) >= most:
            raise UsageError(
                f"the prompt has {len(context)} tokens, and the context holds {most}", hint="shorten it, or start anew"
            )

    def _max_context(self) -> int:
        most = self.device.bundle.manifest.target.facts.max_positions
        if self.link is not None and self.link.welcome is not None:
            most = min(most, self.link.welcome.limits.max_context_tokens)
        return most

    def _loop(self, context: list[int]) -> DecodeLoop:
        assert self.sync is not None
        assert self.controller is not None
        settings, codec = self.settings, self.device.codec
        session = self._continue(context) or self._begin(context)
        turn = Turn(
            session=session,
            rules=TurnRules(
                start=len(context),
                max_new_tokens=settings.max_new_tokens,
                max_context=self._max_context(),
                eos_ids=frozenset() if settings.ignore_eos else codec.eos_ids,
                stop=settings.stop,
            ),
            decode=codec.decode,
            stream=TextStream(codec, settings.stop),
            on_reconnect=settings.on_reconnect,
        )
        patience = Patience(
            first_answer=settings.first_answer_seconds,
            floor=settings.answer_floor_seconds,
            settle=settings.settle_seconds,
        )
        uplink = Uplink(self.link, turn, self.sync, patience, self._generation) if self.link is not None else None
        return DecodeLoop(
            turn=turn,
            drafter=self.device.drafter,
            uplink=uplink,
            controller=self.controller,
            sync=self.sync,
            guard=self.device.guard(settings.max_offline_tokens),
            spending=self.spending,
            sampling=settings.sampling,
            trace=self.trace,
            settle_seconds=settings.settle_seconds,
            ahead=settings.ahead,
        )

    def _continue(self, context: list[int]) -> ClientSession | None:
        """The session of the turn before with the new tokens appended, if it is in a state to go on."""
        session = self._session
        if session is None or not session.settled or session.unsettled or len(context) <= len(session.log):
            return None
        if context[: len(session.log)] != session.log:
            return None
        session.append(
            context[len(session.log) :], max_new_tokens=self.settings.max_new_tokens, stop=list(self.settings.stop)
        )
        return session

    def _begin(self, context: list[int]) -> ClientSession:
        settings = self.settings
        assert self.sync is not None
        old, records = self._session, self.device.drafter.records
        session = ClientSession(
            log=list(context),
            max_new_tokens=settings.max_new_tokens,
            sampling=Sampling(**dataclasses.asdict(settings.sampling)),
            stop=list(settings.stop),
            ignore_eos=settings.ignore_eos,
            records=self.sync.dtype,
            record_rate=settings.budget.record_rate,
        )
        if records is not None:
            # Records belong to tokens: those of a shared beginning still hold.
            shared = _common(old.log, context) if old is not None else 0
            records.truncate(shared)
            for start, stop in records.held:
                session.held.add(start, stop)
        return session

    async def _leave(self, loop: DecodeLoop) -> None:
        """Close sessions that nothing will go on from, so that their slots are free."""
        session = loop.turn.session
        if session.unsettled or loop.turn.provisional:
            if self.link is not None and session.settled:
                await self.link.send(session.close())
            loop.turn.settle_unverified()
            self._session = loop.turn.session

    def _controller(self) -> Controller:
        controller = Controller(draft=self.settings.draft)
        controller.calibrate(*self.device.acceptance())
        for books in (Controller(), controller):  # the first run makes room and is slow: it does not count
            draft = DraftAhead.after(self.device.drafter, [0], _TRIED, self.settings.sampling)
            while not draft.step(books):
                pass
        return controller


def tls_context(authority: str) -> ssl.SSLContext:
    """Certificates are always checked; `authority` adds one that the system does not know."""
    try:
        return ssl.create_default_context(cafile=authority or None)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"cannot use {Path(authority)} as a certificate authority: {error}") from None


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
