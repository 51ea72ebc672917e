"""Pauses of the product that a test would wait for in vain."""

from __future__ import annotations

import pytest

from cloud_verifier.upstream import client, engine, watch


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upstream that has failed is asked again soon. That it rests until then is shown in virtual
    time, in `test_bad.py` and `test_telling.py`."""
    monkeypatch.setattr(client, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(engine, "_LEAST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(watch, "_FIRST_PAUSE", 0.05)
