"""The contract of a decoder: what computes a torch target's layers and its LM head. There are three:
the library's own model, the packed one, and CUDA's graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moa.target.contract import ExpectedLoad
from moa.target.rows import RowBatch


@dataclass(frozen=True, slots=True)
class Forward:
    """What a decoder computes of one batch; tensors have a row for each of its tokens."""

    hidden: Tensor
    """Final states `[tokens, hidden]`, after the last norm."""
    tapped: Tensor | None
    """The inputs of the tapped layers, side by side, `[tokens, taps * hidden]`; None without taps."""
    path: str
    """How it ran, for metrics: a word, and behind a space what was special about its shape."""
    choices: NDArray[np.int64] | None = None
    """The likeliest token after each judged node, -1 elsewhere, `NO_NUMBER` where logits are none;
    None where this decoder leaves that to whoever asks."""


class Decoder(Protocol):
    """Runs batches over a page pool that it was made for."""

    name: str
    """As metrics and `check` show it."""
    samples: bool
    """Whether tokens are sampled where the logits are. On a CPU the host's own walk reads fewer of
    them."""

    def check(self, batch: RowBatch) -> None:
        """A `UsageError` for a batch that it cannot compute; called before anything changes."""

    def run(self, batch: RowBatch) -> Forward:
        """Compute a batch whose tokens have pages: keys and values go to these."""

    def logits(self, hidden: Tensor) -> Tensor:
        """The LM head over final states `[n, hidden]`: float32 `[n, vocab]`, also of weights of lower
        precision, which makes ties rarer."""

    def tap(self, layers: Sequence[int]) -> None:
        """Keep the inputs of these layers, counted from 0, in every forward from now on; before the
        first."""

    @property
    def nbytes(self) -> int:
        """Memory of its work buffers."""

    def prepare(self, load: ExpectedLoad, seconds: float) -> None:
        """`moa.target.contract.Target.prepare`."""

    @property
    def unprepared(self) -> bool:
        """`moa.target.contract.Target.unprepared`."""

    def prepare_more(self) -> None:
        """`moa.target.contract.Target.prepare_more`."""
