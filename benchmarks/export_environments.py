"""Variants on the runtimes they are for, each in its own environment: who ran the nodes, and what is still accepted.

python -m benchmarks.export_environments BUNDLE --target DIR --drafter DIR --environments FOLDER --json OUT.json

Makes `FOLDER/NAME` with `venv` and `pip` where it is missing. QNN runs on the HTP emulation that its package brings,
OpenVINO on the CPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks import export_session
from benchmarks.provenance import write_result
from export.body import BodySpec
from export.embedded import embedded_prompts, embedded_sources
from export.runner import Runner, StepInput, StepOutput, TorchRunner
from export.source import load_source
from export.static_forms import EMBEDDING, StaticShape
from export.static_runner import Feeds, StaticRunner
from export.traces import encode_prompts, make_traces, read_prompts
from export.yardstick import Yardstick
from moa.bundle import Bundle
from moa.errors import MoaError, run_cli
from moa.manifest import Variant
from moa.model.target import Target


@dataclass(frozen=True)
class Environment:
    """A runtime that cannot share an environment with ours."""

    name: str
    packages: tuple[str, ...]
    provider: str


QNN = Environment("qnn", ("onnxruntime==1.31.*", "onnxruntime-qnn", "numpy"), "QNNExecutionProvider")
OPENVINO = Environment("openvino", ("onnxruntime-openvino", "openvino", "numpy"), "OpenVINOExecutionProvider")
RUNTIMES = {"npu-qnn": QNN, "npu-openvino": OPENVINO, "portable": OPENVINO}


class Remote:
    """A session in another environment."""

    def __init__(self, python: Path, model: Path, provider: str) -> None:
        self.placement: dict[str, int] = {}
        command = [str(python), export_session.__file__, str(model), provider]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(self, feeds: Feeds) -> list[Any]:
        """All outputs, in order."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        export_session.write_frame(self._process.stdin, feeds)  # type: ignore[arg-type]
        found = export_session.read_frame(self._process.stdout)  # type: ignore[arg-type]
        if found and "placement" in found:
            self.placement = json.loads(str(found["placement"]))
            found = export_session.read_frame(self._process.stdout)  # type: ignore[arg-type]
        if found is None:
            raise MoaError("the other environment's process ended; its last words are above")
        return list(found.values())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


class RemoteDynamic:
    """A dynamic step graph in another environment."""

    def __init__(self, remote: Remote, spec: BodySpec) -> None:
        self.spec, self._remote = spec, remote

    def step(self, step: StepInput) -> StepOutput:
        """One step."""
        feeds = {name: np.ascontiguousarray(value) for name, value in step.feeds(self.spec).items()}
        logp, tokens, *rows = self._remote.run(feeds)
        return StepOutput(logp[0], tokens[0], [row[0] for row in rows])


def environment(settings: Environment, folder: Path) -> Path:
    """The Python of an environment, made when it is missing."""
    home = folder / settings.name
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *settings.packages], check=True)
        (home / "ready").touch()
    return python


def static_shape(variant: Variant) -> StaticShape:
    """The lengths that a static form was built for."""
    return StaticShape(
        tokens=int(variant.inputs["x"][1]),
        past=int(variant.inputs["past_k_0"][2]),
        records=int(variant.inputs["record_k"][2]),
    )


def runner_of(bundle: Bundle, name: str, remote: Remote, spec: BodySpec) -> Runner:
    """The variant as something that drafts."""
    variant, manifest = bundle.variant(name), bundle.manifest
    if variant.form == "dynamic":
        return RemoteDynamic(remote, spec)
    assert manifest.records is not None
    return StaticRunner(
        remote.run,
        np.load(bundle.path(variant.model).parent / EMBEDDING, mmap_mode="r"),
        spec,
        static_shape(variant),
        rope_theta=manifest.records.rope_theta,
        top_k=manifest.top_k,
        draft_to_target=bundle.draft_to_target(),
    )


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.export_environments", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--target")
    parser.add_argument("--drafter")
    parser.add_argument("--variant", action="append", choices=sorted(RUNTIMES), default=[])
    parser.add_argument("--prompts-file", type=Path, nargs="+", default=[])
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts of the embedded pair")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bundle = Bundle.open(args.bundle)
    target, drafter = (args.target, args.drafter) if args.target else embedded_sources()
    source = load_source(target, drafter)
    model = Target.load(target, slots=16, capacity=1024)
    texts = read_prompts(args.prompts_file) if args.prompts_file else embedded_prompts(args.prompts)[0]
    traces = make_traces(model, source, encode_prompts(model, texts), new_tokens=args.new_tokens)
    yardstick = Yardstick(traces, TorchRunner(source, bundle.manifest.top_k), "held-out prompts")
    results: dict[str, Any] = {}
    for name in args.variant or [name for name in RUNTIMES if name in bundle.manifest.variants]:
        settings = RUNTIMES[name]
        remote = Remote(
            environment(settings, args.environments), bundle.path(bundle.variant(name).model), settings.provider
        )
        agreement = yardstick.judge(runner_of(bundle, name, remote, source.spec))
        remote.close()
        if not remote.placement.get(settings.provider):
            raise MoaError(f"{name}: {settings.provider} ran no node: {remote.placement}")
        results[name] = {"placement": remote.placement, "agreement": msgspec.to_builtins(agreement)}
        print(
            f"{name}: {remote.placement}, acceptance {agreement.acceptance} ({agreement.acceptance_ratio} of fp32)",
            flush=True,
        )
    write_result(args.json, {"variants": results})
    return 0


if __name__ == "__main__":
    sys.exit(run_cli("export_environments", main))
