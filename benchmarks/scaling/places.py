"""Where devices find their verifiers: one process, several workers, or Ray Serve. Each can lose one of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.server_kit import Pair, server
from moa.errors import MoaError

_ROOT = Path(__file__).parents[2]
_START_SECONDS = 600.0
_PORT = 8791
_SERVE = """
proxy_location: HeadOnly
http_options: {{host: 127.0.0.1, port: {port}}}
applications:
  - name: moa
    import_path: cloud_verifier.ray_serve:build
    route_prefix: /
    args: {{slots: {slots}, anonymous: true, max_context_tokens: 512, max_prompt_tokens: 256}}
    deployments:
      - {{name: verifier, num_replicas: {count}, ray_actor_options: {{num_cpus: 0.1}}}}
"""


@dataclass(frozen=True)
class Place:
    """An address with verifiers behind it."""

    url: str
    victims: Callable[[], list[int]]
    """Process ids of the verifiers, any of which may be killed."""

    def kill_one(self) -> None:
        """Kill -9 a verifier, the first of them."""
        os.kill(self.victims()[0], signal.SIGKILL)


@contextlib.contextmanager
def plain(pair: Pair, *flags: str) -> Iterator[Place]:
    """One `cloud-verifier serve`."""
    with server(pair, *flags, threads=1) as process:
        yield Place(process.url, lambda: [process.process.pid])


@contextlib.contextmanager
def workers(pair: Pair, count: int, *flags: str) -> Iterator[Place]:
    """`cloud-verifier serve --workers`."""
    with server(pair, "--workers", str(count), *flags, threads=1) as process:
        yield Place(process.url, lambda: spawned(process.process.pid))


def spawned(front: int) -> list[int]:
    """The workers of a front, in their order."""
    children = psutil.Process(front).children()
    return [child.pid for child in children if any("spawn_main" in word for word in child.cmdline())]


@contextlib.contextmanager
def ray_serve(python: Path, count: int, slots: int) -> Iterator[Place]:
    """Ray Serve on this machine, in an environment of its own: started here, and stopped at the end."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serve.yaml"
        config.write_text(_SERVE.format(port=_PORT, slots=slots, count=count), encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        process = subprocess.Popen(
            [python.absolute().with_name("serve"), "run", "--non-blocking", str(config)], env=environment, cwd=_ROOT
        )
        try:
            if process.wait(_START_SECONDS):
                raise MoaError("Ray Serve did not start", hint="what it said is above")
            yield Place(f"ws://127.0.0.1:{_PORT}", _replicas)
        finally:
            subprocess.run([python.absolute().with_name("serve"), "shutdown", "-y"], env=environment, check=False)


def _replicas() -> list[int]:
    names = ((process.pid, process.info["cmdline"] or [""]) for process in psutil.process_iter(["cmdline"]))
    return [pid for pid, words in names if words[0].startswith("ray::ServeReplica:moa:verifier")]
