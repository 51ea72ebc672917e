"""One question, one answer: the shortest program.

cloud-verifier serve                                # in another terminal, or on another machine
python examples/ask.py ws://127.0.0.1:8765
"""

from __future__ import annotations

import sys

from edge_client import Answer, ask


def main(verifier: str, prompt: str = "What is 17 plus 25?") -> Answer:
    """Ask, and say whether the target has verified all of the text."""
    answer = ask(prompt, verifier=verifier)
    print(answer.text)
    print("verified" if answer.verified else "some of it was written by this device alone")
    return answer


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print("usage: python examples/ask.py ws://HOST:PORT [QUESTION]", file=sys.stderr)
        sys.exit(2)
    main(*sys.argv[1:3])
