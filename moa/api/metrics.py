"""Prometheus metrics of the endpoint."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Else there is a gauge beside every counter, which nobody reads.
disable_created_metrics()  # type: ignore[no-untyped-call]
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class ApiMetrics:
    """One endpoint's metrics; in the given registry, or one of their own."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Make all metrics, at zero, in this registry, or without one in a new one."""
        self.registry = registry or CollectorRegistry()
        self.requests = self._counter(
            "requests", "Requests, by route and status", "route", "status"
        )
        self.refusals = self._counter(
            "refusals", "Requests turned away for now (429), by code and limit", "code", "limit"
        )
        self.running = self._gauge("running_answers", "Answers that are being written")
        self.first_text = Histogram(
            "moa_api_first_text_seconds",
            "From a request to its first text",
            registry=self.registry,
            buckets=_SECONDS,
        )
        self.tokens = self._counter("tokens", "Tokens of prompts and answers", "kind")
        self.hang_ups = self._counter(
            "hang_ups", "Clients that left before their answer was complete"
        )
        self.failed_connections = self._counter(
            "failed_connections", "Connections that brought no request, by kind", "kind"
        )
        self.withdrawn = self._counter("withdrawn_characters", "Characters that were withdrawn")
        self.kept_bytes = self._gauge(
            "kept_stream_bytes", "Bytes kept so that streams can be taken up again"
        )

    def page(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"moa_api_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"moa_api_{name}", text, registry=self.registry)
