"""A draft through the device's own code.

A graph may compute the right results and still not fit the client's caches and records.
"""

from __future__ import annotations

import numpy as np

from moa.graph.drafter import DeviceDrafter, run
from moa.sampling import SamplingSettings
from moa.tree import TreeShape

_IDS = range(8, 20)


def try_out(drafter: DeviceDrafter) -> None:
    """Guess without records, draft a tree with records, continue along it, and add records of drafted tokens."""
    sampling, shape = SamplingSettings(), TreeShape(breadth=2, depth=3, nodes=5)
    ids = list(_IDS)
    run(drafter.guess(ids, sampling))
    for known in (len(ids) - 1, len(ids) + 1):
        if drafter.records is not None:
            wire = drafter.records.wire
            rows = np.zeros((known, wire.count, wire.width), np.float32)
            drafter.records.put(0, rows, rows)
        ids += run(drafter.draft(ids, shape, sampling)).tokens[1:3]
    if drafter.records is not None:
        drafter.records.truncate(0)
