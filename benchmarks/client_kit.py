"""What the client's benchmarks share: a verifier to talk to, prompts, and what the target says with its records."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.prompts import skill_prompts
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.drafter.cache import RecordBuffer
from edge_client.drafter.graph import Heads
from edge_client.drafter.onnx import DeviceDrafter, OnnxDrafter, run
from edge_client.link.local import LocalVerifier
from edge_client.settings import ClientSettings
from edge_client.tools.compare import ask
from edge_client.tools.emulated_network import PROFILES, Profile
from moa.demo.skills import Example
from moa.errors import MoaError, UsageError
from moa.sampling import SamplingSettings
from moa.tree import TreeShape

LINKS = ("wifi", "5g", "4g", "4g-weak", "bursty")
"""The paper's; the emulator has more."""
_RECORD_SECONDS = 30.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Which pair, which verifier, how many prompts."""
    parser.add_argument("--verifier", default="local", metavar="ADDRESS", help="default: one is started here")
    parser.add_argument("--bundle", default="", metavar="DIR", help="default: the embedded one")
    parser.add_argument("--target", default="", metavar="DIR", help="for a verifier started here")
    parser.add_argument("--drafter", default="", metavar="DIR", help="for a verifier started here")
    parser.add_argument("--per-skill", type=int, default=1, metavar="N", help="held-out prompts of every skill")
    parser.add_argument("--prompts", type=int, default=0, metavar="N", help="of these, N of all kinds (default: all)")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="tokens of an answer at most")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result with its provenance")


def add_links(parser: argparse.ArgumentParser, default: Iterable[str] = LINKS) -> None:
    """Which emulated links."""
    parser.add_argument(
        "--links", type=_link_names, default=list(default), metavar="NAME,...", help=f"default: {','.join(default)}"
    )


def _link_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PROFILES]:
        raise UsageError(f"unknown link {unknown[0]!r}", hint=f"known: {', '.join(PROFILES)}")
    return names


def rotated(profile: Profile, share: float) -> Profile:
    """The same profile, begun elsewhere in its cycle: a run shorter than the cycle must not always see its start."""
    total = sum(seconds for seconds, _ in profile.phases)
    if not total:
        return profile
    ahead, phases = share % 1 * total, list(profile.phases)
    while ahead >= phases[0][0]:
        ahead -= phases[0][0]
        phases = [*phases[1:], phases[0]]
    (first, condition), *others = phases
    return Profile(profile.name, ((first - ahead, condition), *others, *([(ahead, condition)] if ahead else [])))


@contextlib.asynccontextmanager
async def address(options: argparse.Namespace, *, slots: int = 16) -> AsyncIterator[str]:
    """The verifier's address, for as long as the body runs; one started here holds so many sessions at once."""
    if options.verifier != "local":
        yield options.verifier
        return
    flags = [f"--{name}={getattr(options, name)}" for name in ("target", "drafter") if getattr(options, name)]
    async with LocalVerifier([*flags, f"--slots={slots}"]).running() as url:
        yield url


def load(options: argparse.Namespace) -> tuple[Device, list[Example], list[list[int]]]:
    """The device, the exercises, and their ids."""
    device = Device.load(options.bundle)
    examples = skill_prompts(options.per_skill)
    if options.prompts:
        wanted = min(options.prompts, len(examples))
        examples = [examples[n * len(examples) // wanted] for n in range(wanted)]
    encoder = EdgeClient(ClientSettings(), device=device)
    return device, examples, [encoder.encode(example.prompt, raw=not device.codec.can_chat) for example in examples]


@dataclass(frozen=True)
class Heard:
    """A prompt, what the target says to it, and the activation records of all of it but the last token."""

    prompt: list[int]
    answer: list[int]
    keys: NDArray[np.float32]
    values: NDArray[np.float32]

    @property
    def log(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt + self.answer


async def hear(url: str, device: Device, prompts: Sequence[Sequence[int]], tokens: int) -> list[Heard]:
    """Let the target answer, and wait for its records in the best precision on the wire."""
    heads = record_heads(device)
    heard = []
    for prompt in prompts:
        buffer = RecordBuffer(heads)
        own = with_drafter(device, functools.partial(fresh_drafter, device, buffer))
        settings = ClientSettings(verifier=url, sync="fp16", draft="server", max_new_tokens=tokens)
        async with EdgeClient(settings, device=own) as client, client.conversation() as conversation:
            await client.wait_online()
            answer = await ask(conversation, prompt)
            rows, ids = len(prompt) + len(answer.ids) - 1, conversation.ids
            async with asyncio.timeout(_RECORD_SECONDS):
                while conversation.records.misses(rows):  # the stream is slow on purpose: another turn takes more in
                    ids = [*ids, ids[-1]]
                    ids += (await ask(conversation, ids, max_new_tokens=1)).ids
        feeds = buffer.feeds()
        keys, values = (feeds[name][0, :, :rows].transpose(1, 0, 2).copy() for name in ("record_k", "record_v"))
        heard.append(Heard(list(prompt), answer.ids, keys, values))
    return heard


def accepted_per_round(
    device: Device, heard: Heard, buffer: RecordBuffer, shape: TreeShape, *, lag: int | None
) -> list[int]:
    """Accepted drafts of every round of a replay, when the newest `lag` records of the log have not arrived.

    `buffer` holds what may arrive at all; None is a lag without end: only the prompt's records are there.
    """
    counts = []
    base = len(heard.prompt) - 1
    drafter = fresh_drafter(device, RecordBuffer(buffer.heads))
    assert drafter.records is not None
    while base + 1 < len(heard.log):
        limit = len(heard.prompt) if lag is None else max(0, base - lag)
        drafter.records.truncate(0)
        feeds = buffer.feeds()
        for start, stop in buffer.held:
            stop = min(stop, limit)
            if start < stop:
                rows = (feeds[name][0, :, start:stop].transpose(1, 0, 2) for name in ("record_k", "record_v"))
                drafter.records.put(start, *rows)
        tree = run(drafter.draft(heard.log[: base + 1], shape, SamplingSettings()))
        node, accepted = 0, 0
        children = {
            (parent, token): n for n, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)) if n
        }
        while base + 1 + accepted < len(heard.log) and (node, heard.log[base + 1 + accepted]) in children:
            node = children[node, heard.log[base + 1 + accepted]]
            accepted += 1
        counts.append(accepted)
        base += accepted + 1
    return counts


def fresh_drafter(device: Device, buffer: RecordBuffer | None = None) -> OnnxDrafter:
    """Another drafter over the same graph, with records of its own."""
    drafter = device.new_drafter()
    assert isinstance(drafter, OnnxDrafter)
    if buffer is not None:
        drafter.records = buffer
    return drafter


def with_drafter(device: Device, new_drafter: Callable[[], DeviceDrafter]) -> Device:
    """The same device with other drafters."""
    return dataclasses.replace(device, new_drafter=new_drafter)


def record_heads(device: Device) -> Heads:
    """The shape of this device's records."""
    records = device.new_drafter().records
    if records is None:
        raise MoaError("this bundle's drafter takes no records")
    return records.heads
