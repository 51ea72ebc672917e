"""A drafter of states on both ends: `moa-train`, `moa-export build`, `serve --drafter`,
and a device."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cloud_verifier.app import Verifier
from cloud_verifier.cli import parser, settings_from
from cloud_verifier.model import load
from cloud_verifier.settings import Settings
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.tools.emulated_network import PROFILES, LinkProxy
from export.build import BuildSettings, build
from moa.drafters.onnx_drafting import OnnxDrafting
from moa.errors import UsageError
from moa.graph.drafter import OnnxDrafter
from moa.sampling import SamplingSettings
from testing.tiny import save_tiny, tiny
from tests.edge import kit
from tests.model import published
from tests.verifier import kit as verifier_kit
from tests.verifier.test_server_drafter import learn

COUNT = 32
PROMPTS = [verifier_kit.prompt(number, 20 + number) for number in range(2)]
HOW = {"greedy": SamplingSettings(), "sampled": SamplingSettings(temperature=0.8, seed=3)}


@dataclass(frozen=True)
class Pair:
    """A server's settings, and a device's bundle."""

    settings: Settings
    bundle: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    target = save_tiny("llama", folder / "target")
    drafter = folder / "drafter"
    texts = [
        [*ids, *verifier_kit.generated(ids, COUNT, how)] for ids in PROMPTS for how in HOW.values()
    ]
    learn(target, texts, drafter)
    build(
        BuildSettings(
            target=str(target),
            drafter=str(drafter),
            out=folder / "bundle",
            variants=("cpu-fp32",),
            time_steps=False,
        )
    )
    flags = ["serve", "--target", str(target), "--drafter", str(drafter), "--device", "cpu"]
    settings = settings_from(parser().parse_args(flags))
    return Pair(replace(settings, port=0, slots=8, limits=verifier_kit.LIMITS), folder / "bundle")


@pytest.mark.parametrize("by_graph", [False, True], ids=["torch", "graph"])
@pytest.mark.parametrize(
    ("draft", "sync", "how"),
    [
        ("device", "int8", "greedy"),
        ("device", "off", "sampled"),
        ("server", "int8", "sampled"),
        ("server", "off", "greedy"),
    ],
)
async def test_the_text_is_the_targets_and_records_come(
    pair: Pair, draft: Any, sync: Any, how: str, by_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier_kit.draft_in_every_round(monkeypatch)
    drafted: list[int] = []
    real = OnnxDrafting.draft
    monkeypatch.setattr(
        OnnxDrafting, "draft", lambda self, asked: drafted.append(len(asked)) or real(self, asked)
    )
    device = Device.load(pair.bundle, threads=1)
    sampling: dict[str, Any] = {"temperature": HOW[how].temperature, "seed": HOW[how].seed}
    settings = replace(pair.settings, bundle=str(pair.bundle)) if by_graph else pair.settings
    served = await asyncio.to_thread(load, settings)
    assert served.drafts == ("states, cpu-fp32" if by_graph else "states")
    async with (
        Verifier(served, settings).open() as running,
        LinkProxy("127.0.0.1", running.transport.port, PROFILES["wifi"]) as link,
    ):
        ways: dict[str, Any] = {
            "draft": draft,
            "guess_ahead": False,
            "sync": sync,
            "max_new_tokens": COUNT,
            "offline_after": 60.0,
        }
        waiting = list(PROMPTS)
        for _ in range(4 * len(PROMPTS)):
            if not waiting:
                break
            ids = waiting[0]
            drafter = device.new_drafter()
            assert isinstance(drafter, OnnxDrafter)
            own = replace(device, new_drafter=partial(lambda one: one, drafter))
            async with EdgeClient(verifier=link.url, device=own, **ways, **sampling) as client:
                reader = await kit.transcribe(client, ids)
            assert reader.tokens == verifier_kit.generated(ids, COUNT, HOW[how])
            assert all(reader.verified)
            assert reader.done is not None
            assert drafter.records is not None
            has_come = bool(drafter.records.held)
            assert not has_come or sync != "off"
            # Records come while an answer is written: on a busy machine one may end before them.
            if has_come or sync == "off":
                waiting.pop(0)
    assert not waiting, "records of each come"
    assert bool(drafted) == (by_graph and draft == "server")


def test_what_does_not_fit_such_a_drafter_is_refused(pair: Pair, tmp_path: Path) -> None:
    published.write(tmp_path / "eagle3", "specforge-3.1", tiny("llama"), [1, 2, 3])
    with pytest.raises(UsageError, match="read different states"):
        load(replace(pair.settings, server_drafter=str(tmp_path / "eagle3")))
