"""`edge-client doctor`: checks of bundle, drafter, link and verifier, each with what to do about a
problem."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import numpy as np
import onnxruntime
from rich.console import Console
from rich.text import Text

from edge_client.cli import options
from edge_client.client import EdgeClient
from edge_client.device import Device, embedded_bundle
from edge_client.link.plain_get import why_unready
from edge_client.link.websocket import VerifierLink
from edge_client.screen.views import make_console
from edge_client.settings import ClientSettings
from edge_client.shared import UPSTREAM_AWAY
from moa.api.access import is_loopback
from moa.bundle import Bundle
from moa.errors import MoaError
from moa.graph.drafter import OnnxDrafter
from moa.graph.drafter import run as run_steps
from moa.graph.step import StepGraph
from moa.process.busy import slowdown
from moa.process.memory import resident_bytes
from moa.safe_text import safe_line
from moa.sampling import SamplingSettings
from moa.tree import TreeShape
from moa.wire.messages import Welcome

Outcome = Literal["ok", "warning", "failed"]
_STYLES: dict[Outcome, str] = {"ok": "green", "warning": "yellow", "failed": "red"}
_START_SECONDS = 2.0
"""A drafter whose first drafts take longer to come is slow to start."""
_BUSY = 2.0
"""Slowdown of a machine from which on its own work, and not the disk, makes the start slow."""
_GOLDEN_TOLERANCE = 0.5
"""Quantized kernels differ a little between processors; a wrong graph differs much more."""
_UPSTREAM_SECONDS = 15.0
"""For so long an upstream is waited for that has not answered yet: the verifier in front of it gives
its first look 10 s."""
_IDS = range(8, 20)
"""Token ids that every vocabulary has."""


def add(command: argparse.ArgumentParser) -> None:
    """The subcommand's flags."""
    command.description = "Check bundle, runtime, speed, verifier, and say what to do."
    command.add_argument("--json", action="store_true", help="print the findings as JSON")
    options.add_connection(command)


def run(arguments: argparse.Namespace) -> int:
    """Run every check; exit code 1 when one failed. Where what is named is no folder, or a variant
    that the bundle does not have, there is nothing to check: that is a mistake on the command line,
    with exit code 2."""
    settings = options.settings_from(arguments)
    if settings.bundle and not Path(settings.bundle).is_dir():
        Bundle.open(settings.bundle)  # raises the error that says why this is no bundle
    if settings.variant:
        _refuse_unknown_variant(settings)
    console = None if arguments.json else make_console()
    checks = asyncio.run(_examine(settings, console))
    if arguments.json:
        options.print_json(checks)
    return int(any(check.state == "failed" for check in checks))


def _refuse_unknown_variant(settings: ClientSettings) -> None:
    """Raise if the bundle does not have the variant that is named."""
    try:
        bundle = Bundle.open(settings.bundle or embedded_bundle())
    except MoaError:
        return  # what is wrong with the bundle is a finding
    if settings.variant not in bundle.manifest.variants:
        bundle.variant(settings.variant)  # raises the error that names those that it has


def _has_smaller(bundle: Bundle, variant: str) -> bool:
    """Whether the bundle has a smaller variant of the same runtime."""
    variants = bundle.manifest.variants
    mine = variants[variant]
    return any(one.size < mine.size and one.runtime == mine.runtime for one in variants.values())


async def _examine(settings: ClientSettings, console: Console | None) -> list[Check]:
    """Run all checks and return their findings, which are printed as they come if there is a
    console."""
    checks = []
    async for check in examine(settings):
        checks.append(check)
        if console is None:
            continue
        line = Text(safe_line(f"{check.name:11}{check.finding}"))
        console.print(Text(f"{check.state:8}", style=_STYLES[check.state]) + line)
        if check.advice:
            console.print(Text(safe_line(f"{'':19}-> {check.advice}"), style="bold"))
    return checks


@dataclass(frozen=True, slots=True)
class Check:
    """One finding."""

    name: str
    state: Outcome
    finding: str
    advice: str = ""
    """What to do about it, where something is wrong."""


async def examine(settings: ClientSettings) -> AsyncIterator[Check]:
    """Yield the findings of all checks that are possible: each needs those before it, so a failure
    of bundle or drafter is the last one."""
    try:
        bundle = Bundle.open(settings.bundle or embedded_bundle())
        size = bundle.verify()
    except MoaError as error:
        yield Check("bundle", "failed", str(error), error.hint)
        return
    yield Check(
        "bundle", "ok", f"{bundle.folder}: {size / 1e6:.1f} MB, contents as its manifest says"
    )
    yield Check("runtime", "ok", f"ONNX Runtime {onnxruntime.__version__}")
    started = time.perf_counter()
    try:
        device = Device.of(settings)
    except MoaError as error:
        yield Check("drafter", "failed", str(error), error.hint)
        return
    yield _drafter(bundle, device, started)
    yield _golden(bundle, device, device.new_drafter().graph)
    yield _speed(bundle, device, settings)
    if not settings.verifier:
        advice = "pass --verifier ADDRESS, or --verifier local"
        yield Check("verifier", "warning", "none given: text will be provisional", advice)
        return
    async for check in _verifier(settings, device):
        yield check


def _drafter(bundle: Bundle, device: Device, started: float) -> Check:
    """Try the drafter out, which has just been loaded, and check how soon after `started` its first
    drafts are there."""
    loaded = time.perf_counter() - started
    try_out(device.new_drafter())
    first = time.perf_counter() - started
    times = f"loaded in {1000 * loaded:.0f} ms, first drafts after {1000 * first:.0f} ms"
    finding = f"variant {device.variant} {times}, {resident_bytes() / 1e6:.0f} MB resident"
    if first < _START_SECONDS:
        return Check("drafter", "ok", finding)
    advice = "a faster disk: there is no smaller variant"
    if _has_smaller(bundle, device.variant):
        advice = "a smaller variant or a faster disk"
    if slowdown() > _BUSY:
        advice = "try again when the machine does less else"
    return Check("drafter", "warning", finding, advice)


def try_out(drafter: OnnxDrafter) -> None:
    """Try the drafter as a device uses it: guess without activation records, draft a tree with
    them, go on along it, and add the records of drafted tokens. A graph may compute the right
    results and still not fit the device's caches."""
    sampling = SamplingSettings()
    shape = TreeShape(breadth=2, depth=3, nodes=5)
    ids = list(_IDS)
    run_steps(drafter.guess(ids, sampling))
    for known in (len(ids) - 1, len(ids) + 1):  # records of all tokens but the last
        if drafter.records is not None:
            wire = drafter.records.wire
            rows = np.zeros((known, wire.count, wire.width), np.float32)
            drafter.records.put(0, rows, rows)
        ids += run_steps(drafter.draft(ids, shape, sampling)).tokens[1:3]
    if drafter.records is not None:
        drafter.records.truncate(0)


def _golden(bundle: Bundle, device: Device, graph: StepGraph) -> Check:
    """Check that the drafter's graph computes here what it computed when the bundle was made: the
    bundle has inputs and their results, to be compared within a tolerance."""
    try:
        cases = [case for case in bundle.golden() if device.variant in case.expected]
        if not cases:
            return Check(
                "arithmetic", "warning", "the bundle has no expected results for this variant"
            )
        worst = 0.0
        for case in cases:
            logp, tokens = graph.session.run(["top_logp", "top_tokens"], case.inputs)
            worst = max(worst, case.difference(device.variant, logp, tokens))
    except Exception as error:  # onnxruntime raises many types without a common base
        problem = f"its expected results cannot be computed: {safe_line(str(error))}"
        return Check(
            "arithmetic", "failed", problem, "build the bundle again, or take it from elsewhere"
        )
    if worst > _GOLDEN_TOLERANCE or not np.isfinite(worst):
        advice = "text stays exact online, but drafts will miss: try --variant cpu-fp32, and report the processor"
        return Check(
            "arithmetic", "failed", f"results differ from those of the build by {worst:.3g}", advice
        )
    return Check("arithmetic", "ok", f"{len(cases)} expected results reproduced within {worst:.2g}")


def _speed(bundle: Bundle, device: Device, settings: ClientSettings) -> Check:
    """Measure the median time of a drafter's step with one thread and with as many as are in use,
    and advise to change that if the other is at least a tenth faster."""
    times: dict[int, float] = {}
    in_use = device.threads
    for threads in sorted({1, in_use}):
        drafter = Device.load(bundle.folder, variant=device.variant, threads=threads).new_drafter()
        times[threads] = _step_seconds(drafter)
    text = ", ".join(
        f"{1000 * seconds:.2f} ms with {threads} thread{'s' * (threads > 1)}"
        for threads, seconds in times.items()
    )
    best = min(times, key=lambda threads: times[threads])
    if best != in_use and times[best] < 0.9 * times[in_use]:
        return Check("speed", "warning", f"a step takes {text}", f"pass --threads {best}")
    return Check("speed", "ok", f"a step takes {text}")


def _step_seconds(drafter: OnnxDrafter) -> float:
    """Returns the median time of a step, over some drafts for texts of 17 tokens."""
    ids = list(range(8, 24))  # any text will do: ids that every vocabulary has
    shape = TreeShape.chain(4)
    sampling = SamplingSettings()
    samples = []
    for extra in range(8):
        began = time.perf_counter()
        steps = sum(1 for _ in drafter.draft([*ids, 8 + extra], shape, sampling)) + 1
        samples.append((time.perf_counter() - began) / steps)
    return sorted(samples)[len(samples) // 2]


async def _verifier(settings: ClientSettings, device: Device) -> AsyncIterator[Check]:
    """Yield the findings about the verifier: whether it answers, has the bundle's tokenizer, makes
    activation records for this drafter, and is reached over TLS. Of an upstream in its place only
    whether that answers."""
    async with contextlib.AsyncExitStack() as stack:
        try:
            with options.waiting(_what_is_waited_for(settings)):
                client = await stack.enter_async_context(EdgeClient(settings, device=device))
                assert client.link is not None
                await client.link.wait_up(settings.connect_seconds)
                await client.link.wait_answered(_UPSTREAM_SECONDS)
                unready = await why_unready(client.link)
        except MoaError as error:
            # An unusable address or --tls-ca, a local verifier that did not start, or no answer.
            name = "upstream" if settings.upstream else "verifier"
            yield Check(name, "failed", str(error), error.hint)
            return
        assert client.link.welcome is not None
        for check in _answers(client.link, client.link.welcome, unready, device):
            yield check


def _what_is_waited_for(settings: ClientSettings) -> str:
    """What the check of the verifier, or of an upstream in its place, may wait for."""
    if settings.upstream or settings.verifier == "local":
        return options.what_takes_long(settings)
    return f"connecting to {safe_line(settings.verifier)}"


def _answers(link: VerifierLink, welcome: Welcome, unready: str, device: Device) -> Iterator[Check]:
    """Yield the findings about a verifier, or an upstream in its place, that has answered. `unready`
    says why the engine behind it would write nothing now."""
    if link.unanswered:
        advice = "it may be busy: ask again later, or check its address"
        yield Check("upstream", "warning", link.unanswered, advice)
        return
    if reason := unready or _why_away(link, welcome):
        advice = "if that stays so: check its address, model and key"
        if "budget" in reason:
            advice = "wait, or raise --upstream-budget"
        yield Check("upstream", "failed", reason, advice)
        return
    if link.endpoint.upstream:
        # What answered is a part of this program: its round trip and tokenizer say nothing.
        yield Check(
            "upstream", "ok", f"{link.endpoint.name} tells its models (it was asked nothing else)"
        )
        return
    away = f"{welcome.server}, {1000 * link.rtt.smoothed:.1f} ms away, offers {', '.join(welcome.features)}"
    yield Check("verifier", "ok", away)
    if "behind" in welcome.features:
        engine = safe_line(link.behind.model) or "the engine behind it"
        yield Check(
            "upstream", "ok", f"{engine} tells its models there (it was asked nothing else)"
        )
    yield _tokenizer(welcome, device)
    if device.new_drafter().records is not None and "behind" not in welcome.features:
        yield _records(welcome)  # an engine of others makes none
    tls = _tls(link.endpoint.url)
    if tls is not None:
        yield tls


def _why_away(link: VerifierLink, welcome: Welcome) -> str:
    """Why the engine behind the verifier does not answer, as that says now, or, where it is an older
    one, said in its welcome; empty if nothing is said of it."""
    if "behind" in welcome.features:
        return link.behind.away
    for notice in welcome.notices:
        if notice.startswith(UPSTREAM_AWAY):
            return notice.removeprefix(UPSTREAM_AWAY).strip()
    return ""


def _tokenizer(welcome: Welcome, device: Device) -> Check:
    """Check that the verifier's target has the tokenizer of the bundle, as far as it says which."""
    if welcome.tokenizer and welcome.tokenizer != device.bundle.manifest.tokenizer.hash:
        problem = "the verifier's target has another tokenizer"
        return Check("tokenizer", "failed", problem, "use the bundle of this target")
    return Check("tokenizer", "ok", "the same on both ends")


def _records(welcome: Welcome) -> Check:
    """Check that the verifier makes activation records for this drafter."""
    if welcome.records is None:
        reason = f"none will come: {'; '.join(welcome.notices) or 'no reason was given'}"
        advice = "drafts will be accepted less often; check --drafter there"
        return Check("records", "warning", reason, advice)
    made = f"the verifier makes them for this drafter ({', '.join(welcome.records.dtypes)})"
    return Check("records", "ok", made)


def _tls(url: str) -> Check | None:
    """Check that nobody on the way to this address can read what is sent; None for an address on
    this machine, where nobody is on the way."""
    parts = urlsplit(url)
    if parts.scheme == "wss":
        return Check("TLS", "ok", f"{ssl.OPENSSL_VERSION}, certificate checked")
    if is_loopback(parts.hostname or ""):
        return None
    problem = "not encrypted: token and text can be read on the way"
    return Check("TLS", "warning", problem, "use wss://")
