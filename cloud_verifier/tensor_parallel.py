"""One target over several processes: each holds a part of every layer, and of the heads' keys and values.

The first process is the verifier. It says every forward, and everything that happens to the slots, to the others; they
do the same, and the library's plan for the model sums their parts inside the forward. All decisions, the head's logits,
sessions and sockets are the first one's alone. Records need all heads, so to read keys and values is an order too: each
process sends its own.

Orders are msgpack in tensors, so nothing that a process receives is unpickled.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from moa.errors import MoaError
from moa.model.pages import PagePool
from moa.model.rows import Row
from moa.model.target import Step, Target

_FORWARD, _STOP = "forward", "stop"


class SharedPool(PagePool):
    """The first process's pool: what happens to it happens to the others' pools."""

    _busy = False
    """Whether an order that was said is being carried out: what it does in turn is not said."""

    def acquire(self) -> int:
        """Take an empty slot."""
        with self._said("acquire"):
            return super().acquire()

    def share(self, source: int, tokens: int) -> int:
        """Take a slot that begins like `source`."""
        with self._said("share", source, tokens):
            return super().share(source, tokens)

    def release(self, slot: int) -> None:
        """Release a slot."""
        with self._said("release", slot):
            super().release(slot)

    def commit(self, slot: int, nodes: Sequence[int]) -> None:
        """Append scratch tokens to the prefix."""
        with self._said("commit", slot, list(nodes)):
            super().commit(slot, nodes)

    def read(self, slot: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of all heads, a copy."""
        with self._said("read", slot, start, stop):
            return _gathered(*super().read(slot, start, stop))

    @contextlib.contextmanager
    def _said(self, name: str, *what: Any) -> Iterator[None]:
        if self._busy:
            yield
            return
        _say(name, *what)
        self._busy = True
        try:
            yield
        finally:
            self._busy = False


class SharedTarget(Target):
    """The first process's target."""

    Pool = SharedPool

    def forward(self, rows: Sequence[Row]) -> Step:
        """Run the rows in all processes."""
        _say(_FORWARD, [[row.slot, [int(t) for t in row.tokens], [int(p) for p in row.parents]] for row in rows])
        return super().forward(rows)


def follow(load: Callable[[], Target]) -> int:
    """Be one of the other processes, with its part of the target, until the first one stops."""
    # The first process drains when it is told to stop, and needs the others for that.
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, signal.SIG_IGN)
    target = load()
    pool = target.pool
    while (order := _heard())[0] != _STOP:
        name, *what = order
        try:
            if name == _FORWARD:
                target.forward([Row(slot, tokens, parents, judged="none") for slot, tokens, parents in what[0]])
            elif name == "read":
                _gathered(*pool.read(*what))
            else:
                getattr(pool, name)(*what)
        except MoaError:
            pass  # the first process meets the same one, and answers for it
    dist.destroy_process_group()
    return 0


def dismiss() -> None:
    """Let the other processes end."""
    if dist.is_initialized():
        _say(_STOP)
        dist.destroy_process_group()


def enter() -> bool:
    """Meet the other processes; whether this is the one that serves."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    return dist.get_rank() == 0


def _say(*order: Any) -> None:
    data = torch.frombuffer(bytearray(msgspec.msgpack.encode(order)), dtype=torch.uint8)
    dist.broadcast(torch.tensor([len(data)]), 0)
    dist.broadcast(data, 0)


def _heard() -> list[Any]:
    length = torch.zeros(1, dtype=torch.int64)
    dist.broadcast(length, 0)
    data = torch.zeros(int(length), dtype=torch.uint8)
    dist.broadcast(data, 0)
    found: list[Any] = msgspec.msgpack.decode(data.numpy().tobytes())
    return found


def _gathered(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    mine = torch.stack([keys, values]).contiguous()
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    whole = torch.cat(parts, dim=3)
    return whole[0], whole[1]
