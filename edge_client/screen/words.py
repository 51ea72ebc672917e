"""Words that several views share."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_client.client import EdgeClient

_MARKS = re.compile(r"^\s*(?:#{1,6}|[-*+>])\s+|\*\*|`+")
"""What marks headings, lists, quotes, bold words and code in Markdown."""
_TOY = (
    "this is the embedded toy model, which knows sixteen exercises: `moa-edge up TARGET"
    " --device-model MODEL` runs your own models (docs/real-models.md)"
)
_TOY_BESIDE_AN_ENGINE = (
    "the device's model is the embedded toy, which knows sixteen exercises, and limits prompt and"
    " answer to its context of {:,} tokens, online too: for useful answers offline, and for longer"
    " texts, give --bundle (docs/upstream.md says how to make one)"
)

_MORE_ROOM = "its model is the embedded toy, and --bundle with one of your own has more room"


def toy(bundle: str, *, beside_an_engine: bool = False, context: int = 0) -> str:
    """What to say once where the device has the embedded model, with the embedded target behind it
    or somebody else's engine; empty where it has a bundle of its own. `context` is what prompt and
    answer may have together."""
    if bundle:
        return ""
    return _TOY_BESIDE_AN_ENGINE.format(context) if beside_an_engine else _TOY


def toy_of(client: EdgeClient) -> str:
    """What `toy` says of this client, as far as it knows now what stands behind its verifier."""
    return toy(
        client.settings.bundle,
        beside_an_engine=client.shared.has_engine_behind,
        context=client.shared.max_context,
    )


def whose_tokens(reason: str, bundle: str, *, beside_an_engine: bool) -> str:
    """What to say where a limit has cut an answer, or the context is full, and the tokens that were
    counted are not those of the model that answers; empty else. `reason` is why the answer ended."""
    if not beside_an_engine:
        return ""
    if reason == "context":
        full = (
            "prompt and answer fill this device's context, and end there however long the"
            " upstream's is"
        )
        return full if bundle else f"{full}: {_MORE_ROOM}"
    if bundle or reason != "length":
        return ""
    return (
        "limits count tokens of the device's model, here the embedded toy: a text has about one and a"
        " half times as many of them as of a large model's"
    )


def tokens(count: int) -> str:
    """The number of tokens, in words."""
    return "1 token" if count == 1 else f"{count:,} tokens"


def not_verified(count: int) -> str:
    """That so many tokens are not verified, in words."""
    return f"{tokens(count)} {'is' if count == 1 else 'are'} not verified"


def first_words(text: str, most: int) -> str:
    """The first whole words of a text, on one line of at most so many characters; a longer word is
    cut."""
    line = " ".join(text.split())
    if len(line) <= most:
        return line
    whole = line[:most].rpartition(" ")[0]
    return f"{whole or line[: most - 1]}…"


def last_words(text: str, most: int) -> str:
    """The last whole words of a text's last line that has any, without what marks them in Markdown,
    in at most so many characters."""
    lines = [" ".join(_MARKS.sub("", line).split()) for line in text.splitlines()]
    line = next((line for line in reversed(lines) if any(map(str.isalnum, line))), "")
    if len(line) <= most:
        return line
    whole = line[-most:].partition(" ")[2]
    return f"…{whole or line[1 - most :]}"


def forwards(count: int) -> str:
    """The number of the target's forwards, in words."""
    return "1 forward" if count == 1 else f"{count:,} forwards"


_FIRST_SECONDS = 0.7
"""Seconds without a change after which a reader is told that it still goes on."""
_STEP_SECONDS = 0.5
"""Steps in which these are counted: with the pause until a view is drawn again, both are less than
a second, so that nothing stands still for longer."""


def waiting(seconds: float) -> str:
    """The end of a status line that says for how long nothing has changed; empty if that is not
    long."""
    if seconds < _FIRST_SECONDS:
        return ""
    return f" · nothing new for {int(seconds / _STEP_SECONDS) * _STEP_SECONDS:g} s"


_ALONE = "independent:"
"""How a bundle's manifest marks a drafter that is a model of its own."""


def named(source: str) -> str:
    """A model's name: the last part of where it came from."""
    return source.removeprefix(_ALONE).rstrip("/").rpartition("/")[2] or "target"
