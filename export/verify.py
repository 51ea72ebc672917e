"""Checks a bundle on this machine: hashes, golden vectors with its ONNX Runtime, the execution provider of each node,
and a draft with the client's own code."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import onnxruntime

from export.runner import open_session
from moa.bundle import Bundle
from moa.errors import BundleError, MoaError, UsageError

EXACT, QUANTIZED = 1e-3, 0.5
"""Allowed difference of a best token's log-probability: eight-bit kernels differ between processors, float32 ones
hardly."""
_TRIAL_SECONDS = 300


@dataclass(frozen=True)
class VariantCheck:
    """The result for one variant."""

    variant: str
    difference: float
    placement: dict[str, int]
    """Nodes by the execution provider that runs them."""


def verify(
    bundle: Bundle, variants: list[str] | None = None, *, provider: str = "CPUExecutionProvider"
) -> list[VariantCheck]:
    """Check contents, then run every golden case of every dynamic variant; raises at the first failure."""
    names = variants or list(bundle.manifest.variants)
    bundle.verify(names)
    available = onnxruntime.get_available_providers()
    if provider not in available:
        raise UsageError(f"this ONNX Runtime has no {provider}", hint=f"it has {', '.join(available)}")
    dynamic = [name for name in names if bundle.variant(name).form == "dynamic"]
    for name in dynamic:
        draft_with_client(bundle, name)
    return [_run(bundle, name, provider) for name in dynamic]


def draft_with_client(bundle: Bundle, name: str) -> None:
    """Draft with a variant through the client's own code, in its own process: export and client import only `moa`, not
    each other."""
    command = [sys.executable, "-m", "edge_client.tools.trial", str(bundle.folder), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_SECONDS, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise BundleError(f"the client cannot draft with {name} of {bundle.folder}: {said[-1]}")


def _run(bundle: Bundle, name: str, provider: str) -> VariantCheck:
    variant = bundle.variant(name)
    bundle.check_runtime(name, onnxruntime.__version__)
    model = bundle.path(variant.model)
    placement = node_placement(model, bundle, provider)
    if provider != "CPUExecutionProvider" and not placement.get(provider):
        raise BundleError(
            f"{provider} runs none of {name}'s {sum(placement.values())} nodes: all fell back to {', '.join(placement)}"
        )
    session = open_session(model, provider=provider)
    worst = 0.0
    for case in bundle.golden():
        logp, tokens = session.run(["top_logp", "top_tokens"], case.inputs)
        worst = max(worst, case.difference(name, logp, tokens))
    limit = EXACT if variant.precision == "fp32" else QUANTIZED
    if not worst <= limit:
        raise MoaError(f"{name} answers otherwise here than where it was built: {worst:.3g}, allowed {limit:g}")
    return VariantCheck(name, worst, placement)


def node_placement(model: Path, bundle: Bundle, provider: str) -> dict[str, int]:
    """How many nodes each execution provider ran, from a profile of one step: `get_providers()` does not say."""
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(model, provider=provider, profile=Path(folder) / "profile")
        session.run(["top_logp"], bundle.golden()[0].inputs)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    nodes = {
        event["name"]: event["args"]["provider"]
        for event in events
        if event.get("cat") == "Node" and "provider" in event["args"]
    }
    return dict(Counter(nodes.values()))
