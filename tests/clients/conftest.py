"""A device with its verifier, in a thread, that all tests of this folder share: the clients wait
where they stand.

Their packages are those of `make clients`; without them these tests are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shutil
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from cloud_verifier.app import Verifier
from edge_client import EdgeClient
from edge_client.serve.endpoint import endpoint
from edge_client.serve.settings import ServeSettings
from moa.process.listening import Port
from tests.edge.serve.pair import SETTINGS, served

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
MODEL = "demo"
PATIENCE = 120.0


class Device:
    """The endpoint's address, and what a test may do to what is behind it."""

    def __init__(self, verifier: str = "", **settings: Any) -> None:
        """With the verifier at this address, which need not be up; without one, with a verifier of
        its own."""
        self._verifier = verifier
        self._settings = settings
        self.address = ""
        """Where the chat page is; the API is below `/v1`."""
        self.pause = 0.0
        """Seconds that each forward of the target takes longer."""
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._up = threading.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._run(),), daemon=True
        )

    def __enter__(self) -> Device:
        self._thread.start()
        assert self._up.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(PATIENCE)
        self._loop.close()

    def connect(self) -> None:
        """Give the link back that a page has cut."""
        httpx.post(f"{self.address}/moa/link", json={"connected": True}, trust_env=False)
        self.until(online)

    def forget(self, streams: Iterable[str]) -> None:
        """Keep these streams no longer: the device would have them checked before later ones."""
        for stream in streams:
            httpx.delete(f"{self.address}/v1/streams/{stream}", trust_env=False)

    def until(self, happened: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until this holds of the endpoint's status."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            status: dict[str, Any] = httpx.get(f"{self.address}/moa/status", trust_env=False).json()
            if happened(status):
                return status
        raise TimeoutError(status)

    async def _run(self) -> None:
        async with (
            self._own_verifier()
            if not self._verifier
            else contextlib.nullcontext(self._verifier) as url,
            EdgeClient(verifier=url, **self._settings) as client,
            endpoint(client, ServeSettings(), MODEL, Port("127.0.0.1", 0)) as self.address,
        ):
            if not self._verifier:
                await client.wait_online(PATIENCE)
            self._up.set()
            await self._over.wait()

    @contextlib.asynccontextmanager
    async def _own_verifier(self) -> AsyncIterator[str]:
        pair = served()
        forward = pair.target.forward

        def slowly(*rows: Any) -> Any:
            time.sleep(self.pause)
            return forward(*rows)

        pair.target.forward = slowly  # type: ignore[method-assign]
        async with Verifier(pair, SETTINGS).open() as verifier:
            yield verifier.transport.url


@pytest.fixture(scope="session", autouse=True)
def open_sockets() -> Iterator[None]:
    """Other people's clients leave some; found after the last test they would be an error of all."""
    yield
    with warnings.catch_warnings(action="ignore", category=ResourceWarning):
        gc.collect()


@pytest.fixture(scope="session")
def device() -> Iterator[Device]:
    """The device."""
    with Device(max_new_tokens=80, reconnect_seconds=0.2) as running:
        yield running


@pytest.fixture
def apart() -> Iterator[tuple[Device, str]]:
    """A device whose verifier is not there yet, and the port that the verifier shall have."""
    with Port("127.0.0.1", 0) as free:
        port = str(free.number)
    with Device(f"ws://127.0.0.1:{port}", max_new_tokens=1024) as device:
        yield device, port


def online(status: dict[str, Any]) -> bool:
    return bool(status["link"] == "online")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs `make clients`")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--no-proxy-server"]
        )
        yield browser
        browser.close()


@contextlib.contextmanager
def visits(chromium: Any, hosts: set[str | None], *harmless: str) -> Iterator[Callable[..., Any]]:
    """Opens an address in a browser that knows nothing yet, or in a given context, and waits for
    the state of its link; adds the hosts that are asked. No test may leave errors in the console,
    but for those."""
    errors: list[str] = []
    contexts: list[Any] = []

    def visit(
        address: str,
        state: str,
        width: int = 1280,
        height: int = 720,
        context: Any = None,
        **how: Any,
    ) -> Any:
        if context is None:
            context = chromium.new_context(viewport={"width": width, "height": height}, **how)
            context.set_default_timeout(1000 * PATIENCE)
            context.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
            contexts.append(context)
        page = context.new_page()
        page.on("websocket", lambda socket: hosts.add(urlsplit(socket.url).hostname))
        page.on(
            "console",
            lambda message: errors.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address)
        page.wait_for_selector(f"#link[data-state={state}]")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert not [error for error in errors if not any(one in error for one in harmless)]
