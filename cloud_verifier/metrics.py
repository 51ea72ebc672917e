"""Prometheus metrics; names of speculative decoding follow vLLM's, under our prefix."""

from __future__ import annotations

from functools import partial
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

disable_created_metrics()  # else there is a gauge beside every counter, which nobody reads
_MS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_FINE = (
    0.0001,
    0.0002,
    0.0003,
    0.0004,
    0.0005,
    0.00075,
    0.001,
    0.0015,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    1.0,
)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_POSITIONS = 16
_KINDS: tuple[Any, ...] = Counter, Gauge, Histogram


class Metrics:
    """One verifier's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # memory, processor time, and since when it runs
        counter, gauge, histogram = (
            partial(kind, namespace="moa", registry=self.registry) for kind in _KINDS
        )
        self.drafts = counter("spec_decode_num_drafts", "Drafts verified")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens verified")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self.accepted_per_pos = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by depth",
            ("position",),
        )
        self._accepted_at = [
            self.accepted_per_pos.labels(str(position)) for position in range(_POSITIONS)
        ]
        self.emitted_tokens = counter("emitted_tokens", "Verified tokens sent", ("mode",))
        self.sessions = gauge("sessions", "Sessions by state", ("state",))
        self.connections = gauge("connections", "Open connections")
        self.slots_free = gauge("slots_free", "Slots that no session claims")
        self.info = gauge(
            "info",
            "What is served, and by what; always 1",
            ("version", "model", "dtype", "device", "decoder", "computes"),
        )
        self.waiting_answers = gauge(
            "api_waiting_answers",
            "Answers of the API that wait for room at the model, by the limit that they wait for",
            ("limit",),
        )
        self.pages = gauge("kv_pages", "Pages of key/value memory")
        self.pages_free = gauge("kv_pages_free", "Pages of key/value memory that no session holds")
        self.queue = gauge("queued_rounds", "Rounds waiting for the model")
        self.evictions = counter(
            "session_evictions", "Slots or sessions taken away, by reason", ("reason",)
        )
        self.resumes = counter("session_resumes", "Resumes by outcome", ("outcome",))
        self.refusals = counter(
            "refusals", "Requests refused, by code and limit", ("code", "limit")
        )
        self.cuts = counter(
            "cut_connections", "Connections cut because they kept asking for too much", ("limit",)
        )
        self.half_open = gauge(
            "half_open_connections", "Connections that have not finished their handshake"
        )
        self.half_open_dropped = counter(
            "half_open_dropped", "Half-open connections dropped for newer ones"
        )
        self.failed_connections = counter(
            "failed_connections", "Connections that opened no websocket, by kind", ("kind",)
        )
        self.unauthorized = counter(
            "unauthorized",
            "Requests without a valid token, by port and what was wrong",
            ("port", "kind"),
        )
        self.token_file_unread = gauge(
            "token_file_unread",
            "Whether the token file cannot be read as it is now: nothing that was revoked in it is",
        )
        self.certificate_end = gauge(
            "certificate_end_time_seconds",
            "When the certificate of the port ends, in seconds of Unix time; 0 without one",
        )
        self.quarantined = counter(
            "quarantined_sessions", "Sessions dropped because their work failed"
        )
        self.engine_faults = counter(
            "engine_faults", "What raised in the engine, by place", ("where",)
        )
        self.queue_seconds = histogram("queue_seconds", "Waiting time of rounds", buckets=_MS)
        self.forward_seconds = histogram(
            "forward_seconds", "Duration of forwards, by kind", ("kind",), buckets=_MS
        )
        self.verify_seconds = histogram(
            "verify_seconds",
            "From a draft's arrival on its socket to the writing of its verdict",
            buckets=_MS,
        )
        self.overhead_seconds = histogram(
            "verify_overhead_seconds",
            "The same without the forward: waiting, and the server's own work",
            buckets=_FINE,
        )
        self.forwards = counter(
            "forwards",
            "Forwards by path (graph, eager, or the decoder) and the accelerator's tier",
            ("path", "tier"),
        )
        self.batch_rows = histogram(
            "batch_rows", "Sessions in one forward of drafts", buckets=_ROWS
        )
        self.record_bytes = counter(
            "record_bytes", "Activation payload bytes sent, by precision", ("dtype",)
        )
        self.shared_tokens = counter("shared_prefix_tokens", "Prompt tokens shared instead of run")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens run")
        self.sent_bytes = counter("sent_bytes", "Bytes of frames sent, by kind", ("kind",))

    def accepted(self, drafted: int, accepted: int, emitted: int, mode: str) -> None:
        """Count one verified draft."""
        self.drafts.inc()
        self.draft_tokens.inc(drafted)
        self.accepted_tokens.inc(accepted)
        self.emitted_tokens.labels(mode).inc(emitted)
        for counter in self._accepted_at[:accepted]:
            counter.inc()

    def page(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self.registry)
