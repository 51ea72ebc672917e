"""Loads the tokenizer's file with checks: it is untrusted, and the library does not sandbox it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from moa.errors import BundleError, MoaError
from moa.safe_text import safe_line

_LARGEST_FILE = 2**26
_LONGEST_REPLACEMENT = 64
"""Longest replacement text of one step; a longer one could turn a prompt into gigabytes."""


class _Parts(msgspec.Struct):
    """The parts of a tokenizer's file that change text; the vocabulary is skipped."""

    normalizer: msgspec.Raw = msgspec.Raw(b"null")
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer, or an error that names the problem of its file."""
    try:
        if file.stat().st_size > _LARGEST_FILE:
            raise BundleError(f"{file} is too large for a tokenizer")
        content = file.read_bytes()
    except OSError:
        raise BundleError(f"no tokenizer at {file}") from None
    try:
        parts = msgspec.json.decode(content, type=_Parts)
        for part in (parts.normalizer, parts.pre_tokenizer, parts.decoder):
            if part and _longest_replacement(msgspec.json.decode(part)) > _LONGEST_REPLACEMENT:
                raise BundleError(f"{file} is not a tokenizer: it replaces characters by long texts")
        with tokenizer_errors("read"):
            return Tokenizer.from_buffer(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{file} is not a tokenizer: {safe_line(str(error))}") from None
    except BundleError as error:
        raise BundleError(f"{file} is not a tokenizer: {safe_line(str(error))}") from None


def _longest_replacement(part: Any) -> int:
    """The longest replacement `content` of any step of normalizer, pre-tokenizer or decoder."""
    if isinstance(part, dict):
        own = part.get("content", "")
        return max([len(own) if isinstance(own, str) else 0, *map(_longest_replacement, part.values())])
    return max(map(_longest_replacement, part), default=0) if isinstance(part, list) else 0


@contextlib.contextmanager
def tokenizer_errors(what: str) -> Iterator[None]:
    """The tokenizers library raises bare `Exception`, and panics that are not derived from it."""
    try:
        yield
    except MoaError:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise BundleError(f"the tokenizer cannot {what} this: {safe_line(str(error))}") from None
        raise
