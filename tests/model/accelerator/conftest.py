"""Triton's kernels run in its interpreter here; it must know before they are imported."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
