"""A short form of each part that needs processes: `make torture` takes them further."""

from __future__ import annotations

import pytest

from tests.torture import kills
from tests.torture.neighbours import beside
from tests.torture.server import mortal, server

pytestmark = pytest.mark.timeout(900)  # processes start slowly on a busy machine


async def test_a_flood_of_pings_is_cut_and_the_neighbour_and_the_memory_are_well() -> None:
    async with server(
        "--openai", "0", "--max-empty-frames-per-second", "100", "--flood-seconds", "0.5"
    ) as running:
        result = await beside(running, "pings", 2.0)
        assert [
            one for one in result.problems if ", s: " not in one and ", ms: " not in one
        ] == [], "times are for a calm machine"
        assert set(result.report.limits) == {"max_empty_frames_per_second"}
        assert "Traceback" not in running.said


async def test_texts_survive_kills_and_cuts() -> None:
    async with mortal() as place:
        toll = await kills.run(place, kills=2, cuts=6, clients=2)
    assert toll.wrong == []
    assert (toll.counts["kills"], toll.counts["cuts"]) == (2, 6)
    assert toll.counts["answers"] >= 2
