"""Metrics of several processes as one page."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cloud_verifier.metrics import Metrics
from cloud_verifier.workers.pages import merge


def test_samples_keep_their_values_and_get_the_name_of_their_process() -> None:
    first, second = Metrics(), Metrics()
    first.opens.inc(3)
    second.opens.inc(4)
    first.refusals.labels("busy", 'a "limit" {odd}').inc()
    registry = CollectorRegistry()
    Gauge("moa_workers_well", "Workers", registry=registry).set(2)
    page = merge({"front": generate_latest(registry), "0": first.page(), "1": second.page()}).decode()
    families = list(text_string_to_metric_families(page))
    assert len({family.name for family in families}) == len(families), "a family stands in one place"
    samples = {(s.name, s.labels["worker"]): s for family in families for s in family.samples if len(s.labels) == 1}
    assert samples["moa_session_opens_total", "0"].value == 3
    assert samples["moa_session_opens_total", "1"].value == 4
    assert samples["moa_workers_well", "front"].value == 2
    (refused,) = (s for f in families for s in f.samples if s.name == "moa_refusals_total")
    assert refused.labels == {"worker": "0", "code": "busy", "limit": 'a "limit" {odd}'}


def test_one_page_alone() -> None:
    registry = CollectorRegistry()
    Counter("moa_x", "X", registry=registry).inc()
    assert b'moa_x_total{worker="0"} 1.0' in merge({"0": generate_latest(registry)})
