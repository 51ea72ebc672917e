"""The browser's codec, hash and noise against Python's: the same bytes, the same numbers, the same
refusals."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np

from moa.sampling import gumbel
from moa.wire import FEATURES, PROTOCOL_VERSIONS, RETRYABLE, SUBPROTOCOL, Refusal, chain_hash
from moa.wire import messages as m
from moa.wire.codec import decode_client, decode_server, encode
from tests.web.node import Node
from tests.wire.examples import EXAMPLES, ID

IMPORTS = """
import * as messages from "./messages.js";
import { chainHash } from "./chain.js";
import { gumbel } from "./noise.js";
"""
HANDLE = """
    if (ask.read) return ask.read.map((frame) => {
        try { return messages.decodeServer(frame); }
        catch (error) { if (error instanceof messages.Refusal) return null; throw error; }
    });
    if (ask.write) return ask.write.map(([message, most]) => {
        try { return messages.clientFrame(message, most); }
        catch (error) { if (error instanceof messages.Refusal) return error.code; throw error; }
    });
    if (ask.hash) return ask.hash.map(chainHash);
    if (ask.noise) return ask.noise.map((about) => new Uint8Array(gumbel(...about).buffer));
    if (ask.constants) return {
        ...messages, CLIENT: Object.fromEntries(Object.entries(messages.CLIENT).map(([k, f]) => [k, Object.keys(f)])),
        SERVER: Object.fromEntries(Object.entries(messages.SERVER).map(([k, f]) => [k, Object.keys(f)])),
        RETRYABLE: [...messages.RETRYABLE],
    };
"""
SERVERS = [example for example in EXAMPLES if isinstance(example, m.ServerMessage)]
CLIENTS = [example for example in EXAMPLES if not isinstance(example, m.ServerMessage)]
UNSENT: dict[str, Any] = {"grammar": None, "penalties": None, "messages": []}
NOT_HERE = {"logprobs", "grammar", "penalties", "streams_only", "messages"}


def as_sent(message: Any) -> Any:
    """Without what the browser never sends."""
    return msgspec.structs.replace(
        message, **{name: empty for name, empty in UNSENT.items() if hasattr(message, name)}
    )


def fields(message: Any) -> dict[str, Any]:
    """A message as the browser holds it."""

    def plain(value: Any) -> Any:
        if isinstance(value, msgspec.Struct):
            return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return {"kind": message.__struct_config__.tag, **plain(message)}


def test_messages_have_the_fields_of_pythons(node: Node) -> None:
    told = node.ask({"constants": True})
    for direction, examples in (("CLIENT", CLIENTS), ("SERVER", SERVERS)):
        assert told[direction] == {
            e.__struct_config__.tag: list(e.__struct_fields__) for e in examples
        }
    assert set(told["FEATURES"]) == FEATURES - NOT_HERE
    assert (told["VERSION"], told["SUBPROTOCOL"]) == (PROTOCOL_VERSIONS[0], SUBPROTOCOL)
    assert set(told["RETRYABLE"]) == RETRYABLE


def test_frames_are_the_same_bytes(node: Node) -> None:
    plain = [as_sent(e) for e in CLIENTS]
    bare = [
        m.Hello([2], []),
        m.Open(ID, [1]),
        m.Append(ID, 1, [2]),
        m.Resume(ID, 1, ID, 0),
        m.Sync(ID),
    ]
    long = [
        m.Verify(ID, 2**31 - 1, 70_000, [2**31 - 1, 0, 255, 256, 65_535, 65_536] * 600),
        m.Ack(2**53 - 1),
    ]
    every = [
        *plain,
        *bare,
        *long,
        m.Hello([2, -1, -33, -129, -32769, -(2**31) - 1], ["é" * 100, "x" * 31, "x" * 32]),
    ]
    assert node.ask({"write": [[fields(e), 2**20] for e in every]}) == [encode(e) for e in every]


def test_answers_mean_the_same(node: Node) -> None:
    bare = [
        m.Opened(ID, 1),
        m.Verdict(ID, 1, 2, [0], 3),
        m.StreamTokens(ID, 1, 2, []),
        m.Resumed(ID, "gone"),
    ]
    every = [*SERVERS, *bare, m.Error("busy", "é€𝄞"), m.Goaway("")]
    assert node.ask({"read": [encode(e) for e in every]}) == [fields(e) for e in every]


def test_what_python_refuses_to_read_is_refused(node: Node) -> None:
    """Frames with changed, added and missing bytes, and with other values in their places."""
    rng = random.Random(1)
    frames = [encode(example) for example in SERVERS]
    numbers = [
        0,
        1,
        -1,
        127,
        128,
        2**31 - 1,
        2**31,
        2**63,
        2**64 - 1,
        -(2**63),
        0.0,
        1.0,
        1.5,
        -1.0,
        1e300,
        86_400_001,
    ]
    lists = [
        [],
        [0],
        [-1],
        [1, 2],
        [[1, 2]],
        [1.0],
        ["a"],
        {},
        {"a": 1},
        [2, 16, ["int8"]],
        [1, 2, 3, 4, 5, 6],
    ]
    texts = [
        "",
        "int8",
        "eos",
        "gone",
        "x" * 129,
        "é" * 128,
        b"",
        ID,
        bytes(15),
        float("nan"),
        float("inf"),
    ]
    raw = [
        msgspec.Raw(data)
        for data in (b"\xc1", b"\xca\x3f\x80\x00\x00", b"\xd4\x01\x02", b"\xa1\xff")
    ]
    others: list[Any] = [
        None,
        True,
        False,
        msgspec.msgpack.Ext(5, b"abc"),
        *numbers,
        *lists,
        *texts,
        *raw,
    ]
    hostile = [
        b"",
        b"\x90",
        b"\x91\xa0",
        b"\xdd\xff\xff\xff\xff",
        b"\x92\xa6opened",
        b"\x91" * 2000,
        b"\x93\xa6goaway\xa0\x00\x91",
    ]
    for _ in range(4000):
        example = rng.choice(SERVERS)
        values = msgspec.to_builtins(
            msgspec.msgpack.decode(encode(example)), builtin_types=(bytes,)
        )
        place = rng.randrange(len(values) + 1)
        values[place : place + 1] = [rng.choice(others)] * rng.choice([1, 1, 1, 2])
        hostile.append(msgspec.msgpack.encode(values[: rng.choice([None, None, place, place + 1])]))
    for _ in range(8000):
        frame = bytearray(rng.choice(frames))
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(frame))
            match rng.randrange(4):
                case 0:
                    frame[place] = rng.randrange(256)
                case 1:
                    frame[place:place] = rng.randbytes(rng.randrange(1, 3))
                case 2:
                    frame[place : place + 1] = b""
                case _:
                    frame[place] ^= 1 << rng.randrange(8)
            if not frame:
                break
        hostile.append(bytes(frame))
    expected = []
    for frame in hostile:
        try:
            message = fields(decode_server(frame))
        except Refusal:
            message = None
        large = (
            message is not None and abs(message.get("version", 0)) >= 2**53
        )  # no number of the browser's
        expected.append(None if large else message)
    assert 1000 < sum(e is None for e in expected) < len(expected) - 1000
    for frame, found, wanted in zip(hostile, node.ask({"read": hostile}), expected, strict=True):
        assert repr(found) == repr(wanted) or found == wanted, frame.hex()


def test_what_python_refuses_to_send_is_refused(node: Node) -> None:
    values: list[Any] = [
        -1,
        -2,
        2**31,
        1.5,
        True,
        None,
        "int8",
        "other",
        "x" * 128,
        "x" * 129,
        "€" * 128,
        b"",
        ID,
        bytes(17),
        [],
        [1],
        [-1],
        [2**31],
        [0] * 4097,
        [[1, 2]],
        [[1, 2, 3]],
        [[-1, 0]],
        255,
        256,
        ["a" * 129],
        ["a"] * 65,
        ["a"] * 17,
    ]
    asked = []
    expected = []
    for example in CLIENTS:
        for name in example.__struct_fields__:
            for value in values:
                changed = fields(as_sent(example))
                changed[name] = value
                kind = type(example)
                try:
                    built = kind(**{n: v for n, v in changed.items() if n != "kind"})
                    if isinstance(changed.get("sampling"), dict):
                        built = msgspec.structs.replace(
                            built, sampling=m.Sampling(**changed["sampling"])
                        )
                    frame: Any = encode(built)
                    decode_client(frame)
                except (Refusal, TypeError, AttributeError, OverflowError):
                    frame = "bad_message"
                if name in ("sampling", "penalties") and isinstance(value, list):
                    continue  # an array to Python's encoder, like the structure itself
                asked.append([changed, 2**20])
                expected.append(frame)
    for (changed, _), found, wanted in zip(
        asked, node.ask({"write": asked}), expected, strict=True
    ):
        assert found == wanted, changed
    assert node.ask({"write": [[fields(m.Verify(ID, 1, 2, [5] * 300)), 200]]}) == ["limit"]


def test_hashes_are_the_same(node: Node) -> None:
    rng = random.Random(2)
    logs = [
        [rng.randrange(2**31) for _ in range(length)] for length in (0, 1, 31, 32, 33, 64, 1000)
    ]
    assert node.ask({"hash": logs}) == [chain_hash(log) for log in logs]


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
