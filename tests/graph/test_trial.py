"""A stranger's graph is loaded only after a child with limits could load and run it; later steps
end, and Ctrl-C ends the program."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from edge_client.device import Device
from moa import demo
from moa.bundle import Bundle
from moa.errors import BundleError, MoaError
from moa.graph import trial
from moa.graph.control_flow import refuse_foreign_weights
from moa.graph.trial import try_out
from moa.process import watch
from moa.sampling import SamplingSettings
from moa.tree import TreeShape
from tests.graph.hostile import LOADED, Part, constant_sums, later_steps, make

_WITHIN = 1400
"""Megabytes: 1 GiB and eight times the bundle, and what a program has without any graph."""
_LONG = "one two three four five six seven eight nine ten " * 10


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


_REFUSED = """
import resource, sys
from moa.bundle import Bundle
from moa.errors import BundleError, MoaError
from moa.graph.trial import try_out
try:
    try_out(Bundle.open(sys.argv[1]), "web")
    print("accepted")
except BundleError as error:
    print(error.line())
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)
"""


@pytest.mark.parametrize(
    "part",
    [
        part if part is constant_sums else pytest.param(part, marks=pytest.mark.slow)
        for part in LOADED
    ],
)
def test_what_costs_too_much_is_refused_within_the_limits(
    part: Callable[[], Part], tmp_path: Path
) -> None:
    bundle = make(tmp_path / "bundle", part())
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", _REFUSED, str(bundle)], capture_output=True, text=True, check=True
    )
    line, megabytes = ran.stdout.splitlines()
    print(f"\n{part.__name__}: {time.monotonic() - began:.1f} s, {megabytes} MB: {line[:120]}")
    assert line.endswith("(do not use this bundle)")
    assert int(megabytes) < _WITHIN


def test_a_busy_machine_is_no_fault_of_a_bundle(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processor time is limited. By the clock the same work takes as long as others let it."""
    bundle = Bundle.open(make(tmp_path / "bundle"))
    monkeypatch.setattr(trial, "_CHILD_SECONDS", 0.001)
    with pytest.raises(MoaError) as refused:
        try_out(bundle, "web")
    assert not isinstance(refused.value, BundleError)
    assert refused.value.hint == "try again when the machine is less busy"
    assert not (cache / "moa-edge/tried").exists()


def test_an_honest_bundle_is_tried_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = make(tmp_path / "bundle")
    assert Device.load(bundle).variant == "web"
    assert len(list((cache / "moa-edge/tried").iterdir())) == 1
    with monkeypatch.context() as patched:
        patched.setattr(trial, "_child", lambda *_: pytest.fail("it is known"))
        Device.load(bundle)
        Device.load()  # the embedded one is ours
    os.utime(bundle / "variants/web/model.onnx", (1, 1))
    tried: list[str] = []
    monkeypatch.setattr(trial, "_child", lambda *_: (tried.append("again"), trial._DONE)[1])
    Device.load(bundle)
    assert tried == ["again"], "the file has changed"


def test_without_a_place_to_remember_it_is_tried_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle.open(make(tmp_path / "bundle"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    tried: list[str] = []
    monkeypatch.setattr(trial, "_child", lambda *_: (tried.append("again"), trial._DONE)[1])
    try_out(bundle, "web")
    try_out(bundle, "web")
    assert len(tried) == 2


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.skipif(os.name == "nt", reason="needs signals")
def test_ctrl_c_ends_the_program_though_a_step_does_not_end(command: str, tmp_path: Path) -> None:
    bundle = make(tmp_path / "bundle", later_steps())
    try_out(Bundle.open(bundle), "web")
    program_text = "from moa.cli.console_scripts import edge_client; edge_client()"
    words = [sys.executable, "-c", program_text, command, "--offline"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*words, "--bundle", str(bundle), *([_LONG] if command == "generate" else [])],
        stdin=pipe if command == "chat" else subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
    ) as program:
        if program.stdin is not None:
            program.stdin.write(_LONG + "\n")
            program.stdin.flush()
        while cpu_seconds(program.pid) < 3:  # it is in the step
            assert program.poll() is None, program.communicate()
            time.sleep(0.1)
        began = time.monotonic()
        program.send_signal(signal.SIGINT)
        if program.stdin is not None:  # it stops the answer, and the end of the input ends the chat
            program.stdin.close()
        code = program.wait(60)
        print(f"\nended {time.monotonic() - began:.1f} s after Ctrl-C")
    assert code == (130 if command == "generate" else 0)


_WAITS = """
import asyncio, signal, subprocess, sys
from moa.process import watch

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, print)
    with watch.watched():
        child = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"])
        child.communicate()

watch.end_by_ctrl_c()
asyncio.run(main())
"""


@pytest.mark.skipif(os.name == "nt", reason="needs signals")
def test_ctrl_c_ends_the_program_though_asyncio_has_taken_the_signals() -> None:
    """As `edge-client generate` does for SIGTERM, before it tries a stranger's graph."""
    with subprocess.Popen(
        [sys.executable, "-c", _WAITS],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as program:
        assert program.stdout is not None
        program.stdout.readline()  # it waits for its child
        program.send_signal(signal.SIGINT)
        try:
            assert program.wait(120) == 130
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)


def test_a_step_takes_too_long_by_what_those_before_it_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A piece of a long prompt took more than eight seconds on a busy machine: the device failed in
    the middle of it, and its answer was empty."""
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[-1])
    monkeypatch.setattr(watch.time, "process_time", lambda: now[-1])

    def too_long_after(seconds: float, longest: float) -> bool:
        work = watch._Work(object(), longest)
        now[:] = [1.0]
        assert not work.takes_too_long()
        now[:] = [1.0 + seconds]
        return work.takes_too_long()

    assert too_long_after(8.5, 0.0)
    assert too_long_after(8.5, 0.1)
    assert not too_long_after(8.5, 5.0)
    assert too_long_after(50.5, 5.0)
    assert too_long_after(120.5, 1000.0), "a stranger's graph cannot raise it for ever"


def test_a_graph_knows_the_longest_of_its_steps() -> None:
    drafter = Device.load().new_drafter()
    for _ in drafter.draft([1, 2, 3], TreeShape(1, 1, 1), SamplingSettings()):
        pass
    assert drafter.graph.longest > 0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---- weights that lie elsewhere


def outside(tensor: TensorProto, location: str) -> TensorProto:
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", "4")):
        entry = tensor.external_data.add()
        entry.key = key
        entry.value = value
    return tensor


@pytest.mark.parametrize(
    "location", ["../../secret", "/etc/passwd", "unlisted.bin", "a/../model.data"]
)
@pytest.mark.parametrize("place", ["initializer", "sparse", "constant", "function"])
def test_weights_come_from_listed_files_only(location: str, place: str, tmp_path: Path) -> None:
    model = onnx.load(demo.paths().bundle / "variants/web/model.onnx")
    tensor = outside(helper.make_tensor("w", TensorProto.FLOAT, [1], b"\0" * 4, raw=True), location)
    constant = helper.make_node("Constant", [], ["w"], value=tensor)
    if place == "initializer":
        model.graph.initializer.append(tensor)
    elif place == "sparse":
        indices = helper.make_tensor("i", TensorProto.INT64, [1], [0])
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(tensor, indices, [4]))
    elif place == "constant":
        model.graph.node.append(constant)
    else:
        opsets = list(model.opset_import)
        model.functions.append(helper.make_function("own", "F", [], ["w"], [constant], opsets))
    file = tmp_path / "model.onnx"
    file.write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match=re.escape("which its bundle does not list")):
        refuse_foreign_weights(file, ["model.data"])
    refuse_foreign_weights(file, ["model.data", location])


def test_the_bundles_that_are_exported_here_list_their_weights() -> None:
    bundle = Bundle.open(demo.paths().bundle)
    for name in bundle.manifest.variants:
        assert Device.load(variant=name).variant == name
