"""One example of every message, with every field off its default. `golden_frames.json` holds their
bytes."""

from __future__ import annotations

from moa.wire import messages as m

ID = bytes(range(16))

EXAMPLES: list[m.ClientMessage | m.ServerMessage] = [
    m.Hello([3], ["foresee", "records"], "edge-client/1.2.3", "tok", "tgt", "dft"),
    m.Open(
        ID,
        [1, 2, 3],
        9,
        m.Sampling(0.5, 40, 0.9, 0.1, 1.1, 7),
        ["\n\n"],
        True,
        1,
        4,
        "fp16",
        1000,
        [(0, 2)],
        5,
        m.Grammar("regex", "[ab]+"),
        m.Penalties(0.5, -0.25, [(7, -100.0)]),
        [m.ChatMessage("user", "é")],
    ),
    m.Append(
        ID,
        12,
        [5, 6],
        9,
        ["."],
        True,
        0,
        m.Grammar("lark", 'start: "a"'),
        [m.ChatMessage("user", "é")],
    ),
    m.Stream(ID, 4, 14, False, True),
    m.Foresee(ID, 4, 14, [9, 8, 7], [-1, 0, 0], [0, 3, 20], False),
    m.Cancel(ID, 4),
    m.Resume(ID, 14, bytes(16), 3, 1, "int4", 2000, [(0, 10), (12, 13)]),
    m.Sync(ID, "off", 500, [(3, 4)]),
    m.Ack(123456),
    m.Close(ID),
    m.Welcome(
        3,
        ["foresee"],
        "cloud-verifier/1.2.3",
        "abcd",
        "tok",
        "tgt",
        "dft",
        128,
        [2],
        m.WireLimits(1, 2, 3, 4, 5, 6),
        m.RecordContract(2, 16, ["int8"]),
        ["a notice"],
    ),
    m.Opened(ID, 3, 1),
    m.StreamTokens(ID, 4, 14, [9, 8], True, "eos", 5, 0.5, 1.25, bytes(8), 2, m.Usage(30, 2)),
    m.Progress(ID, 4, 256, 2060),
    m.Activations(ID, 1, 5, 1, "int8", 1, 2, b"\x01\x02\x03\x04\x05\x06\x07\x08"),
    m.Resumed(ID, "resumed", 16, 4, [7, 7], "stop", 5, 2, bytes(8)),
    m.Error("limit", "too many", ID, 3, 250, "max_guess_tokens"),
    m.Goaway("stopping", 20000, 1000),
    m.Behind("org/model", "the upstream is not reached"),
]
