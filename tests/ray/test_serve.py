"""The example of deploy/ray, started as users start it. Needs what `make ray` installs."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from moa.process.listening import Port

pytest.importorskip("ray", reason="`make ray` installs it")

ROOT = Path(__file__).parents[2]
PATIENCE = 600.0
FLAGS = "--host 127.0.0.1 --slots 8 --max-context-tokens 1024"
RUN = """
import ray  # as `serve run` starts it, but without a dashboard, and with little shared memory
ray.init(namespace="serve", include_dashboard=False, object_store_memory=100 << 20)
from ray.serve.scripts import cli
cli()
"""


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Ray Serve with two replicas of the embedded pair on a CPU."""
    with Port("127.0.0.1", 0) as taken:
        port = taken.number
    config = yaml.safe_load((ROOT / "deploy/ray/serve.yaml").read_text())
    config["http_options"] |= {"host": "127.0.0.1", "port": port}
    (application,) = config["applications"]
    application["args"] = {"flags": FLAGS}
    application["deployments"][0]["ray_actor_options"] = {"num_cpus": 0}
    file = folder / "serve.json"  # JSON is YAML
    file.write_text(json.dumps(config))
    own = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "deploy/ray"), str(ROOT)]),
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray writes one to the home folder
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }
    command = [sys.executable, "-c", RUN, "run", str(file)]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | own, start_new_session=True)
    try:
        yield process, f"127.0.0.1:{port}"
    finally:
        process.terminate()
        _, alive = psutil.wait_procs(_processes(process), timeout=30)
        for one in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def _processes(process: subprocess.Popen[bytes], word: str = "") -> list[psutil.Process]:
    found = []
    for one in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getsid(one.pid) == process.pid and word in " ".join(one.cmdline()):
                found.append(one)
    return found


def _wait_for(process: subprocess.Popen[bytes], address: str, replicas: int) -> None:
    until = time.monotonic() + PATIENCE
    while True:
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://{address}/health/ready", timeout=10),
        ):
            if len(_processes(process, "ServeReplica")) == replicas:
                return
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE)
def test_texts_are_the_targets_own_also_after_a_replica_has_died() -> None:
    audit = "from edge_client.cli import main; main()", "audit", "What is 17 plus 25?", "--verifier"
    with (
        tempfile.TemporaryDirectory(
            prefix="r", ignore_cleanup_errors=True
        ) as folder,  # paths of sockets are short
        serving(Path(folder)) as (process, address),
    ):
        for kill in (False, True):
            _wait_for(process, address, 2)
            if kill:
                _processes(process, "ServeReplica")[0].send_signal(signal.SIGKILL)
            subprocess.run(
                [sys.executable, "-c", *audit, f"ws://{address}"],
                cwd=ROOT,
                check=True,
                timeout=PATIENCE,
            )
