"""The files of `deploy` name metrics, settings and paths that exist."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cloud_verifier.cli import parser, settings_from
from cloud_verifier.metrics import Metrics
from cloud_verifier.upstream.figures import Figures

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.mark.parametrize("file", ["prometheus/alerts.yml", "grafana/cloud-verifier.json"])
def test_every_metric_that_is_watched_is_served(file: str) -> None:
    watched = set(re.findall(r"\bmoa_[a-z_]+", (DEPLOY / file).read_text()))
    metrics = Metrics()
    Figures(metrics.registry)
    names = {family.name for family in text_string_to_metric_families(metrics.page().decode())}
    assert watched
    assert watched <= {
        f"{name}{end}" for name in names for end in ("", "_total", "_bucket", "_sum", "_count")
    }


def test_the_dashboard_has_a_query_in_every_panel() -> None:
    board = json.loads((DEPLOY / "grafana/cloud-verifier.json").read_text())
    assert all(target["expr"] for panel in board["panels"] for target in panel["targets"])
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_prometheus_takes_the_rules() -> None:
    subprocess.run(
        ["promtool", "check", "rules", str(DEPLOY / "prometheus/alerts.yml")], check=True
    )


def test_the_flags_for_ray_serve_are_those_of_the_command() -> None:
    config = yaml.safe_load((DEPLOY / "ray/serve.yaml").read_text())
    flags = shlex.split(config["applications"][0]["args"]["flags"])
    assert settings_from(parser().parse_args(["serve", *flags])).auth_tokens


def test_the_manifests_ask_for_what_the_verifier_answers() -> None:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes/verifier.yaml").read_text())
    by_kind: dict[str, Any] = {document["kind"]: document for document in documents}
    pod = by_kind["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
    drain = next(
        int(flag.partition("=")[2])
        for flag in container["args"]
        if flag.startswith("--drain-seconds")
    )
    assert pod["spec"]["terminationGracePeriodSeconds"] > drain + 5, (
        "and the pause before, and what closing takes"
    )
    budget = by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    for selected in (by_kind["Service"]["spec"]["selector"], budget):
        assert selected.items() <= pod["metadata"]["labels"].items()
    annotations = by_kind["Ingress"]["metadata"]["annotations"].values()
    assert sum("$http_x_session_id$arg_session" in value for value in annotations) == 2


UPSTREAM_FILES = ("compose/sglang.yaml", "compose/vllm.yaml", "kubernetes/upstream.yaml")


def commands_of(file: str) -> dict[str, tuple[list[str], int]]:
    """The words of each container's command, and its cards, by the name that others reach it by."""
    text = (DEPLOY / file).read_text()
    if file.startswith("compose"):
        found = {}
        for name, service in yaml.safe_load(text)["services"].items():
            (devices,) = (
                service.get("deploy", {}).get("resources", {}).get("reservations", {}).values()
            ) or ([],)
            cards = sum(one.get("count", 0) + len(one.get("device_ids", ())) for one in devices)
            found[name] = (" ".join(service["command"]).split(), cards)
        return found
    found = {}
    for document in yaml.safe_load_all(text):
        if document["kind"] in ("Deployment", "StatefulSet"):
            (container,) = document["spec"]["template"]["spec"]["containers"]
            cards = container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0)
            found[document["metadata"]["name"]] = (" ".join(container["args"]).split(), cards)
    return found


def number(words: list[str], flag: str) -> int:
    """A flag's number, 1 without it."""
    return next((int(word.partition("=")[2]) for word in words if word.startswith(f"{flag}=")), 1)


@pytest.mark.parametrize("file", UPSTREAM_FILES)
def test_verifiers_stand_in_front_of_engines_that_are_there(file: str) -> None:
    commands = commands_of(file)
    (flags,) = (words for name, (words, _) in commands.items() if "verifier" in name)
    settings = settings_from(parser().parse_args(["serve", *flags]))
    assert settings.bundle
    assert settings.upstream
    for address in settings.upstream:
        host, port = address.removeprefix("http://").split(":")
        words, cards = commands[host]
        assert f"--port={port}" in words
        assert f"--served-model-name={settings.upstream_model}" in words
        width = number(words, "--tp") * number(words, "--tensor-parallel-size")
        assert cards == width == 2


@pytest.mark.parametrize("file", ["compose/vllm.yaml", "kubernetes/upstream.yaml"])
def test_a_pipeline_has_as_many_nodes_as_stages(file: str) -> None:
    text = (DEPLOY / file).read_text()
    stages = int(re.findall(r"--pipeline-parallel-size=(\d+)", text)[0])
    if file.startswith("compose"):
        nodes = sum("ray start" in " ".join(words) for words, _ in commands_of(file).values())
    else:
        (nodes,) = (
            document["spec"]["replicas"]
            for document in yaml.safe_load_all(text)
            if document["kind"] == "StatefulSet"
        )
    assert nodes == stages
