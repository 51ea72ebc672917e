"""What replicas are told, and how many there should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cloud_verifier.replicas import replicas_wanted, settings_from
from moa.errors import ConfigError


def test_settings_are_the_flags_of_serve_from_a_file_or_a_command_line() -> None:
    typed = {"slots": 4, "batch_wait_ms": 0.5, "auth_tokens": "/t", "origin": ["https://a", "https://b"]}
    for arguments in (typed, typed | {"slots": "4", "batch_wait_ms": "0.5"}):
        found = settings_from(arguments)
        assert (found.slots, found.batch_wait_ms, found.auth_tokens) == (4, 0.5, Path("/t"))
        assert found.origins == ("https://a", "https://b")
    assert settings_from({"host": "127.0.0.1", "max-context-tokens": 9000}).limits.max_prompt_tokens == 9000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"slots": 4}, "without authentication"),
        ({"slotz": 4, "host": "127.0.0.1"}, "slotz"),
        ({"slots": "many", "host": "127.0.0.1"}, "slots"),
        ({"slots": 0, "host": "127.0.0.1"}, "slots"),
        ({"port": 1, "host": "127.0.0.1"}, "port"),
    ],
)
def test_mistakes_are_told(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        settings_from(arguments)


@pytest.mark.parametrize(
    ("now", "queue_ms", "pages", "then"),
    [
        (1, [], [], 1),
        (2, [20, 20], [0.1, 0.1], 2),
        (2, [40, 40], [0.1, 0.1], 4),
        (2, [0, 0], [0.95, 0.95], 3),
        (4, [1, 1, 1, 1], [0.1, 0.1, 0.1, 0.1], 1),
    ],
)
def test_enough_replicas_for_queue_and_memory(now: int, queue_ms: list[float], pages: list[float], then: int) -> None:
    assert replicas_wanted(now, queue_ms, pages) == then
