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
    """A content security policy: nothing from other hosts, no inline scripts or styles, and no
    strings as HTML.

    `connect` are other addresses to connect to; `wasm` allows WebAssembly. Without `header` it is
    for a page's `<meta>`, where browsers ignore who may frame the page, and say so.
    """
    directives = ["default-src 'none'"]
    for kind in ("script", "style", "img", "connect", "manifest", "worker"):
        sources = ["'self'"]
        if kind == "script" and wasm:
            sources.append("'wasm-unsafe-eval'")
        if kind == "connect":
            sources += connect
        directives.append(f"{kind}-src {' '.join(sources)}")
    directives += ["base-uri 'none'", "form-action 'none'"]
    if header:
        directives.append("frame-ancestors 'none'")
    directives += ["require-trusted-types-for 'script'", "trusted-types service-worker"]
    return "; ".join(directives)
