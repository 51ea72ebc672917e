"""Runtimes that need their own environment: their installation, and sessions in them."""

from __future__ import annotations

import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from benchmarks.export import session
from export.body import BodySpec
from export.runner import StepInput, StepOutput
from export.static_runner import Feeds
from moa.errors import MoaError


class NotHere(MoaError):
    """This machine has no such runtime, and it could not be installed."""


@dataclass(frozen=True)
class Runtime:
    """A runtime's packages, and the provider that must run its nodes."""

    name: str
    packages: tuple[str, ...]
    provider: str


QNN = Runtime("qnn", ("onnxruntime==1.31.*", "onnxruntime-qnn==2.*", "numpy"), "QNNExecutionProvider")
OPENVINO = Runtime("openvino", ("onnxruntime-openvino", "openvino", "numpy"), "OpenVINOExecutionProvider")
WEB = Runtime("web", ("onnxruntime-web@1",), "")
"""Its only provider is wasm, so nothing can fall back."""


def command_of(runtime: Runtime, folder: Path, model: Path) -> list[str]:
    """The command that serves `model`; installs the runtime in `folder` first, where it is missing."""
    home = (folder / runtime.name).absolute()
    here = Path(session.__file__)
    if runtime is WEB:
        _install(home, ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(home)], runtime)
        return ["node", str(here.with_suffix(".mjs")), str(model), str(home)]
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        venv.create(home, with_pip=True, clear=True)
    _install(home, [str(python), "-m", "pip", "install", "--quiet"], runtime)
    return [str(python), str(here), str(model), runtime.provider]


def _install(home: Path, installer: list[str], runtime: Runtime) -> None:
    if (home / "ready").exists():
        return
    home.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run([*installer, *runtime.packages], check=True, stdout=sys.stderr)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotHere(f"{' '.join(runtime.packages)} could not be installed: {error}") from None
    (home / "ready").touch()


class Remote:
    """A session in another environment."""

    def __init__(self, runtime: Runtime, folder: Path, model: Path) -> None:
        self.placement: dict[str, int] = {}
        command = command_of(runtime, folder, model)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        head, _ = self._read()
        self.runtime: str = head["runtime"]

    def run(self, feeds: Feeds) -> list[Any]:
        """All outputs, in order."""
        session.write_frame(cast(IO[bytes], self._process.stdin), feeds)  # type: ignore[arg-type]
        head, outputs = self._read()
        self.placement |= head.get("placement", {})
        return list(outputs.values())

    def close(self) -> None:
        """End the process."""
        with self._process:  # closes both pipes and waits
            pass

    def _read(self) -> tuple[dict[str, Any], dict[str, Any]]:
        found = session.read_frame(cast(IO[bytes], self._process.stdout))  # type: ignore[arg-type]
        if found is None:
            self.close()
            raise MoaError("the other environment's process ended; its last words are above")
        return found


class RemoteDynamic:
    """A dynamic step graph in another environment."""

    def __init__(self, remote: Remote, spec: BodySpec) -> None:
        self.spec, self._remote = spec, remote

    def step(self, step: StepInput) -> StepOutput:
        """One step."""
        logp, tokens, *rest = self._remote.run(step.feeds(self.spec))
        return StepOutput.of(self.spec, logp[0], tokens[0], [value[0] for value in rest])
