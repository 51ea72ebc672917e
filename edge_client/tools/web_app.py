"""Writes the web app: a folder of static files, with the chat page, a bundle, and what runs it in a
browser.

The chat page's files are copied, and those of `edge_client/web` over them. What others wrote comes
from npm, by hash. Large files are packed, whatever the host compresses, and named by their
contents.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.resources
import json
import lzma
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from moa.api.static import TYPES, content_security
from moa.bundle import Bundle, sha256
from moa.errors import BundleError, MoaError, UsageError
from moa.manifest import KVHeads, Variant
from moa.wire.limits import Limits

CONFIG = "config.json"
_SUITED = ("web", "cpu-int8")
"""Variants for a browser, the best first: wasm has no fast four-bit product."""
_HEAD = 'const VERSION = "moa-app-'
"""How the service worker of an app begins."""
_WASM_MEMORY = 4 << 30
_PHONE_MEMORY = 1 << 30
"""What a page gets of a phone's 3 GB, about: so much it takes where a browser does not say how much
memory there is."""
_UNSERVED = ("sw.js", "LICENSE")
"""Ends of names that the service worker does not keep."""


@dataclass(frozen=True)
class Package:
    """A package of npm: `integrity` is the SHA-512 of its archive, `files` what we take of it and
    the names here."""

    name: str
    version: str
    integrity: str
    files: dict[str, str]

    @property
    def archive(self) -> str:
        """The archive's name, as `npm pack` has it."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"


RUNTIME = "ort.wasm"
PACKAGES = (
    Package(
        "onnxruntime-web",
        "1.30.0",
        "q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ==",
        {"dist/ort.wasm.bundle.min.mjs": "ort.js", "dist/ort-wasm-simd-threaded.wasm": RUNTIME},
    ),
    Package(
        "@huggingface/tokenizers",
        "0.2.0",
        "LidMHe1FpcSYH4vcSjXooda34pC0M8m1gmDOv7SQi6Iv+ib1zX7J3sHBCC9/3FPCkn2k1b55FneVqMRxrr99pg==",
        {"dist/tokenizers.min.mjs": "tokenizers.js", "LICENSE": "tokenizers.LICENSE"},
    ),
    Package(
        "@huggingface/jinja",
        "0.5.11",
        "YzEzwM5oQf4r0vs7ifWQ+yuVR1YkAHrjERQ+a8WRsStHHp4NRBg+NesjiFc+X2AFUpRvvrIeHDS1xFy9jY/IjQ==",
        {"dist/index.js": "jinja.js", "LICENSE": "jinja.LICENSE"},
    ),
)


@dataclass(frozen=True, kw_only=True)
class WebAppSettings:
    """What the app is made of. `verifiers` are addresses of endpoints that the user may choose
    from, or a path of the app's own host; without one the app only writes alone."""

    out: Path
    bundle: Path
    demo: bool = False
    """Whether the bundle is the embedded one: the page says what it can do."""
    variant: str = ""
    verifiers: tuple[str, ...] = ()
    packages: Path | None = None
    """A folder with the archives of `PACKAGES`; None: `npm pack` gets them."""
    max_new_tokens: int = Limits.max_new_tokens


def build_web_app(settings: WebAppSettings, say: Callable[[str], None] = lambda _: None) -> int:
    """Write the web app into its folder; returns the bytes that a first visit loads. The folder is
    written beside its place and moved there when it is whole."""
    connect: list[str] = []  # origins that the page may ask, for its content security policy
    for verifier in settings.verifiers:
        connect += _origin(verifier)
    bundle = Bundle.open(settings.bundle)
    name = settings.variant or _suited(bundle)
    variant = _usable(bundle, name)
    memory = memory_needed(variant)
    if memory > _PHONE_MEMORY:
        say(f"loading it takes {memory / 2**30:.1f} GB of a browser's memory: phones refuse it")
    bundle.verify([name or bundle.manifest.default_variant])
    with _replacing(settings.out.absolute()) as folder:
        _copy_pages(folder)
        runtime = _vendor(settings.packages, folder / "vendor", say)
        config = _config(settings, bundle, variant, folder, runtime)
        runtime.unlink()  # the app loads the packed one
        (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        _secure(folder, connect)
        size = _service_worker(folder, content_security(connect, wasm=True))
    return size


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """Yield a new folder, which takes the place of `out` when the body has ended. A `UsageError`
    if something of the user's would be lost by that."""
    if out.exists() and not _replaceable(out):
        raise UsageError(
            f"{out} is not an empty folder",
            hint="name a new folder, or one that this command wrote",
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as work:
        folder = Path(work) / out.name
        yield folder
        if out.exists():
            shutil.rmtree(out)
        folder.replace(out)


def _copy_pages(folder: Path) -> None:
    """Copy the files of the chat page, and over them those of the app."""
    _copy(importlib.resources.files("edge_client.serve") / "page", folder)
    _copy(importlib.resources.files("moa.api") / "assets", folder)
    _copy(importlib.resources.files("edge_client") / "web", folder)


def _suited(bundle: Bundle) -> str:
    """The variant of a bundle that suits a browser best; empty, the default one, if none does."""
    for name in _SUITED:
        if name in bundle.manifest.variants:
            return name
    return ""


def _replaceable(out: Path) -> bool:
    """Whether nothing of anybody else is lost if the folder is replaced: it is empty, or an app of
    ours, which is known by the beginning of its service worker."""
    if not out.is_dir():
        return False
    is_empty = not any(out.iterdir())
    if is_empty:
        return True
    script = out / "sw.js"
    return script.is_file() and script.read_bytes().startswith(_HEAD.encode())


def _usable(bundle: Bundle, name: str) -> Variant:
    """Returns the variant of this name, by default the bundle's own; a `BundleError` if no browser
    can run it."""
    variant = bundle.variant(name)
    # A page loads a graph of dynamic sizes, and one file of weights beside it.
    if variant.form != "dynamic" or len(variant.files) > 2:
        raise BundleError(
            f"no browser can run variant {name or bundle.manifest.default_variant}",
            hint="build one with `moa-export build --variant web`",
        )
    memory = memory_needed(variant)
    if memory > _WASM_MEMORY:
        raise BundleError(
            f"no browser can run variant {name}: loading it takes {memory / 2**30:.1f} GB, and wasm has 4",
            hint="take a smaller drafter, or fewer draft tokens: `moa-export build --draft-vocab`",
        )
    return variant


def _origin(verifier: str) -> list[str]:
    """Returns the origin of an endpoint that the page may ask, in a list, as a content security
    policy names it. The list is empty for a path of the page's own host, which needs no permission;
    what is no address of an endpoint is a `UsageError`."""
    if verifier.startswith("/") and not verifier.startswith("//"):
        return []
    address = urlsplit(verifier)
    if address.scheme in ("ws", "wss"):
        raise UsageError(
            f"{verifier!r} is the verifier's own port: the page asks its endpoint",
            hint="name what `cloud-verifier serve --openai PORT` serves: https://HOST:PORT",
        )
    odd = set(verifier) & set("; ,'\"")
    if address.scheme not in ("http", "https") or not address.hostname or odd:
        raise UsageError(
            f"{verifier!r} is no address of an endpoint",
            hint="https://HOST or https://HOST:PORT; / where the endpoint itself serves the page",
        )
    host = address.netloc.rpartition("@")[2]  # without a user's name and password
    return [f"{address.scheme}://{host}"]


def _copy(source: Traversable, folder: Path) -> None:
    """Copy a folder of a package, with all folders in it; files that are there are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in source.iterdir():
        if entry.is_dir():
            _copy(entry, folder / entry.name)
        else:
            (folder / entry.name).write_bytes(entry.read_bytes())


def _vendor(packages: Path | None, folder: Path, say: Callable[[str], None]) -> Path:
    """Unpack the files that the app needs of npm's packages into `folder`, and return the path of
    ONNX Runtime's program. The archives are in the folder `packages`, or fetched by npm if that is
    None; each must have the hash that is written down here."""
    folder.mkdir()
    with tempfile.TemporaryDirectory() as fetched:
        for package in PACKAGES:
            archives = packages
            if archives is None:
                archives = _fetch(package, Path(fetched), say)
            archive = archives / package.archive
            _check_archive(package, archive)
            _unpack(package, archive, folder)
    return folder / RUNTIME


def _check_archive(package: Package, archive: Path) -> None:
    """A `UsageError` if this archive of a package is missing, or is not the one that is known."""
    if not archive.is_file():
        raise UsageError(
            f"no {package.archive} in {archive.parent}", hint=f"npm pack {package.name}"
        )
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != package.integrity:
        raise UsageError(f"{archive} is not {package.name} {package.version}: its hash differs")


def _unpack(package: Package, archive: Path, folder: Path) -> None:
    """Write the files that the app needs of a package into `folder`, under their names there."""
    with tarfile.open(archive) as content:
        for inside, name in package.files.items():
            file = content.extractfile(f"package/{inside}")
            assert file is not None, inside
            (folder / name).write_bytes(file.read())


def _fetch(package: Package, folder: Path, say: Callable[[str], None]) -> Path:
    """Have npm download a package's archive into `folder`, and return that folder."""
    say(f"getting {package.name} {package.version} by npm")
    npm = shutil.which("npm")
    if npm is None:
        raise UsageError(
            "npm is not installed",
            hint=f"put {package.archive} into a folder, and name it: --packages",
        )
    command = [npm, "pack", f"{package.name}@{package.version}", "--pack-destination", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise MoaError(
            f"npm could not get {package.name}: {lines[-1] if lines else done.returncode}"
        )
    return folder


def _config(
    settings: WebAppSettings, bundle: Bundle, variant: Variant, folder: Path, runtime: Path
) -> dict[str, Any]:
    """Returns what the page reads first: the figures that it needs of the bundle's manifest, and
    the names and hashes of its files, which are written compressed into `folder`."""
    manifest = bundle.manifest
    tokenizer = manifest.tokenizer
    if tokenizer.file is None:
        raise BundleError(f"{bundle.folder} has no tokenizer", hint="build it again with one")
    files = {
        "runtime": runtime,
        "model": bundle.path(variant.model),
        "tokenizer": bundle.path(tokenizer.file),
    }
    weights = [name for name in variant.files if name != variant.model]  # none, or one file
    if weights:
        files["data"] = bundle.path(weights[0])
    if tokenizer.chat_template:
        files["template"] = bundle.path(tokenizer.chat_template)
    if manifest.vocabulary.map:
        files["map"] = bundle.path(manifest.vocabulary.map)
    records = manifest.records
    return {
        "model": manifest.target.source.rstrip("/").rpartition("/")[2] or "target",
        "demo": settings.demo,
        "endpoints": list(settings.verifiers),
        "context": manifest.target.facts.max_positions,
        "max_tokens": settings.max_new_tokens,
        "memory": memory_needed(variant),
        "small": _PHONE_MEMORY,
        "eos": tokenizer.eos_ids,
        "special": tokenizer.special_tokens,
        "calibration": msgspec.to_builtins(manifest.calibration),
        "graph": {
            "cache": [_heads(heads) for heads in manifest.cache],
            "records": _heads(records) if records is not None else None,
            "borrowed": len(records.borrowed) if records is not None else 0,
            "features": "feature_rows" in variant.inputs,
            "vocabulary": manifest.vocabulary.target,
            "data": Path(weights[0]).name if weights else "",
            "map": _npy_header(files["map"]) if "map" in files else 0,
        },
        "files": {part: _pack(path, folder) for part, path in files.items()},
    }


def memory_needed(variant: Variant) -> int:
    """Bytes that a page takes while it loads the drafter, about: measured with 2 MB and with 0.5 GB
    of weights."""
    return (200 << 20) + 7 * variant.size // 2


def _heads(heads: KVHeads) -> dict[str, int]:
    """The heads of a layer, by the page's names."""
    return {"count": heads.kv_heads, "width": heads.head_dim}


def _npy_header(path: Path) -> int:
    """The number of bytes before the numbers of an .npy file: the page reads these alone."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        np.lib.format.read_array_header_1_0(file)
        return file.tell()


def packed(runtime: bytes) -> bytes:
    """Compress the runtime's program in the form that `edge_client/web/lzma.js` unpacks."""
    how = {"id": lzma.FILTER_LZMA1, "dict_size": 1 << 24, "lc": 3, "lp": 0, "pb": 0}
    return lzma.compress(runtime, format=lzma.FORMAT_RAW, filters=[how])


def _pack(path: Path, folder: Path) -> dict[str, Any]:
    """Write a compressed copy of a file into the app, under a name made of its hash; returns that
    name, and the hash and size of the file itself."""
    digest = sha256(path)
    name = f"packed/{digest[:16]}"
    (folder / "packed").mkdir(exist_ok=True)
    content = path.read_bytes()
    if path.name == RUNTIME:
        copy = packed(content)
    else:
        copy = gzip.compress(content, 9, mtime=0)  # without a time: equal files give equal copies
    (folder / name).write_bytes(copy)
    return {"name": name, "sha256": digest, "size": path.stat().st_size}


def _secure(folder: Path, connect: list[str]) -> None:
    """Write the content security policy into the page itself, for a host that sends no headers.
    `connect` are the origins that the page may ask."""
    page = folder / "index.html"
    policy = content_security(connect, wasm=True, header=False)
    tag = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    before = '<meta charset="utf-8">\n'
    html = page.read_text(encoding="utf-8")
    assert before in html
    page.write_text(html.replace(before, f"{before}{tag}\n"), encoding="utf-8")


def _service_worker(folder: Path, policy: str) -> int:
    """Write the list of the app's files into its service worker, with their types and the policy to
    send with them; returns the size of all files, compressed, in bytes. The version is a hash of
    all contents, so a browser that has the app takes a new one as a whole."""
    types: dict[str, str] = {}  # by address
    hashes = hashlib.sha256(policy.encode())
    size = 0
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name.endswith(_UNSERVED):
            continue
        content = path.read_bytes()
        hashes.update(name.encode() + content)
        is_packed = name.startswith("packed/")
        size += len(content) if is_packed else len(gzip.compress(content))
        address = "./" if name == "index.html" else name
        types[address] = TYPES.get(name.rpartition(".")[2], "application/octet-stream")
    script = folder / "sw.js"
    head = f'{_HEAD}{hashes.hexdigest()[:16]}";\n'
    head += f"const FILES = {json.dumps(types)};\n"
    head += f"const POLICY = {json.dumps(policy)};\n"
    script.write_text(head + script.read_text(encoding="utf-8"), encoding="utf-8")
    return size
