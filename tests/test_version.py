"""Which version a program says that it runs."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import moa
from moa import version
from moa.version import COMMIT_FILE, commit_of, running_version

COMMIT = "0123456789abcdef" * 2 + "01234567"
OTHER = "f" * 40


@pytest.fixture(autouse=True)
def asked_anew() -> Iterator[None]:
    """Nothing is remembered from one test to the next."""
    running_version.cache_clear()
    yield
    running_version.cache_clear()


def write(folder: Path, **files: str) -> None:
    """Files of these names below a folder; `_` in a name is a slash, `__` a minus."""
    for name, content in files.items():
        path = folder / name.replace("__", "-").replace("_", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.mark.parametrize(
    ("files", "commit"),
    [
        ({"HEAD": "ref: refs/heads/main\n", "refs_heads_main": f"{COMMIT}\n"}, COMMIT),
        (
            {
                "HEAD": "ref: refs/heads/main\n",
                "packed__refs": f"# pack-refs with: peeled\n{OTHER} refs/heads/old\n"
                f"{COMMIT} refs/heads/main\n^{OTHER}\n",
            },
            COMMIT,
        ),
        ({"HEAD": f"{COMMIT}\n"}, COMMIT),
        ({"HEAD": "ref: refs/heads/main\n"}, ""),
        ({"HEAD": "ref: refs/heads/.invalid\n", "reftable_tables.list": "x"}, ""),
        ({"HEAD": "nonsense\n"}, ""),
        ({}, ""),
    ],
    ids=["loose", "packed", "detached", "unborn", "of another kind", "nonsense", "none"],
)
def test_a_commit_is_read_from_gits_own_files(
    files: dict[str, str], commit: str, tmp_path: Path
) -> None:
    write(tmp_path / ".git", **files)
    assert commit_of(tmp_path) == commit


def test_a_worktree_has_a_commit_of_its_own(tmp_path: Path) -> None:
    git = tmp_path / "main/.git"
    write(git, HEAD="ref: refs/heads/main\n", refs_heads_main=OTHER, refs_heads_ops=COMMIT)
    write(git / "worktrees/ops", HEAD="ref: refs/heads/ops\n", commondir="../..\n")
    (tmp_path / "ops").mkdir()
    for place in (git / "worktrees/ops", Path("../main/.git/worktrees/ops")):
        (tmp_path / "ops/.git").write_text(f"gitdir: {place}\n")
        assert commit_of(tmp_path / "ops") == COMMIT


@pytest.mark.skipif(shutil.which("git") is None, reason="asks git")
def test_git_says_the_same_of_this_checkout() -> None:
    root = Path(moa.__file__).parents[1]
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    if said.returncode:
        pytest.skip("this is no checkout of git")
    assert commit_of(root) == said.stdout.strip()
    assert running_version() == f"{moa.__version__}+g{said.stdout[:8]}"


def installed(
    monkeypatch: pytest.MonkeyPatch, package: Path, direct_url: dict[str, Any] | None
) -> None:
    """The package is in this folder, and pip has noted this of where it came from."""
    package.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(version, "__file__", str(package / "version.py"))
    noted = None if direct_url is None else json.dumps(direct_url)
    distribution = SimpleNamespace(read_text=lambda _: noted)
    monkeypatch.setattr("importlib.metadata.distribution", lambda _: distribution)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.1.0")


def test_the_build_or_pip_says_which_commit_is_installed_and_else_it_is_the_release_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages/moa"
    from_a_folder = {"url": "file:///somewhere", "dir_info": {}}
    for noted in (None, from_a_folder):
        running_version.cache_clear()
        installed(monkeypatch, package, noted)
        assert running_version() == "0.1.0"
    running_version.cache_clear()
    installed(monkeypatch, package, {"vcs_info": {"vcs": "git", "commit_id": OTHER}})
    assert running_version() == "0.1.0+gffffffff"
    (package / COMMIT_FILE).write_text(f"{COMMIT}\n")
    assert running_version() == "0.1.0+gffffffff", "what has been said stays so"
    running_version.cache_clear()
    assert running_version() == "0.1.0+g01234567"
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0+source")
    running_version.cache_clear()
    assert running_version() == "0+source.g01234567"
