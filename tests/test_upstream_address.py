"""Addresses of somebody else's engine."""

from __future__ import annotations

import pytest

from moa.errors import UsageError
from moa.upstream_address import upstream_address


def test_what_users_give_is_completed_or_refused() -> None:
    assert upstream_address("gpu:8000") == "http://gpu:8000/v1"
    with pytest.raises(UsageError) as route:
        upstream_address("http://gpu:8000/v1/chat/completions/")
    assert route.value.hint == "did you mean http://gpu:8000/v1?"
    assert upstream_address("https://api.example/openai/v1/") == "https://api.example/openai/v1"
    for port in ("0", "99999", "x"):
        with pytest.raises(UsageError, match="no port that can be"):
            upstream_address(f"http://gpu:{port}/v1")
    for wrong in (
        "ftp://x",
        "http://",
        "http://[::1",
        "http://me:secret@gpu/v1",
        "http://gpu/v1?key=1",
    ):
        with pytest.raises(UsageError):
            upstream_address(wrong)
