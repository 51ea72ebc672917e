"""What a target takes is known before it is loaded; what does not fit is refused before it swaps."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moa.errors import UsageError
from moa.process import memory
from moa.target.contract import LoadOptions
from moa.target.loading import load_model
from moa.target.memory_plan import DrafterMemory, plan_memory
from testing.tiny import save_tiny, tiny, tiny_tokenizer

OPTIONS = LoadOptions(device="cpu", dtype="float32", slots=8, capacity=512, kv_tokens=4096)
PER_TOKEN = 2 * 4 * 2 * 16 * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny("llama", tmp_path_factory.mktemp("target")))


def with_free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr("moa.target.memory_plan.available_bytes", lambda: size)


def test_sizes_are_those_of_the_files(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, 20 * 10**9)
    plan = plan_memory(folder, OPTIONS)
    assert plan is not None
    numbers = sum(weight.numel() for weight in tiny("llama").parameters())
    assert plan.weights == 4 * numbers
    assert plan.head == 4 * 128 * 64
    assert (plan.kv_bytes_per_token, plan.kv_tokens) == (PER_TOKEN, 4096)
    assert plan.cut == ""
    half = plan_memory(folder, dataclasses.replace(OPTIONS, dtype="bfloat16"))
    assert half is not None
    assert half.weights == plan.weights // 2
    assert "takes 0.9 GB: weights 0.0 GB" in str(plan)


def test_a_head_that_is_stored_beside_the_embedding_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library makes the two one matrix: the copy is read by nobody."""
    with_free(monkeypatch, 20 * 10**9)
    tied = save_tiny("llama", tmp_path / "tied", tie_word_embeddings=True)
    wanted = plan_memory(str(tied), OPTIONS)
    assert wanted is not None
    weights = load_file(tied / "model.safetensors")
    assert "lm_head.weight" not in weights
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tied / "model.safetensors", {"format": "pt"})
    repeated = plan_memory(str(tied), OPTIONS)
    assert repeated == wanted


def test_the_cache_s_limit_follows_free_memory_and_nothing_is_loaded_that_would_swap(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = dataclasses.replace(OPTIONS, slots=100_000, kv_tokens=10**9)
    with_free(monkeypatch, 1_200_000_000)
    plan = plan_memory(folder, many)
    assert plan is not None
    assert 4096 < plan.kv_tokens < 10**9
    assert plan.cut.endswith(f" and the free memory holds {plan.kv_tokens:,}")
    assert plan.at_start + plan.kv_limit <= 0.9 * 1_200_000_000
    with_free(monkeypatch, 1_000_000_000)
    with pytest.raises(
        UsageError, match=r"needs 0\.9 GB of memory here .* of 1\.0 GB free it may take 0\.9 GB"
    ) as no:
        plan_memory(folder, many)
    assert no.value.hint == "--dtype bfloat16 halves it"
    with_free(monkeypatch, 0)  # a system that does not say
    assert (plan := plan_memory(folder, many)) is not None
    assert plan.kv_tokens == 100_000 * 512


def test_a_drafter_beside_the_target_takes_its_part(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not counted: a sibling whose cache is as large as the target's took twice the limit."""
    many = dataclasses.replace(OPTIONS, slots=100_000, kv_tokens=10**9)
    with_free(monkeypatch, 1_200_000_000)
    alone = plan_memory(folder, many)
    drafter = DrafterMemory(at_start=90_000_000, per_token=2 * PER_TOKEN)
    beside = plan_memory(folder, many, drafter)
    assert alone is not None
    assert beside is not None
    assert beside.at_start == alone.at_start + 90_000_000
    assert beside.kv_limit == 3 * PER_TOKEN * beside.kv_tokens
    usable = 0.9 * 1_200_000_000
    assert usable - 3 * PER_TOKEN < beside.at_start + beside.kv_limit <= usable
    assert "drafter 0.1 GB" in str(beside)
    assert "drafter" not in str(alone)
    with pytest.raises(UsageError, match=r"drafter 0\.3 GB, libraries"):
        plan_memory(folder, many, dataclasses.replace(drafter, at_start=300_000_000))


_LOADING = """
import sys, threading
import torch
from moa.target.contract import LoadOptions
from moa.target.registry import open_target

def own_bytes():
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon:"))

def watch():
    global most
    while not over.wait(0.001):
        most = max(most, own_bytes())

options = LoadOptions(device="cpu", dtype="float32", slots=2, capacity=64, kv_tokens=128)
warm = open_target(sys.argv[1], options)
_ = warm._head.wide
over, most, before = threading.Event(), 0, own_bytes()
watching = threading.Thread(target=watch)
watching.start()
target = open_target(sys.argv[2], options)
_ = target._head.wide
over.set()
watching.join()
print(max(most, own_bytes()) - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what the process's own memory is")
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_loading_takes_no_more_of_its_own_than_was_planned(
    folder: str, stored: torch.dtype, tmp_path: Path
) -> None:
    """A second copy of the weights while they are loaded would be twice the plan. The files' own
    pages, which the system takes back when it needs them, are not counted."""
    wide = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 16}
    model = tiny("qwen2", **wide).to(stored)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    plan = plan_memory(str(tmp_path), OPTIONS)
    assert plan is not None
    assert plan.weights > 140_000_000
    command = [sys.executable, "-c", _LOADING, folder, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    # Beside the weights 50 MB are kernels and the heap, which the plan counts among the libraries.
    assert int(told.stdout) < 1.6 * (plan.weights + plan.head)


def test_a_head_that_is_the_embedding_once_more_is_kept_once(tmp_path: Path) -> None:
    model = tiny("qwen2")
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded: Any = load_model(tmp_path)
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    assert not loaded.facts.tie_embeddings, "the identity is that of the files"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 2000 kB\n"}, 2048000),
        (
            {
                "/proc/meminfo": "MemAvailable: 2000 kB\n",
                "/sys/fs/cgroup/memory.max": "1000000\n",
                "/sys/fs/cgroup/memory.current": "700000\n",
                "/sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 100000\n",
            },
            400000,
        ),
        (
            {"/proc/meminfo": "MemAvailable: 2000 kB\n", "/sys/fs/cgroup/memory.max": "max\n"},
            2048000,
        ),
        (  # a service of systemd, in a slice with a limit of its own
            {
                "/proc/meminfo": "MemAvailable: 2000 kB\n",
                "/proc/self/cgroup": "0::/a.slice/b.service\n",
                "/sys/fs/cgroup/a.slice/memory.max": "900000\n",
                "/sys/fs/cgroup/a.slice/memory.current": "800000\n",
                "/sys/fs/cgroup/a.slice/memory.stat": "inactive_file 100000\n",
                "/sys/fs/cgroup/a.slice/b.service/memory.max": "1000000\n",
                "/sys/fs/cgroup/a.slice/b.service/memory.current": "700000\n",
                "/sys/fs/cgroup/a.slice/b.service/memory.stat": "inactive_file 0\n",
            },
            200000,
        ),
        (  # a container of the first version, whose group has its outer name
            {
                "/proc/meminfo": "MemAvailable: 2000 kB\n",
                "/proc/self/cgroup": "4:cpu,memory:/docker/1f\n0::/\n",
                "/sys/fs/cgroup/memory/memory.limit_in_bytes": "1000000\n",
                "/sys/fs/cgroup/memory/memory.usage_in_bytes": "700000\n",
                "/sys/fs/cgroup/memory/memory.stat": "total_inactive_file 50000\n",
            },
            350000,
        ),
        ({}, 0),
    ],
)
def test_free_memory_is_the_machine_s_and_the_container_s(
    files: dict[str, str], free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: str, **_: Any) -> io.StringIO:
        if path not in files:
            raise FileNotFoundError(path)
        return io.StringIO(files[path])

    monkeypatch.setattr("builtins.open", opened)
    assert memory.available_bytes() == free
