"""A conversation: later questions see earlier answers, and both ends keep their KV caches.

python examples/conversation.py ws://127.0.0.1:8765
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from edge_client import Done, EdgeClient

QUESTIONS = ("My name is Ada.", "What is my name?")


def mark(answer: Done) -> str:
    """What is said behind an answer that the verifier has not checked."""
    return "" if answer.verified else "  [written by this device alone, not verified]"


async def main(verifier: str, questions: Sequence[str] = QUESTIONS) -> list[str]:
    """Ask one question after another; returns the answers."""
    answers: list[str] = []
    async with EdgeClient(verifier=verifier) as client:
        conversation = client.conversation()
        for question in questions:
            print(question)
            async for event in conversation.generate(question):
                if isinstance(event, Done):
                    answers.append(event.text)
                    print(f"  {event.text}{mark(event)}", flush=True)
            if conversation.unverified:
                # This ends, whatever happens to the network: after a few seconds where nobody is there.
                print("  (the verifier is asked to check this before the next question)")
                async for event in conversation.recheck():
                    if isinstance(event, Done) and event.verified:
                        answers[-1] = event.text
                        print(f"  {event.text}", flush=True)
        await conversation.aclose()
    return answers


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print("usage: python examples/conversation.py ws://HOST:PORT", file=sys.stderr)
        sys.exit(2)
    asyncio.run(main(sys.argv[1]))
