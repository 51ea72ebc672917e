"""An answer that matches a JSON schema, with a verifier and without one.

python examples/schema.py ws://127.0.0.1:8765
python examples/schema.py                            # this device alone
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from edge_client import Done, EdgeClient, Grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "amount": {"type": "integer", "minimum": 0, "maximum": 100},
    },
    "required": ["colour", "amount"],
    "additionalProperties": False,
}


async def main(verifier: str = "", prompt: str = "Pick a colour and an amount.") -> dict[str, Any]:
    """Ask for an object; it parses whatever happens to the link."""
    async with EdgeClient(verifier=verifier, offline=not verifier) as client:
        async for event in client.generate(prompt, grammar=Grammar.of_schema(SCHEMA)):
            if isinstance(event, Done):
                found: dict[str, Any] = json.loads(event.text)
                print(found, "verified" if event.verified else "by this device alone")
                return found
    raise RuntimeError("no answer")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
