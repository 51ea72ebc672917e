"""The client's measurements beside a slow target and across an outage: their arithmetic, and small runs of them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import client_kit, client_links, client_reconnect, client_slow, report, timeline
from edge_client.tools.compare import TimedAnswer
from edge_client.tools.emulated_network import PROFILES, Condition, Profile
from moa.errors import run_cli


def test_a_cycle_that_begins_elsewhere_is_the_same_cycle() -> None:
    bursty = PROFILES["bursty"]
    for share in (0.0, 0.3, 0.8, 0.95, 1.3):
        turned = client_kit.rotated(bursty, share)
        for second in (0.05, 3.05, 7.05, 9.05):
            assert turned.at(second) == bursty.at(second + 10 * share)
        assert sum(seconds for seconds, _ in turned.phases) == pytest.approx(10)
    assert client_kit.rotated(PROFILES["wifi"], 0.5) is PROFILES["wifi"]


def test_the_mean_round_trip_weighs_time() -> None:
    assert client_slow.mean_rtt(PROFILES["4g"]) == 60
    profile = Profile("x", ((3.0, Condition(10)), (1.0, Condition(50))))
    assert client_slow.mean_rtt(profile) == 20


def test_faster_targets_get_fewer_lanes() -> None:
    assert [client_slow.lanes_for(step, 8) for step in (10, 30, 60, 120, 1000)] == [1, 3, 7, 8, 8]


def test_figures_of_a_cell() -> None:
    stats = {
        "tokens": 10, "seconds": 2.0, "calls": 3, "sent_bytes": 100, "received_bytes": 500,
        "offline_tokens": 0, "retracted": 0, "first_token_seconds": 0.25,
    }  # fmt: skip
    found = client_slow.figures([TimedAnswer([], "", True, "eos", stats)] * 2, 0.1)
    assert found == {
        "tokens": 20,
        "tokens_per_second": 5.0,
        "calls_per_100": 30.0,
        "up_bytes_per_token": 10.0,
        "down_bytes_per_token": 50.0,
        "first_token_ms": 250.0,
        "edge_cpu_ms_per_token": 5.0,
        "provisional_tokens": 0,
        "retracted_tokens": 0,
    }


def test_a_link_is_told_by_the_medians_of_its_passes() -> None:
    passes = [{"same": 6, "tokens_per_second": speed, "calls_per_100": 2.0} for speed in (10.04, 90.0, 20.0)]
    assert client_links._middle(passes) == {
        "same": 18, "repeats": 3, "tokens_per_second": 20.0, "calls_per_100": 2.0, "speeds": [10.0, 90.0, 20.0],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (client_slow, ["--links", "carrier-pigeon"]),
        (client_slow, ["--steps", "0"]),
        (client_reconnect, ["--speed", "0"]),
        (client_reconnect, ["--verifier", "ws://somewhere"]),
        (timeline, ["--prompts", "0"]),
    ],
)
def test_mistakes_are_one_line(
    module: object, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark", *arguments])
    assert run_cli("benchmark", module.main) == 2  # type: ignore[attr-defined]
    assert "benchmark: error: " in capsys.readouterr().err


@pytest.mark.slow
def test_a_small_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "slow.json"
    flags = [
        "--steps",
        "30",
        "--links",
        "wifi",
        "--prompts",
        "1",
        "--tokens",
        "12",
        "--independent",
        str(tmp_path / "no"),
    ]
    monkeypatch.setattr("sys.argv", ["client_slow", *flags, "--json", str(out)])
    assert client_slow.main() == 0
    assert "6 of 6 texts equal the target's own" in capsys.readouterr().out
    result = json.loads(out.read_text())
    found = {run["way"]: run for run in result["client_slow"]}
    assert found["a call a token"]["calls_per_100"] == 100
    assert found["plain API streaming"]["tokens_per_second"] < 1000 / 30
    assert report.main([str(out)]) == 0


@pytest.mark.slow
def test_an_outage_in_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "reconnect.json"
    flags = ["--prompts", "2", "--gaps", "0", "1", "--speed", "20", "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["client_reconnect", *flags])
    assert client_reconnect.main() == 0
    runs = json.loads(out.read_text())["client_reconnect"]
    assert len(runs) == 4
    for run in runs:
        assert (run["offline_tokens"] > 0) == (run["gap_seconds"] > 0)
        if run["policy"] == "rewind":
            assert run["wholly_verified"] == run["asked"] == 2
    assert client_reconnect.tables(json.loads(out.read_text())) in capsys.readouterr().out


@pytest.mark.slow
def test_a_timeline_is_a_trace_with_every_part_of_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "timeline.json"
    monkeypatch.setattr("sys.argv", ["timeline", "--tokens", "32", "--json", str(out)])
    assert timeline.main() == 0
    result = json.loads(out.read_text())
    events = result["traceEvents"]
    assert {"up", "verify", "verdict", "records", "draft", "ask", "answer"} <= {event["name"] for event in events}
    for event in events:
        assert {"name", "ph", "pid", "tid"} <= set(event)
        assert event["ph"] in "XiM"
        assert event["ph"] != "X" or event["dur"] >= 0
    assert result["round"]["from_us"] < result["round"]["to_us"]


def test_rounds_are_put_together_from_both_ends() -> None:
    from moa.wire.messages import Verdict

    session = b"s" * 16
    events = [
        {"name": "draft", "ts": 100.0, "ph": "X", "dur": 50.0, "pid": 1, "tid": 1, "args": {"ahead": False}},
        {"name": "ask", "ts": 200.0, "ph": "i", "pid": 1, "tid": 1, "args": {"round": 1}},
    ]
    heard = [(1200.0, Verdict(session, 1, 4, [0], 7, queue_ms=0.1, forward_ms=0.5))]
    rounds = timeline.rounds_of(events, heard)
    assert rounds == [timeline.Round(200.0, 1200.0, 100.0, 500.0)]
    assert rounds[0].one_way == 200.0
    merged = {event["name"]: event for event in timeline.merged(events, heard, rounds) if event["ph"] == "X"}
    assert (merged["up"]["ts"], merged["queue"]["ts"], merged["verify"]["ts"], merged["verdict"]["ts"]) == (
        200.0, 400.0, 500.0, 1000.0,
    )  # fmt: skip
    assert timeline.shown(events, heard, rounds)["from_us"] < 100.0


def test_options_need_no_more_than_they_say() -> None:
    case = client_reconnect.Case(0, "rewind", 8, 1.0)
    outcome = client_reconnect.Outcome(
        [1, 2], "x", True, 2.0, 1.5, 1, {"offline_tokens": 3, "retracted": 1, "adopted": 0}
    )
    from moa.demo.skills import Example

    row = client_reconnect._row("rewind", 8, 1.0, [(case, outcome)], [Example("arithmetic", "What is 1 + 1?", "2")])
    assert (row["asked"], row["wholly_verified"], row["retracted"], row["tokens"]) == (1, 1, 1, 2)
    assert isinstance(argparse.Namespace(**row).seconds, float)


def test_some_prompts_are_of_all_kinds() -> None:
    def skills(**options: int) -> list[str]:
        return [example.skill for example in client_kit.load(argparse.Namespace(bundle="", **options))[1]]

    every = skills(per_skill=1, prompts=0)
    assert skills(per_skill=1, prompts=4) == every[::4]
    assert every[-1] in skills(per_skill=1, prompts=10) or every[-2] in skills(per_skill=1, prompts=10)
    assert skills(per_skill=1, prompts=99) == every
