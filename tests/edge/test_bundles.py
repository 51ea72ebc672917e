"""Bundles are pulled from any source, complete or not at all, and without other files."""

from __future__ import annotations

import errno
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edge_client.bundles.pull import pull
from edge_client.bundles.store import installed, locate, store
from edge_client.cli import main
from edge_client.cli.use import remember
from edge_client.device import embedded_bundle
from edge_client.settings import read_config_file
from moa.errors import BundleError, ConfigError, LinkError, MoaError, UsageError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "demo"
    shutil.copytree(embedded_bundle(), folder)
    return folder


def test_what_was_pulled_is_used_by_its_name(bundle: Path) -> None:
    (bundle / "extra").write_text("no file of the manifest")
    made = pull(str(bundle), name="mine")
    assert made.folder == store() / "mine"
    assert locate("mine") == str(made.folder)
    assert [name for name, _ in installed()] == ["mine"]
    ours = {p.name for p in embedded_bundle().rglob("*") if p.is_file()}
    assert {p.name for p in made.folder.rglob("*") if p.is_file()} == ours
    with pytest.raises(UsageError, match="already"):
        pull(str(bundle), name="mine")
    pull(str(bundle), name="mine", force=True)


@pytest.mark.parametrize(
    "what", ["changed", "longer", "shorter", "missing", "link out", "name out"]
)
def test_what_is_not_as_its_manifest_says_is_not_kept(home: Path, bundle: Path, what: str) -> None:
    folder = home / "bad"
    shutil.copytree(bundle, folder)
    file = folder / "shared" / "tokenizer.json"
    if what == "changed":
        file.write_bytes(b"x" * file.stat().st_size)
    elif what == "longer":
        file.write_bytes(file.read_bytes() + b" ")
    elif what == "shorter":
        file.write_bytes(file.read_bytes()[:-1])
    elif what == "missing":
        file.unlink()
    elif what == "link out":
        file.unlink()
        file.symlink_to(bundle / "shared" / "tokenizer.json")
    else:
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["files"]["../../outside"] = {"sha256": "0" * 64, "size": 1}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(MoaError) as refused:
        pull(str(folder))
    assert list(installed()) == []
    assert isinstance(refused.value, LinkError) or not list(store().iterdir()), (
        "no part of what was refused is kept"
    )


class _Server(http.server.SimpleHTTPRequestHandler):
    """Breaks off in the middle of the first try of each large file; knows ranges, and redirects."""

    folder: Path
    elsewhere = ""
    tried: set[str]
    ranges: list[str]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, directory=str(self.folder))

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if self.elsewhere or not path.is_file():
            self.send_response(302 if self.elsewhere else 404)
            self.send_header("Location", self.elsewhere)
            self.end_headers()
            return
        content = path.read_bytes()
        given = self.headers.get("Range", "")
        start = int(given.removeprefix("bytes=").rstrip("-") or 0)
        self.ranges.extend([given] * bool(given))
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        breaks = len(content) > 100_000 and self.path not in self.tried
        self.tried.add(self.path)
        self.wfile.write(content[start : len(content) // 2 if breaks else None])

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def served(bundle: Path) -> Iterator[tuple[str, type[_Server]]]:
    handler = type("Handler", (_Server,), {"folder": bundle.parent, "tried": set(), "ranges": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=partial(server.serve_forever, 0.01), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", handler
        server.shutdown()
        thread.join(60)


def test_a_broken_download_goes_on_where_it_ended(served: tuple[str, type[_Server]]) -> None:
    url, handler = served
    for _ in range(20):
        try:
            made = pull(f"{url}/demo/")
            break
        except MoaError:
            assert list(installed()) == [], "nothing half done is a bundle"
    assert made.folder.name == "demo"
    assert len(handler.ranges) > 1
    assert all(not given.startswith("bytes=0-") for given in handler.ranges)


def test_a_hub_id_is_an_address(
    served: tuple[str, type[_Server]], bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = served
    monkeypatch.setenv("HF_ENDPOINT", url)
    handler.tried |= {
        f"/org/demo/resolve/main/{p.relative_to(bundle).as_posix()}" for p in bundle.rglob("*")
    }
    hub = bundle.parent / "org" / "demo" / "resolve"
    hub.mkdir(parents=True)
    (hub / "main").symlink_to(bundle)
    assert pull("org/demo").folder.name == "demo"


@pytest.mark.parametrize(
    ("source", "name", "what"),
    [
        ("/nowhere/at/all", "", "no bundle at"),
        ("http://example.org/b/", "", "over https"),
        ("ftp://example.org/b", "", "over https"),
        (__file__, "x", "it is a file"),
        ("org/demo", "../x", "no name for a bundle"),
        ("org/demo", "embedded", "no name for a bundle"),
    ],
)
def test_what_cannot_be_pulled_is_one_line(home: Path, source: str, name: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        pull(source, name=name)
    assert not [path for path in home.rglob("*") if path.name.endswith(".partial")]


@pytest.mark.skipif(os.name == "nt", reason="needs limits of a process")
def test_a_full_disk_is_named(bundle: Path) -> None:
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
from edge_client.cli import main
main(["pull", {str(bundle)!r}, "--name", "mine"])
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 2
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"edge-client: error: cannot write {store() / 'mine.partial'}")
    assert "File too large" in last


@pytest.mark.parametrize("what", ["a large file", "the manifest"])
def test_a_disk_that_is_full_is_not_taken_for_the_network(
    served: tuple[str, type[_Server]], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Writing happens while the address is read: it was said that the address cannot be read."""
    url, handler = served
    handler.tried |= {
        "/demo/" + path.relative_to(handler.folder / "demo").as_posix()
        for path in (handler.folder / "demo").rglob("*")
    }

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        if what == "the manifest":
            patched.setattr(Path, "write_bytes", full)
        else:
            patched.setattr("edge_client.bundles.pull._write_all", full)
        with pytest.raises(UsageError) as refused:
            pull(f"{url}/demo/")
    assert re.match(
        r"cannot write .*demo\.partial.*: No space left on device"
        r" \(make room, and run the same command again to continue\)$",
        refused.value.line(),
    )
    assert pull(f"{url}/demo/").folder.name == "demo"


def test_what_has_come_already_needs_no_room(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = store() / "mine.partial"
    shutil.copytree(bundle, partial)
    (partial / "manifest.json").unlink()
    usage = shutil.disk_usage(partial)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert pull(str(bundle), name="mine").folder.name == "mine"
    with pytest.raises(UsageError, match=r"no room in .* MB more are needed"):
        pull(str(bundle), name="other")


@pytest.mark.parametrize("elsewhere", ["ftp://127.0.0.1:1/x", "http://example.org/x"])
def test_a_redirect_to_another_scheme_is_refused(
    served: tuple[str, type[_Server]], elsewhere: str
) -> None:
    url, handler = served
    handler.elsewhere = elsewhere
    with pytest.raises(BundleError, match="leads away from https"):
        pull(f"{url}/b/")
    assert not list(store().iterdir())


def command(*words: str) -> object:
    with pytest.raises(SystemExit) as end:
        main(words)
    return end.value.code


def test_use_is_remembered_and_list_shows_it(
    home: Path, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = home / "config" / "moa-edge" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text("# mine\ntop_k = 3\nverifier = 'ws://old:1' # old\n")
    assert command("pull", str(bundle), "--name", "mine") == 0
    assert command("use", "mine", "--verifier", "wss://new.example") == 0
    assert (
        config.read_text() == '# mine\ntop_k = 3\nbundle = "mine"\nverifier = "wss://new.example"\n'
    )
    capsys.readouterr()
    assert command("list", "--json") == 0
    rows = {row["name"]: row["in_use"] for row in json.loads(capsys.readouterr().out)}
    assert rows == {"embedded": False, "mine": True}
    assert command("use", "mine", "--bundle", "embedded") == 2
    assert "two bundles" in capsys.readouterr().err
    assert command("use", "wss://new.example") == 2
    assert "--verifier wss://new.example" in capsys.readouterr().err
    assert command("list") == command("use", "--bundle", "embedded", "--verifier", "") == 0
    assert config.read_text() == "# mine\ntop_k = 3\n"
    assert (
        command("use", "--bundle", "nothing-like-it")
        == command("use", "--verifier", "nonsense")
        == 2
    )
    assert config.read_text() == "# mine\ntop_k = 3\n"


def test_use_shows_and_remembers_an_upstream(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that named one was shown with `verifier  none`."""
    config = home / "c.toml"
    config.write_text("verifier = 'ws://old:1'\n")
    where = ("--config", str(config))
    assert command("use", "--upstream", "http://gpu:8000/v1", *where) == 0
    shown = capsys.readouterr().out
    assert "upstream  http://gpu:8000/v1\n" in shown
    assert "verifier" not in shown
    assert config.read_text() == 'upstream = "http://gpu:8000/v1"\n'
    assert command("use", "--verifier", "ws://new:1", *where) == 2
    assert "--upstream takes the place of --verifier" in capsys.readouterr().err
    config.write_text("upstream = 'gpu:8000'\nupstream_key_file = 'key'\n")
    assert command("use", "--upstream", "", *where) == 2
    assert "--upstream-key-file needs --upstream" in capsys.readouterr().err
    config.write_text("upstream = 'gpu:8000'\n")
    assert command("use", "--upstream", "", "--verifier", "ws://new:1", *where) == 0
    assert "verifier  ws://new:1\n" in capsys.readouterr().out
    assert config.read_text() == 'verifier = "ws://new:1"\n'


def test_a_settings_file_that_is_too_clever_is_left_alone(home: Path) -> None:
    path = home / "c.toml"
    path.write_text('stop = ["""\nverifier = 1\n"""]\n')
    with pytest.raises(ConfigError, match="cannot be changed from here"):
        remember(path, {"verifier": "ws://x"})
    assert read_config_file(path) == {"stop": ("verifier = 1\n",)}
    assert [p.name for p in home.glob("c.toml*")] == ["c.toml"]
