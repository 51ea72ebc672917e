"""Who is fastest, who is as fast within an error, and the tables of a grid."""

from __future__ import annotations

from typing import Any

from benchmarks.device.winners import Place, places

KINDS = ["exercises", "code", "exercises", "code"]


def run(way: str, *seconds: float, link: str = "4g", step_ms: float = 30.0) -> dict[str, Any]:
    costs = ("forwards_per_token", "calls_per_100", "first_token_ms", "up_bytes_per_token", "down_bytes_per_token",
             "edge_cpu_ms_per_token")  # fmt: skip
    return {
        "way": way, "link": link, "step_ms": step_ms, "temperature": 0.0, "tokens": [10] * len(seconds),
        "seconds": [[one] for one in seconds], "server_seconds": [[one / 2] for one in seconds],
        "streamed_by": {"device": 3, "server": 1}, **dict.fromkeys(costs, 1.0),
    }  # fmt: skip


def grid(*runs: dict[str, Any]) -> dict[str, Any]:
    return {
        "prompts": 4, "tokens": 48, "repeats": 1, "kinds": KINDS, "rtt_ms": {"4g": 60.0, "wifi": 10.0}, "runs": [*runs],
        "steps": [{"step_ms": 30.0, "lanes": 2, "cores_busy": 0.5, "late_forwards": 0.02}],
    }  # fmt: skip


PLAIN = run("plain API streaming", 4.0, 4.0, 4.0, 4.0)
DEVICE = run("device", 1.0, 2.0, 1.3, 1.8)
SERVER = run("server-drafted", 2.0, 1.0, 1.9, 1.1)
AUTO = run("auto", 1.2, 1.6, 1.6, 1.5)


def place(*runs: dict[str, Any]) -> Place:
    return places(grid(*runs))[0]


def test_a_way_within_an_error_of_the_fastest_is_level_with_it() -> None:
    found = place(PLAIN, DEVICE, SERVER, AUTO)
    assert found.fastest == found.best_other == "server-drafted"
    assert found.level == ["server-drafted", "device", "auto"]
    assert found.times("device", "plain API streaming", {"exercises"}).value > 3
    assert found.times("device", "plain API streaming", {"code"}).value < 2.5


def test_who_is_clearly_slower_is_not_level_though_means_are_near() -> None:
    slower = run("server-drafted, other", *(1.02 * passes[0] for passes in SERVER["seconds"]))
    assert place(SERVER, slower).level == ["server-drafted"]
    assert not place(run("server-drafted", 1.1, 1.1, 1.1, 1.1), run("device, other", 1.0, 1.0, 1.0, 1.0)).ours
