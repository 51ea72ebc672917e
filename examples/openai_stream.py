"""OpenAI's client through the device's endpoint: no change but the address.

edge-client serve --verifier ws://127.0.0.1:8765
python examples/openai_stream.py                     # pip install openai
"""

from __future__ import annotations

import os
import sys

from openai import APIConnectionError, OpenAI

ENDPOINT = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")


def main(endpoint: str = ENDPOINT, prompt: str = "What is 17 plus 25?") -> str:
    """Stream an answer; it goes on when the network does not."""
    api = OpenAI(base_url=endpoint, api_key="any")
    model = api.models.list().data[0].id
    text = ""
    chunks = api.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        if chunk.choices and chunk.choices[0].delta.content:
            text += chunk.choices[0].delta.content
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            marks = (chunk.usage.model_extra or {}).get("moa")
            # Another endpoint has no such field: then nobody knows.
            alone = "unknown how many" if marks is None else marks.get("unverified_tokens", 0)
            print(f"\n{alone} tokens are the device's own, and not verified")
    return text


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit(f"nothing answers at {ENDPOINT}: start edge-client serve, or set OPENAI_BASE_URL")
