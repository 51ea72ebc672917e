"""Text to ids and back: chat template and tokenizer. The tokenizer's file is untrusted, and the library does not
sandbox it, so it is checked when it is loaded."""

from __future__ import annotations

import base64
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from tokenizers import Tokenizer

from moa.bundle import Bundle
from moa.errors import BundleError, MoaError, UsageError
from moa.safe_text import safe_line
from moa.text_stream import TextStream as TextStream

if TYPE_CHECKING:
    from edge_client.text.template import ChatTemplate

_LARGEST_FILE = 2**26
_LARGEST_GROWTH = 64
"""Times as much text as goes in that the steps may make together; more could turn a prompt into gigabytes."""
_MOST_STEPS = 64
_GROWTH = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "ByteLevel": 2, "Metaspace": 2}
"""Of steps that write no text of their own: the longest expansion of a character, or what another run of it doubles."""
_LONGEST_TOKEN = 4096
"""Most characters that one token can add to a text; real vocabularies have tokens of a few hundred spaces."""


class TextCodec:
    """The tokenizer and chat template of a bundle. They are untrusted, so their output is bounded."""

    def __init__(
        self,
        tokenizer_file: Path,
        template_file: Path | None = None,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """`special_tokens` are the names that a template may use; by default those of `bos_id` and the first of
        `eos_ids`."""
        self.tokenizer = read_tokenizer(tokenizer_file)
        self.eos_ids = frozenset(eos_ids)
        ids = {"bos_token": bos_id, "eos_token": next(iter(eos_ids), None)}
        named = {name: self.tokenizer.id_to_token(i) or "" for name, i in ids.items() if i is not None}
        self._special = dict(special_tokens or named)
        self._template_file = template_file

    @classmethod
    def of(cls, bundle: Bundle) -> TextCodec:
        """The codec of a bundle."""
        files = bundle.manifest.tokenizer
        if files.file is None:
            raise BundleError(f"{bundle.folder} has no tokenizer", hint="build it again with one")
        return cls(
            bundle.path(files.file),
            bundle.path(files.chat_template) if files.chat_template else None,
            bos_id=files.bos_id,
            eos_ids=files.eos_ids,
            special_tokens=files.special_tokens,
        )

    @property
    def can_chat(self) -> bool:
        """Whether there is a chat template."""
        return self._template_file is not None

    @cached_property
    def _template(self) -> ChatTemplate | None:
        if self._template_file is None:
            return None
        from edge_client.text.template import ChatTemplate

        return ChatTemplate(self._template_file)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, with the tokenizer's start token."""
        return self._encode(text, special=True)

    @property
    def template(self) -> str:
        """The chat template's source; empty if there is none."""
        return self._template.source if self._template is not None else ""

    def chat(self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any] | None = None) -> str:
        """A conversation as one text, up to the start of the assistant's answer; `template` are variables for it."""
        if self._template is None:
            raise UsageError("this bundle has no chat template", hint="use `generate --raw`")
        return self._template.render(messages, self._special, template or {})

    def plain(self, text: str) -> list[int]:
        """Ids of a rendered conversation, or of a piece from the middle of a text."""
        return self._encode(text, special=False)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids, by default without special tokens."""
        with tokenizer_errors("decode"):
            text = str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special))
        if len(text) > _LONGEST_TOKEN * max(1, len(ids)):
            raise BundleError(f"the bundle's tokenizer makes {len(text)} characters of {len(ids)} tokens")
        return text

    def _encode(self, text: str, *, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError("the prompt is not text (UTF-8)", hint="give a text prompt") from None
        with tokenizer_errors("encode"):
            # Of the library's calls only the one for batches lets other threads run meanwhile.
            return list(self.tokenizer.encode_batch([text], add_special_tokens=special)[0].ids)


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
        for way in ((parts.normalizer, parts.pre_tokenizer), (parts.decoder,)):
            growths = [growth for part in way for growth in _growths(msgspec.json.decode(part))]
            if len(growths) > _MOST_STEPS:
                raise BundleError(f"it has more than {_MOST_STEPS} steps")
            if (growth := math.prod(growths)) > _LARGEST_GROWTH:
                raise BundleError(f"it makes {growth:.0f} times as much text, at most {_LARGEST_GROWTH}")
        with tokenizer_errors("read"):
            return Tokenizer.from_buffer(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{file} is not a tokenizer: {safe_line(str(error))}") from None
    except BundleError as error:
        raise BundleError(f"{file} is not a tokenizer: {safe_line(str(error))}") from None


def _growths(part: Any) -> Iterator[float]:
    """Of each step of a normalizer, pre-tokenizer or decoder: how many times as much text it may make."""
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
        (len(text) for key in ("content", "prepend", "replacement") if isinstance(text := step.get(key), str)),
        default=0,
    )
    if kind == "Precompiled":  # base64 of a trie's size, the trie, and texts that end with zeros
        charsmap = base64.b64decode(step.get("precompiled_charsmap") or "")
        texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].decode("utf-8", "replace").split("\0")
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
            raise BundleError(f"the tokenizer cannot {what} this: {safe_line(str(error))}") from None
        raise
