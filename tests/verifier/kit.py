"""Helpers of the verifier's tests: tiny models in memory, a verifier on loopback, and a small client."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from websockets.asyncio.client import ClientConnection, connect

from cloud_verifier.app import Verifier
from cloud_verifier.auth import Authenticator
from cloud_verifier.model import Served, serve_model
from cloud_verifier.settings import Settings
from moa.config import DrafterConfig
from moa.model.checkpoint import new_drafter
from moa.model.target import Row, Target
from moa.sampling import SamplingSettings, choose
from moa.wire import ClientSession, Limits, decode_server, encode
from moa.wire.messages import Ack, Activations, Hello, Message, ServerMessage, Welcome
from moa.wire.session import Advanced, Recovered, Refused, SessionEvent
from moa.wire.versions import FEATURES, PROTOCOL_VERSIONS
from tests.tiny import tiny

__all__ = ["Row", "Verifier", "decode_server"]

VOCAB = 128
LIMITS = Limits(max_context_tokens=160, max_prompt_tokens=150, max_chain_tokens=32, max_tree_nodes=32)
SETTINGS = Settings(port=0, slots=8, limits=LIMITS)
PATIENCE = 20.0  # seconds; far more than anything takes, so that only a hang runs into it


@cache
def model(family: str = "llama") -> Any:
    """A tiny random model, fp32."""
    torch.set_num_threads(1)
    return tiny(family)


def served(settings: Settings = SETTINGS, *, family: str = "llama", drafter: bool = True, text: Any = None) -> Served:
    """A tiny target with slots of its own, and a random drafter."""
    target = Target.from_model(model(family), slots=settings.slots, capacity=settings.slot_capacity)
    random_drafter = None
    if drafter:
        torch.manual_seed(0)
        random_drafter = new_drafter(DrafterConfig.for_target(target.facts), target.model).eval()
    return serve_model(target, random_drafter, text=text, drafter_name="d" if drafter else "")


@contextlib.asynccontextmanager
async def verifier(
    settings: Settings = SETTINGS, *, auth: Authenticator | None = None, **how: Any
) -> AsyncIterator[Verifier]:
    """A verifier that listens on loopback."""
    async with Verifier(served(settings, **how), settings, auth).open() as running:
        yield running


class Client:
    """A bare edge: says hello, sends what it is told, sorts what arrives."""

    def __init__(self, connection: ClientConnection, *, ack: bool = True) -> None:
        self.connection = connection
        self.sessions: dict[bytes, ClientSession] = {}
        self.rows: list[Activations] = []
        self.other: list[ServerMessage] = []
        self._ack, self._received = ack, 0

    async def send(self, *messages: Message) -> None:
        """Send messages."""
        for message in messages:
            await self.connection.send(encode(message))

    async def receive(self) -> ServerMessage:
        """The next message that is no activation record; records are kept and acknowledged."""
        async with asyncio.timeout(PATIENCE):
            while True:
                message = decode_server(await self.connection.recv())  # type: ignore[arg-type]
                if not isinstance(message, Activations):
                    return message
                await self.take_rows(message)

    async def take_rows(self, message: Activations) -> None:
        """Keep and acknowledge records."""
        self.rows.append(message)
        self._received += len(message.payload)
        if message.session in self.sessions:
            self.sessions[message.session].receive(message)
        if self._ack:
            await self.send(Ack(self._received))

    async def event(self, session: ClientSession) -> SessionEvent:
        """The next event of `session`."""
        while True:
            message = await self.receive()
            if getattr(message, "session", None) == session.id:
                if (event := session.receive(message)) is not None:  # type: ignore[arg-type]
                    return event
            else:
                self.other.append(message)

    async def start(self, ids: Sequence[int], *, patient: bool = False, **settings: Any) -> ClientSession:
        """Open a session and wait for the answer; a patient client asks again while all slots are busy."""
        session = ClientSession(list(ids), **settings)
        self.sessions[session.id] = session
        while True:
            await self.send(session.open())
            event = await self.event(session)
            if not (patient and isinstance(event, Refused) and event.retry):
                return session
            await asyncio.sleep(min(0.05, event.retry_after))

    async def advance(self, session: ClientSession, tokens: Sequence[int], parents: Sequence[int] = ()) -> Advanced:
        """One verify round, patiently repeated while the server is busy."""
        message = session.verify(tokens, parents)
        while True:
            await self.send(message)
            event = await self.event(session)
            if isinstance(event, Advanced):
                return event
            if isinstance(event, Recovered):
                for request in event.resend[:-1]:
                    await self.send(request)
                    await self.event(session)
                continue
            assert isinstance(event, Refused), event
            assert event.retry, event
            await asyncio.sleep(min(0.05, event.retry_after))


@contextlib.asynccontextmanager
async def client(running: Verifier, *, token: str = "", ack: bool = True, **hello: Any) -> AsyncIterator[Client]:
    """A client that has been welcomed."""
    async with connection(running, token=token) as raw:
        made = Client(raw, ack=ack)
        await made.send(Hello(**({"versions": list(PROTOCOL_VERSIONS), "features": sorted(FEATURES)} | hello)))
        welcome = await made.receive()
        assert isinstance(welcome, Welcome), welcome
        yield made


@contextlib.asynccontextmanager
async def connection(running: Verifier, *, token: str = "", **options: Any) -> AsyncIterator[ClientConnection]:
    """A bare websocket to the verifier."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with connect(
        running.transport.url,
        additional_headers=headers,
        subprotocols=["moa.v2"],  # type: ignore[list-item]
        compression=None,
        proxy=None,
        max_size=2**24,
        close_timeout=1,
        **options,
    ) as raw:
        yield raw


def generated(ids: Sequence[int], count: int, *, family: str = "llama") -> list[int]:
    """The library's own greedy text."""
    return generate(model(family), ids, count)


def generate(model: Any, ids: Sequence[int], count: int, sampling: SamplingSettings | None = None) -> list[int]:
    """What `model.generate` says; of its logits, with sampling, the sampler's choice."""
    told = [] if sampling is None or sampling.plain_greedy else [_Chosen(sampling)]
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([list(ids)]),
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=count,
            do_sample=False,
            logits_processor=LogitsProcessorList(told),
        )
    return [int(token) for token in out[0, len(ids) :]]


class _Chosen(LogitsProcessor):
    """Leaves `generate` only the token that the sampler takes."""

    def __init__(self, sampling: SamplingSettings) -> None:
        self._sampling = sampling

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        """Scores in which one token is certain."""
        log = input_ids[0].tolist()
        only = torch.full_like(scores, -torch.inf)
        only[0, choose(scores[0].numpy(), self._sampling, len(log), log)] = 0.0
        return only


def random_draft(
    rng: random.Random, truth: Sequence[int], pending: int, nodes: int, vocab: int = VOCAB
) -> tuple[list[int], list[int]]:
    """A random tree whose nodes are right about half of the time."""
    tokens, parents, depth = [pending], [-1], [0]
    for node in range(1, nodes):
        parent = rng.randrange(node)
        right = depth[parent] < len(truth) and rng.random() < 0.6
        tokens.append(truth[depth[parent]] if right else rng.randrange(4, vocab))
        parents.append(parent)
        depth.append(depth[parent] + 1)
    return tokens, parents


def prompt(seed: int, length: int, vocab: int = VOCAB) -> list[int]:
    """Random ids that are no special tokens."""
    return [int(t) for t in np.random.default_rng(seed).integers(4, vocab, size=length)]
