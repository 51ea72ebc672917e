"""Static pages of the endpoint: all files are in the package, and the content security policy allows nothing else."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moa.api.static import TYPES, content_security

POLICY = content_security()


def page(package: str, folder: str, at: str) -> Iterator[Route]:
    """Routes for the files of a folder in a package; `index.html` is served at `at` itself."""
    for entry in sorted(resources.files(package).joinpath(folder).iterdir(), key=lambda entry: entry.name):
        name, _, ending = entry.name.rpartition(".")
        if ending in TYPES:
            path = at if entry.name == "index.html" else at.rstrip("/") + "/" + entry.name
            yield Route(path, _File(entry.read_bytes(), TYPES[ending]).get, name=name)


class _File:
    def __init__(self, content: bytes, kind: str) -> None:
        self._content, self._packed = content, gzip.compress(content, mtime=0)
        tag = hashlib.sha256(content).hexdigest()[:16]
        self._headers = {
            "Content-Type": kind,
            "ETag": f'W/"{tag}"',
            "Cache-Control": "no-cache",
            "Content-Security-Policy": POLICY,
            "Vary": "Accept-Encoding",
        }

    async def get(self, request: Request) -> Response:
        """The file, or 304 if it has not changed."""
        if request.headers.get("if-none-match") == self._headers["ETag"]:
            return Response(status_code=304, headers=self._headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self._packed, headers={**self._headers, "Content-Encoding": "gzip"})
        return Response(self._content, headers=self._headers)
