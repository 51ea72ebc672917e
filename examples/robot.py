"""A robot that plans with a large model, and goes on with the small one in a tunnel.

It acts on provisional plans only where an action can be undone; others wait until the target has
verified the plan.

    python examples/robot.py ws://127.0.0.1:8765
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from edge_client import Done, EdgeClient, Grammar

ACTIONS = {"move": True, "look": True, "grip": False}
"""What the robot can do, and whether it can be undone."""
PLAN: dict[str, Any] = {
    "type": "object",
    "properties": {"action": {"enum": list(ACTIONS)}, "seconds": {"enum": [1, 2, 5]}},
    "required": ["action", "seconds"],
    "additionalProperties": False,
}


async def step(client: EdgeClient, seen: str, act: Callable[[dict[str, Any]], None]) -> bool:
    """Plan one action and do it; returns whether it was done."""
    done: Done | None = None
    # `generate` of the client begins a conversation, and closes it at the answer's end.
    async for event in client.generate(
        f"You see: {seen}. What do you do?", grammar=Grammar.of_schema(PLAN)
    ):
        if isinstance(event, Done):
            done = event
    if done is None or done.reason != "eos":
        return False
    plan = json.loads(done.text)
    if not done.verified and not ACTIONS[plan["action"]]:
        return False  # cannot be undone: ask again when the link is back
    act(plan)
    return True


async def main(verifier: str) -> None:
    """Three steps."""
    async with EdgeClient(verifier=verifier) as client:
        for seen in ("a door", "a cup", "nothing"):
            print(seen, "->", "done" if await step(client, seen, print) else "waits")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print("usage: python examples/robot.py ws://HOST:PORT", file=sys.stderr)
        sys.exit(2)
    asyncio.run(main(sys.argv[1]))
