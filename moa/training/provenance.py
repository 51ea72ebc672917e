"""Where a drafter came from, written beside its weights."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch

import moa
from moa.config import TargetFacts


def provenance(
    argv: Sequence[str], target: TargetFacts, *, settings: Mapping[str, Any], data: Mapping[str, Any]
) -> dict[str, Any]:
    """The command, the versions, the machine, the target and the data of a run."""
    return {
        "command": ["moa-train", *argv],
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()}
        | {"moa-edge": moa.__version__}
        | {package: version(package) for package in ("torch", "transformers", "numpy")},
        "hardware": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "target": dataclasses.asdict(target),
        "settings": dict(settings),
        "data": dict(data),
    }
