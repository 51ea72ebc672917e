"""Equal but for rounding: the tolerance follows the dtype and the size of the numbers, not the
machine of the author.

Processors sum in different orders (AVX2, AVX-512, ARM), so the same product differs by some
roundings of its largest terms. A defect is larger by orders of magnitude.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_ROUNDINGS = 256


def assert_rounded(found: Any, wanted: Any) -> None:
    """Every number is within some hundred roundings of the largest; tensors and arrays have the
    same dtype and shape, lists of numbers count as float32."""
    pair = [
        x.detach() if isinstance(x, torch.Tensor) else torch.as_tensor(np.asarray(x))
        for x in (found, wanted)
    ]
    if isinstance(wanted, list):
        pair = [x.float() for x in pair]
    largest = float(pair[1].abs().max()) if pair[1].numel() else 0.0
    torch.testing.assert_close(
        *pair, rtol=0, atol=_ROUNDINGS * torch.finfo(pair[1].dtype).eps * largest
    )
