"""Whoever offers a bundle decides its manifest and each byte of its answers. `pull` ends with a
bundle or with one line, writes nothing but its own folder, and keeps nothing that was refused."""

from __future__ import annotations

import copy
import http.server
import json
import random
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edge_client.bundles import pull as pulling
from edge_client.bundles.store import installed, store
from edge_client.cli import main
from edge_client.device import embedded_bundle
from moa.bundle import read_manifest
from moa.errors import BundleError
from moa.safe_text import safe_text

_NAMES = (
    "../outside",
    "a/../../outside",
    "/outside",
    "C:/outside",
    "C:outside",
    "file:stream",
    "a\\..\\outside",
    "nul\0byte",
    "\x1b]0;owned\x07",
    "line\nbreak",
    "\u202emanifest",
    "",
    ".",
    "a//b",
    "a/./b",
    "dots.",
    "space ",
    "x" * 300,
    "/".join("x" * 300),
    "manifest.json",
    "shared",
    "golden.npz/inside",
)
_SIZES: tuple[Any, ...] = (-1, 0, 1, 2**40, 2**63, -(2**63), 10**30, 1.5, "1", None)
_HASHES: tuple[Any, ...] = ("0" * 64, "", "x", 7, None)


class _Hostile(http.server.BaseHTTPRequestHandler):
    """Serves a manifest that was changed, and files in some way."""

    manifest = b""
    way = "honest"

    def do_GET(self) -> None:
        name = self.path.removeprefix("/b/")
        manifest = name == "manifest.json"
        file = embedded_bundle() / name
        content = file.read_bytes() if file.is_file() else b"something"
        if manifest:
            content = self.manifest
        if manifest and not self.way.startswith("all "):
            self._send(content)
        else:
            getattr(self, "_" + self.way.removeprefix("all ").replace(" ", "_"))(content)

    def _send(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def _honest(self, content: bytes) -> None:
        self._send(content)

    def _error(self, content: bytes) -> None:
        self.send_response(500, "\x1b[2Jgone")
        self.end_headers()

    def _short(self, content: bytes) -> None:
        self._send(content[: len(content) // 2])

    def _cut(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])

    def _endless(self, content: bytes) -> None:
        self.send_response(200)
        self.end_headers()
        try:
            for _ in range(64):
                self.wfile.write(bytes(2**20))
        except OSError:
            return

    def _zipped(self, content: bytes) -> None:
        self._send(b"\x1f\x8b" + content, Content_Encoding="gzip")

    def _another_part(self, content: bytes) -> None:
        self._send(content, 206, Content_Range="bytes 7-99/100")

    def _a_nameless_part(self, content: bytes) -> None:
        self._send(content, 206, Content_Range="bytes */0")

    def _around(self, content: bytes) -> None:
        self._send(b"", 302, Location=self.path)

    def _to_a_file(self, content: bytes) -> None:
        self._send(b"", 302, Location="file:///etc/passwd")

    def _to_the_web(self, content: bytes) -> None:
        self._send(b"", 307, Location="http://example.org/\x1b[2J")

    def _nonsense(self, content: bytes) -> None:
        self.wfile.write(b"\x00\xffHTTP/9.9 what\r\n\r\n" + bytes(100))

    def _long_head(self, content: bytes) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 50_000 + b"\r\n")

    def _nothing(self, content: bytes) -> None:
        self.connection.close()

    def _silence(self, content: bytes) -> None:
        self.rfile.read(1)  # until the client gives up

    def _a_length_that_is_none(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "-5")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def handle(self) -> None:
        try:
            super().handle()
        except (OSError, ValueError):
            return


WAYS = [name[1:].replace("_", " ") for name in vars(_Hostile) if name[:1] == "_" and name[1] != "_"]
WAYS.remove("send")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home" / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home" / "config"))
    monkeypatch.setattr(pulling, "_TIMEOUT_SECONDS", 0.5)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def served() -> Iterator[tuple[str, type[_Hostile]]]:
    handler = type("Handler", (_Hostile,), {})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=partial(server.serve_forever, 0.01), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/b/", handler
        server.shutdown()
        thread.join(60)


def changed(rng: random.Random, real: dict[str, Any]) -> bytes:
    """A manifest with odd names, sizes and hashes; sometimes none at all."""
    made = copy.deepcopy(real)
    files = made["files"]
    for _ in range(rng.choice([0, 1, 1, 2])):
        entry = rng.choice(list(files))
        match rng.randrange(6):
            case 0:
                files[entry]["size"] = rng.choice(_SIZES)
            case 1:
                files[entry]["sha256"] = rng.choice(_HASHES)
            case 2:
                del files[entry]
            case 3:
                files[rng.choice(_NAMES)] = files.pop(entry)
            case _:
                files[rng.choice(_NAMES)] = {"sha256": "0" * 64, "size": rng.choice([0, 9, 2**20])}
    content = json.dumps(made).encode()
    match rng.randrange(20):
        case 0:
            return content[: rng.randrange(len(content))]
        case 1:
            return b"[" * 100_000
        case 2:
            return content + b" " * (4 * 2**20)
        case _:
            return content


def check(home: Path, url: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Pull, and look at all that is there afterwards."""
    began = time.monotonic()
    with pytest.raises(SystemExit) as end:
        main(["pull", url, "--name", "mine"])
    assert time.monotonic() - began < 60
    said = "".join(capsys.readouterr())
    assert said == safe_text(said), "what a terminal would obey"
    assert "Traceback" not in said
    there = {path for path in home.rglob("*") if path.is_file()}
    ours = [store() / "mine", store() / "mine.partial"]
    assert all(any(path.is_relative_to(own) for own in ours) for path in there), there
    names = [name for name, _ in installed()]
    if end.value.code == 0:
        assert names == ["mine"]
        assert read_manifest(store() / "mine").files
        return "pulled"
    assert names == []
    assert end.value.code in (1, 2)
    kept = (store() / "mine.partial").exists()
    return "broke off" if kept else "refused"


@pytest.mark.parametrize("way", [*WAYS, *(f"all {way}" for way in WAYS)])
def test_whatever_a_server_answers_it_is_one_line(
    way: str,
    home: Path,
    served: tuple[str, type[_Hostile]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, handler = served
    handler.manifest = (embedded_bundle() / "manifest.json").read_bytes()
    handler.way = way
    outcome = check(home, url, capsys)
    right = way.removeprefix("all ") in ("honest", "a length that is none")
    assert (outcome == "pulled") == right, "whole files are taken, however they come"


@pytest.mark.parametrize("count", [30, pytest.param(2000, marks=pytest.mark.slow)])
def test_whatever_a_manifest_says_it_is_one_line(
    count: int,
    home: Path,
    served: tuple[str, type[_Hostile]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    url, handler = served
    real = json.loads((embedded_bundle() / "manifest.json").read_text())
    outcomes: dict[str, int] = {}
    for seed in range(count):
        handler.manifest = changed(random.Random(seed), real)
        outcome = check(home, url, capsys)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        if outcome == "pulled":
            shutil.rmtree(store() / "mine")
    print(f"\n{outcomes}")
    assert outcomes["refused"] >= count // 3


@pytest.mark.parametrize("name", _NAMES)
def test_a_file_has_an_ordinary_name(name: str, tmp_path: Path) -> None:
    """Also where another system would read it otherwise: as a drive, a stream, another name."""
    manifest = json.loads((embedded_bundle() / "manifest.json").read_text())
    manifest["files"][name] = {"sha256": "0" * 64, "size": 0}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    if name in ("shared", "golden.npz/inside"):  # which only the disk can say
        read_manifest(tmp_path)
        return
    with pytest.raises(BundleError, match="no name for a file of a bundle"):
        read_manifest(tmp_path)
