"""The endpoint: the API's routes over one client, the chat page, and the switch of the link."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge_client.client import EdgeClient
from edge_client.serve.answerer import EdgeAnswerer
from edge_client.serve.settings import ServeSettings
from moa.api.access import Access, ApiKeys
from moa.api.app import Api, ApiLimits
from moa.api.connections import serving
from moa.api.http import Json, read_body
from moa.api.pages import page, web_app
from moa.api.requests import Defaults, decode
from moa.errors import MoaError
from moa.process.listening import Port


@contextlib.asynccontextmanager
async def endpoint(
    client: EdgeClient, settings: ServeSettings, model: str, port: Port
) -> AsyncIterator[str]:
    """Serve the API and the chat page over an open client, on `port`, while the body runs; yields
    the address. `model` is the model's name for programs."""
    answerer = EdgeAnswerer(client, model)
    access = Access(
        ApiKeys(settings.api_keys),
        host=settings.host,
        hosts=settings.allowed_hosts,
        origins=settings.origins,
    )
    limits = ApiLimits(max_running=settings.most_answers, keep_seconds=settings.keep_seconds)
    defaults = Defaults(mode=settings.mode, patience=settings.patience)
    api = Api(answerer, access, limits, defaults, also_called=settings.also_called)
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
