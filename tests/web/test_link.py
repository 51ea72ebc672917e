"""The browser's link in virtual time: when it dials, what it takes for dead, and what it does with
what arrives."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from edge_client.link.dialling import Dialling
from edge_client.link.retry import Retry
from moa.errors import LinkError
from moa.wire import messages as m
from moa.wire.codec import decode_client, encode
from tests.edge.turn.world import WELCOME
from tests.web.node import Node

IMPORTS = """
import { Dialling, Mailbox, VerifierLink } from "./link.js";
import { Retry } from "./reach.js";
"""
HANDLE = """
    if (ask.dialling) {
        const jitter = [...ask.jitter], dialling = new Dialling(new Retry(0.25, 5, () => jitter.shift()));
        return ask.dialling.map(([verb, now]) => {
            if (verb === "cut") dialling.cut = !dialling.cut;
            else if (verb === "ended") dialling.ended(new Error(""), now);
            else if (verb === "goaway") dialling.askedWait = now;
            else dialling[verb](now);
            return [dialling.due(), dialling.downSince, dialling.failures];
        });
    }
    let now = 0, timers = [];
    const sockets = [], told = [];
    class WebSocket {
        constructor(url, protocols) { this.id = sockets.push(this); told.push([now, "dial", this.id]); }
        send(frame) { told.push([now, "frame", new Uint8Array(frame)]); }
        close() { told.push([now, "close", this.id]); }
    }
    const environment = {
        WebSocket, now: () => now, random: () => 0, randomBytes: (size) => new Uint8Array(size),
        setTimeout: (call, ms) => { const timer = { call, at: now + ms / 1000 }; timers.push(timer); return timer; },
        clearTimeout: (timer) => { timers = timers.filter((other) => other !== timer); },
    };
    const seconds = { connectSeconds: 10, reconnectSeconds: 5, keepaliveSeconds: 5 };
    const link = new VerifierLink("ws://v", {}, environment, seconds);
    const box = new Mailbox(environment);
    const pass = (until) => {
        for (;;) {
            timers.sort((a, b) => a.at - b.at);
            if (!timers.length || timers[0].at > until) break;
            now = Math.max(now, timers[0].at);
            timers.shift().call();
        }
        now = until;
    };
    for (const [at, verb, argument] of ask) {
        pass(at);
        const socket = sockets[sockets.length - 1];
        if (verb === "opened") socket.onopen?.();
        else if (verb === "frame") socket.onmessage?.({ data: new Uint8Array(argument).buffer });
        else if (verb === "closed") socket.onclose?.({ code: 1006, reason: "" });
        else if (verb === "listen") link.listen(box);
        else if (verb === "deliver") link.deliver(argument, box);
        else if (verb) link[verb](argument);
        told.push([now, "state", link.state]);
    }
    told.push([now, "error", link.lastError]);
    told.push([now, "box", box.messages.map(([, message]) => message.kind)]);
    return told;
"""


def test_it_dials_when_python_does(node: Node) -> None:
    rng = random.Random(4)
    for _ in range(50):
        jitter = [rng.random() for _ in range(100)]
        dialling = Dialling(Retry(0.25, 5.0, iter(jitter).__next__))
        now = 0.0
        verbs = []
        wanted = []
        for _ in range(40):
            now += rng.choice([0.01, 0.5, 3.0, 10.0])
            verb = rng.choice(["welcomed", "won", "ended", "ended", "newTurn", "cut", "goaway"])
            verbs.append([verb, now])
            match verb:
                case "welcomed":
                    dialling.welcomed(now)
                case "won":
                    dialling.won()
                case "ended":
                    dialling.ended(LinkError(""), now)
                case "newTurn":
                    dialling.new_turn()
                case "cut":
                    dialling.cut = not dialling.cut
                case _:
                    dialling.asked_wait = now
            due = dialling.due()
            wanted.append(
                [None if due == -math.inf else due, dialling.down_since, dialling.failures]
            )
        for found, expected in zip(
            node.ask({"dialling": verbs, "jitter": jitter}), wanted, strict=True
        ):
            assert found == pytest.approx(expected)


UP: list[list[Any]] = [[0, "open"], [0.1, "opened"], [0.2, "frame", encode(WELCOME)]]


def of(told: list[Any], kind: str) -> list[Any]:
    return [[at, what] for at, verb, what in told if verb == kind]


def test_a_silent_link_is_asked_and_then_given_up(node: Node) -> None:
    """Only while somebody waits; an answer to anything is a sign of life."""
    told = node.ask(
        [
            *UP,
            [30, ""],
            [30, "listen"],
            [36, "frame", encode(m.Resumed(bytes(16), "gone"))],
            [60, ""],
        ]
    )
    probes = [at for at, frame in of(told, "frame") if isinstance(decode_client(frame), m.Resume)]
    assert probes == [35, 41]
    assert of(told, "close") == [[51, 1]]
    assert [at for at, _ in of(told, "dial")][:2] == [0, pytest.approx(51.125)]


def test_another_network_is_tried_at_once(node: Node) -> None:
    told = node.ask([*UP, [10, "networkChanged"], [10.5, ""], [13, ""]])
    assert of(told, "state")[-2:] == [[10.5, "up"], [13, "down"]]
    told = node.ask([[0, "open"], [9, "closed"], [9.05, "networkChanged"], [9.1, "opened"]])
    assert [at for at, _ in of(told, "dial")] == [0, 9.05]


def test_what_refuses_it_for_good_is_not_dialled_again(node: Node) -> None:
    refusal = encode(m.Error("tokenizer_mismatch", "another tokenizer"))
    told = node.ask(
        [[0, "open"], [0, "opened"], [1, "frame", refusal], [100, ""], [100, "newTurn"]]
    )
    assert of(told, "state")[-2:] == [[100, "refused"], [100, "down"]]
    assert [at for at, _ in of(told, "dial")] == [0, 100]
    assert of(told, "error")[0][1] == "another tokenizer"


@pytest.mark.parametrize("frame", [b"", b"\xc1", encode(m.Opened(bytes(16), 1))])
def test_it_believes_only_a_welcome(node: Node, frame: bytes) -> None:
    told = node.ask([[0, "open"], [0, "opened"], [1, "frame", frame]])
    assert of(told, "state")[-1] == [1, "down"]
    assert of(told, "error")[0][1].startswith("the verifier")


def test_messages_go_to_the_session_that_asked(node: Node) -> None:
    mine = bytes(16)
    other = bytes(range(16))
    bad = encode(m.Error("bad_message", "it cannot be read"))
    told = node.ask(
        [
            *UP,
            [1, "listen"],
            [1, "deliver", mine],
            [2, "frame", encode(m.Opened(mine, 1))],
            [2, "frame", encode(m.Opened(other, 1))],
            [3, "frame", encode(m.Activations(other, 0, 0, 1, "int8", 1, 2, bytes(8)))],
            [
                4,
                "send",
                {
                    "kind": "verify",
                    "session": mine,
                    "round": 1,
                    "base": 0,
                    "tokens": [1],
                    "parents": [],
                },
            ],
            [5, "frame", bad],
        ]
    )
    assert of(told, "box")[0][1] == ["opened", "error"]
    assert of(told, "state")[-1] == [5, "up"], (
        "an error without a session is of the only one that asked"
    )


@pytest.mark.parametrize(
    ("answer", "pause"),
    [
        (m.Verdict(bytes(16), 1, 1, [0], 5), 0.125),
        (m.StreamTokens(bytes(16), 1, 1, [5]), 0.125),
        (m.Resumed(bytes(16), "resumed", tail=[5]), 0.125),
        (m.StreamTokens(bytes(16), 1, 1, [], True), 2.0),
        (m.Resumed(bytes(16), "resumed"), 2.0),
    ],
    ids=["verdict", "tokens", "tail", "no tokens", "no tail"],
)
def test_a_connection_that_brings_tokens_is_followed_by_another_at_once(
    node: Node, answer: Any, pause: float
) -> None:
    connection = [
        [0, "opened"],
        [0, "frame", encode(WELCOME)],
        [0, "frame", encode(answer)],
        [0, "closed"],
    ]
    told = node.ask(
        [
            [0, "open"],
            *([at + 10 * n, *what] for n in range(5) for at, *what in connection),
            [43, ""],
        ]
    )
    assert of(told, "dial")[-1][0] == 40 + pause


def test_flight_mode(node: Node) -> None:
    told = node.ask([*UP, [1, "cutOff", True], [50, ""], [50, "cutOff", False]])
    assert [state for _, state in of(told, "state")][-3:] == ["down", "down", "down"]
    assert [at for at, _ in of(told, "dial")] == [0, 50]
