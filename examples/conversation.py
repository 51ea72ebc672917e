"""A conversation: later questions see earlier answers, and both ends keep their KV caches.

python examples/conversation.py ws://127.0.0.1:8765
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from edge_client import Done, EdgeClient

QUESTIONS = ("My name is Ada.", "What is my name?")


async def main(verifier: str, questions: Sequence[str] = QUESTIONS) -> list[str]:
    """Ask one question after another; returns the answers."""
    answers: list[str] = []
    async with EdgeClient(verifier=verifier) as client:
        conversation = client.conversation()
        for question in questions:
            async for event in conversation.generate(question):
                if isinstance(event, Done):
                    answers.append(event.text)
                    print(f"{question}\n  {event.text}")
            if conversation.unverified:
                # The link was lost: have it checked before the next question builds on it.
                async for event in conversation.recheck():
                    if isinstance(event, Done):
                        answers[-1] = event.text
        await conversation.aclose()
    return answers


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
