"""No word to third parties: ONNX Runtime's telemetry is off before its library is loaded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("moa", "edge_client", "cloud_verifier", "export", "benchmarks", "demo", "tools")
LOADS = (
    "from edge_client.device import Device; Device.load()",
    "from export.runner import open_session; from moa import demo;"
    " open_session(next(demo.paths().bundle.rglob('model.onnx')))",
)


def environment(home: Path) -> dict[str, str]:
    """That of a user with an empty home who wants the telemetry."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    return kept | {"HOME": str(home), "ORT_DISABLE_TELEMETRY": "0", "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_that_loads_the_library_imports_ours_first(package: str) -> None:
    """A package's `__init__` runs before its modules, and `moa/__init__.py` sets the variable."""
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / package).rglob("*.py")}
    using = [
        path
        for path, text in texts.items()
        if re.search(r"^\s*(import|from) (onnxruntime|optimum)", text, re.M)
    ]
    ours = re.search(
        r"^(import|from) (moa|edge_client)", texts[ROOT / package / "__init__.py"], re.M
    )
    assert not using or ours or package == "moa", (
        f"{using[0]} may load the library with its telemetry"
    )


def test_no_file_is_written_in_the_user_s_home(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", "; ".join(LOADS)], env=environment(tmp_path), check=True, timeout=300
    )
    assert not list(tmp_path.rglob("*"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace here")
def test_no_name_is_looked_up(tmp_path: Path) -> None:
    """With its telemetry the library looks a host up 8 s after it was loaded, so the process lives
    for 15."""
    log = tmp_path / "calls"
    home = tmp_path / "home"
    home.mkdir()
    traced = [
        "strace",
        "-f",
        "-qq",
        "-s",
        "99",
        "-e",
        "trace=connect,sendto,sendmmsg",
        "-o",
        str(log),
        sys.executable,
    ]
    child = f"{LOADS[0]}; import time; time.sleep(15)"
    run = subprocess.run(
        [*traced, "-c", child], env=environment(home), capture_output=True, text=True, timeout=240
    )
    if "ptrace" in run.stderr.lower():
        pytest.skip("processes may not be traced here")
    assert run.returncode == 0, run.stderr
    assert not re.findall(r".*(?:AF_INET|microsoft).*", log.read_text())
