"""A draft in one run of the graph: what torch drafts in one pass, however the cache came about, and exact as any."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from edge_client.cli import main
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.settings import ClientSettings
from edge_client.turn.one_pass import one_pass_pays
from moa.bundle import Bundle, write_manifest
from moa.errors import BundleError
from moa.graph.drafter import OnnxDrafter, run
from moa.manifest import Acceptance, Calibration, Offline, StepTime, TreeUsed
from moa.model.checkpoint import load_drafter
from moa.model.drafting import DraftRequest
from moa.model.loading import load_model
from moa.model.one_pass import OnePassDrafting
from moa.sampling import SamplingSettings
from moa.tree import DraftTree, TreeShape
from tests.edge import kit
from tests.tiny import EOS
from tests.verifier import kit as verifier_kit

BLOCK = 6
SHAPES = (TreeShape.chain(BLOCK, min_score=-1e9), TreeShape(3, 4, 12, min_score=-1e9))
GREEDY, SAMPLED = SamplingSettings(), SamplingSettings(temperature=0.7, seed=11)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one-pass")
    kit.make_pair(folder, block=BLOCK, pair_rank=16)
    return folder


@pytest.fixture(scope="module")
def device(folder: Path) -> Device:
    return Device.load(folder / "bundle", threads=1, one_pass=True)


def fresh(device: Device) -> OnnxDrafter:
    drafter = device.new_drafter()
    assert isinstance(drafter, OnnxDrafter)
    return drafter


def same(a: DraftTree, b: DraftTree) -> None:
    assert (a.tokens, a.parents) == (b.tokens, b.parents)
    np.testing.assert_allclose(a.scores, b.scores, atol=2e-3)  # the bundle's pairs are float16


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_round_is_one_run_and_a_used_cache_drafts_what_torch_does(
    folder: Path, device: Device, sampling: SamplingSettings
) -> None:
    loaded = load_model(folder / "target")
    drafter = load_drafter(folder / "drafter", loaded.model, loaded.facts)
    rng, used, ids = random.Random(0), fresh(device), verifier_kit.prompt(0, 20)
    for round in range(8):
        shape, runs = SHAPES[round % 2], used.runs
        tree = run(used.draft(ids, shape, sampling))
        assert used.runs == runs + 1
        assert shape.breadth > 1 or max(tree.depths()) == shape.depth
        torch_side = OnePassDrafting(drafter, capacity=128)
        slot = torch_side.open()
        torch_side.records = None  # the device was given none
        torch_side.read(slot, ids[:-1])
        (expected,) = torch_side.draft([DraftRequest(slot, ids[-1], shape, sampling)])
        same(tree, expected)
        path, at = [], 0
        while rng.random() < 0.7 and (children := [n for n, parent in enumerate(tree.parents) if parent == at and n]):
            at = rng.choice(children)
            path.append(tree.tokens[at])
        ids = [*ids, *path][: -3 if round == 4 else None]
        ahead = round % 3 == 1
        ids = [*ids, run(used.guess(ids, sampling)) if ahead else rng.randrange(4, 128)]


def test_step_by_step_where_nothing_was_measured_and_grown_trees_as_ever(folder: Path, device: Device) -> None:
    stepping = Device.load(folder / "bundle", threads=1)
    one, other, ids = fresh(device), fresh(stepping), verifier_kit.prompt(1, 12)
    assert (one.block, other.block) == (BLOCK, 0)
    run(other.draft(ids, SHAPES[0], GREEDY))
    assert other.runs == SHAPES[0].depth
    assert run(one.grow(ids, 3, -1e9, GREEDY)).tree.tokens == run(other.grow(ids, 3, -1e9, GREEDY)).tree.tokens
    assert run(one.guess(ids, SAMPLED)) == run(other.guess(ids, SAMPLED))
    first = run(one.draft(ids, SHAPES[0], GREEDY)).tokens[1]
    assert first == run(other.draft(ids, SHAPES[0], GREEDY)).tokens[1], "the first token is the step's own"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
async def test_text_over_a_link_is_the_target_s(device: Device, sampling: dict[str, Any]) -> None:
    async with kit.verifier() as running:
        settings: dict[str, Any] = {"draft": "device", "foresee": False, "max_new_tokens": 24, **sampling}
        async with EdgeClient(verifier=running.transport.url, device=device, **settings) as client:
            for seed in range(2):
                ids = verifier_kit.prompt(seed, 12)
                expected = verifier_kit.generate(verifier_kit.model(), ids, 24, SamplingSettings(**sampling))
                transcript = await kit.transcribe(client, ids)
                assert transcript.tokens == expected
                assert transcript.done is not None
                assert transcript.done.reason == ("eos" if expected[-1] == EOS else "length")
            assert client._shared is not None
            controller = client._shared.controller
            assert controller.block == BLOCK
            assert controller.whole.samples > 1
            assert controller.plan(64, "device").shape.depth <= BLOCK


def _measured(folder: Path, made: Path, whole: float) -> Path:
    """The bundle as if it had been calibrated: seven in ten by steps of 10 ms, fewer in a pass of `whole`."""
    shutil.copytree(folder / "bundle", made)
    content = Bundle.open(made).manifest
    (name,) = content.variants
    times = tuple(StepTime(tokens=tokens, threads=1, ms=ms) for tokens, ms in ((1, 10.0), (8, 11.0), (BLOCK, whole)))
    tree = TreeUsed(breadth=4, depth=6, nodes=24)
    curve = Offline(lengths=(1,), agreement=(0.9,), unbroken=(0.9,))
    calibration = Calibration(
        prompts=1,
        tokens=1,
        source="",
        acceptance=Acceptance(chain=(0.7, 0.49), tree=(0.8, 0.64), tree_shape=tree),
        one_pass=Acceptance(chain=(0.7, 0.42), tree=(0.8, 0.4), tree_shape=tree),
        offline=curve,
    )
    variants = {name: msgspec.structs.replace(content.variants[name], step_times=times)}
    write_manifest(made, msgspec.structs.replace(content, variants=variants, calibration=calibration))
    return made


def test_the_way_that_was_measured_to_pay_unless_asked_otherwise(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the controller begins with the acceptance of the way that is taken."""
    fast, slow = (_measured(folder, tmp_path / name, ms) for name, ms in (("fast", 12.0), ("slow", 60.0)))
    for made, one_pass, block in (
        (fast, None, BLOCK), (slow, None, 0), (fast, False, 0), (slow, True, BLOCK)
    ):  # fmt: skip
        device = Device.of(ClientSettings(bundle=str(made), threads=1, one_pass=one_pass))
        assert fresh(device).block == block
        chain, tree = device.acceptance()
        assert chain == pytest.approx([0.7, 0.6] if block else [0.7, 0.7])
        assert tree == pytest.approx([0.8, 0.5] if block else [0.8, 0.8])
    for made, says in ((fast, "6 tokens in one pass, the default here"), (slow, "by default by steps")):
        with pytest.raises(SystemExit, match=r"^0$"):
            main(["inspect", "--bundle", str(made), "--threads", "1"])
        assert says in capsys.readouterr().out


def test_what_was_not_measured_drafts_by_steps(folder: Path, tmp_path: Path) -> None:
    """As bundles of before: the acceptance of one pass, or its time."""
    bundle = Bundle.open(_measured(folder, tmp_path / "made", 12.0))
    manifest, variant = bundle.manifest, bundle.variant()
    assert one_pass_pays(manifest, variant, 4), "the times of one thread are the nearest"
    assert manifest.calibration is not None
    before = msgspec.structs.replace(manifest.calibration, one_pass=None)
    assert not one_pass_pays(msgspec.structs.replace(manifest, calibration=before), variant, 4)
    assert not one_pass_pays(manifest, msgspec.structs.replace(variant, step_times=variant.step_times[:2]), 4)


def test_a_pair_head_of_another_size_is_refused(folder: Path) -> None:
    path = folder / "bundle" / "shared" / "pairs.npy"
    tables = np.load(path)
    try:
        np.save(path, tables.transpose(0, 2, 1).copy())  # a file as large
        with pytest.raises(BundleError, match="does not fit its manifest"):
            Device.load(folder / "bundle", threads=1, one_pass=True)
    finally:
        np.save(path, tables)
