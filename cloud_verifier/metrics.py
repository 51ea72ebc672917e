"""Prometheus metrics; names of speculative decoding follow vLLM's, under our prefix."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_MS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_FINE = (0.0001, 0.0002, 0.0003, 0.0004, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
_POSITIONS = 16


class Metrics:
    """One verifier's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.drafts = self._counter("spec_decode_num_drafts", "Drafts verified")
        self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Draft tokens verified")
        self.accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Draft tokens accepted")
        self.accepted_per_pos = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by depth", "position"
        )
        self._accepted_at = [self.accepted_per_pos.labels(str(position)) for position in range(_POSITIONS)]
        self.emitted_tokens = self._counter("emitted_tokens", "Verified tokens sent", "mode")
        self.sessions = self._gauge("sessions", "Sessions by state", "state")
        self.connections = self._gauge("connections", "Open connections")
        self.slots_free = self._gauge("slots_free", "Slots that no session claims")
        self.pages_free = self._gauge("kv_pages_free", "Pages of key/value memory that no session holds")
        self.queue = self._gauge("queued_rounds", "Rounds waiting for the model")
        self.evictions = self._counter("session_evictions", "Slots or sessions taken away, by reason", "reason")
        self.resumes = self._counter("session_resumes", "Resumes by outcome", "outcome")
        self.refusals = self._counter("refusals", "Requests refused, by code and limit", "code", "limit")
        self.cuts = self._counter("cut_connections", "Connections cut because they kept asking for too much", "limit")
        self.half_open = self._gauge("half_open_connections", "Connections that have not finished their handshake")
        self.half_open_dropped = self._counter("half_open_dropped", "Half-open connections dropped for newer ones")
        self.quarantined = self._counter("quarantined_sessions", "Sessions dropped because their work failed")
        self.engine_faults = self._counter("engine_faults", "What raised in the engine, by place", "where")
        self.queue_seconds = self._histogram("queue_seconds", "Waiting time of rounds", _MS)
        self.forward_seconds = self._histogram("forward_seconds", "Duration of forwards, by kind", _MS, "kind")
        self.verify_seconds = self._histogram(
            "verify_seconds", "From a draft's arrival on its socket to the writing of its verdict", _MS
        )
        self.overhead_seconds = self._histogram(
            "verify_overhead_seconds", "The same without the forward: waiting, and the server's own work", _FINE
        )
        self.forwards = self._counter(
            "forwards", "Forwards by path (graph, eager or library) and the accelerator's tier", "path", "tier"
        )
        self.batch_rows = self._histogram("batch_rows", "Sessions in one forward of drafts", _ROWS)
        self.record_bytes = self._counter("record_bytes", "Activation payload bytes sent, by precision", "dtype")
        self.shared_tokens = self._counter("shared_prefix_tokens", "Prompt tokens shared instead of run")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens run")
        self.sent_bytes = self._counter("sent_bytes", "Bytes of frames sent, by kind", "kind")

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

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return Counter(f"moa_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Any:
        return Gauge(f"moa_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Any:
        return Histogram(f"moa_{name}", text, labels, registry=self.registry, buckets=buckets)
