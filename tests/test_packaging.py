"""What `pip install .` brings: four packages and a light base."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from moa.cli import installed
from moa.version import COMMIT_FILE
from tools.oldest import lower_bounds

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("moa", "export", "edge_client", "cloud_verifier")
SCRATCH = (".*", "build", "dist", "runs", "*.egg-info", "__pycache__")
COMMIT = "0123456789" * 4
HEAVY = {"torch", "transformers", "optimum", "onnx", "onnxscript", "safetensors"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """A wheel of the whole tree, tests and benchmarks beside the packages, as a user's pip would
    build it in a checkout."""
    source = tmp_path_factory.mktemp("source") / "tree"
    out = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*SCRATCH))
    (source / ".git").mkdir()
    (source / ".git/HEAD").write_text(COMMIT)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*command, "--wheel-dir", str(out), str(source)], check=True, timeout=300)
    (built,) = out.glob("*.whl")
    return zipfile.Path(built)


def test_ships_every_file_of_four_packages_and_nothing_else(wheel: zipfile.Path) -> None:
    shipped = {entry.name for entry in wheel.iterdir() if not entry.name.endswith(".dist-info")}
    assert shipped == set(PACKAGES)
    files = {
        p
        for package in PACKAGES
        for p in (ROOT / package).rglob("*")
        if p.is_file() and p.suffix != ".pyc"
    }
    assert {path.relative_to(ROOT).as_posix() for path in files} <= set(wheel.root.namelist())


def test_a_wheel_knows_the_commit_that_it_was_built_from(wheel: zipfile.Path) -> None:
    assert (wheel / "moa" / COMMIT_FILE).read_text() == f"{COMMIT}\n"


def test_metadata_names_the_licence_and_the_commands(wheel: zipfile.Path) -> None:
    (info,) = (entry for entry in wheel.iterdir() if entry.name.endswith(".dist-info"))
    metadata = (info / "METADATA").read_text()
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Python: >=3.11\n" in metadata
    assert (info / "licenses" / "LICENSE").exists()
    scripts = re.findall(r"^([\w-]+) = ", (info / "entry_points.txt").read_text(), re.MULTILINE)
    assert scripts == ["cloud-verifier", "edge-client", "moa-edge", "moa-export", "moa-train"]


def test_base_install_is_light_all_the_way_down() -> None:
    reached: set[str] = set()
    todo = [Requirement(text) for text in PROJECT["dependencies"]]
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in reached or (
            requirement.marker and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        reached.add(name)
        try:
            todo += [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:
            assert name not in {
                canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]
            }, name
    assert reached >= {"numpy", "onnxruntime", "tokenizers"}
    assert reached & HEAVY == set()


def test_every_dependency_is_pinned_within_its_range() -> None:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    pins = {
        canonicalize_name(name): version
        for name, _, version in (line.partition("==") for line in lines)
    }
    groups = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    for texts in groups.values():
        for requirement in map(Requirement, texts):
            name = canonicalize_name(requirement.name)
            if name != "moa-edge":
                assert requirement.specifier.contains(pins[name]), requirement


def test_the_oldest_versions_are_those_that_the_ranges_begin_with() -> None:
    """`make oldest` installs them."""
    oldest = lower_bounds()
    assert {"onnxruntime", "tokenizers", "transformers", "onnx", "optimum"} <= set(oldest)
    requirements = [Requirement(text) for text in PROJECT["dependencies"]]
    assert all(one.specifier.contains(oldest[canonicalize_name(one.name)]) for one in requirements)


def test_no_line_sends_a_user_to_a_package_index_that_does_not_have_it() -> None:
    """Whoever takes the name there could have users install anything: `how_to_install` says the
    checkout."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    files += [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    assert not [
        path.name
        for path in files
        if re.search(r"pip install\s.{0,20}moa-edge", path.read_text("utf-8"))
    ]


@pytest.mark.skipif(os.name == "nt" or shutil.which("make") is None, reason="needs make and a pty")
@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("verb", ["demo", "fix"])
def test_make_lets_pip_show_what_it_does_on_a_terminal_only(
    verb: str, is_terminal: bool, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("python", "edge-client", "ruff"):
        program = tmp_path / "bin" / name
        program.write_text('#!/bin/sh\necho "$@" >> "$0.said"\n')
        program.chmod(0o755)
    ours, theirs = os.openpty()
    subprocess.run(
        ["make", verb, f"VENV={tmp_path}"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=theirs if is_terminal else subprocess.DEVNULL,
        timeout=60,
        check=True,
    )
    os.close(theirs)
    os.close(ours)
    said = (tmp_path / "bin" / "python.said").read_text()
    assert said.startswith("-m pip install ")
    assert ("--quiet" in said) is not is_terminal


def _distributions(extra: str) -> set[str]:
    """The names of what an extra installs, with what its own extras of this project do."""
    found: set[str] = set()
    for line in PROJECT["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            for other in requirement.extras:
                found |= _distributions(other)
        else:
            found.add(canonicalize_name(requirement.name))
    return found


@pytest.mark.parametrize("extra", sorted(set(installed.PACKAGES) - {"gguf"}))
def test_what_a_program_misses_is_what_its_extra_installs(extra: str) -> None:
    """Else the command in the error would not bring it. Several packages have llama.cpp's library."""
    names = {canonicalize_name(name) for name in installed.PACKAGES[extra]}
    assert names <= _distributions(extra)
