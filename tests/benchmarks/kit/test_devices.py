"""Cheap devices: what they are told, and what becomes of them when connections drop or there is no room."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.kit.devices import Script, ScriptedDevice, run_all, scripts
from moa.errors import MoaError
from tests.verifier import kit


async def test_devices_get_their_answers_through_drops_and_refusals() -> None:
    limits = dataclasses.replace(kit.LIMITS, idle_seconds=0.05)
    settings = dataclasses.replace(kit.SETTINGS, slots=2, limits=limits)
    async with kit.verifier(settings) as running:
        url = running.transport.url
        said = await scripts(url, 4, length=20, tokens=24, rate=0.7, nodes=6)
        assert len({len(one.ids) for one in said}) == 4
        assert all(len(one.truth) == len(one.drafts) == 24 and len(one.drafts[0]) == 5 for one in said)
        devices = [ScriptedDevice((url,), one, drop_every=2) for one in said]
        found = await run_all(devices)
        assert found["exact"] == found["devices"] == 4
        assert found["returns"] >= 4
        assert found["same_verifier"] == 1.0
        assert found["tokens"] == sum(one.tokens for device in devices for one in device.rounds) == 4 * 24


@pytest.mark.parametrize("way", ["device", "ahead", "server", "none"])
async def test_another_text_than_the_targets_is_a_loud_failure(way: str) -> None:
    async with kit.verifier() as running:
        url = running.transport.url
        (said,) = await scripts(url, 1, length=20, tokens=8, rate=1.0, nodes=4)
        device = ScriptedDevice((url,), said, way=way)  # type: ignore[arg-type]
        await device.run()
        assert device.exact
        wrong = Script(said.ids, [(token + 1) % kit.VOCAB for token in said.truth], said.drafts)
        with pytest.raises(MoaError, match="another text"):
            await run_all([ScriptedDevice((url,), wrong, way=way)])  # type: ignore[arg-type]
