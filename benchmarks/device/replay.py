"""Replays drafting on the target's text, with late, coarse or sparse activation records."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.kit.lab import Lab
from benchmarks.kit.progress import steps
from edge_client.device import Device
from edge_client.tools.compare import ask
from moa.errors import MoaError
from moa.graph.cache import RecordBuffer
from moa.graph.drafter import OnnxDrafter
from moa.graph.step import Heads

_RECORD_SECONDS = 30.0


@dataclass(frozen=True)
class TargetAnswer:
    """A prompt, what the target says to it, and the activation records of all of it but the last
    token."""

    prompt: list[int]
    answer: list[int]
    keys: NDArray[np.float32]
    values: NDArray[np.float32]

    @property
    def log(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt + self.answer


async def target_answers(lab: Lab, tokens: int) -> list[TargetAnswer]:
    """Let the target answer, and wait for its records in the best precision on the wire."""
    heads = record_heads(lab.device)
    answered = []
    for prompt in steps(lab.prompts, "answers answered"):
        buffer = RecordBuffer(heads)
        own = with_drafter(lab.device, functools.partial(fresh_drafter, lab.device, buffer))
        async with (
            lab.client(device=own, sync="fp16", draft="server", max_new_tokens=tokens) as client,
            client.conversation() as conversation,
        ):
            answer = await ask(conversation, prompt)
            rows = len(prompt) + len(answer.ids) - 1
            ids = conversation.ids
            async with asyncio.timeout(_RECORD_SECONDS):
                while conversation.records.misses(
                    rows
                ):  # the stream is throttled on purpose: another turn receives more
                    ids = [*ids, ids[-1]]
                    ids += (await ask(conversation, ids, max_new_tokens=1)).ids
        keys, values = rows_of(buffer, 0, rows)
        answered.append(TargetAnswer(list(prompt), answer.ids, keys.copy(), values.copy()))
    return answered


def rows_of(
    buffer: RecordBuffer, start: int, stop: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Keys and values of these positions."""
    feeds = buffer.feeds()
    keys, values = (
        feeds[name][0, :, start:stop].transpose(1, 0, 2) for name in ("record_k", "record_v")
    )
    return keys, values


def fresh_drafter(device: Device, buffer: RecordBuffer | None = None) -> OnnxDrafter:
    """Another drafter over the same graph, with records of its own."""
    drafter = device.new_drafter()
    if buffer is not None:
        drafter.records = buffer
    return drafter


def with_drafter(device: Device, new_drafter: Callable[[], OnnxDrafter]) -> Device:
    """The same device with other drafters."""
    return dataclasses.replace(device, new_drafter=new_drafter)


def record_heads(device: Device) -> Heads:
    """The shape of this device's records."""
    records = device.new_drafter().records
    if records is None:
        raise MoaError("this bundle's drafter takes no records")
    return records.heads
