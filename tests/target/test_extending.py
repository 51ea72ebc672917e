"""docs/extending.md, followed: a toy target is registered by the page's own words, served, measured,
and gives its own text."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from cloud_verifier.app import Verifier
from cloud_verifier.check import measure
from cloud_verifier.model import load
from cloud_verifier.settings import Settings
from moa import demo
from moa.errors import UsageError
from moa.sampling import SamplingSettings, choose
from moa.target import registry
from moa.target.registry import Source
from moa.wire import Limits
from moa.wire.events import Advanced
from moa.wire.messages import Sampling
from testing import client as wire_client
from tests.target.subjects import SUBJECTS
from tests.target.toy import ToyModel
from tests.verifier import kit

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
LIMITS = Limits(max_context_tokens=160, max_prompt_tokens=100, max_tree_nodes=16)


def settings(folder: Path, **more: str) -> Settings:
    file = folder / "small.toy"
    file.write_text("7\n")
    return Settings(target=str(file), port=0, slots=2, limits=LIMITS, **more)


def plain(ids: list[int], count: int, sampling: SamplingSettings) -> list[int]:
    """The toy's own text."""
    model = ToyModel(7)
    log = list(ids)
    for _ in range(count):
        log.append(choose(model.plainly(log), sampling, len(log), log))
    return log[len(ids) :]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of the page, in the registry."""
    found = re.search(r"^ +Source\(\n.*?^ +\)$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, "the page shows the line"
    source: Source = eval(found[0].strip(), {"Source": Source})
    monkeypatch.setattr(registry, "SOURCES", [source, *registry.SOURCES])


def test_the_page_names_the_suite_that_holds_the_toy_to_the_contract() -> None:
    assert "tests/target/subjects.py" in PAGE.read_text()
    assert "toy" in [subject.name for subject in SUBJECTS]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_it_is_served_and_its_text_is_its_own(tmp_path: Path, temperature: float) -> None:
    served = load(settings(tmp_path))
    ids = kit.prompt(3, 20)
    truth = plain(ids, 24, SamplingSettings(temperature=temperature, seed=5))
    rng = random.Random(1)
    verifier = Verifier(served, settings(tmp_path))
    async with verifier.open(), wire_client.client(verifier.transport.url) as edge:
        session = await edge.start(
            ids,
            max_new_tokens=24,
            ignore_eos=True,
            sampling=Sampling(temperature=temperature, seed=5),
        )
        for _ in range(3):
            rest = truth[len(session.log) - len(ids) :]
            await edge.advance(session, *kit.random_draft(rng, rest, session.log[-1], 8))
        await edge.send(session.stream())
        while not session.finish:
            assert isinstance(await edge.event(session), Advanced)
        assert session.log[len(ids) :] == truth


def test_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cloud_verifier.check._SECONDS", 0.0)  # each size runs three times
    figures = measure(settings(tmp_path))
    assert (figures["decoder"], figures["records"], figures["drafts"]) == ("toy", False, "none")
    assert figures["kv_tokens"] == 2 * 176
    assert all(tree["ms"] > 0 for tree in figures["trees"])


def test_a_drafter_that_reads_states_is_refused_with_a_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a target of toy gives no states"):
        load(settings(tmp_path, drafter=str(demo.paths().drafter)))


def test_what_it_does_not_know_is_refused_with_a_line(tmp_path: Path) -> None:
    for option, value in (("quantize", "int8"), ("dtype", "bfloat16"), ("kv_type", "q8_0")):
        flag = "--" + option.replace("_", "-")
        with pytest.raises(UsageError, match=f"{flag} does not go with .*small.toy"):
            load(settings(tmp_path, **{option: value}))
    (tmp_path / "other.toy").write_text("seven")
    with pytest.raises(UsageError, match="it must hold one number"):
        load(Settings(target=str(tmp_path / "other.toy"), port=0))
