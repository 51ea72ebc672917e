from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from moa.sampling import MAX_TEMPERATURE, MIN_TEMPERATURE
from moa.wire import codec, messages
from moa.wire.messages import Message
from tests.wire.examples import EXAMPLES, ID
from tools.wire import structure_lists

GOLDEN = Path(__file__).with_name("golden_frames.json")


def _decode(frame: bytes, kind: type) -> Message:
    return (
        codec.decode_client(frame)
        if kind in get_args(messages.ClientMessage)
        else codec.decode_server(frame)
    )


def test_every_message_has_an_example() -> None:
    kinds = {*get_args(messages.ClientMessage), *get_args(messages.ServerMessage)}
    assert {type(example) for example in EXAMPLES} == kinds


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: type(e).__name__)
def test_the_bytes_of_a_message_never_change(example: Message) -> None:
    # An older end has these bytes built in: after an additive change regenerate by hand, never in a
    # test run.
    frame = codec.encode(example)
    golden = json.loads(GOLDEN.read_text())
    assert frame.hex() == golden[type(example).__name__]
    assert _decode(frame, type(example)) == example


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: type(e).__name__)
def test_a_field_from_the_future_is_skipped(example: Message) -> None:
    fields = msgspec.msgpack.decode(codec.encode(example))
    frame = msgspec.msgpack.encode([*fields, {"from": "the future"}])
    assert _decode(frame, type(example)) == example


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: type(e).__name__)
def test_fields_that_an_older_end_does_not_send_have_defaults(example: Message) -> None:
    fields = msgspec.structs.fields(type(example))
    required = sum(
        f.default is msgspec.NODEFAULT and f.default_factory is msgspec.NODEFAULT for f in fields
    )
    sent = msgspec.msgpack.decode(codec.encode(example))[: 1 + required]
    decoded = _decode(msgspec.msgpack.encode(sent), type(example))
    for field in fields[required:]:
        default = (
            field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        )  # type: ignore[misc]
        assert getattr(decoded, field.name) == default


def test_rounds_are_small() -> None:
    guesses = messages.Foresee(ID, 100, 1000, list(range(1000, 1016)), [-1, *range(15)], [3] * 16)
    assert len(codec.encode(guesses)) < 130
    answer = messages.StreamTokens(
        ID, 100, 1000, list(range(1000, 1006)), drafted=15, queue_ms=0.4, forward_ms=9.3
    )
    assert len(codec.encode(answer)) < 90


def test_the_page_names_the_temperatures_that_are_taken() -> None:
    """It said up to 100 when no more than 2 was taken."""
    (note,) = re.findall(r"temperature: float = 0\.0`: (.*)", structure_lists())
    assert note == f"0, for the likeliest token, or {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}."
