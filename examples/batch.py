"""Many prompts at once over one connection, eight at a time.

python examples/batch.py ws://127.0.0.1:8765 < prompts.txt
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from edge_client import Done, EdgeClient

AT_ONCE = 8
"""As many as the verifier has slots for us: more would wait there."""


async def main(verifier: str, prompts: Sequence[str]) -> list[str]:
    """The answers, in the order of the prompts."""
    room = asyncio.Semaphore(AT_ONCE)
    async with EdgeClient(verifier=verifier) as client:

        async def answer(prompt: str) -> str:
            async with room:
                async for event in client.generate(prompt):
                    if isinstance(event, Done):
                        return event.text
            raise RuntimeError("no answer")

        return await asyncio.gather(*map(answer, prompts))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print("usage: python examples/batch.py ws://HOST:PORT < prompts.txt", file=sys.stderr)
        sys.exit(2)
    prompts = sys.stdin.read().splitlines()
    if not prompts:
        print("no prompts: give one a line, on standard input", file=sys.stderr)
        sys.exit(2)
    for line in asyncio.run(main(sys.argv[1], prompts)):
        print(line)
