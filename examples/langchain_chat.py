"""LangChain through the device's endpoint.

edge-client serve --verifier ws://127.0.0.1:8765
python examples/langchain_chat.py                    # pip install langchain-openai
"""

from __future__ import annotations

from langchain_openai import ChatOpenAI

ENDPOINT = "http://127.0.0.1:8080/v1"


def main(endpoint: str = ENDPOINT, prompt: str = "What is 17 plus 25?") -> str:
    """Stream an answer through LangChain."""
    chat = ChatOpenAI(base_url=endpoint, api_key="any", model="target")
    text = ""
    for chunk in chat.stream(prompt):
        text += str(chunk.content)
        print(chunk.content, end="", flush=True)
    print()
    return text


if __name__ == "__main__":
    main()
