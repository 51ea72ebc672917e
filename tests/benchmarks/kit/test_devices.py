"""Cheap devices: what they are told, and what becomes of them when connections break or there is no
room."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.kit.lab import link_to
from cloud_verifier.engine import schedule
from edge_client.tools.emulated_network import PROFILES
from moa.errors import MoaError
from testing.devices import Script, ScriptedDevice, scripts, together
from tests.verifier import kit


async def test_devices_get_their_answers_through_broken_connections_and_refusals() -> None:
    limits = dataclasses.replace(kit.LIMITS, idle_seconds=0.05)
    settings = dataclasses.replace(kit.SETTINGS, slots=2, limits=limits)
    async with kit.verifier(settings) as running:
        url = running.transport.url
        said = await scripts(url, 4, length=20, tokens=24, rate=0.7, nodes=6)
        assert len({len(one.ids) for one in said}) == 4
        assert all(
            len(one.truth) == len(one.drafts) == 24 and len(one.drafts[0]) == 5 for one in said
        )
        async with link_to(url, PROFILES["loopback"]) as link:

            async def cut_soon() -> None:
                link.cut_after(400, "down")

            devices = [ScriptedDevice(link.url, one, begin=cut_soon) for one in said]
            async with together(devices):
                pass
        assert all(device.exact for device in devices)
        assert link.connections > 4


@pytest.mark.parametrize("way", ["device", "ahead", "server", "none"])
async def test_another_text_than_the_targets_is_a_loud_failure(way: str) -> None:
    async with kit.verifier() as running:
        url = running.transport.url
        (said,) = await scripts(url, 1, length=20, tokens=8, rate=1.0, nodes=4)
        device = ScriptedDevice(url, said, way=way)  # type: ignore[arg-type]
        await device.run()
        assert device.exact
        wrong = Script(said.ids, [(token + 1) % kit.VOCAB for token in said.truth], said.drafts)
        with pytest.raises(MoaError, match="another text"):
            async with together([ScriptedDevice(url, wrong, way=way)]):  # type: ignore[arg-type]
                pass


async def test_a_full_verifier_verifies_as_many_guesses_as_their_device_says_are_likely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The chance that is asked of a guess where each token makes a forward longer.
    monkeypatch.setattr(schedule, "least_chance", lambda cost, rows: 0.5)
    async with kit.verifier() as running:
        url = running.transport.url
        (said,) = await scripts(url, 1, length=20, tokens=16, rate=1.0, nodes=8)
        sure = dataclasses.replace(said, neg_log_probs=[[0] * len(one) for one in said.drafts])
        won = []
        for script in (said, sure):
            device = ScriptedDevice(url, script)
            await device.run()
            won.append(device.rounds[0].tokens)
    assert won == [6, 8]


def test_guesses_ahead_have_the_chances_of_their_drafts() -> None:
    script = Script([5], [6, 7, 8, 9], [[6, 7], [7, 8], [8, 1], [9]], [[1, 2], [3, 4], [5, 6], [7]])
    assert script.after(1) == ([7, 8], [3, 4])
    assert script.ahead(0) == ([6, 7, 8, 1], [1, 2, 5, 6])
