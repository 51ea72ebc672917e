"""One thread for a test, and for the processes that it starts: pytest runs as many workers as there are cores.

Threads of a product wait for each other in a loop. Where other processes keep the cores busy, the one that is waited
for does not run, and a test takes ten times as long.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
