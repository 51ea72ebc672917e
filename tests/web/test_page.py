"""What the web app adds to the turn machine: events as the page's chunks, the folder and its
refusals."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from edge_client.device import embedded_bundle
from edge_client.tools.web_app import PACKAGES, WebAppSettings, build_web_app, packed
from moa.errors import BundleError, UsageError
from tests.web.node import Node

IMPORTS = """import { Chunks } from "./../chunks.js"; import { unlzma } from "./../lzma.js";
    import { Answer } from "./../../serve/page/answer.js";"""
HANDLE = """
    if (ask.packed) return unlzma(ask.packed, ask.size);
    let chunks = new Chunks(), answer = new Answer();
    const seen = [];
    for (const event of ask.events) {
      if (event === "killed") {
        chunks = new Chunks(structuredClone(chunks.state));
        answer = new Answer();
        answer.take(chunks.replay());
        continue;
      }
      const chunk = chunks.take(event);
      if (chunk) answer.take(chunk);
      seen.push([answer.text, answer.verified, answer.done && answer.allVerified]);
    }
    return seen;
"""


@pytest.mark.parametrize("seed", range(20))
def test_the_page_shows_what_the_events_say_also_after_a_kill(node: Node, seed: int) -> None:
    rng = random.Random(seed)
    start = rng.randrange(1, 9)
    texts = list[str]()
    verified = 0
    events: list[Any] = [{"event": "prompt", "ids": [7] * start}]
    wanted: list[list[Any]] = [["", 0, False]]
    for _ in range(60):
        kind = rng.choice(["token", "token", "token", "confirm", "retract", "killed"])
        if kind == "killed":
            events.append(kind)
            continue
        if kind == "token":
            sure = verified == len(texts) and rng.random() < 0.5
            texts.append(rng.choice(["", "a", " word", "é", "👩‍🚀", "\n"]))
            verified += sure
            status = "verified" if sure else "provisional"
            events.append(
                {
                    "event": kind,
                    "position": start + len(texts) - 1,
                    "id": 5,
                    "text": texts[-1],
                    "status": status,
                }
            )
        elif verified == len(texts):
            continue
        elif kind == "confirm":
            before = verified
            verified = rng.randint(verified + 1, len(texts))
            events.append({"event": kind, "start": start + before, "stop": start + verified})
        else:
            stop = len(texts)
            kept = rng.randint(verified, len(texts) - 1)
            del texts[kept:]
            left = len("".join(texts))
            events.append(
                {"event": kind, "start": start + kept, "stop": start + stop, "characters": left}
            )
        wanted.append(["".join(texts), len("".join(texts[:verified])), False])
    texts.append(" held back")
    done = {"event": "done", "reason": "eos", "verified": True, "text": "".join(texts), "stats": {}}
    wanted.append(["".join(texts), len("".join(texts)), True])
    assert node.ask({"events": [*events, done]}) == wanted


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
        ("new", "https://server.example", "no address of a verifier"),
        ("new", "ws://server.example; script-src *", "no address of a verifier"),
        ("new", "wss://server.example", f"no {PACKAGES[0].archive}"),
    ):
        settings = WebAppSettings(
            out=tmp_path / out,
            bundle=embedded_bundle(),
            verifier=verifier,
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
