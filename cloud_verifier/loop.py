"""The event loop of a verifier process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any

SWITCH_SECONDS = 0.0005
"""A verdict should not wait the default 5 ms for the engine's thread to yield."""


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` to its end, on uvloop where there is one."""
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        import uvloop
    except ImportError:  # uvloop is optional
        asyncio.run(main)
    else:
        uvloop.run(main)
