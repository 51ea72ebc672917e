"""An endpoint that you have as the target: what the device writes while it is away is marked.

pip install -e ".[upstream]" -c constraints.txt     # nothing is installed beside the engine
python examples/upstream.py http://gpu:8000/v1 "What is 17 plus 25?"

The API is found out by `upstream_api="auto"`; docs/upstream.md says what "verified" means with each.
A key comes from the variable MOA_UPSTREAM_KEY.
"""

from __future__ import annotations

import sys

from edge_client import Answer, ask


def main(
    engine: str, prompt: str = "What is 17 plus 25?", *, model: str = "", api: str = "auto"
) -> Answer:
    """Ask the engine's only model, or the one that is named, and say who wrote the answer."""
    answer = ask(prompt, upstream=engine, upstream_model=model, upstream_api=api)
    print(answer.text)
    print("the engine's own" if answer.verified else "some of it was written by this device alone")
    return answer


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print("usage: python examples/upstream.py http://HOST:PORT/v1 [QUESTION]", file=sys.stderr)
        sys.exit(2)
    main(*sys.argv[1:3])
