"""The files of `deploy` name metrics, settings and paths that exist."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import socket
import subprocess
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cloud_verifier.cli import parser, settings_from
from cloud_verifier.metrics import Metrics
from cloud_verifier.upstream.figures import Figures
from moa.api.errors import ApiError
from moa.api.metrics import ApiMetrics
from moa.process.listening import Port
from moa.version import COMMIT_FILE

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.mark.parametrize("file", ["prometheus/alerts.yml", "grafana/cloud-verifier.json"])
def test_every_metric_that_is_watched_is_served(file: str) -> None:
    watched = set(re.findall(r"\bmoa_[a-z_]+", (DEPLOY / file).read_text()))
    metrics = Metrics()
    ApiMetrics(metrics.registry)
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


CPU_BUILD = (
    "torch -c constraints.txt --index-url https://download.pytorch.org/whl/cpu"
    " --extra-index-url https://pypi.org/simple"
)


def test_the_image_and_the_unit_have_the_step_for_a_machine_without_a_card(tmp_path: Path) -> None:
    for file in ("../README.md", "cloud-verifier.service"):
        assert f"pip install {CPU_BUILD}\n" in (DEPLOY / file).read_text()
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\necho "$@"\n')
    pip.chmod(0o755)
    (step,) = re.findall(
        r"^ARG TORCH=cuda\nRUN (.*?esac)$", (DEPLOY / "Dockerfile").read_text(), re.M | re.S
    )

    def run(torch: str) -> tuple[int, str]:
        """What the image's step does, with a pip that only says how it was called."""
        done = subprocess.run(
            ["/bin/sh", "-c", step],
            env={"TORCH": torch, "PATH": f"{tmp_path}:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    assert run("cuda") == (0, "")
    assert run("cpu") == (0, f"install --no-cache-dir {CPU_BUILD}\n")
    assert run("gpu") == (1, "")


@pytest.mark.parametrize(
    ("commit", "code"), [("0123456789" * 4, 0), ("", 0), ("0123456", 1), ("main", 1)]
)
def test_the_image_names_the_commit_that_it_was_built_from(
    commit: str, code: int, tmp_path: Path
) -> None:
    """The builder gets no file of git, and logs of the image named the release alone."""
    image = (DEPLOY / "Dockerfile").read_text()
    step, after = re.findall(r"^ARG COMMIT=\nRUN (.*?fi)\n(.*)$", image, re.M | re.S)[0]
    assert "pip install" in after, "the package is built behind it"
    (tmp_path / "moa").mkdir()
    done = subprocess.run(
        ["/bin/sh", "-c", step],
        env={"COMMIT": commit, "PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == code
    written = tmp_path / "moa" / COMMIT_FILE
    assert written.exists() == (code == 0 and bool(commit))
    if written.exists():
        assert written.read_text() == f"{commit}\n"
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    assert COMMIT_FILE in project["tool"]["setuptools"]["package-data"]["moa"]
    for file in ("Dockerfile", "compose/sglang.yaml", "compose/vllm.yaml"):
        for line in re.findall("^.*docker build .*$", (DEPLOY / file).read_text(), re.M):
            assert '--build-arg COMMIT="$(git rev-parse HEAD)"' in line


@pytest.mark.parametrize("file", ["compose/sglang.yaml", "compose/vllm.yaml"])
def test_a_verifier_may_wait_for_its_engine_as_long_as_that_loads(file: str) -> None:
    services = yaml.safe_load((DEPLOY / file).read_text())["services"]
    waits = [services[name]["healthcheck"]["start_period"] for name in ("engine", "verifier")]
    assert waits[0] == waits[1]


def test_the_unit_names_the_extra_of_each_way_to_serve() -> None:
    unit = (DEPLOY / "cloud-verifier.service").read_text()
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    for extra, of in {
        "verifier": ".[verifier]",
        "serve": "`serve` for --openai",
        "gguf": "`gguf` for a GGUF file",
        "upstream": ".[upstream]",
    }.items():
        assert extra in project["optional-dependencies"]
        assert of in unit


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


def test_the_scrape_names_the_operators_token_and_how_its_file_is_made() -> None:
    text = (DEPLOY / "prometheus/prometheus.yml").read_text()
    (job,) = yaml.safe_load(text)["scrape_configs"]
    file = job["authorization"]["credentials_file"]
    assert f"token new --name operator --append /etc/moa/tokens > {file})" in text
    assert "without --auth-tokens leave `authorization` out" in text


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_prometheus_takes_the_rules() -> None:
    subprocess.run(
        ["promtool", "check", "rules", str(DEPLOY / "prometheus/alerts.yml")], check=True
    )


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_the_end_of_a_certificate_is_an_alert_14_days_before_it_and_no_certificate_is_none(
    tmp_path: Path,
) -> None:
    days = 86400
    served = "moa_certificate_end_time_seconds"
    alert = {
        "exp_labels": {"severity": "warn", "instance": "soon"},
        "exp_annotations": {
            "summary": "The certificate that soon serves ends at 1970-01-31 00:00:00 +0000 UTC:"
            " renew it, and restart."
        },
    }
    rules = {
        "rule_files": [str(DEPLOY / "prometheus/alerts.yml")],
        "tests": [
            {
                "interval": "12h",
                "input_series": [
                    {"series": f'{served}{{instance="soon"}}', "values": f"{30 * days}x60"},
                    {"series": f'{served}{{instance="late"}}', "values": f"{90 * days}x60"},
                    {"series": f'{served}{{instance="plain"}}', "values": "0x60"},
                ],
                "alert_rule_test": [
                    {"eval_time": "15d", "alertname": "MoaCertificateEnds", "exp_alerts": []},
                    {"eval_time": "17d", "alertname": "MoaCertificateEnds", "exp_alerts": [alert]},
                ],
            }
        ],
    }
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump(rules))
    subprocess.run(["promtool", "test", "rules", str(file)], check=True)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_one_device_that_finds_no_place_is_an_alert_and_one_at_its_rate_is_none(
    tmp_path: Path,
) -> None:
    refused = "moa_refusals_total"
    alert = {
        "exp_labels": {"severity": "warn", "instance": "here", "limit": "max_connections"},
        "exp_annotations": {
            "summary": "here has had no place for somebody for half an hour: max_connections."
            " The log has their names (refused)."
        },
    }
    every_five_seconds = "0+12x60"  # of a minute each
    limits = ("max_connections", "max_tokens_per_second")
    rules = {
        "rule_files": [str(DEPLOY / "prometheus/alerts.yml")],
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {
                        "series": f'{refused}{{instance="here",code="busy",limit="{limit}"}}',
                        "values": every_five_seconds,
                    }
                    for limit in limits
                ],
                "alert_rule_test": [
                    {"eval_time": "10m", "alertname": "MoaDeviceIsKeptOut", "exp_alerts": []},
                    {"eval_time": "40m", "alertname": "MoaDeviceIsKeptOut", "exp_alerts": [alert]},
                ],
            }
        ],
    }
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump(rules))
    subprocess.run(["promtool", "test", "rules", str(file)], check=True)


def test_the_flags_for_ray_serve_are_those_of_the_command() -> None:
    config = yaml.safe_load((DEPLOY / "ray/serve.yaml").read_text())
    flags = shlex.split(config["applications"][0]["args"]["flags"])
    assert settings_from(parser().parse_args(["serve", *flags])).auth_tokens


def test_the_manifests_ask_for_what_the_verifier_answers() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes/verifier.yaml").read_text()))
    # Of two Ingresses the first one.
    by_kind: dict[str, Any] = {document["kind"]: document for document in reversed(documents)}
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


API_KEY = "$http_x_session_id$arg_session$http_authorization"
"""What the API's requests are sent to a replica by: a conversation's id where there is one, else the
key; a stream is resumed with the same ones."""


def test_the_api_of_replicas_is_routed_by_its_own_key_to_its_own_port() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes/verifier.yaml").read_text()))
    named = {(one["kind"], one["metadata"]["name"]): one for one in documents}
    ingress = named["Ingress", "moa-verifier-api"]
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert path["path"] == "/v1/"
    service = named["Service", path["backend"]["service"]["name"]]
    ports = {port["name"]: port for port in service["spec"]["ports"]}
    port = ports[path["backend"]["service"]["port"]["name"]]
    (container,) = named["Deployment", "moa-verifier"]["spec"]["template"]["spec"]["containers"]
    listening = {one["name"]: one["containerPort"] for one in container["ports"]}
    flags = ["--host=0.0.0.0", "--auth-tokens=/etc/moa/tokens", *container["args"]]
    settings = settings_from(parser().parse_args(["serve", *flags]))
    assert settings.openai_address == ("0.0.0.0", listening[port["targetPort"]])
    assert settings.openai_hosts == (rule["host"],) == tuple(ingress["spec"]["tls"][0]["hosts"])
    verifier = named["Ingress", "moa-verifier"]["spec"]["rules"][0]["host"]
    assert verifier != rule["host"], "F5's controller takes a host for one Ingress"
    annotations = ingress["metadata"]["annotations"]
    assert sum(API_KEY in value for value in annotations.values()) == 2
    assert annotations["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"


def test_nginx_routes_the_api_by_that_key_and_never_asks_twice_for_a_slow_answer() -> None:
    text = (DEPLOY / "nginx.conf").read_text()
    replicas = {
        name: set(re.findall(r"server ([\d.]+):(\d+)", body))
        for name, body in re.findall(r"^upstream (\w+) \{(.*?)^\}", text, re.M | re.S)
    }
    hosts = [{host for host, _ in servers} for servers in replicas.values()]
    assert hosts[0] == hosts[1], "the same verifiers"
    assert {port for _, port in replicas["moa_apis"]} == {"8080"}
    assert f"hash {API_KEY} consistent;" in text
    (api,) = re.findall(r"location /v1/ \{(.*?)\n    \}", text, re.S)
    assert "proxy_pass http://moa_apis;" in api
    assert "proxy_buffering off;" in api
    assert "proxy_set_header Host $host;" in api, "which --openai-host lets in"
    for route in re.findall(r"location .*? \{(.*?)\n    \}", text, re.S):
        if "proxy_pass" in route:
            assert "proxy_set_header X-Forwarded-For $moa_client;" in route, "no client's own word"
    (again,) = re.findall(r"proxy_next_upstream (.*);", api)
    assert "timeout" not in again
    name = re.findall(r"server_name (.*);", text)[0]
    assert f"--openai 8080 --openai-host {name}," in text


class Replica(ThreadingHTTPServer):
    """A stand-in of a verifier's API, which says which one it is, or that it stops."""

    stops = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ReplicaHandler)


class ReplicaHandler(BaseHTTPRequestHandler):
    """Answers with its replica's port."""

    def do_POST(self) -> None:
        """Read the request, and answer it."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer()

    def do_GET(self) -> None:
        """Answer."""
        self._answer()

    def _answer(self) -> None:
        assert isinstance(self.server, Replica)
        content = str(self.server.server_port).encode()
        self.send_response(503 if self.server.stops else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    """Two stand-ins that serve."""
    made = [Replica(), Replica()]
    for one in made:
        threading.Thread(target=one.serve_forever, daemon=True).start()
    yield made
    for one in made:
        one.shutdown()
        one.server_close()


@pytest.fixture
def behind_nginx(replicas: list[Replica], tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of nginx in front of the stand-ins, with the file as it is but for its addresses and
    TLS."""
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed")
    with Port("127.0.0.1", 0) as free:
        port = free.number
    text = (DEPLOY / "nginx.conf").read_text()
    text = re.sub(r"^ *(ssl_.*|server 10\.0\.0\.13:.*);.*\n", "", text, flags=re.M)
    text = text.replace("listen 443 ssl", f"listen 127.0.0.1:{port}")
    for host, replica in zip(("11", "12"), replicas, strict=True):
        text = text.replace(f"10.0.0.{host}:8080", f"127.0.0.1:{replica.server_port}")
    configuration = tmp_path / "nginx.conf"
    temporary = "\n".join(
        f"{kind}_temp_path {tmp_path}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    configuration.write_text(
        f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error;\nevents {{}}\n"
        f"http {{\naccess_log off; client_body_buffer_size 4m;\n{temporary}\n{text}\n}}\n"
    )
    nginx = subprocess.Popen(["nginx", "-p", str(tmp_path), "-c", str(configuration)])
    try:
        _wait_for(port, nginx)
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60
        ) as client:
            yield client
    finally:
        nginx.terminate()
        nginx.wait(timeout=60)


def test_nginx_keeps_a_conversation_on_its_replica_until_that_stops(
    replicas: list[Replica], behind_nginx: httpx.Client
) -> None:
    def served_by(session: str, method: str = "POST") -> str:
        """Which replica has answered for this conversation."""
        path = "/v1/chat/completions" if method == "POST" else "/v1/streams/chatcmpl-1"
        answer = behind_nginx.request(
            method,
            path,
            headers={"Authorization": "Bearer key", "X-Session-Id": session},
            content=b"{}",
        )
        assert answer.status_code == 200
        return answer.text

    first = {str(one): served_by(str(one)) for one in range(20)}
    assert len(set(first.values())) == 2, "conversations of one key are spread"
    assert {one: served_by(one, "GET") for one in first} == first, "a stream is resumed"
    replicas[0].stops = True
    stays = str(replicas[1].server_port)
    assert {served_by(one) for one in first} == {stays}, "none sees the 503"
    replicas[0].stops, replicas[1].stops = False, True
    other = str(replicas[0].server_port)
    assert {served_by(one) for one in first} == {other}, "the first is asked again at once"
    assert behind_nginx.get("/metrics").status_code in (403, 404), "it is of one replica"


def test_what_nginx_says_by_itself_is_in_the_form_of_the_api(
    replicas: list[Replica], behind_nginx: httpx.Client
) -> None:
    """Programs got a page of HTML, which their libraries could not read."""
    most = 2 * 2**20
    path = "/v1/chat/completions"
    assert behind_nginx.post(path, content=b" " * most).status_code == 200, "for the API to judge"
    refused = behind_nginx.post(path, content=b" " * (most + 1))
    words = f"the body is longer than {most} bytes"
    assert refused.status_code == 413
    assert refused.json() == ApiError(413, words, code="body_too_long").body()
    for one in replicas:
        one.stops = True
    passed_on = behind_nginx.post(path, content=b"{}")
    assert passed_on.status_code == 503
    assert passed_on.text in {str(one.server_port) for one in replicas}, "a verifier's own words"
    for one in replicas:
        one.server_close()
    away = behind_nginx.post(path, content=b"{}")
    wanted = ApiError(
        502, "no verifier can be reached now", code="verifier_unavailable", retry_after=1.0
    )
    assert (away.status_code, away.json()) == (502, wanted.body())
    assert away.headers["Retry-After"] == wanted.headers()["Retry-After"]
    for answer in (refused, away):
        assert answer.headers["Content-Type"] == "application/json"


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a program accepts connections at its port; it must not end before."""
    while True:
        assert process.poll() is None
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return


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
