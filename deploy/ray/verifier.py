"""An example: the verifier on Ray Serve, whose proxy owns the sockets. From the repository's root:

    pip install "ray[serve]==2.60.0" ".[verifier]"
    PYTHONPATH=deploy/ray serve run deploy/ray/serve.yaml

Serve's proxy sends equal `X-Session-Id` headers to the same replica. A replica that ends takes its
sockets along: its devices reconnect, to another replica, and open their sessions again with the
tokens that they hold.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


@serve.deployment(
    name="verifier",
    max_ongoing_requests=4096,  # a websocket is one request for as long as it lives
    graceful_shutdown_timeout_s=20.0,  # answers that are running may end
    request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
)
@serve.ingress()
class Replica:
    """One verifier process without a port of its own."""

    def __init__(self, flags: str) -> None:
        # Imported here: Serve's controller and proxies import this module too, and need no torch.
        from cloud_verifier import cli, logs
        from cloud_verifier.app import Verifier
        from cloud_verifier.model import load
        from cloud_verifier.serving.asgi import AsgiVerifier
        from cloud_verifier.serving.auth import Authenticator

        settings = cli.settings_from(cli.parser().parse_args(["serve", *shlex.split(flags)]))
        logs.configure("info", settings.limits)
        sys.setswitchinterval(cli.SWITCH_SECONDS)
        self._verifier = Verifier(load(settings), settings, Authenticator(settings.auth_tokens))
        self._app = AsgiVerifier(self._verifier, settings.origins)

    def __serve_build_asgi_app__(self) -> Any:
        """What Serve passes requests to."""
        return self._app

    def check_health(self) -> None:
        """Serve replaces a replica whose check raises."""
        if wrong := self._verifier.engine.wrong():
            raise RuntimeError(wrong)


def build(arguments: Mapping[str, str]) -> serve.Application:
    """The application; `flags` are those of `cloud-verifier serve`."""
    return Replica.bind(arguments["flags"])
