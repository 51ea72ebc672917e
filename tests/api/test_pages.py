"""A web app that `edge-client page` wrote, served by an endpoint: its own policy, types, and packed
files."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2 as httpx
import pytest
from starlette.routing import Router

from cloud_verifier import cli
from cloud_verifier.settings import Settings
from moa.api.pages import web_app
from moa.errors import ConfigError, UsageError

POLICY = "default-src 'none'; connect-src 'self' wss://verifier.example"
FILES = {
    "index.html": b"<!doctype html>" + b" " * 100,
    "sw.js": f'const VERSION = "moa-app-1";\nconst FILES = {{}};\nconst POLICY = {json.dumps(POLICY)};\n'.encode(),
    "turn/machine.js": b"export const x = 1;",
    "packed/0123": bytes(range(256)),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


async def test_an_app_is_served_whole_under_its_own_policy(folder: Path) -> None:
    transport = httpx.ASGITransport(app=Router(web_app(folder)))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for name, content in FILES.items():
            answer = await client.get(f"/app/{name.removesuffix('index.html')}")
            assert (answer.status_code, answer.content) == (200, content)
            assert answer.headers["content-security-policy"] == POLICY
            assert ("content-encoding" in answer.headers) == (not name.startswith("packed/"))
        assert (
            (await client.get("/app/turn/machine.js"))
            .headers["content-type"]
            .startswith("text/javascript")
        )
        assert (await client.get("/app")).headers["location"].endswith("/app/")
        assert (await client.get("/app/index.html", follow_redirects=True)).url.path == "/app/"
        assert (await client.get("/app/../sw.js")).status_code == 404


def test_what_is_no_app_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert web_app(None) == []
    (tmp_path / "sw.js").write_text("const FILES = [];")
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(UsageError, match="is no web app"):
            web_app(folder)
    monkeypatch.setattr(
        "cloud_verifier.model.load", lambda settings: pytest.fail("the model was loaded first")
    )
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--port", "0", "--openai", "0", "--app", str(tmp_path)])
    assert ended.value.code == 2
    with pytest.raises(ConfigError, match="give --openai"):
        Settings(app=tmp_path)
