"""What the verifier's benchmarks share: a random target in a folder, a verifier in a process of its own, and a light
client."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from moa.errors import MoaError
from moa.wire import FEATURES, PROTOCOL_VERSIONS, SUBPROTOCOL, ClientSession, decode_server, encode
from moa.wire.events import Advanced, Ready, Recovered, Refused
from moa.wire.messages import Ack, Activations, Goaway, Hello, Message, ServerMessage, Welcome
from moa.wire.versions import SESSION_HEADER

_RECORD_SECONDS = 30.0
_MAKE = """
import sys, torch
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
from moa.config import DrafterConfig
from moa.model.checkpoint import new_drafter, save_drafter
from moa.model.target import Target
from tests.tiny import tiny_tokenizer
folder, hidden, layers, vocab = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)
heads = max(2, hidden // 64)
wide = int(2.75 * hidden) // 32 * 32
model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, hidden_size=hidden, intermediate_size=wide,
    num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), head_dim=64,
    max_position_embeddings=16384, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False))
model.save_pretrained(folder + "/target")
tiny_tokenizer(vocab).save_pretrained(folder + "/target")
target = Target.load(folder + "/target")
save_drafter(new_drafter(DrafterConfig.for_target(target.facts), target.model), Path(folder) / "drafter")
"""


@dataclass(frozen=True)
class Pair:
    """Folders of a target and its drafter; empty ones stand for the embedded pair."""

    target: str = ""
    drafter: str = ""

    @property
    def flags(self) -> list[str]:
        """Flags of `cloud-verifier`."""
        return (["--target", self.target] if self.target else []) + (
            ["--drafter", self.drafter] if self.drafter else []
        )


@contextlib.contextmanager
def random_pair(hidden: int, layers: int, vocab: int = 4096) -> Iterator[Pair]:
    """A random Llama-shaped target and drafter, gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", _MAKE, folder, str(hidden), str(layers), str(vocab)], check=True)
        yield Pair(f"{folder}/target", f"{folder}/drafter")


class ServerProcess:
    """A `cloud-verifier serve` in a process of its own."""

    def __init__(self, pair: Pair, *flags: str, threads: int = 0) -> None:
        command = [sys.executable, "-c", "from cloud_verifier.cli import main; main()", "serve", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--log-level", "error", *pair.flags, *flags],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {}),
        )
        line = self.process.stdout.readline() if self.process.stdout is not None else ""
        if not line.startswith("listening on "):
            raise MoaError("the verifier did not start", hint="what it said is above")
        self.url = line.split()[-1]
        self._ps = psutil.Process(self.process.pid)

    def memory(self) -> int:
        """Resident bytes."""
        return int(self._ps.memory_info().rss)

    def descriptors(self) -> int:
        """Open file descriptors."""
        return int(self._ps.num_fds())

    def terminate(self) -> None:
        """SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End it, and wait."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def server(pair: Pair, *flags: str, threads: int = 0) -> Iterator[ServerProcess]:
    """A verifier for as long as the context lasts."""
    process = ServerProcess(pair, *flags, threads=threads)
    try:
        yield process
    finally:
        process.close()


@dataclass
class Client:
    """One connection: sends, receives, acknowledges records, counts bytes."""

    connection: ClientConnection
    welcome: Welcome
    received: int = 0
    rows: list[tuple[float, int, int]] = field(default_factory=list)
    """Arrival time, start and count of every run of records."""
    record_bytes: int = 0
    token_bytes: int = 0
    goaway: bool = False

    async def send(self, *messages: Message) -> None:
        """Send messages."""
        for message in messages:
            frame = encode(message)
            self.token_bytes += len(frame)
            await self.connection.send(frame)

    async def receive(self) -> ServerMessage:
        """The next message that is neither a record nor a goaway."""
        while True:
            if (message := await self.take(await self.connection.recv(decode=False))) is not None:
                return message

    async def take(self, frame: bytes) -> ServerMessage | None:
        """Take in a frame; None when it was a record or a goaway."""
        message = decode_server(frame)
        if isinstance(message, Activations):
            self.rows.append((time.perf_counter(), message.start, message.rows))
            self.record_bytes += len(frame)
            self.received += len(message.payload)
            await self.connection.send(encode(Ack(self.received)))
            return None
        if isinstance(message, Goaway):
            self.goaway = True
            return None
        self.token_bytes += len(frame)
        return message

    async def event(self, session: ClientSession) -> Ready | Advanced | Refused | Recovered:
        """The next event of the one session of this connection."""
        while True:
            found = session.receive(await self.receive())
            if isinstance(found, Ready | Advanced | Refused | Recovered):
                return found

    async def start(self, session: ClientSession) -> None:
        """Open, patiently."""
        message = session.open()
        while True:
            await self.send(message)
            found = await self.event(session)
            if isinstance(found, Ready):
                return
            if isinstance(found, Refused):
                await asyncio.sleep(found.retry_after)

    async def advance(self, session: ClientSession, tokens: Sequence[int], parents: Sequence[int] = ()) -> Advanced:
        """One round, patiently."""
        message = session.verify(tokens, parents)
        while True:
            await self.send(message)
            found = await self.event(session)
            if isinstance(found, Advanced):
                return found
            if isinstance(found, Refused):
                await asyncio.sleep(found.retry_after)

    async def stream(self, session: ClientSession, *, speculate: bool = True) -> None:
        """One round that the server decodes, to the end of the turn."""
        await self.send(session.stream(speculate=speculate))
        while session.busy:
            await self.event(session)


@contextlib.asynccontextmanager
async def client(url: str, features: Iterable[str] = FEATURES, *, key: str = "") -> AsyncIterator[Client]:
    """A welcomed client."""
    async with connect(
        url,
        proxy=None,
        compression=None,
        subprotocols=[Subprotocol(SUBPROTOCOL)],
        max_size=2**24,
        ping_interval=None,
        additional_headers={SESSION_HEADER: key} if key else {},
    ) as raw:
        await raw.send(encode(Hello(list(PROTOCOL_VERSIONS), sorted(features))))
        welcome = decode_server(await raw.recv(decode=False))
        if not isinstance(welcome, Welcome):
            raise MoaError(f"not welcome: {welcome}")
        with contextlib.suppress(ConnectionClosed):
            yield Client(raw, welcome)


def prompt(seed: int, length: int, vocab: int) -> list[int]:
    """Random ids that are no special tokens."""
    rng = random.Random(seed)
    return [rng.randrange(4, vocab) for _ in range(length)]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99."""
    ordered = sorted(values)
    return {f"p{q}": round(ordered[min(len(ordered) - 1, len(ordered) * q // 100)], 3) for q in (50, 90, 99)}


async def all_rows(edge: Client, count: int) -> None:
    """Take records in until `count` rows have arrived."""
    async with asyncio.timeout(_RECORD_SECONDS):
        while sum(n for _, _, n in edge.rows) < count:
            await edge.take(await edge.connection.recv(decode=False))


def folder_of(path: Path | None) -> str:
    """A path as a flag's value."""
    return "" if path is None else str(path)
