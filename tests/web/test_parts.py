"""Parts of the browser's turn that its whole turns do not reach, against Python's: trees, records,
text, chats."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from moa import records
from moa.chat_window import fitting, left_out_notice, prompt_room
from moa.graph.cache import RecordBuffer
from moa.graph.step import Heads
from moa.text_stream import TextStream
from moa.tree import TreeGrower, TreeShape
from moa.wire import Ranges
from tests.web.device import named
from tests.web.node import Node

IMPORTS = """
import { Ranges } from "./ranges.js";
import { RecordBuffer, decodeRecords } from "./records.js";
import { TextStream } from "./transcript.js";
import { TreeGrower } from "./tree.js";
import { fitting, leftOutNotice, promptRoom } from "./window.js";
"""
HANDLE = """
    const odd = { nan: NaN, inf: Infinity, "-inf": -Infinity };
    const number = (score) => odd[score] ?? score;
    const bytes = (array) => new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
    if (ask.shape) {
        const grower = new TreeGrower(ask.root, { ...ask.shape, least: number(ask.shape.least) });
        const frontiers = [];
        for (let level = 0; grower.frontier.length; level++) {
            frontiers.push([...grower.frontier]);
            const rows = grower.frontier.map((_, row) => ask.levels[level][row]);
            grower.expand(rows.map(([tokens]) => tokens), rows.map(([, scores]) => scores.map(number)));
        }
        const { tokens, parents } = grower.tree();
        return { frontiers, tokens, parents };
    }
    if (ask.messages) {
        const letters = (messages) => [...messages.map(({ role, content }) => `[${role}]${content}`).join("")];
        const { ids, leftOut } = fitting(ask.messages, promptRoom(ask.context, ask.answer), letters);
        return [ids.join(""), leftOutNotice(leftOut)];
    }
    if (ask.ranges) return ask.ranges.map(([verb, ...about]) => {
        if (verb === "new") globalThis.ranges = new Ranges();
        else ranges[verb](...about);
        return [[...ranges], ranges.full(about.at(-1) ?? 0), ranges.end];
    });
    if (ask.text) {
        const utf8 = new TextDecoder();
        const stream = new TextStream((ids) => utf8.decode(Uint8Array.from(ids)), ask.stop);
        return [...ask.text.map(([verb, about]) => [stream[verb](about), stream.text]), stream.flush(), stream.text];
    }
    if (ask.decode) {
        try {
            const { keys, values } = decodeRecords(...ask.decode);
            return [bytes(keys), bytes(values)];
        } catch (error) { return error.message; }
    }
    const buffer = new RecordBuffer(ask.heads, ask.borrowed);
    const mine = ask.mine.map((array) => new Float32Array(new Uint8Array(array).buffer));
    for (const [verb, ...about] of ask.verbs) {
        if (verb === "put") {
            const { keys, values } = decodeRecords(about[1], "fp16", about[2], buffer.wire.count, buffer.wire.width);
            buffer.put(about[0], keys, values);
        } else if (verb === "lend") buffer.lend(mine, about[0]);
        else buffer[verb](...about);
    }
    return [buffer.wire, Object.values(buffer.feeds()).map(bytes), mine.map(bytes), [...buffer.held]];
"""


def test_trees_grow_alike(node: Node) -> None:
    rng = random.Random(5)
    odd = {"nan": np.nan, "-inf": -np.inf, "inf": np.inf}
    for _ in range(150):
        breadth = rng.randrange(1, 6)
        depth = rng.randrange(1, 6)
        least = rng.choice([float("-inf"), -3.0])
        shape = TreeShape(
            breadth, depth, rng.randrange(1, 20), rng.choice([-12.0, -2.0, -0.5]), least
        )
        grower = TreeGrower(7, shape)
        levels = []
        frontiers = []
        while grower.frontier:
            frontiers.append(list(grower.frontier))
            rows: list[Any] = []
            for _ in grower.frontier:
                scores: list[Any] = sorted(
                    (rng.choice([-0.5, -1.0, -1.5, -2.0, -3.0]) for _ in range(6)), reverse=True
                )
                if rng.random() < 0.1:
                    scores[rng.randrange(6)] = rng.choice([*odd, -1e9])
                rows.append([[rng.randrange(99) for _ in range(6)], scores])
            levels.append(rows)
            tokens = np.array([row[0] for row in rows])
            guesses = [[odd.get(s, s) for s in row[1]] for row in rows]
            grower.expand(tokens, np.array(guesses, np.float32))
        tree = grower.tree()
        named = {
            "breadth": breadth,
            "depth": depth,
            "nodes": shape.nodes,
            "minScore": shape.min_score,
        }
        found = node.ask(
            {
                "root": 7,
                "shape": named | {"least": "-inf" if least < -9 else least},
                "levels": levels,
            }
        )
        assert found == {"frontiers": frontiers, "tokens": tree.tokens, "parents": tree.parents}


def test_ranges_are_kept_alike(node: Node) -> None:
    rng = random.Random(6)
    asked = [["new"]]
    wanted = [[[], True, 0]]
    ranges = Ranges()
    for _ in range(600):
        start = rng.randrange(60)
        verb, about = rng.choice(
            [("add", [start, start + rng.randrange(9)]), ("truncate", [start])]
        )
        if rng.random() < 0.05:
            verb = "new"
            about = []
            ranges = Ranges()
        else:
            getattr(ranges, verb)(*about)
        asked.append([verb, *about])
        full = ranges.newest_missing(about[-1] if about else 0, 1) is None
        wanted.append(
            [[list(run) for run in ranges], full, max((stop for _, stop in ranges), default=0)]
        )
    assert node.ask({"ranges": asked}) == wanted


class Bytes:
    """Each id is a byte of UTF-8."""

    def decode(self, ids: Any) -> str:
        return bytes(ids).decode(errors="replace")


def test_text_is_shown_alike(node: Node) -> None:
    """Incomplete characters, beginnings of stop strings, and text that is taken back."""
    rng = random.Random(7)
    for _ in range(150):
        stop = rng.sample(["STOP", "né", "\n\n", "a", "𝄞x"], rng.randrange(3))
        stream = TextStream(Bytes(), tuple(stop))
        verbs = []
        wanted = []
        count = 0
        text = "".join(
            rng.choice(["S", "ST", "STOP", "n", "né", "𝄞", "𝄞x", "\n", "b", "ab"])
            for _ in range(12)
        ).encode()
        for byte in text:
            verbs.append(["add", byte])
            told: Any = stream.add(byte)
            count += 1
            wanted.append([told, stream.text])
            if rng.random() < 0.1:
                count = rng.randrange(count + 1)
                verbs.append(["cut", count])
                told = stream.cut(count)
                wanted.append([told, stream.text])
        assert node.ask({"text": verbs, "stop": stop}) == [*wanted, stream.flush(), stream.text]


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
        messages += [{"role": "user", "content": "Why?" * rng.choice([1, 1, 99])}] * (
            rng.random() < 0.9
        )
        context = rng.randrange(2, 1500)
        answer = rng.randrange(1, 700)
        (text, _), left_out = fitting(messages, prompt_room(context, answer), _letters)
        trimmed += left_out > 0
        found = node.ask({"messages": messages, "context": context, "answer": answer})
        assert found == [text, left_out_notice(left_out)]
    assert 40 < trimmed < 160


@pytest.mark.parametrize("dtype", records.DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(2, 32), (1, 6), (3, 64)])
def test_records_are_read_alike(
    node: Node, dtype: records.PayloadDtype, heads: int, width: int
) -> None:
    rng = np.random.default_rng(1)
    keys, values = rng.normal(size=(2, 3, heads, width)).astype(np.float32)
    values[0] *= 1e-7  # below the smallest normal number of 16 bits
    payload = records.encode(keys, values, dtype)
    wanted = [
        part.astype(np.float32).tobytes()
        for part in records.decode(payload, dtype, 3, heads, width)
    ]
    assert node.ask({"decode": [payload, dtype, 3, heads, width]}) == wanted
    assert "bytes for 3" in node.ask({"decode": [payload[:-1], dtype, 3, heads, width]})
    assert "NaN or Inf" in node.ask(
        {"decode": [payload[:-2] + b"\x00\x7c", dtype, 3, heads, width]}
    )


def test_records_are_stored_and_lent_alike(node: Node) -> None:
    rng = random.Random(8)
    noise = np.random.default_rng(2)
    lent = [Heads(2, 8), Heads(1, 16)]
    for heads, borrowed in ((Heads(2, 16), []), (Heads(2, 16), lent), (Heads(0, 8), lent)):
        buffer = RecordBuffer(heads, borrowed)
        cache = [
            noise.normal(size=(1, of.count, 600, of.width)).astype(np.float32)
            for of in borrowed
            for _ in "kv"
        ]
        mine = [array.tobytes() for array in cache]
        verbs = []
        for _ in range(12):
            start = rng.randrange(300)
            match rng.randrange(4):
                case 0:
                    verbs.append(["made", start, start + 20])
                    buffer.made(start, start + 20)
                case 1:
                    verbs.append(["lend", start])
                    buffer.lend(cache, start)
                case 2 if rng.random() < 0.3:
                    verbs.append(["truncate", start])
                    buffer.truncate(start)
                case _:
                    rows = noise.normal(size=(2, 5, buffer.wire.count, buffer.wire.width)).astype(
                        np.float16
                    )
                    verbs.append(["put", start, rows.tobytes(), 5])
                    buffer.put(start, *rows.astype(np.float32))
        asked = {"heads": named(heads), "borrowed": [named(of) for of in borrowed]}
        feeds = [array.astype(np.float32).tobytes() for array in buffer.feeds().values()]
        wanted = [named(buffer.wire), feeds, [a.tobytes() for a in cache]]
        found = node.ask(asked | {"mine": mine, "verbs": verbs})
        assert found == [*wanted, [list(run) for run in buffer.held]]
