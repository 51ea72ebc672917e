"""Text as it comes: verified text plain, provisional text in brackets, corrections as they happen.

python examples/stream.py ws://127.0.0.1:8765
"""

from __future__ import annotations

import asyncio
import sys

from edge_client import Confirm, Done, EdgeClient, Link, Retract, Token


async def main(verifier: str, prompt: str = "Tell me a short story with Ada.") -> str:
    """Print events; returns the final text."""
    text = ""
    async with EdgeClient(verifier=verifier) as client:
        async for event in client.generate(prompt):
            match event:
                case Token(text=piece, status="verified"):
                    text += piece
                    print(piece, end="", flush=True)
                case Token(text=piece):
                    text += piece
                    print(f"[{piece}]", end="", flush=True)
                case Retract(characters=kept):
                    text = text[:kept]
                    print(f"\n-- the target disagrees; what stays: --\n{text}", end="")
                case Confirm():
                    pass  # text that is on the screen already is now verified
                case Link(state=state):
                    print(f"\n-- link: {state} --")
                case Done(text=final, verified=verified):
                    print(f"\n-- {'verified' if verified else 'not all verified'} --")
                    return final
    return text


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print("usage: python examples/stream.py ws://HOST:PORT", file=sys.stderr)
        sys.exit(2)
    asyncio.run(main(sys.argv[1]))
