from __future__ import annotations

import logging

import pytest

from moa.process.rare_lines import RareLines


def test_a_kind_has_a_line_every_ten_seconds_however_often_it_happens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    lines = RareLines(logging.getLogger("test_rare_lines"), clock=lambda: now)
    for tenth in range(251):
        now = tenth / 10
        lines.warn("tls", "no TLS", "10.0.0.1:5", "failed_connection")
        if tenth == 3:
            lines.warn("other", "100 %s", "10.0.0.2:5", "refused")
    more = " (99 more of these since the last such line)"
    assert caplog.messages == ["no TLS", "100 %s", f"no TLS{more}", f"no TLS{more}"]
    assert vars(caplog.records[1])["peer"] == "10.0.0.2:5"
