"""The endpoint beside a verifier's port: the API's routes, the operator's page, and access to them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from starlette.responses import RedirectResponse
from starlette.routing import Route

from cloud_verifier.app import Verifier
from cloud_verifier.openai.answerer import Tokenizer, VerifierAnswerer
from cloud_verifier.serving.auth import Authenticator, may_measure
from cloud_verifier.settings import Settings
from moa.api.access import Access
from moa.api.app import Api, ApiLimits
from moa.api.connections import serving
from moa.api.metrics import ApiMetrics
from moa.api.pages import page, web_app
from moa.process.listening import Port


@contextlib.asynccontextmanager
async def endpoint(
    verifier: Verifier, *, port: Port, tokenizer: Any, settings: Settings, auth: Authenticator
) -> AsyncIterator[str]:
    """Serve OpenAI's API and the operator's page on `port` while the body runs; yields the
    address."""
    service = verifier.service
    limits = settings.limits
    answerer = VerifierAnswerer(
        service, Tokenizer(tokenizer), settings.served_name, verifier.engine.wrong
    )
    access = Access(
        auth.principal,
        watching=auth.watching_key,
        refused=partial(verifier.admission.count_unauthorized, "openai"),
        host=settings.openai_address[0],
        hosts=settings.openai_hosts,
        names_flag="--openai-host",
        origins=settings.origins,
    )
    api = Api(
        answerer,
        access,
        ApiLimits(
            max_running=limits.max_connections,
            max_running_of_one=limits.max_connections_per_principal,
            running_limit="max_connections",
            running_of_one_limit="max_connections_per_principal",
        ),
        metrics=ApiMetrics(verifier.metrics.registry),
        observe=service.observe,
        others=service.others,
        may_measure=may_measure,
        also_called=settings.also_called,
    )
    pages = [*page("cloud_verifier.openai", "page", "/ui"), *page("moa.api", "assets", "/ui")]
    home = Route("/", lambda request: RedirectResponse("/ui"))
    routes = [*pages, *web_app(settings.app), home]
    async with (
        api.running(),
        serving(api.app(routes, settings.origins), port, tls=settings.tls, ports=2) as address,
    ):
        yield address
