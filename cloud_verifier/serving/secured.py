"""The class of a port's connections, with TLS or without."""

from __future__ import annotations

import ssl

from cloud_verifier.serving.connection import Connection
from cloud_verifier.settings import Settings
from moa.errors import UsageError
from moa.process.half_open import HalfOpen
from moa.process.secured import Secured
from moa.wire.limits import Limits


def tls(settings: Settings) -> ssl.SSLContext | None:
    """What `--tls-cert` and `--tls-key` say; None for a port without TLS."""
    if settings.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"cannot use the TLS certificate {settings.tls_cert}: {error.strerror or error}") from None
    return context


class SecuredConnection(Secured, Connection):
    """A `Connection` that is established when its TLS handshake is over."""


def kind(limits: Limits, half_open: HalfOpen, tls: ssl.SSLContext | None) -> type[Connection]:
    """The class of one server's connections."""
    if tls is None:
        return type("BoundedConnection", (Connection,), {"_limits": limits, "_half_open": half_open})
    parts = {"_limits": limits, "_half_open": half_open, "_tls": tls, "_handshake_seconds": limits.handshake_timeout}
    return type("BoundedConnection", (SecuredConnection,), parts)
