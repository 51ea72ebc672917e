"""Additive attention masks: 0 where a token may look, a large negative number where it may not. Numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MASKED = -1e9
"""Finite, so that a row in which everything is masked does not become NaN."""


def additive(visible: NDArray[np.bool_]) -> NDArray[np.float32]:
    """The mask of what is `visible`."""
    return np.where(visible, np.float32(0), np.float32(MASKED))
