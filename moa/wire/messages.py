"""Every message of the protocol: two closed sets of typed, tagged msgpack arrays, one for each direction.

Edge to verifier (`ClientMessage`)
    Hello     first on every connection: versions, features, identities of drafter, tokenizer, target
    Open      a new session (idempotent): prompt ids, sampling, limits of the turn
    Append    the next turn of a session (idempotent by base)
    Stream    a round: tokens from now on, to the end of the turn (idempotent by round)
    Foresee   what may come next in a running stream: guesses, to be verified
    Cancel    stop the running round where it is
    Resume    take a session over after a lost connection
    Sync      which activation records are wanted: precision, byte rate, rows held
    Ack       bytes of activations received on this connection so far: flow control of the low-priority stream
    Close     forget the session
Verifier to edge (`ServerMessage`)
    Welcome   answer to Hello: agreed version and features, identities, record contract, limits
    Opened    answer to Open and Append
    StreamTokens  tokens of a round, in order
    Progress  the round is being worked on: how much of its prompt has been read
    Activations   a run of activation records (raw tensor bytes with dtype, shape and row range)
    Resumed   answer to Resume: resumed, reprefilled or gone, and the tokens that the edge has missed
    Error     a typed refusal
    Goaway    this server is about to stop: resume elsewhere
    Behind    which engine stands behind this server, and whether it answers

The log of a session is prompt and output tokens alike; an index into it is a *position*. The last token of the log is
*pending*: emitted, not yet run through the target. A round's `base` is the position of the pending token, and node 0 of
guesses is the pending token itself. The first round of a session starts from the last prompt token.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from moa.grammar.spec import Grammar
from moa.logprobs import MAX_TOP

MOST_IN_A_DRAFT = 4096
"""Tokens of a draft in a frame, whatever a verifier allows."""
SessionId = Annotated[bytes, Meta(min_length=16, max_length=16)]
"""Drawn at random by the edge for each session; who knows it and has the same token may resume it."""
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
"""A token of the target's vocabulary; below `welcome.vocab_size`."""
Position = Annotated[int, Meta(ge=0, lt=2**31)]
"""An index into the log of a session, from 0."""
Round = Annotated[int, Meta(ge=0, lt=2**31)]
"""The number of a round: 1 for the first of a session, then one more each; 0 for none."""
Count = Annotated[int, Meta(ge=0, lt=2**31)]
"""How many of something, or how long in milliseconds."""
Milliseconds = Annotated[float, Meta(ge=0, le=86_400_000)]
"""A time that was measured."""
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
"""A hash of the first tokens of a log: BLAKE2b of 16 bytes over their ids."""
Parent = Annotated[int, Meta(ge=-1, lt=4096)]
"""The index of a node's parent within the same message, below its own; -1 for node 0."""
NegLogProb = Annotated[int, Meta(ge=0, le=255)]
"""-8 ln(p) of a node given its parent, rounded; 255 for all below that, 0 for node 0."""
Name = Annotated[str, Meta(max_length=128)]
"""A short text."""
Ids = Annotated[list[TokenId], Meta(max_length=2**20)]
"""Tokens in their order."""
RecordDtype = Literal["off", "int8", "int4", "fp16"]
"""The precision of activation records; `off`: none are sent."""
Top = Annotated[int, Meta(ge=-1, le=MAX_TOP)]
"""How many likeliest tokens have log-probabilities beside the chosen one; -1: no log-probabilities."""
Finish = Literal["", "eos", "stop", "length", "context"]
"""Why the turn ended after this token: an end token, a stop string, `max_new_tokens`, a full
context."""
RowRange = tuple[Position, Position]
"""Rows from..to (exclusive), as positions."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base of all wire structures. They are encoded as arrays, without field names; unknown
    trailing fields are skipped."""


class Sampling(Message, frozen=True):
    """The fields of `moa.sampling.SamplingSettings`."""

    temperature: float = 0.0
    """0, for the likeliest token, or 0.001 to 2."""
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    """Up to 2^20; 0: all tokens."""
    top_p: float = 1.0
    """Above 0, up to 1: all tokens."""
    min_p: float = 0.0
    """From 0, for all tokens, to below 1."""
    repetition_penalty: float = 1.0
    """0.1 to 10, for tokens of prompt and answer; 1: none."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """The same seed gives the same text, whatever was drafted and however often the connection was
    lost. It is not drawn for you: with 0 each time, the same prompt has the same answer each time."""


class Penalties(Message, frozen=True):
    """What is taken from the logits of the answer's tokens, and added to others
    (`moa.sampling.adjust`)."""

    frequency: float = 0.0
    """-2 to 2."""
    presence: float = 0.0
    """-2 to 2."""
    bias: Annotated[list[tuple[TokenId, float]], Meta(max_length=1024)] = []
    """Tokens, each once, and what is added to their logits: -100 to 100."""


class ChatMessage(Message, frozen=True):
    """A message of the conversation that `ids` are the prompt of, as plain text."""

    role: Annotated[str, Meta(max_length=64)]
    content: Annotated[str, Meta(max_length=2**20)]


class Usage(Message, frozen=True):
    """Tokens as an engine behind the verifier counts them, and may bill them."""

    read: Count
    written: Count


class RecordContract(Message, frozen=True):
    """What a record is: keys, rotated at their own positions, and values, `heads x head_dim` each."""

    heads: Count
    head_dim: Count
    dtypes: Annotated[list[Name], Meta(max_length=16)]


class WireLimits(Message, frozen=True):
    """The limits of `moa.wire.limits.Limits` that a client must keep to."""

    max_frame_bytes: Count
    max_prompt_tokens: Count
    max_context_tokens: Count
    max_new_tokens: Count
    max_tree_nodes: Count
    max_guess_tokens: Count


# ---- edge to verifier ------------------------------------------------------------------------------------------


class Hello(Message, tag="hello", frozen=True):
    """First message of a connection. Identities are hashes; an empty one means "do not compare"."""

    versions: Annotated[list[int], Meta(min_length=1, max_length=16)]
    features: Annotated[list[Name], Meta(max_length=64)]
    client: Name = ""
    tokenizer: Name = ""
    target: Name = ""
    drafter: Name = ""


class Open(Message, tag="open", frozen=True):
    """A new session, or one that the server has lost.

    `generated` trailing ids are this turn's output already (after a loss, or text written offline
    and adopted); `max_new_tokens` counts them. `round` is the last settled round, so that numbering
    goes on.
    """

    session: SessionId
    ids: Ids
    max_new_tokens: Count = 512
    sampling: Sampling = Sampling()
    stop: Annotated[list[Name], Meta(max_length=64)] = []
    ignore_eos: bool = False
    generated: Count = 0
    round: Round = 0
    records: RecordDtype = "int8"
    record_rate: Count = 0
    """Limit for activation bytes a second; 0: as much as the link can carry."""
    held: Annotated[list[RowRange], Meta(max_length=4096)] = []
    """Record rows that the edge still has from before the session was lost."""
    logprobs: Top = -1
    """Send the log-probability of every token, and of so many likeliest ones; -1: none."""
    grammar: Grammar | None = None
    """What the turn's answer must match."""
    penalties: Penalties | None = None
    """Beside `sampling`, where there are any."""
    messages: Annotated[list[ChatMessage], Meta(max_length=4096)] = []
    """The whole conversation up to this answer, for a verifier that has agreed on `messages`; a
    last message of the assistant's is continued. Empty: the prompt is no chat."""


class Append(Message, tag="append", frozen=True):
    """The next turn: `ids` go to the log at position `base`. The edge applies the chat template,
    because it has the conversation."""

    session: SessionId
    base: Position
    ids: Ids
    max_new_tokens: Count = 512
    stop: Annotated[list[Name], Meta(max_length=64)] = []
    ignore_eos: bool = False
    logprobs: Top = -1
    grammar: Grammar | None = None
    messages: Annotated[list[ChatMessage], Meta(max_length=4096)] = []
    """As in `Open`: the whole conversation, not only what is new."""


class Stream(Message, tag="stream", frozen=True):
    """A round: tokens until the turn ends, sent as they are verified. What the edge guesses
    (`foresee`) is verified first; without guesses the server drafts. `Cancel` ends it sooner."""

    session: SessionId
    round: Round
    base: Position
    speculate: bool = True
    """If false, the server decodes one token a forward, as a plain API does. For comparison."""
    waits: bool = False
    """If no guess fits, wait for more instead of drafting or decoding on the server. `foresee` may
    change it."""


class Foresee(Message, tag="foresee", frozen=True):
    """Guesses at what stream `round` will bring: a tree whose node 0 is the token at position
    `base`.

    Not answered, and never an error: what fits the log when it is wanted is verified, the rest is
    dropped. `neg_log_probs` are the negative logarithms of each node's probability given its
    parent, in parts of 1/8.
    """

    session: SessionId
    round: Round
    base: Position
    tokens: Annotated[list[TokenId], Meta(min_length=1, max_length=4096)]
    parents: Annotated[list[Parent], Meta(min_length=1, max_length=4096)]
    neg_log_probs: Annotated[list[NegLogProb], Meta(min_length=1, max_length=4096)]
    waits: bool | None = None
    """Whether the stream `waits` from now on; null: as before."""


class Cancel(Message, tag="cancel", frozen=True):
    """Stop `round`: its stream ends after what it has sent."""

    session: SessionId
    round: Round


class Resume(Message, tag="resume", frozen=True):
    """Take over a session on this connection. The edge knows `length` settled tokens, whose
    `chain_hash` is `chain`."""

    session: SessionId
    length: Position
    chain: Digest
    round: Round
    epoch: Count = 0
    records: RecordDtype = "int8"
    record_rate: Count = 0
    held: Annotated[list[RowRange], Meta(max_length=4096)] = []


class Sync(Message, tag="sync", frozen=True):
    """Change the stream of activation records of a session, from now on."""

    session: SessionId
    records: RecordDtype = "int8"
    record_rate: Count = 0
    held: Annotated[list[RowRange], Meta(max_length=4096)] | None = None
    """Rows that the edge has; None leaves the server's record of them unchanged."""


class Ack(Message, tag="ack", frozen=True):
    """Activation payload bytes received on this connection, in all."""

    received: Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Close(Message, tag="close", frozen=True):
    """Forget the session and free what it holds. Idempotent; not answered."""

    session: SessionId


# ---- verifier to edge ------------------------------------------------------------------------------------------


class Welcome(Message, tag="welcome", frozen=True):
    """Answer to Hello. Without `records` there is token-only service: `notices` says why."""

    version: int
    features: list[str]
    server: str
    instance: str
    """A new value means a new process, which has none of the earlier sessions."""
    tokenizer: str
    target: str
    drafter: str
    vocab_size: Count
    eos_ids: list[TokenId]
    limits: WireLimits
    records: RecordContract | None = None
    notices: list[str] = []
    computes: str = ""
    """The identity of what is computed here: weights, precision, and the files beside them. A turn
    that was begun with another is not gone on with. Empty: not known."""
    promise: str = ""
    """What "verified" says of a text of this verifier, in one sentence, for people."""


class Opened(Message, tag="opened", frozen=True):
    """The session's log has `length` tokens now."""

    session: SessionId
    length: Count
    epoch: Count = 0


class StreamTokens(Message, tag="stream_tokens", frozen=True):
    """`tokens` follow the token at position `base`. The round is over when `done`."""

    session: SessionId
    round: Round
    base: Position
    tokens: Ids
    done: bool = False
    finish: Finish = ""
    drafted: Count = 0
    queue_ms: Milliseconds = 0.0
    forward_ms: Milliseconds = 0.0
    logprobs: bytes = b""
    foreseen: Count = 0
    """How many of the `drafted` nodes came from the edge."""
    usage: Usage | None = None
    """With `done`: what the engine behind has counted for this round, where it tells that; it may
    have another tokenizer. None: not known."""


class Progress(Message, tag="progress", frozen=True):
    """A round that waits is being worked on: `done` of the `total` tokens before it have been read.

    Sent about twice a second to an edge that has agreed on the feature `progress`, for as long as
    nothing else is sent for the session. Not an answer, and nothing waits for it.
    """

    session: SessionId
    round: Round
    done: Count
    total: Count


class Activations(Message, tag="activations", frozen=True):
    """Activation records of `rows` positions from `start` on; `moa.records` reads the payload."""

    session: SessionId
    epoch: Count
    start: Position
    rows: Count
    dtype: RecordDtype
    heads: Count
    head_dim: Count
    payload: bytes


class Resumed(Message, tag="resumed", frozen=True):
    """Answer to Resume: `tail` are the tokens after the edge's `length`; a round still running is
    `running` (else 0).

    resumed: the target's state was still there. reprefilled: it is being rebuilt from the token
    log, under a new epoch. gone: the server has nothing; open the session again with its ids.
    """

    session: SessionId
    outcome: Literal["resumed", "reprefilled", "gone"]
    length: Count = 0
    round: Round = 0
    tail: Ids = []
    finish: Finish = ""
    running: Round = 0
    epoch: Count = 0
    logprobs: bytes = b""
    """Rows of the last tokens of `tail`."""


class Error(Message, tag="error", frozen=True):
    """A typed refusal; `moa.wire.codes` lists the codes. Without a session it concerns the
    connection."""

    code: str
    message: str
    session: bytes = b""
    round: Round = 0
    retry_after_ms: Count = 0
    limit: str = ""
    """Name of the limit that was exceeded."""


class Goaway(Message, tag="goaway", frozen=True):
    """No new work is taken; running rounds end within `drain_ms`. Resume elsewhere, or here after
    `retry_after_ms`."""

    reason: str
    drain_ms: Count = 0
    retry_after_ms: Count = 0


class Behind(Message, tag="behind", frozen=True):
    """What stands behind this verifier: an engine that others run, of which it may not be known
    when a connection begins what it is, and which may be away.

    Sent to an edge that has agreed on the feature `behind`, after the welcome and whenever it
    changes. Not an answer, and it forbids nothing: a request may be sent while the engine is away.
    """

    model: str = ""
    """The engine's own name of its model; empty: not known."""
    away: str = ""
    """Why it does not answer, in one line; empty: it does, or, without a `model`, has answered
    nothing yet."""


ClientMessage = Hello | Open | Append | Stream | Foresee | Cancel | Resume | Sync | Ack | Close
ServerMessage = (
    Welcome | Opened | StreamTokens | Progress | Activations | Resumed | Error | Goaway | Behind
)


def round_of(message: ClientMessage | None) -> int:
    """The round that an answer to this message names. An `Open` or a `Resume` tells the last
    settled one and asks for none."""
    return message.round if isinstance(message, Stream | Foresee | Cancel) else 0
