"""How the files of our pages are served: types, and the content security policy. Used without a
server, too."""

from __future__ import annotations

from collections.abc import Iterable

TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "json": "application/json",
    "svg": "image/svg+xml",
    "webmanifest": "application/manifest+json",
}
"""By the end of a file's name."""


def content_security(
    connect: Iterable[str] = (), *, wasm: bool = False, header: bool = True
) -> str:
    """Nothing from other hosts, no inline scripts or styles, and no strings as HTML.

    `connect` are other addresses to connect to; `wasm` allows WebAssembly. Without `header` it is
    for a page's `<meta>`, where browsers ignore who may frame the page, and say so.
    """
    more = {"script": ["'wasm-unsafe-eval'"] if wasm else [], "connect": connect}
    kinds = ("script", "style", "img", "connect", "manifest", "worker")
    return "; ".join(
        (
            "default-src 'none'",
            *(" ".join((f"{kind}-src 'self'", *more.get(kind, ()))) for kind in kinds),
            "base-uri 'none'",
            "form-action 'none'",
            *(("frame-ancestors 'none'",) if header else ()),
            "require-trusted-types-for 'script'",
            "trusted-types service-worker",
        )
    )
