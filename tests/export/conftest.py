"""One tiny random pair and one bundle of it, made once: exporting takes seconds."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from export.build import BuildSettings, build
from export.source import Source, load_source
from moa.bundle import Bundle
from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import new_attention
from moa.model.checkpoint import save_drafter
from moa.target.loading import load_model
from testing.tiny import save_tiny

PROMPTS = ("hello world", "1+1=", "abc abc abc")


def saturates() -> bool:
    """Whether 8-bit products of the default recipe overflow here: on an x86 processor without
    instructions for them."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "vnni" not in (text := cpuinfo.read_text()) and "asimd" not in text


INT8_CPU = "avx2" if saturates() else "avx512_vnni"
"""The recipe of eight bits that is right for this processor."""


@pytest.fixture(scope="session", autouse=True)
def equal_modules_are_exported_once() -> Iterator[None]:
    """Torch takes 4 s for each export, and most tests differ in what is done with the graph."""
    export = torch.onnx.export
    made = {}

    def remembered(module: nn.Module, args: tuple[torch.Tensor, ...], **how: Any) -> Any:
        parts = str([vars(part) for part in module.modules()])
        weights = [value.numpy().tobytes() for value in module.state_dict().values()]
        key = parts, *weights, str([(one.shape, one.dtype) for one in args]), str(how)
        if key not in made:
            made[key] = export(
                copy.deepcopy(module), args, **how
            )  # of weights that no test changes
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", remembered)
        yield


@dataclass(frozen=True)
class Pair:
    """Folders of a target and its drafter."""

    target: Path
    drafter: Path

    def source(self) -> Source:
        return load_source(str(self.target), str(self.drafter))


def make_pair(
    folder: Path, family: str = "llama", shape: Mapping[str, Any] | None = None, **overrides: object
) -> Pair:
    """A random target and a random drafter of this shape for it."""
    target = save_tiny(family, folder / "target", **overrides)
    loaded = load_model(target)
    torch.manual_seed(3)
    drafter = new_attention(AttentionConfig.for_target(loaded.facts, **shape or {}), loaded.model)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(
                4.0
            )  # large enough that a wrong path through the graph shows in the logits
    save_drafter(drafter, folder / "drafter")
    return Pair(target, folder / "drafter")


def settings_for(pair: Pair, out: Path, **changes: Any) -> BuildSettings:
    """Settings of a build that measures no times."""
    given = {
        "target": str(pair.target),
        "drafter": str(pair.drafter),
        "out": out,
        "time_steps": False,
    }
    return BuildSettings(**(given | changes))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def tied_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="session")
def bundle(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Calibrated, with three variants."""
    return build(
        settings_for(
            pair, tmp_path_factory.mktemp("out") / "bundle", prompts=PROMPTS, new_tokens=10
        )
    )
