"""Reads a tokenizer's file, of a bundle or of a target. It is untrusted, and the library has no
sandbox, so it is checked before it is loaded."""

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

LARGEST_FILE = 2**26
"""Bytes; the largest real ones have 34 million."""
_LARGEST_GROWTH = 64
"""Characters that all steps together may make of one; more could turn a prompt into gigabytes."""
_MOST_STEPS = 64
_GROWTH_BY_TYPE = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "ByteLevel": 2, "Metaspace": 2}
"""Characters that one step of this type may make of one character, where its settings do not say
it: of a normal form its longest expansion; the last two escape or double one."""


class _Parts(msgspec.Struct):
    """The parts of a tokenizer's file that change text; the vocabulary is skipped."""

    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")


_parts_of = msgspec.json.Decoder(_Parts)


def read_tokenizer(file: Path) -> Tokenizer:
    """Load a tokenizer from its file after checking it; a `BundleError` that names the file's problem
    otherwise."""
    content = checked_tokenizer(file)
    try:
        with tokenizer_errors("read"):
            tokenizer = Tokenizer.from_buffer(content)
    except BundleError as error:
        raise BundleError(f"{file} is not a tokenizer: {safe_line(str(error))}") from None
    # What a file says of these is no part of its identity: a prompt is never cut in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def checked_tokenizer(file: Path) -> bytes:
    """Read a tokenizer's file, and return its content; a `BundleError` if it is too large, no
    tokenizer, or describes one that could make far more text than goes in."""
    try:
        if file.stat().st_size > LARGEST_FILE:
            raise BundleError(f"{file} is too large for a tokenizer")
        content = file.read_bytes()
    except OSError:
        raise BundleError(f"no tokenizer at {file}") from None
    try:
        parts = _parts_of.decode(content)
        # Normalizer and pre-tokenizer run one after the other on a prompt, the decoder on an answer.
        _check_growth(parts.normalizer, parts.pre_tokenizer)
        _check_growth(parts.decoder)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, BundleError) as error:
        raise BundleError(f"{file} is not a tokenizer: {safe_line(str(error))}") from None
    return content


def _check_growth(*parts: msgspec.Raw) -> None:
    """Raise a `BundleError` if these parts of a tokenizer, run one after the other on a text, could
    make far more text than goes in: each step multiplies what the steps before it have made."""
    growths: list[float] = []
    for part in parts:
        growths += _growths(msgspec.json.decode(part))
    if len(growths) > _MOST_STEPS:
        raise BundleError(f"it has more than {_MOST_STEPS} steps")
    growth = math.prod(growths)
    if growth > _LARGEST_GROWTH:
        raise BundleError(f"it makes {growth:.0f} times as much text, at most {_LARGEST_GROWTH}")


def _growths(part: Any) -> Iterator[float]:
    """Yield for each step of a normalizer, pre-tokenizer or decoder how many characters it may make
    of one. Steps are nested in lists and in fields whose names differ by type."""
    if isinstance(part, list):
        for step in part:
            yield from _growths(step)
    elif isinstance(part, dict):
        yield _growth(part)
        for inner in part.values():
            if isinstance(inner, list | dict):
                yield from _growths(inner)


def _growth(step: dict[str, Any]) -> float:
    """How many characters one step of a tokenizer may make of one character, steps inside of it
    left out; by its type and settings, and never too few."""
    step_type = step.get("type")
    written = _longest_written(step)
    if step_type == "Precompiled":
        return max(1, _longest_precompiled(step))
    if step_type == "Prepend":
        return 1 + written
    if step_type == "Strip":
        return 1
    pattern = step.get("pattern")
    if step_type == "Replace" and isinstance(pattern, dict):
        replaced = pattern.get("String")
        if isinstance(replaced, str) and replaced:
            return max(1.0, written / len(replaced))
    known = _GROWTH_BY_TYPE.get(step_type, 1) if isinstance(step_type, str) else 1
    return max(1, written, known)


def _longest_written(step: dict[str, Any]) -> int:
    """The length of the longest text that a step writes into its output."""
    longest = 0
    for key in ("content", "prepend", "replacement"):
        text = step.get(key)
        if isinstance(text, str):
            longest = max(longest, len(text))
    return longest


def _longest_precompiled(step: dict[str, Any]) -> int:
    """The length of the longest replacement in a precompiled map of characters: base64 of a trie's
    size in four bytes, the trie, and the replacements, each ended by a zero byte."""
    charsmap = base64.b64decode(step.get("precompiled_charsmap") or "")
    trie_bytes = int.from_bytes(charsmap[:4], "little")
    replacements = charsmap[4 + trie_bytes :].decode("utf-8", "replace").split("\0")
    return max(map(len, replacements))


@contextlib.contextmanager
def tokenizer_errors(what: str) -> Iterator[None]:
    """Turn whatever the tokenizers library raises into a `BundleError` that says it cannot do `what`.
    It raises bare `Exception`, and panics that are not derived from it."""
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
