"""The web app: its runtime as it is packed, events of a stream, the folder and its refusals."""

from __future__ import annotations

import json
import random
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from edge_client.device import embedded_bundle
from edge_client.tools.web_app import PACKAGES, WebAppSettings, build_web_app, packed
from moa.errors import BundleError, UsageError
from tests.web.node import Node

IMPORTS = """import { unlzma } from "./../lzma.js";
    import { events } from "./../../serve/page/events.js";"""
HANDLE = """
    if (ask.packed) return unlzma(ask.packed, ask.size);
    let heard = 0;
    const found = [];
    const body = new ReadableStream({
      start(controller) { for (const piece of ask.pieces) controller.enqueue(piece); controller.close(); },
    });
    for await (const event of events({ body }, (size) => { heard += size; })) found.push(event);
    return [found, heard];
"""


def test_events_are_read_wherever_the_network_cuts_them(node: Node) -> None:
    rng = random.Random(2)
    wanted = [{"id": f"s/{at}", "data": json.dumps({"text": "é👩‍🚀\n" * at})} for at in range(9)]
    frames = [f"id: {e['id']}\ndata: {e['data']}\n\n" for e in wanted]
    signs = [": still here\n", ": still here\n\n"]
    text = "".join(frame + rng.choice(signs) for frame in frames).encode()
    for _ in range(30):
        places = sorted(rng.sample(range(len(text)), 20))
        pieces = [text[a:b] for a, b in pairwise([0, *places, len(text)])]
        assert node.ask({"pieces": pieces}) == [wanted, len(text)]


def test_the_runtime_is_unpacked_as_it_was_packed_and_damage_ends(node: Node) -> None:
    rng = random.Random(1)
    words = [rng.randbytes(rng.randrange(1, 300)) for _ in range(200)]
    mixed = b"".join(rng.choice(words) + rng.randbytes(rng.choice([0, 1, 9])) for _ in range(1000))
    for content in (b"a", b"ab" * 5000, rng.randbytes(3000), mixed, bytes(70_000) + mixed[::-1]):
        size = len(content)
        small = bytearray(packed(content))
        assert node.ask({"packed": bytes(small), "size": size}) == content
        assert (
            node.ask({"packed": bytes(small[: len(small) // 2]), "size": size}) != content
            or size < 10
        )
        for _ in range(5):
            small[rng.randrange(len(small))] ^= 1 << rng.randrange(8)
            assert len(node.ask({"packed": bytes(small), "size": size})) == size, (
                "the hash tells that it is damaged"
            )


def test_a_folder_of_others_an_unknown_address_and_a_missing_package_are_refused(
    tmp_path: Path,
) -> None:
    for folder, file in (("full", "theirs"), ("model", "config.json"), ("page", "sw.js")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("{}")
    for out, verifier, words in (
        ("full", "", "is not an empty folder"),
        ("model", "", "is not an empty folder"),
        ("page", "", "is not an empty folder"),
        ("full/theirs", "", "is not an empty folder"),
        ("new", "wss://server.example", "the page asks its endpoint"),
        ("new", "ftp://server.example", "no address of an endpoint"),
        ("new", "//server.example", "no address of an endpoint"),
        ("new", "http://server.example; script-src *", "no address of an endpoint"),
        ("new", "https://server.example", f"no {PACKAGES[0].archive}"),
        ("new", "/", f"no {PACKAGES[0].archive}"),
    ):
        settings = WebAppSettings(
            out=tmp_path / out,
            bundle=embedded_bundle(),
            verifiers=(verifier,) if verifier else (),
            packages=tmp_path / "none",
        )
        with pytest.raises(UsageError, match=words):
            build_web_app(settings)
    assert {path.name for path in tmp_path.iterdir()} == {"full", "model", "page"}, (
        "nothing is left behind"
    )


def test_a_changed_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / PACKAGES[0].archive).write_bytes(b"something else")
    with pytest.raises(UsageError, match="its hash differs"):
        build_web_app(
            WebAppSettings(out=tmp_path / "new", bundle=embedded_bundle(), packages=tmp_path)
        )


def test_a_bundle_that_no_browser_can_load_is_refused_and_one_for_no_phone_is_named(
    tmp_path: Path,
) -> None:
    shutil.copytree(embedded_bundle(), tmp_path / "bundle")
    file = tmp_path / "bundle" / "manifest.json"
    said = list[str]()
    manifest = json.loads(file.read_text())
    settings = WebAppSettings(out=tmp_path / "new", bundle=tmp_path / "bundle", packages=tmp_path)
    for size, refusal in ((1 << 30, "no onnxruntime"), (3 << 30, "takes 10.7 GB, and wasm has 4")):
        manifest["variants"]["web"]["size"] = size
        file.write_text(json.dumps(manifest))
        with pytest.raises((BundleError, UsageError), match=refusal):
            build_web_app(settings, said.append)
    assert said == ["loading it takes 3.7 GB of a browser's memory: phones refuse it"]
