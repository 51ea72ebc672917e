from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moa.errors import ConfigError
from moa.wire import Code, Limits, Refusal, chain_hash, check, decode_client, encode, remote_error
from moa.wire.codes import RETRYABLE
from moa.wire.limits import MAX_STOP_BYTES, MAX_STOP_STRINGS
from moa.wire.messages import Append, Error, Foresee, Open
from tests.wire.examples import EXAMPLES, ID

LIMITS = Limits(
    max_prompt_tokens=8,
    max_context_tokens=16,
    max_new_tokens=4,
    max_tree_nodes=4,
    max_guess_tokens=6,
)
VOCAB = 100


def guesses(tokens: list[int], parents: Sequence[int] = ()) -> Foresee:
    """A chain without parents."""
    told = list(parents) or list(range(-1, len(tokens) - 1))
    return Foresee(ID, 1, 0, tokens, told, [0] * len(tokens))


def refusal_of(frame: bytes) -> Refusal | None:
    """What is wrong with a frame; anything but a refusal escapes."""
    try:
        message = decode_client(frame)
        assert encode(decode_client(encode(message))) == encode(message)
        check(message, LIMITS, VOCAB)
    except Refusal as refusal:
        return refusal
    return None


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_decode_or_be_refused(frame: bytes) -> None:
    refusal_of(frame)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(EXAMPLES), st.data())
def test_no_broken_message_does_either(example: Any, data: st.DataObject) -> None:
    frame = bytearray(encode(example))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    refusal = refusal_of(bytes(frame))
    assert refusal is None or refusal.code in (Code.BAD_MESSAGE, Code.LIMIT)


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.integers() | st.binary(max_size=20) | st.text(max_size=9),
        st.lists,
        max_leaves=8,
    )
)
def test_well_formed_msgpack_of_another_shape_is_refused(value: Any) -> None:
    try:
        frame = msgspec.msgpack.encode(value)
    except OverflowError:
        return
    with pytest.raises(Refusal):
        decode_client(frame)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(Refusal, match="not a message"):
        decode_client(b"\x91" * 100_000 + b"\x90")


@pytest.mark.parametrize(
    ("message", "limit"),
    [
        (Open(ID, [1] * 9), "max_prompt_tokens"),
        (Append(ID, 3, [1] * 9), "max_prompt_tokens"),
        (Open(ID, [1] * 17, max_new_tokens=1, generated=9), "max_context_tokens"),
        (Open(ID, [1], max_new_tokens=5), "max_new_tokens"),
        (Open(ID, [1], max_new_tokens=1, stop=["x"] * 9), "max_stop_strings"),
        (Open(ID, [1], max_new_tokens=1, stop=["y", "ü" * 65]), "max_stop_bytes"),
        (guesses([1] * 7), "max_guess_tokens"),
    ],
)
def test_an_exceeded_limit_is_named(message: Any, limit: str) -> None:
    with pytest.raises(Refusal) as caught:
        check(message, LIMITS, VOCAB)
    assert caught.value.code == Code.LIMIT
    assert caught.value.error().limit == limit


@pytest.mark.parametrize(
    "message",
    [
        Open(ID, [VOCAB], max_new_tokens=1),
        Open(ID, [], max_new_tokens=1),
        Open(ID, [1], max_new_tokens=0),
        Open(ID, [1, 2], max_new_tokens=1, generated=2),
        Open(ID, [1], max_new_tokens=1, stop=[""]),
        guesses([1, VOCAB]),
        Foresee(ID, 1, 0, [1, 2], [-1, 0], [0]),
        guesses([1, 2], [-1]),
        guesses([1, 2], [0, 0]),
        guesses([1, 2, 3], [-1, 0, -1]),
        guesses([1, 2, 3], [-1, 2, 0]),
        guesses([1, 2, 3], [-1, 1, 0]),
    ],
)
def test_what_the_model_would_not_survive_is_refused(message: Any) -> None:
    with pytest.raises(Refusal) as caught:
        check(message, LIMITS, VOCAB)
    assert caught.value.code == Code.BAD_MESSAGE


def test_good_messages_pass() -> None:
    check(Open(ID, [1, 2], max_new_tokens=4, generated=1), LIMITS, VOCAB)
    check(
        Open(ID, [1] * 16, max_new_tokens=4, generated=9), LIMITS, VOCAB
    )  # a lost session, longer than a prompt
    check(guesses([1, 2, 3, 4], [-1, 0, 0, 1]), LIMITS, VOCAB)
    check(guesses([1] * 6), LIMITS, VOCAB)
    # The limit of bytes is of each string: all of them may be as long.
    longest = ["ü" * (MAX_STOP_BYTES // 2)] * MAX_STOP_STRINGS
    message = decode_client(encode(Open(ID, [1], max_new_tokens=1, stop=longest)))
    check(message, LIMITS, VOCAB)


def test_chain_hashes_tell_logs_apart() -> None:
    logs = [[], [0], [0, 0], [1], [256], [1, 2], [2, 1]]
    assert len({chain_hash(log) for log in logs}) == len(logs)
    assert chain_hash([1, 2]) == chain_hash((1, 2))


@pytest.mark.parametrize("code", [*Code, "from_the_future"])
def test_what_may_be_tried_again(code: str) -> None:
    error = remote_error(Error(code, "no", retry_after_ms=1500))
    assert error.code == code
    assert error.retry_after == (1.5 if code in RETRYABLE else None)
    assert error.retryable == (code in RETRYABLE)


@pytest.mark.parametrize("name", ["max_queue", "send_timeout", "max_frame_bytes"])
def test_limits_are_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        replace(Limits(), **{name: 0})


def test_limits_fit_together() -> None:
    with pytest.raises(ConfigError, match="max_prompt_tokens"):
        Limits(max_prompt_tokens=100, max_context_tokens=50)
    with pytest.raises(ConfigError, match="whole number"):
        Limits(max_queue=1.5)  # type: ignore[arg-type]
