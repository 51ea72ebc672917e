"""The verifier on Ray Serve (extra `ray`): each replica of the deployment holds the target; and when to have more.

    serve run deploy/ray/serve.yaml
    serve run cloud_verifier.ray_serve:build host=127.0.0.1 slots=8

Serve's proxy sends equal `X-Session-Id` headers to the same replica. A replica that is lost or scaled down takes its
sockets along: its devices come back, to another one, and open their sessions again with the tokens that they hold.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingContext, RequestRouterConfig

from cloud_verifier import logs
from cloud_verifier.replicas import replicas_wanted, settings_from
from cloud_verifier.serving.event_loop import SWITCH_SECONDS
from cloud_verifier.settings import Settings
from cloud_verifier.workers.pages import merge
from moa.errors import MoaError
from moa.process.gc_freeze import leave_out_what_is_loaded

_PAGE_SECONDS = 5.0
_QUEUE_MS, _PAGES = "queue_ms", "pages_used"
_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


@serve.deployment(
    name="verifier",
    max_ongoing_requests=4096,  # a websocket is one for as long as it lives
    graceful_shutdown_timeout_s=20.0,  # for answers that are under way; nothing tells a replica that it is to end
    request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
)
@serve.ingress()
class Replica:
    """One verifier without a port: the sockets are Serve's."""

    def __init__(self, settings: Settings) -> None:
        # Imported here: Serve's controller and proxies, which import this module, need no torch.
        from cloud_verifier.app import Verifier
        from cloud_verifier.model import load
        from cloud_verifier.serving.asgi import AsgiVerifier
        from cloud_verifier.serving.auth import Authenticator, TokenFile

        logs.configure("info", settings.limits)
        sys.setswitchinterval(SWITCH_SECONDS)
        served = load(settings)
        self._pool = served.target.pool
        auth = TokenFile(settings.auth_tokens) if settings.auth_tokens else Authenticator()
        self._verifier = Verifier(served, settings, auth)
        self._verifier.admission.page = self._page
        self._asgi = AsgiVerifier(self._verifier, settings.origins)
        self._waited = (0.0, 0.0)
        leave_out_what_is_loaded()

    def __serve_build_asgi_app__(self) -> Any:
        """What Serve passes requests to."""
        return self._asgi

    def check_health(self) -> None:
        """Serve replaces a replica whose check raises."""
        if wrong := self._verifier.wrong():
            raise MoaError(wrong)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """How long rounds have waited since the last call, and how much of the KV cache is in use."""
        (seconds, rounds), before = self._verifier.metrics.waited(), self._waited
        self._waited = (seconds, rounds)
        mean = (seconds - before[0]) / max(1.0, rounds - before[1])
        return {_QUEUE_MS: 1000 * mean, _PAGES: 1 - self._pool.free_pages / self._pool.pages}

    async def own_page(self) -> tuple[str, bytes]:
        """The metrics of this replica, under its name."""
        return serve.get_replica_context().replica_id.unique_id, await self._verifier.admission.own_page()

    async def _page(self) -> bytes:
        """The metrics of all replicas."""
        context = serve.get_replica_context()
        everybody = serve.get_deployment_handle(context.deployment, context.app_name)
        pages = await everybody.broadcast("own_page").results_async(timeout_s=_PAGE_SECONDS)
        return merge(dict(pages))


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """The application; `arguments` are flags of `cloud-verifier serve`."""
    return Replica.bind(settings_from(arguments))  # type: ignore[attr-defined]  # it is a deployment


def wanted(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """How many replicas there should be: an autoscaling policy of Serve."""
    metrics = context.aggregated_metrics or {}
    queue_ms, pages = (list(metrics.get(name, {}).values()) for name in (_QUEUE_MS, _PAGES))
    return replicas_wanted(context.target_num_replicas, queue_ms, pages), {}
