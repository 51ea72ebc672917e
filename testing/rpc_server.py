"""llama.cpp's `rpc-server` as a process of its own, from the shared library of a build that has that
backend: `python -m testing.rpc_server LIBRARY HOST:PORT`. It serves this machine's processor."""

from __future__ import annotations

import contextlib
import ctypes
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from moa.llama.library import CPU, load

_PATIENCE = 120.0
"""Seconds until it listens: this process imports first, on a busy machine."""


def serve(path: Path, address: str, *, threads: int = 1) -> None:
    """Serve until the process is ended."""
    library = load(path)
    backend = library.c.ggml_backend_reg_by_name(b"RPC")
    name = b"ggml_backend_rpc_start_server"
    start = library.c.ggml_backend_reg_get_proc_address(backend, name) if backend else None
    if not start:
        raise SystemExit(f"{path} has no RPC backend")
    handles = [handle for kind, handle in library.devices() if kind == CPU]
    devices = (ctypes.c_void_p * len(handles))(*handles)
    run = ctypes.CFUNCTYPE(
        None,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_void_p,
    )(start)
    run(address.encode(), None, threads, len(handles), devices)


@contextlib.contextmanager
def running(library: Path, count: int) -> Iterator[list[str]]:
    """So many servers on loopback, and their addresses."""
    addresses = [f"127.0.0.1:{_free_port()}" for _ in range(count)]
    made = []
    try:
        for address in addresses:
            command = [sys.executable, "-m", "testing.rpc_server", str(library), address]
            made.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        for address, process in zip(addresses, made, strict=True):
            _wait_for(address, process)
        yield addresses
    finally:
        for process in made:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server takes connections."""
    host, _, port = address.rpartition(":")
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1.0):
            return
        time.sleep(0.1)
    raise RuntimeError(f"no rpc-server listens at {address}")


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2])
