"""Bytes to messages and back. One binary websocket frame is one message."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np

from moa.wire.codes import Code, Refusal
from moa.wire.limits import Limits
from moa.wire.messages import (
    Ack,
    Append,
    ClientMessage,
    Foresee,
    Message,
    Open,
    ServerMessage,
    WireLimits,
)

_M = TypeVar("_M")
_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_server_decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)


def encode(message: Message) -> bytes:
    """The frame of a message."""
    return _encoder.encode(message)


def client_frame(message: ClientMessage, most: int) -> bytes:
    """Encode a message for a verifier whose frames have `most` bytes at most. Raises a `Refusal` if
    the verifier would not read it, because the frame is too large, or a caller's values are out of
    range: so nothing is sent that would end the connection."""
    try:
        frame = encode(message)
        # Decoding checks all ranges. These two are frequent, and made of numbers that were checked.
        if not isinstance(message, Foresee | Ack):
            decode_client(frame)
    except (ValueError, OverflowError, Refusal) as error:
        raise Refusal(Code.BAD_MESSAGE, f"this cannot be sent: {error}") from None
    _at_most(len(frame), most, "max_frame_bytes", "bytes in a frame")
    return frame


def _decode(decoder: msgspec.msgpack.Decoder[_M], frame: bytes) -> _M:
    """Decode a frame; a `Refusal` for whatever is no message, whatever the bytes."""
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refusal(Code.BAD_MESSAGE, f"not a message of this protocol: {error}") from None
    except RecursionError:
        raise Refusal(Code.BAD_MESSAGE, "not a message of this protocol: nested too deep") from None


def decode_client(frame: bytes) -> ClientMessage:
    """Read what an edge sent. Anything malformed or out of range is a `Refusal`, whatever the
    bytes."""
    return _decode(_client_decoder, frame)


def decode_server(frame: bytes) -> ServerMessage:
    """Read what a verifier sent."""
    return _decode(_server_decoder, frame)


def chain_hash(ids: Sequence[int]) -> bytes:
    """A 16-byte hash of a token log, to compare the logs of both ends. `docs/wire-protocol.md` defines
    it for clients in other languages."""
    return hashlib.blake2b(np.asarray(ids, dtype="<u4").tobytes(), digest_size=16).digest()


def wire_limits(limits: Limits, *, max_context_tokens: int) -> WireLimits:
    """The limits that a client is told. Its context is `max_context_tokens`: the model's may be
    smaller than the configured limit."""
    values = {name: getattr(limits, name) for name in WireLimits.__struct_fields__}
    values["max_context_tokens"] = max_context_tokens
    return WireLimits(**values)


def check(message: ClientMessage, limits: Limits, vocab_size: int) -> None:
    """Raise a `Refusal` for a message that is well-formed, but asks for more than the limits allow
    or has what is no token or no tree; before anything is allocated for it."""
    match message:
        case Open() | Append():
            _check_turn(message, limits, vocab_size)
        case Foresee():
            _at_most(len(message.tokens), limits.max_guess_tokens, "max_guess_tokens", "guesses")
            _check_tree(message.tokens, message.parents, vocab_size)
            if len(message.neg_log_probs) != len(message.tokens):
                raise Refusal(
                    Code.BAD_MESSAGE,
                    f"{len(message.tokens)} tokens, {len(message.neg_log_probs)} neg_log_probs",
                )
        case _:
            pass


def _check_turn(message: Open | Append, limits: Limits, vocab_size: int) -> None:
    """Raise a `Refusal` for a turn (a prompt and its answer) whose prompt, number of new tokens or
    stop strings are outside of the limits, or whose settings do not go together."""
    if not message.ids:
        raise Refusal(Code.BAD_MESSAGE, "there must be ids")
    if isinstance(message, Open) and (message.round or message.generated):
        # A lost session is opened again with its whole log: several prompts and the answers between
        # them.
        _at_most(len(message.ids), limits.max_context_tokens, "max_context_tokens", "tokens")
    else:
        _at_most(len(message.ids), limits.max_prompt_tokens, "max_prompt_tokens", "prompt tokens")
    _at_most(message.max_new_tokens, limits.max_new_tokens, "max_new_tokens", "new tokens")
    if message.max_new_tokens < 1:
        raise Refusal(Code.BAD_MESSAGE, "max_new_tokens must be at least 1")
    _at_most(len(message.stop), limits.max_stop_strings, "max_stop_strings", "stop strings")
    longest = max((len(text.encode()) for text in message.stop), default=0)
    _at_most(longest, limits.max_stop_bytes, "max_stop_bytes", "bytes in a stop string")
    if message.grammar is not None and message.ignore_eos:
        raise Refusal(Code.BAD_MESSAGE, "a grammar cannot be used with ignore_eos")
    if "" in message.stop:
        raise Refusal(Code.BAD_MESSAGE, "a stop string must not be empty")
    _in_vocab(message.ids, vocab_size)
    # Of a turn that is opened again some ids are its output already; a prompt must be left.
    if isinstance(message, Open) and message.generated >= max(1, len(message.ids)):
        raise Refusal(Code.BAD_MESSAGE, "generated must be below the number of ids")


def _check_tree(tokens: Sequence[int], parents: Sequence[int], vocab_size: int) -> None:
    """Raise a `Refusal` for guesses that are no tree. In a tree node 0 is the root, whose parent is
    -1, and each other node's parent comes before it. A bad index would be an illegal memory access
    on a GPU, which ends all sessions."""
    if len(parents) != len(tokens):
        raise Refusal(Code.BAD_MESSAGE, f"{len(tokens)} tokens but {len(parents)} parents")
    if parents[0] != -1:
        raise Refusal(Code.BAD_MESSAGE, "node 0 is the root: its parent must be -1")
    for node, parent in enumerate(parents):
        if node and not 0 <= parent < node:
            raise Refusal(
                Code.BAD_MESSAGE, f"parent of node {node} must be in 0..{node - 1}, not {parent}"
            )
    _in_vocab(tokens, vocab_size)


def _in_vocab(ids: Sequence[int], vocab_size: int) -> None:
    """A `Refusal` for token ids outside of the target's vocabulary."""
    if ids and max(ids) >= vocab_size:
        raise Refusal(
            Code.BAD_MESSAGE, f"token id {max(ids)} is outside the vocabulary of {vocab_size}"
        )


def _at_most(value: int, limit: int, name: str, what: str) -> None:
    """A `Refusal` that names the setting of a limit where a number of things is above it."""
    if value > limit:
        raise Refusal(Code.LIMIT, f"{value} {what}, at most {limit}", limit=name)
