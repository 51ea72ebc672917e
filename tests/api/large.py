"""Requests of a megabyte in every shape that the API has, as bytes."""

from __future__ import annotations

import json
from typing import Any

_WORDS = "the quick brown fox jumps over the lazy dog " * 22_000
_CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 2,
    "moa": {"mode": "keep", "patience": 0},
}
_PREDICTED = {"type": "content", "content": _WORDS}
_PARTS = [{"type": "text", "text": "a"}] * 25_000
LARGE: dict[str, tuple[str, dict[str, Any]]] = {
    "prediction": ("chat/completions", {**_CHAT, "n": 16, "prediction": _PREDICTED}),
    "prediction of one letter": (
        "chat/completions",
        {**_CHAT, "n": 16, "prediction": _PREDICTED | {"content": "a" * 1_000_000}},
    ),
    "message": (
        "chat/completions",
        {**_CHAT, "n": 16, "messages": [{"role": "user", "content": _WORDS}]},
    ),
    "many messages": (
        "chat/completions",
        # The latest of them are answered: each choice reads a full context.
        {**_CHAT, "n": 2, "messages": [{"role": "user", "content": "hello " * 100}] * 1024},
    ),
    "parts": ("chat/completions", {**_CHAT, "messages": [{"role": "user", "content": _PARTS}]}),
    "logit_bias": ("chat/completions", {**_CHAT, "logit_bias": {str(n): 1 for n in range(70_000)}}),
    "unknown fields": ("chat/completions", {**_CHAT, "x": [[]] * 200_000}),
    "stop": ("chat/completions", {**_CHAT, "stop": ["x" * 100] * 9000}),
    "text": ("completions", {"prompt": _WORDS, "n": 16}),
    "texts": ("completions", {"prompt": ["a"] * 200_000}),
    "ids": ("completions", {"prompt": [1] * 300_000, "n": 16}),
    "response": ("responses", {"input": _WORDS}),
    "response of parts": ("responses", {"input": [{"role": "user", "content": _PARTS}]}),
}
"""Endpoint and fields of each, below the limit of 1 MiB."""


def large_request(model: str, name: str) -> tuple[str, bytes]:
    """Path and body of one."""
    endpoint, fields = LARGE[name]
    return f"/v1/{endpoint}", json.dumps({"model": model, **fields}).encode()
