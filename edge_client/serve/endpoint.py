"""The endpoint: the API's routes over one client, the chat page, and the switch of the link."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge_client.client import EdgeClient
from edge_client.link.plain_get import plain_get
from edge_client.serve.answerer import EdgeAnswerer, log
from edge_client.serve.settings import ServeSettings
from moa.api.access import Access, ApiKeys
from moa.api.app import Api, ApiLimits
from moa.api.connections import serving
from moa.api.http import Json, read_body
from moa.api.pages import page, web_app
from moa.api.requests import Defaults, decode
from moa.errors import MoaError
from moa.process.listening import Port
from moa.process.rare_lines import RareLines

_METRICS_SECONDS = 1.0
"""For so long the process in front of an upstream, on this machine, may write its metrics."""
_UPSTREAM_METRICS = b"moa_upstream_"
"""How the names of an upstream's metrics begin."""


@contextlib.asynccontextmanager
async def endpoint(
    client: EdgeClient, settings: ServeSettings, model: str, port: Port
) -> AsyncIterator[str]:
    """Serve the API and the chat page over an open client, on `port`, while the body runs; yields
    the address. `model` is the model's name for programs; without one it is the target's own."""
    answerer = EdgeAnswerer(client, model)
    also_called = list(settings.also_called)
    if client.settings.upstream:
        # By this name the endpoint was known until the upstream said which model it has.
        also_called.append(model_name(answerer.bundles_model))
    access = Access(
        ApiKeys(settings.api_keys),
        refused=partial(_tell_of_wrong_key, RareLines(log)),
        host=settings.host,
        hosts=settings.allowed_hosts,
        origins=settings.origins,
    )
    limits = ApiLimits(max_running=settings.most_answers, keep_seconds=settings.keep_seconds)
    defaults = Defaults(mode=settings.mode, patience=settings.patience)
    api = Api(
        answerer,
        access,
        limits,
        defaults,
        also_called=also_called,
        more_names=answerer.more_names,
        more_metrics=partial(metrics_of_upstream, client),
    )
    # The template's process takes 0.5 s to start, and a busy machine seconds: before the first
    # question, not within it. A template that refuses this is told to whoever asks.
    with contextlib.suppress(MoaError):
        if client.device.codec.can_chat:
            await asyncio.to_thread(client.encode, "hello")
    async with api.running():
        routes = [
            *page("edge_client.serve", "page", "/"),
            *page("moa.api", "assets", "/"),
            *web_app(settings.app),
            _link_route(api, answerer),
        ]
        async with serving(api.app(routes, settings.origins), port) as address:
            yield address


async def metrics_of_upstream(client: EdgeClient) -> bytes:
    """Returns what the process in front of a device's upstream counts of it, as Prometheus reads
    it; nothing without an upstream, or where that process does not answer."""
    link = client.link
    if link is None or not client.settings.upstream:
        return b""
    _, page = await plain_get(link.endpoint, "/metrics", _METRICS_SECONDS)
    lines = page.splitlines(keepends=True)
    return b"".join(line for line in lines if _UPSTREAM_METRICS in line)


def model_name(source: str) -> str:
    """A target's name for clients: the last part of where it came from."""
    return source.rstrip("/").rpartition("/")[2] or "target"


def _link_route(api: Api, answerer: EdgeAnswerer) -> Route:
    """The switch that disconnects the verifier, to see what the device does offline."""

    async def switch(request: Request, principal: str) -> Response:
        body = await read_body(request, 1000)
        answerer.cut_off(cut=not decode(body, _switch_of).connected)
        return Json(answerer.status())

    return Route("/moa/link", api.keyed(switch), methods=["POST"])


class _Switch(msgspec.Struct):
    """What the page's switch sends."""

    connected: bool


_switch_of = msgspec.json.Decoder(_Switch)


def _tell_of_wrong_key(lines: RareLines, authorization: Sequence[str], peer: str) -> None:
    """Log that a caller at this address had no valid key, now and then: else who has a wrong one
    looks in vain for why."""
    kind = "a wrong key" if authorization else "no key"
    lines.warn("401", f"refused with 401: a request with {kind}", peer, "unauthorized")
