"""Provenance of a result: hardware, commit, command, versions. Written into every JSON result."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from moa.process.files import write_whole

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("moa-edge", "torch", "transformers", "numpy", "safetensors")


def origin() -> dict[str, Any]:
    """Everything a reader needs to judge or repeat a measurement."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "commit": commit(),
        "command": shlex.join(["python", *map(_relative, sys.orig_argv[1:])]),
        "versions": {"python": platform.python_version()}
        | {p: v for p in _PACKAGES if (v := _version(p))},
    }


def hardware() -> dict[str, Any]:
    """Processor, cores, threads in use, memory, load at the start, GPU.

    Machines of the same name can differ in their vector instructions, and then several times in
    speed.
    """
    found: dict[str, Any] = {
        "processor": f"{_processor()} ({torch.backends.cpu.get_cpu_capability()})",
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(psutil.getloadavg()[0], 2),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def commit() -> str:
    """The commit that ran, marked when the tree had changes on top of it."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return f"{head}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def write_result(out: Path | None, result: Mapping[str, Any], tables: str = "") -> None:
    """Write OUT.json, and with tables OUT.md with where they come from, each whole or not at all."""
    if out is None:
        return
    result = result if "provenance" in result else {"provenance": origin(), **result}
    _write(out.with_suffix(".json"), json.dumps(_without_places(result), indent=1))
    if tables:
        _write(out.with_suffix(".md"), f"{tables.strip()}\n\n{line(result)}")


def line(result: Mapping[str, Any]) -> str:
    """Command, commit, day and hardware, as they stand below tables."""
    found = result["provenance"]
    hardware = found["hardware"]
    where = f"{hardware.get('gpu') or hardware['processor']}, {hardware['cores']} cores, {hardware['threads']} threads"
    return f"`{found['command']}`, commit {found['commit']}, {found['when'][:10]}; {where}."


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, f"{text}\n".encode())


def _without_places(value: Any) -> Any:
    """A result without the absolute paths of this machine, which options may have brought into it."""
    if isinstance(value, Mapping):
        return {name: _without_places(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_places(one) for one in value]
    return _relative(value) if isinstance(value, str) else value


def _relative(text: str) -> str:
    """An absolute path, or those of a `--flag=PATH` or `NAME=PATH=PATH`: inside the repository
    relative to it, outside by name; other text as it is."""
    is_prose = any(map(str.isspace, text))  # a result may quote a text that begins with a slash
    if "=" in text and not is_prose:
        return "=".join(map(_relative, text.split("=")))
    path = Path(text)
    if path.is_relative_to(_ROOT):
        return str(path.relative_to(_ROOT))
    return path.name if path.is_absolute() and path.name and not is_prose else text


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(_ROOT), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    ).stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
