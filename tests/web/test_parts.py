"""Parts of the browser's device against Python's: text, chats, the guard's limits, noise, and the
constants that both share."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from edge_client.device import embedded_bundle
from edge_client.turn.guard import OfflineGuard
from moa.bundle import Bundle
from moa.chat_window import fitting, left_out_notice, prompt_room
from moa.manifest import Calibration, Offline
from moa.sampling import gumbel
from moa.text_stream import TextStream
from tests.web.node import Node
from tools.web import FILE, constants

IMPORTS = """
import { OfflineGuard } from "./guard.js";
import { gumbel } from "./noise.js";
import { TextStream } from "./text.js";
import { fitting, leftOutNotice, promptRoom } from "./window.js";
"""
_measured = Bundle.open(embedded_bundle()).manifest.calibration
assert _measured is not None
MEASURED: Calibration = _measured
HANDLE = """
    if (ask.noise) return ask.noise.map((about) => new Uint8Array(gumbel(...about).buffer));
    if (ask.texts) {
        const guard = new OfflineGuard(ask.calibration, ([id]) => ask.spelled[id] ?? ` w${id}`);
        return ask.texts.map((text) => [guard.stops(text), guard.warning(text.length)]);
    }
    if (ask.messages) {
        const letters = (messages) => [...messages.map(({ role, content }) => `[${role}]${content}`).join("")];
        const { ids, leftOut } = fitting(ask.messages, promptRoom(ask.context, ask.answer), letters);
        return [ids.join(""), leftOutNotice(leftOut)];
    }
    const utf8 = new TextDecoder();
    const stream = new TextStream((ids) => utf8.decode(Uint8Array.from(ids)), ask.stop);
    return [...ask.text.map((byte) => [stream.add(byte), stream.text]), stream.flush(), stream.text];
"""


def test_the_constants_are_those_of_python() -> None:
    assert FILE.read_text(encoding="utf-8") == constants(), "python -m tools.web"


class Bytes:
    """Each id is a byte of UTF-8."""

    def decode(self, ids: Any) -> str:
        return bytes(ids).decode(errors="replace")


def test_text_is_shown_alike(node: Node) -> None:
    """Incomplete characters, and beginnings of stop strings."""
    rng = random.Random(7)
    for _ in range(150):
        stop = rng.sample(["STOP", "né", "\n\n", "a", "𝄞x"], rng.randrange(3))
        stream = TextStream(Bytes(), tuple(stop))
        pieces = ["S", "ST", "STOP", "n", "né", "𝄞", "𝄞x", "\n", "b", "ab"]
        text = "".join(rng.choice(pieces) for _ in range(12)).encode()
        wanted: list[Any] = [[stream.add(byte), stream.text] for byte in text]
        found = node.ask({"text": list(text), "stop": stop})
        assert found == [*wanted, stream.flush(), stream.text]


def _letters(messages: Sequence[dict[str, str]]) -> tuple[str, None]:
    return "".join(f"[{message['role']}]{message['content']}" for message in messages), None


def test_a_full_context_loses_the_same_turns(node: Node) -> None:
    rng = random.Random(9)
    trimmed = 0
    for _ in range(200):
        messages = [{"role": "system", "content": "Be brief."}] * rng.randrange(3)
        for turn in range(rng.randrange(12)):
            roles = ["user", "assistant"] if rng.random() < 0.9 else ["user", "system"]
            messages += [
                {"role": role, "content": f"{turn}" * rng.randrange(1, 60)} for role in roles
            ]
        last = {"role": "user", "content": "Why?" * rng.choice([1, 1, 99])}
        messages += [last] * (rng.random() < 0.9)
        context = rng.randrange(2, 1500)
        answer = rng.choice([0, rng.randrange(1, 700)])
        (text, _), left_out = fitting(messages, prompt_room(context, answer), _letters)
        trimmed += left_out > 0
        found = node.ask({"messages": messages, "context": context, "answer": answer})
        assert found == [text, left_out_notice(left_out)]
    assert 40 < trimmed < 160


SPELLED = dict(enumerate([*"0123456789", ".", " ):", ".\n", ","], 1000))
"""Tokens of digits, and of what stands behind a number."""


def test_offline_text_ends_alike(node: Node) -> None:
    """By the limits without records, and where it repeats itself."""
    rng = random.Random(3)
    stopped = 0
    for _ in range(60):
        told = None
        calibration = None
        if rng.random() < 0.7:
            lengths = (1, 2, 4, 8, 16, 32)
            agreement = tuple(sorted((rng.random() for _ in lengths), reverse=True))
            cold = Offline(lengths=lengths, agreement=agreement, unbroken=agreement)
            calibration = replace(MEASURED, offline=cold, cold=cold)
            told = msgspec.to_builtins(calibration)
        guard = OfflineGuard.of(
            calibration,
            -1,
            informed=lambda: False,
            decode=lambda ids: SPELLED.get(ids[0], f" w{ids[0]}"),
        )
        text: list[int] = []
        texts = []
        phrase = [rng.randrange(99) for _ in range(rng.randrange(1, 40))]
        numbered = rng.random() < 0.3
        listed = rng.random() < 0.3
        while len(text) < (400 if numbered else 200):
            if listed:
                item = len(texts) + 1 + (rng.random() < 0.05)
                text += [*(1000 + int(digit) for digit in str(item)), 1000 + rng.randrange(10, 14)]
            text += phrase if rng.random() < 0.8 else [rng.randrange(99)]
            if numbered:
                text += [100 + len(text)]
            texts.append(list(text))
        wanted = [[guard.stops(text), guard.warning(len(text))] for text in texts]
        assert node.ask({"texts": texts, "calibration": told, "spelled": SPELLED}) == wanted
        stopped += wanted[-1][0]
    assert stopped > 0


def test_noise_is_the_same_to_the_bit(node: Node) -> None:
    rng = random.Random(3)
    asked: list[Any] = [[0, 0, 4096], [7, 1, 4096], [2**53 - 1, 8191, 4096]]
    asked += [
        [rng.randrange(2**53), rng.randrange(2**20), rng.sample(range(200_000), 50)]
        for _ in range(100)
    ]
    for (seed, position, tokens), found in zip(asked, node.ask({"noise": asked}), strict=True):
        ids = tokens if isinstance(tokens, int) else np.array(tokens)
        assert found == gumbel(seed, position, ids).astype(np.float32).tobytes()
