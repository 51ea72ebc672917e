"""The endpoint on the device: the API's routes over one client, the chat page, and the switch of the link."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edge_client.client import EdgeClient
from edge_client.serve.answerer import EdgeAnswerer
from moa.api.access import Access, ApiKeys, is_loopback
from moa.api.app import Api, ApiLimits
from moa.api.http import Json, read_body, serving
from moa.api.pages import page, web_app
from moa.api.requests import Defaults, decode
from moa.errors import ConfigError, MoaError
from moa.process.listening import Port


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Address, access and limits of the endpoint."""

    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    """Host names, beside addresses and localhost, that requests may use."""
    origins: tuple[str, ...] = ()
    """Other websites whose pages may use the endpoint."""
    app: Path | None = None
    """Folder of `edge-client page`, served below `/app/`."""
    limits: ApiLimits = field(default_factory=ApiLimits)
    defaults: Defaults = field(default_factory=Defaults)

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be 0..65535, not {self.port}")
        if not self.api_keys and not is_loopback(self.host):
            raise ConfigError(
                f"refusing to listen on {self.host} without an api key", hint="give --api-key, or listen on 127.0.0.1"
            )
        if any(not key.strip() or not key.isascii() for key in self.api_keys):
            raise ConfigError("an api key is empty or not ASCII")


@contextlib.asynccontextmanager
async def endpoint(client: EdgeClient, settings: ServeSettings, model: str, port: Port) -> AsyncIterator[str]:
    """Serve an open client on `port` while the body runs; yields the address."""
    answerer = EdgeAnswerer(client, model)
    access = Access(
        ApiKeys(settings.api_keys), host=settings.host, hosts=settings.allowed_hosts, origins=settings.origins
    )
    api = Api(answerer, access, settings.limits, settings.defaults)
    # The template's process takes 0.5 s to start, and a busy machine seconds: before the first question, not within it.
    # A template that refuses this is told to whoever asks.
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
        answerer.cut_off(cut=not decode(body, _Switch).connected)
        return Json(answerer.status())

    return Route("/moa/link", api.keyed(switch), methods=["POST"])


class _Switch(msgspec.Struct):
    connected: bool
