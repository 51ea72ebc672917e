"""Static pages of the endpoints: those of the package, and a web app that `edge-client page` wrote.
The content security policy allows nothing else, and for an app what it names itself."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from moa.api.static import TYPES, content_security
from moa.errors import UsageError

POLICY = content_security()
"""The policy of the package's own pages."""
_REMARKS = re.compile(rb"^[ \t]*//.*$", re.MULTILINE)
"""Lines of a script that are comments."""
_APP_POLICY = re.compile(r'^const POLICY = (".*");$', re.MULTILINE)


def page(package: str, folder: str, at: str) -> Iterator[Route]:
    """Routes for the files of a folder in a package; `index.html` is served at `at` itself."""
    entries = resources.files(package).joinpath(folder).iterdir()
    for entry in sorted(entries, key=lambda entry: entry.name):
        name, _, ending = entry.name.rpartition(".")
        if ending in TYPES:
            file = _File(as_sent(entry.name, entry.read_bytes()), TYPES[ending])
            yield from _routes(at, entry.name, file, name)


def as_sent(name: str, content: bytes) -> bytes:
    """Returns the content of a file of the package without comments on lines of their own, which
    nobody reads in a browser; the lines stay, so that their numbers are those of the file."""
    return _REMARKS.sub(b"", content) if name.endswith(".js") else content


def web_app(folder: Path | None) -> list[Route]:
    """Routes below `/app/` for the files of a web app, in a folder that `edge-client page` wrote;
    no routes without a folder. The files are read now, and served from memory."""
    if folder is None:
        return []
    policy = app_policy(folder)
    routes = list[Route]()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        file = _File(path.read_bytes(), TYPES.get(name.rpartition(".")[2], ""), policy)
        routes += _routes("/app/", name, file, f"app {name}")
    return routes


def _routes(at: str, path: str, file: _File, name: str) -> Iterator[Route]:
    """Routes for a file below `at`. The index is served at `at` itself, and its own address leads
    there."""
    address = at.rstrip("/") + "/" + path
    if path == "index.html":
        yield Route(address, _to_folder)
        address = at
    yield Route(address, file.get, name=name)


async def _to_folder(_: Request) -> Response:
    """A page has one address: what a browser keeps for it belongs to that one."""
    return RedirectResponse("./")


def app_policy(folder: Path) -> str:
    """The content security policy, what its pages may load, of a web app in a folder that
    `edge-client page` wrote. It is read from the app's service worker; a `UsageError` without
    one."""
    script = folder / "sw.js"
    found = None
    if script.is_file():
        found = _APP_POLICY.search(script.read_text(encoding="utf-8"))
    if found is None:
        raise UsageError(
            f"{folder} is no web app", hint="write one: edge-client page NEW_FOLDER --verifier URL"
        )
    return str(json.loads(found[1]))


class _File:
    """A file in memory, with the headers that it is served with."""

    def __init__(self, content: bytes, kind: str, policy: str = POLICY) -> None:
        """Hold the content of a file, and compress it once. `kind` is its content type; one that is
        not known is empty, and such a file is not compressed. `policy` says what a page may
        load."""
        self._content = content
        self._compressed = gzip.compress(content, mtime=0) if kind else b""
        tag = hashlib.sha256(content).hexdigest()[:16]
        self._headers = {
            "Content-Type": kind or "application/octet-stream",
            "ETag": f'W/"{tag}"',
            "Cache-Control": "no-cache",
            "Content-Security-Policy": policy,
            "Vary": "Accept-Encoding",
        }

    async def get(self, request: Request) -> Response:
        """The file, or 304 if it has not changed."""
        if request.headers.get("if-none-match") == self._headers["ETag"]:
            return Response(status_code=304, headers=self._headers)
        if self._compressed and "gzip" in request.headers.get("accept-encoding", ""):
            headers = {**self._headers, "Content-Encoding": "gzip"}
            return Response(self._compressed, headers=headers)
        return Response(self._content, headers=self._headers)
