"""LangChain through the device's endpoint.

edge-client serve --verifier ws://127.0.0.1:8765
python examples/langchain_chat.py                    # pip install langchain-openai
"""

from __future__ import annotations

import os
import sys

from langchain_openai import ChatOpenAI
from openai import APIConnectionError, OpenAI

ENDPOINT = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")


def main(endpoint: str = ENDPOINT, prompt: str = "What is 17 plus 25?") -> str:
    """Stream an answer through LangChain."""
    # The endpoint refuses another name than its model's.
    model = OpenAI(base_url=endpoint, api_key="any").models.list().data[0].id
    chat = ChatOpenAI(base_url=endpoint, api_key="any", model=model)
    text = ""
    for chunk in chat.stream(prompt):
        text += str(chunk.content)
        print(chunk.content, end="", flush=True)
    print()
    return text


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError:
        sys.exit(f"nothing answers at {ENDPOINT}: start edge-client serve, or set OPENAI_BASE_URL")
