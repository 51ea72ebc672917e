"""The public client: one device, one connection, many conversations, typed events.

async with EdgeClient(verifier="wss://verifier.example", token=...) as client:
    async for event in client.generate("What is 17 plus 25?"):
        match event:
            case Token(text=text): print(text, end="")
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any, Self, Unpack

from edge_client.conversation import Conversation
from edge_client.device import Device
from edge_client.events import Done, Event, Link, Reason
from edge_client.link.dialling import Dialling
from edge_client.link.retry import Retry
from edge_client.link.websocket import Endpoint, VerifierLink, tls_context
from edge_client.settings import ClientSettings, SettingChanges, TurnChanges, changed
from edge_client.shared import Shared
from edge_client.text.chat import Messages, prompt_ids
from edge_client.turn.controller import Controller
from edge_client.turn.worker import time_steps
from moa import __version__
from moa.errors import LinkError, UsageError
from moa.grammar.spec import Grammar
from moa.manifest import Manifest
from moa.wire import FEATURES, PROTOCOL_VERSIONS
from moa.wire.messages import Hello


class EdgeClient:
    """Drafts here, verifies there. Settings are those of `ClientSettings`, as keywords or as an
    object."""

    def __init__(
        self,
        settings: ClientSettings | None = None,
        *,
        device: Device | None = None,
        **changes: Unpack[SettingChanges],
    ) -> None:
        """Make a client, which opens with `async with`. `changes` are settings that replace those
        of `settings`; `device` is a bundle that was loaded before."""
        self._settings = changed(settings or ClientSettings(), changes)
        self._device = device
        self._shared: Shared | None = None
        """What conversations share; None until the client is open."""
        self._stack = contextlib.AsyncExitStack()
        """Closes the connection, and a verifier on this machine, at the end."""
        self._conversations: set[Conversation] = set()
        """Those that are open."""

    # ---- life

    async def __aenter__(self) -> Self:
        """Load the drafter and measure its steps, start a verifier on this machine if that is asked
        for, and begin to connect. Nothing waits for the connection: see `wait_online`."""
        settings = self._settings
        if settings.verifier == "local" and not settings.upstream:
            from edge_client.link.local import check_bundle

            check_bundle(settings.bundle)
        controller = Controller()
        device = self._device or Device.of(settings)
        self._device = device
        controller.calibrate(*device.acceptance())
        # Before anything is started: if the drafter fails, nothing needs to be closed.
        time_steps(device.new_drafter(), controller)
        shared = Shared(device, settings, controller)
        address = settings.verifier
        if address == "local":
            address = await self._start_verifier(device)
        if address and not settings.offline:
            shared.link = await self._stack.enter_async_context(
                _link_to(address, settings, device).running()
            )
            controller.rtt = shared.link.rtt  # one estimate, which both of them improve
        self._shared = shared
        return self

    async def _start_verifier(self, device: Device) -> str:
        """Start a verifier on this machine, which runs until the client is closed; returns its
        address."""
        from edge_client.link.local import local_verifier

        flags, needs = local_flags(self._settings, device)
        verifier = local_verifier(*flags, needs=needs, upstream=self._settings.upstream_name)
        return await self._stack.enter_async_context(verifier)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End all conversations, then the connection, and the verifier on this machine if there is
        one."""
        if self._shared is not None:
            self._shared.is_open = False
        for conversation in list(self._conversations):
            await conversation.aclose()
        await self._stack.aclose()

    @property
    def device(self) -> Device:
        """The bundle in use."""
        if self._device is None:
            raise UsageError("the client is not open", hint="use `async with EdgeClient(...)`")
        return self._device

    @property
    def settings(self) -> ClientSettings:
        """May be replaced between two turns, except for verifier and bundle."""
        return self._settings

    @settings.setter
    def settings(self, settings: ClientSettings) -> None:
        self._settings = settings
        if self._shared is not None:
            self._shared.settings = settings

    @property
    def shared(self) -> Shared:
        """The objects that all conversations share."""
        if self._shared is None:
            raise UsageError("the client is not open", hint="use `async with EdgeClient(...)`")
        return self._shared

    @property
    def link(self) -> VerifierLink | None:
        """The connection to the verifier, if there is to be one."""
        return self.shared.link

    async def wait_online(self, seconds: float | None = None) -> None:
        """Wait for the verifier's welcome, and, where an engine stands behind it, for a word of that;
        `connect_seconds` by default. Raises the reason if there is none."""
        link = self.link
        if link is None:
            raise UsageError("no verifier was given", hint="pass --verifier")
        deadline = perf_counter() + (self.settings.connect_seconds if seconds is None else seconds)
        await link.wait_up(deadline - perf_counter())
        await link.wait_answered(deadline - perf_counter())
        if link.away:
            raise LinkError(link.away)

    # ---- use

    def conversation(self) -> Conversation:
        """A conversation with several turns; close it at its end."""
        conversation = Conversation(self.shared, closed=self._conversations.discard)
        self._conversations.add(conversation)
        return conversation

    async def generate(
        self,
        prompt: str | Messages | None = None,
        *,
        ids: Sequence[int] | None = None,
        messages: Messages = (),
        raw: bool = False,
        prediction: str | Sequence[int] = (),
        grammar: Grammar | None = None,
        **changes: Unpack[TurnChanges],
    ) -> AsyncGenerator[Event, None]:
        """Answer a prompt in a new conversation; many can run at once. See `Conversation.generate`."""
        async with self.conversation() as conversation:
            turn = conversation.generate(
                prompt,
                ids=ids,
                messages=messages,
                raw=raw,
                prediction=prediction,
                grammar=grammar,
                **changes,
            )
            async with contextlib.aclosing(turn) as events:
                async for event in events:
                    yield event

    def encode(self, prompt: str | Messages, *, raw: bool = False) -> list[int]:
        """The ids of a prompt in a new conversation."""
        return prompt_ids(self.device.codec, prompt, raw=raw)[0]


def local_flags(settings: ClientSettings, device: Device) -> tuple[list[str], tuple[str, ...]]:
    """Returns the flags for a verifier on this machine, and the names of the packages that it
    needs: torch for a target of its own, an HTTP client for one that an upstream engine runs."""
    if not settings.upstream:
        return [], ("torch", "transformers")
    flags = [f"--upstream={settings.upstream}", f"--upstream-api={settings.upstream_api}"]
    if settings.upstream_model:
        flags.append(f"--upstream-model={settings.upstream_model}")
    if settings.upstream_key_file:
        flags.append(f"--upstream-key-file={settings.upstream_key_file}")
    if settings.upstream_budget:
        flags += [
            f"--upstream-price-in={settings.upstream_price_in}",
            f"--upstream-price-out={settings.upstream_price_out}",
            f"--upstream-budget={settings.upstream_budget}",
        ]
    return [*flags, f"--bundle={device.bundle.folder}"], ("httpx2", "prometheus_client")


def hello_of(manifest: Manifest) -> Hello:
    """Returns the hello by which a device with this bundle introduces itself to a verifier.

    A small model that reads tokens alone drafts for every target with its tokenizer, so it names no
    target. Text that began with one target still goes on with no other: the verifier's welcome says
    what it computes (`Welcome.computes`).
    """
    drafter = manifest.drafter
    return Hello(
        versions=list(PROTOCOL_VERSIONS),
        features=sorted(FEATURES if manifest.records is not None else FEATURES - {"records"}),
        client=f"moa-edge {__version__}",
        tokenizer=manifest.tokenizer.hash,
        target=manifest.target.facts.weights_id if drafter.reads_target else "",
        drafter=drafter.weights_id,
    )


def _link_to(address: str, settings: ClientSettings, device: Device) -> VerifierLink:
    """Returns a link to the verifier at this address, which does not connect yet."""
    endpoint = Endpoint(
        url=address,
        token=settings.token,
        hello=hello_of(device.bundle.manifest),
        tls=tls_context(settings.tls_ca) if address.startswith("wss://") else None,
        connect_seconds=settings.connect_seconds,
        keepalive_seconds=settings.keepalive_seconds,
        upstream=settings.upstream_name,
    )
    longest_pause = settings.reconnect_seconds
    first_pause = min(0.25, longest_pause)
    return VerifierLink(endpoint, Dialling(Retry(first_pause, longest_pause)))


@dataclass(frozen=True, slots=True)
class Answer:
    """What `ask` returns. As a `str` it is its text, marked where not all of it is verified."""

    text: str
    """As it is; `str(answer)` has the mark."""
    verified: bool
    """Whether the target has verified all of the text."""
    reason: Reason
    """Why the answer ended."""
    stats: dict[str, Any]
    """Its figures: tokens, forwards, bytes, times."""
    link: Link | None = None
    """The last news of the link: its state, and in `detail` why; None if there was none."""

    def __str__(self) -> str:
        """For people: text that the device wrote alone never goes unmarked."""
        if self.verified:
            return self.text
        why = f": {self.link.detail}" if self.link is not None and self.link.detail else ""
        return f"{self.text}\n[not all of this was verified by the target{why}]"


def ask(
    prompt: str | Messages,
    settings: ClientSettings | None = None,
    *,
    raw: bool = False,
    **changes: Unpack[SettingChanges],
) -> Answer:
    """Answer a prompt: `print(ask("What is 17 plus 25?", verifier="local"))`. Inside an event loop
    use `EdgeClient`."""
    client = EdgeClient(settings, **changes)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_ask(client, prompt, raw=raw))
    raise UsageError(
        "ask waits for the answer, which an event loop must not",
        hint="use `async with EdgeClient(...)`",
    )


async def _ask(client: EdgeClient, prompt: str | Messages, *, raw: bool) -> Answer:
    """Answer one prompt with a client that is opened for it."""
    done: Done | None = None
    link: Link | None = None
    async with client:
        async for event in client.generate(prompt, raw=raw):
            if isinstance(event, Link):
                link = event
            elif isinstance(event, Done):
                done = event
    assert done is not None  # the last event of every answer
    return Answer(done.text, done.verified, done.reason, done.stats, link)
