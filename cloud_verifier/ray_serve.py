"""The verifier on Ray Serve (extra `ray`): a deployment whose replicas each hold the target, and when to have more.

    serve run deploy/ray/serve.yaml
    serve run cloud_verifier.ray_serve:build anonymous=true slots=8

Serve's proxy sends equal `X-Session-Id` headers to the same replica. A replica that is killed or scaled down takes its
sockets along: devices come back and open their sessions again with the tokens that they hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingContext, RequestRouterConfig

from cloud_verifier import logs
from cloud_verifier.app import Verifier
from cloud_verifier.asgi import AsgiApp
from cloud_verifier.auth import Authenticator, TokenFile
from cloud_verifier.loop import SWITCH_SECONDS
from cloud_verifier.model import load
from cloud_verifier.settings import Settings
from moa.errors import ConfigError
from moa.wire.limits import Limits

_QUEUE_MS, _SLOTS = "queue_ms", "slots_used"
_GOOD_QUEUE_MS = 20.0
_GOOD_SLOTS = 0.7
"""Of the sessions' memory; the rest is for those that come while another replica starts."""
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


@serve.deployment(
    name="verifier",
    max_ongoing_requests=4096,  # a websocket is one for as long as it lives
    graceful_shutdown_timeout_s=10.0,  # nothing tells a replica that it is to end: its devices resume when it has
    health_check_period_s=5.0,
    request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
)
@serve.ingress()
class Replica:
    """One verifier without a port; the sockets are Serve's."""

    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]  # Serve awaits it
        logs.configure("info", settings.limits)
        sys.setswitchinterval(SWITCH_SECONDS)
        served = await asyncio.to_thread(load, settings)
        auth = TokenFile(settings.auth_tokens) if settings.auth_tokens else Authenticator()
        self._verifier = Verifier(served, settings, auth)
        self._life = contextlib.AsyncExitStack()
        await self._life.enter_async_context(self._verifier.running())
        self._before = (0.0, 0.0)

    def __serve_build_asgi_app__(self) -> AsgiApp:
        """What Serve sends requests to."""
        return AsgiApp(self._verifier.service, self._verifier.door, self._verifier.settings.origins)

    def check_health(self) -> None:
        """Serve replaces a replica whose check raises."""
        if wrong := self._verifier.wrong():
            raise RuntimeError(wrong)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """How long rounds have waited lately, and how much of the sessions' memory is taken."""
        store, facts = self._verifier.service.store, self._verifier.service.facts
        total, count = self._verifier.metrics.queued_so_far()
        before, self._before = self._before, (total, count)
        rounds = count - before[1]
        waited = 1000 * (total - before[0]) / rounds if rounds else 0.0
        return {_QUEUE_MS: waited, _SLOTS: 1 - store.slots_free / facts.slots}


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """The application: `arguments` are settings of the verifier, and its limits. `serve run` gives them as text."""
    return Replica.bind(settings_from(arguments))  # type: ignore[attr-defined]  # it is a deployment by now


def settings_from(arguments: Mapping[str, Any]) -> Settings:
    """Settings from a configuration file or a command line, unknown names rejected."""
    given = dict(arguments)
    anonymous = str(given.pop("anonymous", "false")).lower() == "true"
    limits = {f.name: _read(f.type, given.pop(f.name)) for f in dataclasses.fields(Limits) if f.name in given}
    known = {f.name: f.type for f in dataclasses.fields(Settings) if f.name not in ("host", "port", "limits")}
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(
            f"unknown setting {unknown[0]!r}", hint=f"there are {', '.join(known)}, anonymous and all limits"
        )
    values = {name: _read(known[name], value) for name, value in given.items()}
    if not values.get("auth_tokens") and not anonymous:
        raise ConfigError("without auth_tokens everybody may come in", hint="give a file, or say anonymous=true")
    return Settings(limits=Limits(**limits), **values)


def wanted(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """How many replicas there should be: an autoscaling policy of Serve."""
    metrics = context.aggregated_metrics or {}
    found = {name: list((metrics.get(name) or {}).values()) for name in (_QUEUE_MS, _SLOTS)}
    return replicas(context.target_num_replicas, found[_QUEUE_MS], found[_SLOTS]), {}


def replicas(now: int, queue_ms: Iterable[float], slots_used: Iterable[float]) -> int:
    """So many that rounds wait no longer, and memory is no fuller, than it should be; whichever wants more."""
    pressure = max(_mean(queue_ms) / _GOOD_QUEUE_MS, _mean(slots_used) / _GOOD_SLOTS)
    return max(1, math.ceil(now * pressure))


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def _read(kind: Any, value: Any) -> Any:
    if not isinstance(value, str):
        return tuple(value) if isinstance(value, list) else value
    return {"int": int, "float": float, "Path | None": Path}.get(str(kind), str)(value)
