"""A llama.cpp server in its own process, out of the wheel `xllamacpp`."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from moa.errors import MoaError
from moa.process.listening import Port

_PROGRAM = """
import sys, time
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.port = int(sys.argv[2])
params.cpuparams.n_threads = int(sys.argv[3])
params.n_parallel = int(sys.argv[4])
params.n_ctx = 2048 * params.n_parallel
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
time.sleep(1e6)
"""


@contextlib.contextmanager
def llama_server(gguf: str, *, threads: int = 1, parallel: int = 1) -> Iterator[str]:
    """Its address, for as long as the context lasts."""
    with Port("127.0.0.1", 0) as port:
        number = port.number
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, gguf, str(number), str(threads), str(parallel)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise MoaError(f"no llama.cpp server over {gguf}", hint="is xllamacpp installed?")
        yield f"http://127.0.0.1:{number}/v1"
    finally:
        process.kill()
        process.communicate()
