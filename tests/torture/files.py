"""Checkpoints and GGUF files that somebody has damaged on purpose: each is loaded or refused in one
line, within seconds and without much memory.

Every case is a child with limits, forked off a process that has imported what it needs and runs
nothing else: a crash or a loop inside a library is found, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import shutil
import signal
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import new_attention
from moa.drafters.registry import find
from moa.drafters.states.config import StateDrafterConfig
from moa.drafters.states.model import StateDrafter
from moa.errors import MoaError
from moa.model.borrowed import SharedWeights
from moa.model.checkpoint import save_drafter
from moa.target.contract import LoadOptions
from moa.target.gguf_folder import folder_of
from moa.target.loading import load_model
from testing import gguf_tiny
from testing.tiny import save_tiny, tiny
from tests.model import published
from tests.torture.tally import Found, Tally

_MEMORY = 2**30
"""Address space of a case beyond what is there at its start; the files have less than a megabyte."""
_CPU_SECONDS = 20
_WALL_SECONDS = 300.0
_LARGEST_SAID = 2**16
_ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    3,
    2**31,
    2**63,
    10**30,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 5000,
    "../../etc/passwd",
    [],
    {},
    [[]],
    [0, 2**40],
    {"a": {"b": []}},
)
_ODD_NUMBERS = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)


class Kind(NamedTuple):
    """Files of a kind, and what reads them."""

    folder: Path
    load: Callable[[Path], object]


# ---- ways of damage


def _damaged(folder: Path, rng: random.Random) -> str:
    """Damage a file of the folder once or twice; how."""
    files = [file for file in sorted(folder.rglob("*")) if file.suffix in _WAYS]
    said = []
    for _ in range(rng.choice([1, 1, 2])):
        file = rng.choice(files)
        said.append(f"{file.name}: {_WAYS[file.suffix](file, rng)}")
    return "; ".join(said)


def _damaged_json(file: Path, rng: random.Random) -> str:
    if rng.random() < 0.1:
        return _damaged_bytes(file, rng, most=2**16)
    try:
        content = json.loads(file.read_text())
    except ValueError:
        return "again"
    changed, how = _changed(content, rng)
    file.write_text(json.dumps(changed))
    return how


def _changed(content: Any, rng: random.Random) -> tuple[Any, str]:
    """A value somewhere inside replaced, removed or added."""
    if not isinstance(content, dict | list) or not content or rng.random() < 0.02:
        odd = rng.choice(_ODD)
        return odd, f"= {str(odd)[:40]}"
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    key = rng.choice(keys)
    match rng.randrange(12):
        case 0:
            del content[key]
            return content, f"{key} removed"
        case 1 if isinstance(content, dict):
            other = rng.choice(keys)
            content[key] = content[other]
            return content, f"{key} = {other}"
        case 2 if isinstance(content, dict):
            name = rng.choice(
                ["auto_map", "model_type", "quantization_config", "rope_scaling", "_"]
            )
            content[name] = rng.choice([*_ODD, {"AutoConfig": "x.Y", "rope_type": "yarn"}])
            return content, f"{name} = {str(content[name])[:40]}"
        case _:
            content[key], how = _changed(content[key], rng)
            return content, f"{key} {how}"


def _damaged_tensors(file: Path, rng: random.Random) -> str:
    """Mostly the header, so that it still is JSON."""
    content = file.read_bytes()
    if rng.random() < 0.3 or len(content) < 8:
        return _damaged_bytes(file, rng, most=4096)
    (size,) = struct.unpack("<Q", content[:8])
    try:
        header, how = _changed(json.loads(content[8 : 8 + size]), rng)
    except ValueError:
        return "again"
    head = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + content[8 + size :])
    return how


def _damaged_bytes(file: Path, rng: random.Random, most: int) -> str:
    """Bytes within the first ones changed, a number put in, or the rest cut off."""
    content = bytearray(file.read_bytes())
    at = rng.randrange(max(1, min(most, len(content))))
    match rng.randrange(4):
        case 0:
            del content[at:]
            how = f"cut at {at}"
        case 1:
            content[at : at + 1] = bytes([rng.randrange(256)])
            how = f"a byte at {at}"
        case 2:
            number = rng.choice(_ODD_NUMBERS)
            content[at : at + 8] = struct.pack("<Q", number)
            how = f"{number} at {at}"
        case _:
            number = rng.choice(_ODD_NUMBERS) & 0xFFFFFFFF
            content[at : at + 4] = struct.pack("<I", number)
            how = f"{number} at {at}, 4 bytes"
    file.write_bytes(content)
    return how


_WAYS: dict[str, Callable[[Path, random.Random], str]] = {
    ".json": _damaged_json,
    ".safetensors": _damaged_tensors,
    ".gguf": lambda file, rng: _damaged_bytes(file, rng, most=8192),
}


# ---- kinds


def kinds(folder: Path) -> dict[str, Kind]:
    """Whole files of each kind that can be read here."""
    model = tiny("llama")
    target = save_tiny("llama", folder / "target")
    loaded = load_model(target)
    found = {"target": Kind(target, load_model)}

    def drafter(place: Path) -> object:
        return find(place).load(loaded.model, loaded.facts)

    for layout in ("specforge-3.1", "speculators"):
        published.write(folder / layout, layout, model, list(range(3, 43)))
        found[f"eagle3, {layout}"] = Kind(folder / layout, drafter)
    states = StateDrafter.new(
        StateDrafterConfig.for_target(loaded.facts), SharedWeights.of(loaded.model)
    )
    save_drafter(states, folder / "states")
    found["states"] = Kind(folder / "states", drafter)
    attention = new_attention(AttentionConfig.for_target(loaded.facts), loaded.model)
    save_drafter(attention, folder / "attention")
    found["attention"] = Kind(folder / "attention", drafter)
    try:
        from moa.llama.target import LlamaTarget
    except ImportError:
        return found
    (folder / "gguf").mkdir()
    gguf_tiny.save(model, folder / "gguf" / "model.gguf")

    def target_of_file(place: Path) -> object:
        return LlamaTarget.open(str(place / "model.gguf"), LoadOptions(slots=2, capacity=64))

    def folder_of_file(place: Path) -> object:
        return load_model(folder_of(place / "model.gguf", weights=True))

    found["gguf, llama.cpp"] = Kind(folder / "gguf", target_of_file)
    found["gguf, converted"] = Kind(folder / "gguf", folder_of_file)
    return found


# ---- a case


class Outcome(NamedTuple):
    """How a case went."""

    what: str
    """loaded, refused, or what it must not be."""
    seconds: float


def tried(kind: Kind, folder: Path) -> Outcome:
    """Load what is in the folder in a child with limits."""
    read, write = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            os.write(write, _in_child(kind, folder).encode()[:_LARGEST_SAID])
        finally:
            os._exit(0)
    os.close(write)
    try:
        ready, _, _ = select.select([read], [], [], _WALL_SECONDS)
        if not ready:
            os.kill(pid, signal.SIGKILL)
        said = os.read(read, _LARGEST_SAID).decode()
    finally:
        os.close(read)
    _, status = os.waitpid(pid, 0)
    if not said:
        said = f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "silent"
    return Outcome(said, time.monotonic() - began)


def _in_child(kind: Kind, folder: Path) -> str:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + _CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)  # llama.cpp talks
    os.dup2(nothing, 2)
    try:
        kind.load(folder)
    except MoaError as error:
        line = error.line()
        return "refused" if line and "\n" not in line else f"not one line: {line[:200]!r}"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "loaded"


@contextmanager
def all_kinds() -> Iterator[dict[str, Kind]]:
    """Whole files of each kind, in a folder that is gone afterwards."""
    torch.set_num_threads(1)  # others would not survive the fork
    with tempfile.TemporaryDirectory() as place:
        yield kinds(Path(place))


def damage(kinds: dict[str, Kind], count: int, seed: int) -> tuple[Counter[str], list[str], float]:
    """So many damaged files of each kind: counts, what was wrong, and the longest time."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    longest = 0.0
    for name, kind in kinds.items():
        for number in range(count):
            rng = random.Random(f"{seed} {name} {number}")
            with tempfile.TemporaryDirectory() as place:
                folder = shutil.copytree(kind.folder, Path(place) / "files")
                how = _damaged(folder, rng)
                os.environ["XDG_CACHE_HOME"] = f"{place}/cache"
                outcome = tried(kind, folder)
            longest = max(longest, outcome.seconds)
            counts["files"] += 1
            if outcome.what in ("loaded", "refused"):
                counts[f"{name}: {outcome.what}"] += 1
            else:
                counts[f"{name}: wrong"] += 1
                wrong.append(f"{name}, case {number}, {how}: {outcome.what}")
    return counts, wrong, longest


async def files(options: argparse.Namespace) -> Found:
    """As many damaged files of each kind as the options say."""
    tally = Tally(options, "files", damaged=25)
    with all_kinds() as every:
        for seed, batch in tally.batches():
            counts, wrong, longest = damage(every, batch["damaged"], seed)
            tally.add(seed, {"damaged": batch["damaged"], **counts}, wrong, seconds=longest)
    return tally.found
