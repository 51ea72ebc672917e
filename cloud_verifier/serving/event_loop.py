"""The event loop of a verifier process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

from moa.process.gc_freeze import leave_out_what_is_loaded

SWITCH_SECONDS = 0.0005
"""A verdict should not wait the default 5 ms for the engine's thread to yield."""


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` to its end, on uvloop where there is one. Everything that it needs must have been loaded."""
    sys.setswitchinterval(SWITCH_SECONDS)
    leave_out_what_is_loaded()
    try:
        import uvloop
    except ImportError:  # uvloop is optional
        asyncio.run(main)
    else:
        uvloop.run(main)
