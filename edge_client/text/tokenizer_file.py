"""Reads a tokenizer's file. It is untrusted, and the library has no sandbox, so it is checked
before it is loaded."""

from __future__ import annotations

import base64
import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from moa.errors import BundleError, MoaError
from moa.safe_text import safe_line

_LARGEST_FILE = 2**26
_LARGEST_GROWTH = 64
"""Times as much text as goes in that the steps may make together; more could turn a prompt into
gigabytes."""
_MOST_STEPS = 64
_GROWTH = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "ByteLevel": 2, "Metaspace": 2}
"""Of steps that write no text of their own: the longest expansion of a character, or what another
run of it doubles."""


class _Parts(msgspec.Struct):
    """The parts of a tokenizer's file that change text; the vocabulary is skipped."""

    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")


_parts_of = msgspec.json.Decoder(_Parts)


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer, or an error that names the problem of its file."""
    try:
        if file.stat().st_size > _LARGEST_FILE:
            raise BundleError(f"{file} is too large for a tokenizer")
        content = file.read_bytes()
    except OSError:
        raise BundleError(f"no tokenizer at {file}") from None
    try:
        parts = _parts_of.decode(content)
        for way in ((parts.normalizer, parts.pre_tokenizer), (parts.decoder,)):
            growths = [growth for part in way for growth in _growths(msgspec.json.decode(part))]
            if len(growths) > _MOST_STEPS:
                raise BundleError(f"it has more than {_MOST_STEPS} steps")
            if (growth := math.prod(growths)) > _LARGEST_GROWTH:
                raise BundleError(
                    f"it makes {growth:.0f} times as much text, at most {_LARGEST_GROWTH}"
                )
        with tokenizer_errors("read"):
            tokenizer = Tokenizer.from_buffer(content)
        # What a file says of these is no part of its identity: a prompt is never cut in silence.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{file} is not a tokenizer: {safe_line(str(error))}") from None
    except BundleError as error:
        raise BundleError(f"{file} is not a tokenizer: {safe_line(str(error))}") from None


def _growths(part: Any) -> Iterator[float]:
    """Of each step of a normalizer, pre-tokenizer or decoder: how many times as much text it may
    make."""
    if isinstance(part, list):
        for step in part:
            yield from _growths(step)
    elif isinstance(part, dict):
        yield _growth(part)
        for inner in part.values():
            if isinstance(inner, list | dict):
                yield from _growths(inner)


def _growth(step: dict[str, Any]) -> float:
    """Of one step alone."""
    kind = step.get("type")
    own = max(
        (
            len(text)
            for key in ("content", "prepend", "replacement")
            if isinstance(text := step.get(key), str)
        ),
        default=0,
    )
    if kind == "Precompiled":  # base64 of a trie's size, the trie, and texts that end with zeros
        charsmap = base64.b64decode(step.get("precompiled_charsmap") or "")
        texts = (
            charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
            .decode("utf-8", "replace")
            .split("\0")
        )
        return max(1, *map(len, texts))
    if kind == "Prepend":
        return 1 + own
    pattern = step.get("pattern")
    if kind == "Replace" and isinstance(pattern, dict) and (text := pattern.get("String")):
        return max(1.0, own / len(text)) if isinstance(text, str) else own
    if kind == "Strip":
        return 1
    return max(1, own, _GROWTH.get(kind, 1) if isinstance(kind, str) else 1)


@contextlib.contextmanager
def tokenizer_errors(what: str) -> Iterator[None]:
    """The tokenizers library raises bare `Exception`, and panics that are not derived from it."""
    try:
        yield
    except MoaError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise BundleError(
                f"the tokenizer cannot {what} this: {safe_line(str(error))}"
            ) from None
        raise
