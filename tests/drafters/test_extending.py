"""docs/extending.md, followed: a toy drafter is registered by the page's own words, and drafts a
verifier's streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloud_verifier.app import Verifier
from cloud_verifier.cli import parser, settings_from
from cloud_verifier.model import load
from cloud_verifier.settings import Settings
from export.cli import main as export
from export.plan import make_plan
from moa.drafters import registry
from moa.drafters.graph import GraphSizes
from moa.drafters.registry import find
from moa.errors import ConfigError, UsageError
from moa.target import registry as target_registry
from moa.target.registry import Source
from moa.target.rows import Row
from moa.target.torch_target import Step
from testing.tiny import save_tiny
from tests.drafters.toy import ToyConfig, ToyDrafter, ToyKind
from tests.target.toy import ToyModel
from tests.verifier import kit

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
TOKENS = 48
TOY_TARGET = Source(
    name="toy",
    accepts=lambda source: source.endswith(".toy"),
    target="tests.target.toy:ToyTarget",
)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the line of the page."""
    monkeypatch.setattr(registry, "KINDS", dict(registry.KINDS))
    line = next(
        line.strip()
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.strip().startswith("register(")
    )
    exec(line, {"register": registry.register, "ToyKind": ToyKind})


def toy_folder(folder: Path) -> Path:
    folder.mkdir()
    ToyConfig().write(folder)
    return folder


@pytest.mark.parametrize(
    ("flag", "on_device", "shares_weights"),
    [
        ("--server-drafter", False, False),
        ("--server-drafter", False, True),
        ("--server-drafter", True, False),
        ("--drafter", True, False),
        ("--drafter", True, True),
    ],
)
async def test_a_drafter_that_is_registered_drafts_streams_and_the_text_stays_the_targets(
    registered: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
    on_device: bool,
    shares_weights: bool,
) -> None:
    monkeypatch.setattr(ToyKind, "on_device", on_device)
    monkeypatch.setattr(ToyKind, "shares_weights", shares_weights)
    kit.draft_in_every_round(monkeypatch)
    target = save_tiny("llama", tmp_path / "target")
    folder = toy_folder(tmp_path / "toy")
    assert find(folder).kind.name == "toy"
    flags = ["serve", "--target", str(target), flag, str(folder), "--device", "cpu"]
    settings = replace(settings_from(parser().parse_args(flags)), port=0, limits=kit.LIMITS)
    served = load(settings)
    assert served.drafts == "toy"
    forwards: list[int] = []
    real = served.target.forward

    def forward(rows: Sequence[Row]) -> Step:
        forwards.append(len(rows))
        found: Step = real(rows)
        return found

    served.target.forward = forward  # type: ignore[method-assign, assignment]
    async with Verifier(served, settings).open() as running, kit.client(running) as edge:
        ids = kit.prompt(0, 20)
        truth = kit.generated(ids, TOKENS)
        for _ in range(2):
            forwards.clear()
            session = await edge.start(ids, max_new_tokens=TOKENS, ignore_eos=True)
            await edge.stream(session)
            assert session.log[len(ids) :][: len(truth)] == truth
    assert len(forwards) < TOKENS / 2, "the second reader gets what was drafted from the first's"


def test_a_drafter_for_devices_without_taps_is_sent_from_one_flag_to_the_other_only_once(
    registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_tiny("llama", tmp_path / "target")
    folder = toy_folder(tmp_path / "toy")
    as_drafter = Settings(target=str(target), drafter=str(folder), device="cpu")
    as_servers = Settings(target=str(target), server_drafter=str(folder), device="cpu")
    with pytest.raises(ConfigError, match="which is for servers alone"):
        load(as_drafter)
    monkeypatch.setattr(ToyKind, "on_device", True)
    monkeypatch.setattr(ToyKind, "shares_weights", True)
    with pytest.raises(UsageError, match="reads no states of the target"):
        load(as_servers)
    load(as_drafter)


@pytest.mark.parametrize(("flag", "on_device"), [("server_drafter", False), ("drafter", True)])
async def test_it_drafts_behind_a_target_without_states(
    registered: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flag: str,
    on_device: bool,
) -> None:
    """The target of docs/extending.md, which is no torch."""
    monkeypatch.setattr(ToyKind, "on_device", on_device)
    monkeypatch.setattr(target_registry, "SOURCES", [TOY_TARGET, *target_registry.SOURCES])
    kit.draft_in_every_round(monkeypatch)
    file = tmp_path / "small.toy"
    file.write_text("7\n")
    settings = replace(
        Settings(target=str(file), port=0, slots=2, limits=kit.LIMITS),
        **{flag: str(toy_folder(tmp_path / "toy"))},
    )
    served = load(settings)
    assert served.drafts == "toy"
    sizes = []
    real = served.target.forward

    def forward(rows: Sequence[Row]) -> Any:
        sizes.append([len(row.tokens) for row in rows])
        return real(rows)

    served.target.forward = forward  # type: ignore[method-assign]
    ids = kit.prompt(0, 20)
    truth = list(ids)
    for _ in range(TOKENS):
        truth.append(int(ToyModel(7).plainly(truth).argmax()))
    async with Verifier(served, settings).open() as running, kit.client(running) as edge:
        for _ in range(2):
            sizes.clear()
            session = await edge.start(ids, max_new_tokens=TOKENS, ignore_eos=True)
            await edge.stream(session)
            assert session.log == truth
    assert len(sizes) < TOKENS / 2, "the second reader gets what was drafted from the first's"


def test_a_drafter_that_reads_states_behind_such_a_target_is_refused_by_its_own_word(
    registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_registry, "SOURCES", [TOY_TARGET, *target_registry.SOURCES])
    file = tmp_path / "small.toy"
    file.write_text("7\n")
    settings = Settings(target=str(file), server_drafter=str(toy_folder(tmp_path / "toy")))
    with monkeypatch.context() as patch:
        patch.setattr(ToyKind, "shares_weights", True)
        with pytest.raises(UsageError, match="no weights, and a drafter of kind toy needs them"):
            load(settings)
    monkeypatch.setattr(ToyDrafter, "config", ToyConfig(taps=(1,)))
    with pytest.raises(UsageError, match="gives no states"):
        load(settings)


def test_a_kind_for_devices_without_a_graph_is_told_what_an_export_needs(
    registered: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ToyKind, "on_device", True)
    target = save_tiny("llama", tmp_path / "target")
    folder = toy_folder(tmp_path / "toy")
    out = tmp_path / "bundle"
    flags = ["build", "--target", str(target), "--drafter", str(folder), "--out", str(out)]
    assert export(flags) == 2
    said = capsys.readouterr().err
    assert "a drafter of kind toy has no graph" in said
    assert "on_device = False" in said
    assert not out.exists()


def test_a_kind_that_no_bundle_can_name_is_refused_before_anything_is_made(
    registered: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = GraphSizes(
        kind="toy",
        hidden_size=8,
        vocabulary=128,
        tied=True,
        cache=(),
        record_width=0,
        layer_weights=1,
    )
    monkeypatch.setattr(ToyKind, "on_device", True)
    monkeypatch.setattr(ToyKind, "sizes", lambda *_: sizes)
    target = save_tiny("llama", tmp_path / "target")
    with pytest.raises(UsageError, match="known are moa, independent, states"):
        make_plan(str(target), str(toy_folder(tmp_path / "toy")), ["cpu-fp32"], None)
