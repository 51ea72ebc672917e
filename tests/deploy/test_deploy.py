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
from moa.api.metrics import ApiMetrics

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


def test_every_metric_is_in_a_table_of_the_documentation_and_no_other() -> None:
    metrics = Metrics()
    ApiMetrics(metrics.registry)
    Figures(metrics.registry)
    served = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in metrics.registry.collect()
        if family.name.startswith("moa_")
    }
    documented = set[str]()
    for page in ("operations.md", "upstream.md"):
        rows = re.findall(r"^\| (`moa_.*?`) \|", (DEPLOY.parent / "docs" / page).read_text(), re.M)
        for name in re.findall(r"`(\w+)", " ".join(rows)):
            documented.add(f"moa_spec_decode{name}" if name.startswith("_") else name)
    others = {"process_resident_memory_bytes", "process_start_time_seconds"}  # of the library
    assert documented - others == served


def test_the_alerts_cover_both_evictions_for_room_and_all_that_should_be_zero() -> None:
    (group,) = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    rules = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    for reason in ("slot_needed", "pages_needed"):
        assert reason in rules["MoaSessionsPushEachOtherOut"]
    watched = " ".join(rules.values())
    assert "moa_engine_faults_total" in watched
    assert "moa_quarantined_sessions_total" in watched


CACHE = "/var/cache/moa"


def test_a_verifier_can_write_its_cache_and_nothing_else_wherever_it_runs() -> None:
    """Where it cannot, each restart hashes all weights, and a GGUF file cannot be served."""
    image = (DEPLOY / "Dockerfile").read_text()
    assert f"XDG_CACHE_HOME={CACHE} " in image
    assert f"install -d -m 1777 {CACHE}\n" in image
    for file in ("compose/sglang.yaml", "compose/vllm.yaml"):
        service = yaml.safe_load((DEPLOY / file).read_text())["services"]["verifier"]
        assert service["read_only"]
        assert service["tmpfs"] == ["/tmp", CACHE]
    for file in ("kubernetes/upstream.yaml", "kubernetes/verifier.yaml"):
        pod = next(yaml.safe_load_all((DEPLOY / file).read_text()))["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        mounts = container["volumeMounts"]
        assert [one["mountPath"] for one in mounts if not one.get("readOnly")] == ["/tmp", CACHE]
        empty = {volume["name"] for volume in pod["volumes"] if "emptyDir" in volume}
        assert {one["name"] for one in mounts if not one.get("readOnly")} == empty
    unit = (DEPLOY / "cloud-verifier.service").read_text()
    assert "CacheDirectory=cloud-verifier\n" in unit
    assert "XDG_CACHE_HOME=%C/cloud-verifier " in unit


@pytest.mark.parametrize("file", ["compose/sglang.yaml", "compose/vllm.yaml"])
def test_a_verifier_may_wait_for_its_engine_as_long_as_that_loads(file: str) -> None:
    services = yaml.safe_load((DEPLOY / file).read_text())["services"]
    waits = [services[name]["healthcheck"]["start_period"] for name in ("engine", "verifier")]
    assert waits[0] == waits[1]


def test_every_way_to_deploy_names_the_operators_token_and_says_what_a_plain_port_lacks() -> None:
    composed = ("compose/sglang.yaml", "compose/vllm.yaml")
    user = f"chown -R {re.findall('USER ([0-9]+)', (DEPLOY / 'Dockerfile').read_text())[0]} "
    for file in (*composed, "kubernetes/upstream.yaml", "kubernetes/verifier.yaml"):
        assert "token new --name operator" in (DEPLOY / file).read_text()
    for file in composed:
        assert user in (DEPLOY / file).read_text()
    for file in (*composed, "Dockerfile", "cloud-verifier.service"):
        assert "speaks plain ws" in (DEPLOY / file).read_text()


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
