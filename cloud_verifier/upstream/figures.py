"""What is counted of upstreams, the engines behind HTTP: Prometheus metrics of each address."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cloud_verifier.upstream.contract import Continuation, Piece, Usage
from cloud_verifier.upstream.tokens import Encode

Outcome = Literal["answered", "failed", "refused", "broken_off"]
"""How a request has ended. answered: text or scores came, to the end or for as long as anybody wanted
them. failed: nothing came, or it broke off; the upstream may answer later. refused: it refuses the
request or the key. broken_off: nobody waited for its first text any more."""
_FIRST_SECONDS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Figures:
    """The metrics of some upstreams, in the given registry, or one of their own."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        """Make all metrics, at zero."""
        registry = registry or CollectorRegistry()
        kinds: tuple[Any, ...] = Counter, Gauge, Histogram
        counter, gauge, histogram = (
            partial(kind, namespace="moa_upstream", registry=registry) for kind in kinds
        )
        self.requests = counter("requests", "Requests by outcome", ("upstream", "outcome"))
        self.tokens = counter(
            "tokens",
            "Tokens read and written, as the upstream counts them, else as the device's tokenizer does",
            ("upstream", "kind"),
        )
        self.retries = counter(
            "retries",
            "Requests sent once more: without a field that was refused, or asking in another way",
            ("upstream",),
        )
        self.failovers = counter(
            "failovers",
            "Requests that the next upstream got, because this one failed or had failed lately",
            ("upstream",),
        )
        self.answers = gauge("answers", "Whether it answers, as far as is known", ("upstream",))
        self.first_seconds = histogram(
            "first_seconds",
            "From a request to the first part of its answer",
            ("upstream",),
            buckets=_FIRST_SECONDS,
        )
        self._budget = gauge("budget", "Money for 24 hours; 0: no limit")
        self._spent = gauge("spent", "Money spent in the last 24 hours, where there is a limit")

    def begin(self, addresses: Sequence[str]) -> None:
        """Have a line for every upstream, also for one that nothing was asked of yet."""
        for address in addresses:
            self.requests.labels(address, "answered")
            self.tokens.labels(address, "read")
            self.tokens.labels(address, "written")
            self.retries.labels(address)
            self.failovers.labels(address)
            self.answers.labels(address).set(0)

    def money(self, budget: float, spent: Callable[[], float]) -> None:
        """Show a budget, and what is spent of it at the moment that somebody looks."""
        self._budget.set(budget)
        self._spent.set_function(spent)

    def request(self, address: str, asked: Continuation, now: float) -> Request:
        """Begin to count a request to this upstream."""
        return Request(self, address, len(asked.ids) + len(asked.draft), now)


class Request:
    """What one request comes to."""

    def __init__(self, figures: Figures, address: str, read: int, now: float) -> None:
        self._figures = figures
        self._address = address
        self._read = read
        """Tokens that were sent, counted by the device's tokenizer."""
        self._started = now
        self._ids = 0
        """Tokens that came as such."""
        self._texts: list[str] = []
        """What came as text: it is counted at the end, if the upstream does not count itself."""
        self._usage: Usage | None = None
        self._outcome: Outcome = "broken_off"

    def took(self, piece: Piece, now: float) -> None:
        """Note a part of the answer, or a sign that it is being worked on."""
        if piece.is_answer and self._outcome != "answered":
            self._outcome = "answered"
            self._figures.first_seconds.labels(self._address).observe(now - self._started)
        self._ids += len(piece.ids)
        if piece.text:
            self._texts.append(piece.text)
        self._usage = piece.usage or self._usage

    def failed(self, *, later: bool) -> None:
        """Note that it has failed; `later` says whether it may be answered another time."""
        self._outcome = "failed" if later else "refused"

    def end(self, encode: Encode | None) -> None:
        """Add it to the metrics. `encode` is the device's tokenizer, None if it is not known."""
        figures = self._figures
        figures.requests.labels(self._address, self._outcome).inc()
        usage = self._usage
        if usage is None and (self._ids or self._texts):
            text = "".join(self._texts)
            of_text = len(encode(text)) if text and encode is not None else 0
            usage = Usage(self._read, self._ids + of_text)
        if usage is not None:
            figures.tokens.labels(self._address, "read").inc(usage.read)
            figures.tokens.labels(self._address, "written").inc(usage.written)
