"""The verifier on Ray Serve, started as users start it: `serve run deploy/ray/serve.yaml`, with some values changed."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from moa.errors import MoaError

_ROOT = Path(__file__).parents[2]
_CONFIG = _ROOT / "deploy" / "ray" / "serve.yaml"
_RUN = """
import ray  # as `serve run` starts it, but without a dashboard, and with little shared memory
ray.init(namespace="serve", include_dashboard=False, object_store_memory=100 << 20)
from ray.serve.scripts import cli
cli()
"""
_START_SECONDS = 600.0
_STARTS = 4
"""Ray gives its own processes 30 s to start, and then gives up: on a busy machine that can be too short."""
_FAREWELL_SECONDS = 20.0


@dataclass
class Serving:
    """Ray Serve, as a process and an address."""

    url: str
    process: subprocess.Popen[bytes]

    def replicas(self) -> int:
        """How many replicas answer."""
        http = self.url.replace("ws://", "http://")
        try:
            with urllib.request.urlopen(f"{http}/metrics", timeout=10) as answer:
                page = answer.read().decode()
        except (OSError, urllib.error.HTTPError):
            return 0
        samples = (one for family in text_string_to_metric_families(page) for one in family.samples)
        return len({one.labels["worker"] for one in samples})

    def processes(self) -> list[int]:
        """Process ids of replicas."""
        return [one.pid for one in self._session() if one.cmdline()[:1] and "ServeReplica" in one.cmdline()[0]]

    def wait(self, replicas: int, seconds: float = _START_SECONDS) -> None:
        """Wait until so many replicas answer."""
        until = time.monotonic() + seconds
        while (found := self.replicas()) != replicas:
            if self.process.poll() is not None or time.monotonic() > until:
                raise MoaError(f"{found} replicas answer and not {replicas}", hint="what Ray said is above")
            time.sleep(0.5)

    def close(self) -> None:
        """End Ray: its processes follow the one that started them."""
        self.process.terminate()
        _, alive = psutil.wait_procs(self._session(), timeout=_FAREWELL_SECONDS)
        for one in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGKILL)
        self.process.wait()

    def _session(self) -> list[psutil.Process]:
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if os.getsid(one.pid) == self.process.pid:
                    found.append(one)
        return found


@contextlib.contextmanager
def serving(
    arguments: Mapping[str, Any], deployment: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> Iterator[Serving]:
    """Run Ray Serve for as long as the context lasts. `arguments` replace the application's, `deployment` values of
    the deployment; a value of None removes one."""
    port = _free_port()
    config = yaml.safe_load(_CONFIG.read_text())
    config["http_options"] |= {"host": "127.0.0.1", "port": port}
    (application,) = config["applications"]
    application["args"] = {"host": "127.0.0.1", **arguments}
    (verifier,) = application["deployments"]
    changed = verifier | {"ray_actor_options": {"num_cpus": 0}} | deployment
    application["deployments"] = [{name: value for name, value in changed.items() if value is not None}]
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "serve.json"  # JSON is YAML
        file.write_text(json.dumps(config))
        own = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(_ROOT),
            "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray writes one to the home folder
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",  # Ray's own 15 starves replicas beside other work on the machine
        }
        command = [sys.executable, "-c", _RUN, "run", str(file)]
        replicas, environ = verifier_count(application["deployments"][0]), os.environ | own | dict(environment or {})
        for left in reversed(range(_STARTS)):
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, cwd=_ROOT, env=environ, start_new_session=True
            )
            running = Serving(f"ws://127.0.0.1:{port}", process)
            with contextlib.closing(running):
                try:
                    running.wait(replicas)
                except MoaError:
                    if not left or process.poll() is None:
                        raise
                    continue
                yield running
                return


def verifier_count(deployment: Mapping[str, Any]) -> int:
    """With how many replicas a deployment begins."""
    scaling = deployment.get("autoscaling_config") or {}
    return int(deployment.get("num_replicas") or scaling.get("initial_replicas") or scaling.get("min_replicas") or 1)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
