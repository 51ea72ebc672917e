"""Checks of bundle, drafter, link and verifier, each with what to do about a problem."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import numpy as np
import onnxruntime

from edge_client.client import EdgeClient
from edge_client.device import Device, embedded_bundle
from edge_client.settings import ClientSettings
from edge_client.tools.trial import try_out
from moa.bundle import Bundle
from moa.errors import MoaError
from moa.graph.drafter import OnnxDrafter
from moa.graph.step import StepGraph, default_threads
from moa.process.memory import resident_bytes
from moa.safe_text import safe_line
from moa.sampling import SamplingSettings
from moa.tree import TreeShape

Outcome = Literal["ok", "warning", "failed"]
_START_SECONDS = 2.0
_GOLDEN_TOLERANCE = 0.5
"""Quantized kernels differ a little between processors; a wrong graph differs much more."""


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    state: Outcome
    finding: str
    advice: str = ""


async def examine(settings: ClientSettings) -> AsyncIterator[Check]:
    """All possible checks, in the order of their dependencies."""
    try:
        bundle = Bundle.open(settings.bundle or embedded_bundle())
        size = bundle.verify()
        yield Check("bundle", "ok", f"{bundle.folder}: {size / 1e6:.1f} MB, contents as its manifest says")
    except MoaError as error:
        yield Check("bundle", "failed", str(error), error.hint)
        return
    yield Check(
        "runtime", "ok", f"ONNX Runtime {onnxruntime.__version__}, {', '.join(onnxruntime.get_available_providers())}"
    )
    started = time.perf_counter()
    try:
        device = Device.of(settings)
    except MoaError as error:
        yield Check("drafter", "failed", str(error), error.hint)
        return
    loaded = time.perf_counter() - started
    try_out(device.new_drafter())
    first = time.perf_counter() - started
    state: Outcome = "ok" if first < _START_SECONDS else "warning"
    memory = f"{resident_bytes() / 1e6:.0f} MB resident"
    times = f"loaded in {1000 * loaded:.0f} ms, first drafts after {1000 * first:.0f} ms"
    yield Check(
        "drafter",
        state,
        f"variant {device.variant} {times}, {memory}",
        "a smaller variant, or a faster disk",
    )
    yield _golden(bundle, device)
    for check in _speed(bundle, device, settings):
        yield check
    if settings.verifier:
        async for check in _verifier(settings, device):
            yield check
    else:
        yield Check(
            "verifier",
            "warning",
            "none given: text will be provisional",
            "pass --verifier ADDRESS, or --verifier local",
        )


def _graph(device: Device) -> StepGraph | None:
    drafter = device.new_drafter()
    return drafter.graph if isinstance(drafter, OnnxDrafter) else None


def _golden(bundle: Bundle, device: Device) -> Check:
    graph = _graph(device)
    try:
        cases = [case for case in bundle.golden() if device.variant in case.expected] if graph is not None else []
        if not cases or graph is None:
            return Check("arithmetic", "warning", "the bundle has no expected results for this variant")
        worst = 0.0
        for case in cases:
            logp, tokens = graph.session.run(["top_logp", "top_tokens"], case.inputs)
            worst = max(worst, case.difference(device.variant, logp, tokens))
    except Exception as error:  # onnxruntime raises many types without a common base
        problem = f"its expected results cannot be computed: {safe_line(str(error))}"
        return Check("arithmetic", "failed", problem, "build the bundle again, or take it from elsewhere")
    if worst > _GOLDEN_TOLERANCE or not np.isfinite(worst):
        return Check(
            "arithmetic",
            "failed",
            f"results differ from those of the build by {worst:.3g}",
            "text stays exact online, but drafts will miss: try --variant cpu-fp32, and report the processor",
        )
    return Check("arithmetic", "ok", f"{len(cases)} expected results reproduced within {worst:.2g}")


def _speed(bundle: Bundle, device: Device, settings: ClientSettings) -> list[Check]:
    """Step times with one thread and with several; where the nodes run."""
    graph = _graph(device)
    if graph is None:
        return []
    placed = graph.session.get_providers()
    checks = [Check("placement", "ok" if placed[0] == "CPUExecutionProvider" else "warning", f"runs on {placed[0]}")]
    times: dict[int, float] = {}
    for threads in sorted({1, settings.threads or default_threads()}):
        other = Device.load(bundle.folder, variant=device.variant, threads=threads)
        drafter, ids = other.new_drafter(), list(range(8, 24))
        shape, sampling = TreeShape.chain(4), SamplingSettings()
        samples = []
        for extra in range(8):
            began = time.perf_counter()
            steps = sum(1 for _ in drafter.draft([*ids, 8 + extra], shape, sampling)) + 1
            samples.append((time.perf_counter() - began) / steps)
        times[threads] = sorted(samples)[len(samples) // 2]
    text = ", ".join(
        f"{1000 * seconds:.2f} ms with {threads} thread{'s' * (threads > 1)}" for threads, seconds in times.items()
    )
    best = min(times, key=lambda threads: times[threads])
    in_use = settings.threads or default_threads()
    if best != in_use and times[best] < 0.9 * times[in_use]:
        return [*checks, Check("speed", "warning", f"a step takes {text}", f"pass --threads {best}")]
    return [*checks, Check("speed", "ok", f"a step takes {text}")]


async def _verifier(settings: ClientSettings, device: Device) -> AsyncIterator[Check]:
    async with contextlib.AsyncExitStack() as stack:
        try:
            client = await stack.enter_async_context(EdgeClient(settings, device=device))
            await client.wait_online()
        except MoaError as error:  # an unusable --tls-ca, a local verifier that did not start, no answer
            yield Check("verifier", "failed", str(error), error.hint)
            return
        assert client.link is not None
        assert client.link.welcome is not None
        link, welcome = client.link, client.link.welcome
        yield Check(
            "verifier",
            "ok",
            f"{welcome.server}, {1000 * link.rtt.smoothed:.1f} ms away, offers {', '.join(welcome.features)}",
        )
        wanted = device.bundle.manifest.tokenizer.hash
        if welcome.tokenizer and welcome.tokenizer != wanted:
            yield Check(
                "tokenizer", "failed", "the verifier's target has another tokenizer", "use the bundle of this target"
            )
        else:
            yield Check("tokenizer", "ok", "the same on both ends")
        reads_records = device.new_drafter().records is not None
        if reads_records and welcome.records is None:
            reason = "; ".join(welcome.notices) or "no reason was given"
            yield Check(
                "records",
                "warning",
                f"none will come: {reason}",
                "drafts will be accepted less often; check --drafter there",
            )
        elif reads_records:
            yield Check(
                "records",
                "ok",
                f"the verifier makes them for this drafter ({', '.join(welcome.records.dtypes)})"
                if welcome.records
                else "",
            )
        parts = urlsplit(link.endpoint.url)
        if parts.scheme == "wss":
            yield Check("TLS", "ok", f"{ssl.OPENSSL_VERSION}, certificate checked")
        elif parts.hostname not in ("127.0.0.1", "::1", "localhost"):
            yield Check("TLS", "warning", "not encrypted: token and text can be read on the way", "use wss://")
