"""Connections that send nothing, or not enough: bounded in number and time, whoever opens them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from moa.api import connections
from moa.api.http import serving
from moa.process import half_open
from moa.process.listening import Port
from tests.api.scripted import PATIENCE, browser, endpoint, says, served

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
PROGRAM = "import sys; from moa.cli.console_scripts import edge_client; sys.exit(edge_client())"
DESCRIPTORS, IDLE = 256, 1200


async def connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has sent nothing."""
    return await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))


@pytest.mark.parametrize(
    "sent",
    [b"", b"G", HEAD, HEAD + b"Content-Length: 9\r\n\r\n{", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"],
    ids=["nothing", "a byte", "half a head", "half a body", "a request, and nothing more"],
)
async def test_a_connection_without_a_whole_request_ends(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_HEAD_SECONDS", "_BODY_SECONDS", "_IDLE_SECONDS"):
        monkeypatch.setattr(connections, name, 0.1)
    async with served(says("x")) as (_, address):
        reader, writer = await connect(address)
        writer.write(sent)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE):
                await reader.read()
        writer.close()


async def test_a_client_that_leaves_within_its_body_is_no_defect_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    async with served(says("x")) as (_, address), browser(address) as client:
        reader, writer = await connect(address)
        writer.write(HEAD + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n")
        async with asyncio.timeout(PATIENCE):
            await reader.readline()  # the body is waited for
            writer.close()
            while "moa_api_hang_ups_total 1.0" not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.01)
    assert not caplog.records


async def test_bytes_now_and_then_do_not_prolong_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HEAD_SECONDS", 0.2)
    async with served(says("x")) as (_, address):
        reader, writer = await connect(address)
        over = asyncio.create_task(reader.read())
        async with asyncio.timeout(PATIENCE):
            with contextlib.suppress(ConnectionError):
                while not over.done():
                    writer.write(b"X")
                    await asyncio.wait({over}, timeout=0.02)
                await over
        writer.close()


async def test_an_answer_may_take_longer_than_any_of_these(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_HEAD_SECONDS", "_BODY_SECONDS", "_IDLE_SECONDS"):
        monkeypatch.setattr(connections, name, 0.1)
    go = asyncio.Event()
    script = [says("x")[0], go, *says("x")[1:]]
    async with served(lambda ask: script) as (_, address), browser(address) as client:
        body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}]}
        held = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await asyncio.sleep(0.3)  # what is tested: nothing ends meanwhile
        go.set()
        assert (await held).status_code == 200


@pytest.mark.parametrize("secured", [False, True])
async def test_idle_connections_make_room_for_others(
    secured: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(half_open, "_free_descriptors", lambda: 40)
    tls, trust = certificate(tmp_path) if secured else (None, None)
    async with endpoint(says("x")) as (_, _, app), serving(app, Port("127.0.0.1", 0), tls=tls) as address:
        idle = [await connect(address) for _ in range(60)]
        verify = trust if trust is not None else True
        async with httpx.AsyncClient(base_url=address, verify=verify, trust_env=False, timeout=PATIENCE) as client:
            for _ in range(5):
                assert (await client.get("/health")).status_code == 200
        for reader, writer in idle[:40]:
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(PATIENCE):
                    assert await reader.read() == b""
            writer.close()
        for _, writer in idle[40:]:
            writer.close()


def certificate(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context, and a client's that trusts it."""
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with openssl")
    key, file = folder / "key", folder / "certificate"
    made = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=localhost")
    subprocess.run(["openssl", *made, "-keyout", key, "-out", file], check=True, capture_output=True)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=str(file))
    server.load_cert_chain(file, key)
    client.check_hostname = False
    return server, client


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    """This process may open what the attack needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, IDLE + 500), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.asynccontextmanager
async def device(log: Path) -> AsyncIterator[str]:
    """`edge-client serve` as a process that may open few files."""
    with Port("127.0.0.1", 0) as port:
        number = port.number
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *("prlimit", f"--nofile={DESCRIPTORS}", sys.executable, "-c", PROGRAM, "serve"),
            *("--offline", "--port", str(number)),
            stderr=stderr,
            env=os.environ | {"MOA_EDGE_CONFIG": os.devnull},
        )
    try:
        async with asyncio.timeout(PATIENCE):
            while b"Ctrl-C" not in log.read_bytes() and process.returncode is None:
                await asyncio.sleep(0.05)
        yield f"http://127.0.0.1:{number}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="limits the process with prlimit")
async def test_an_endpoint_with_few_descriptors_answers_beside_many_idle_connections(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with many_descriptors():
        async with device(log) as address:
            idle = await asyncio.gather(*(connect(address) for _ in range(IDLE)), return_exceptions=True)
            began = time.monotonic()
            for _ in range(5):
                async with browser(address) as client:
                    assert (await client.get("/health")).status_code == 200
            seconds = time.monotonic() - began
            for each in idle:
                if not isinstance(each, BaseException):
                    each[1].close()
    print(f"\nfive answers in {seconds:.2f} s, log of {log.stat().st_size} bytes")
    assert log.stat().st_size < 10_000
