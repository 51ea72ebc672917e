"""Text to ids and back: chat template and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moa.bundle import Bundle
from moa.errors import BundleError, UsageError
from moa.tokenizer_file import read_tokenizer, tokenizer_errors

if TYPE_CHECKING:
    from moa.chat.template import ChatTemplate

_LONGEST_TOKEN = 4096
"""Most characters that one token can add to a text; real vocabularies have tokens of a few hundred
spaces."""


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
        """Read a tokenizer, and remember where its chat template is. `special_tokens` are those
        that a template may use, by name; by default `bos_id` and the first of `eos_ids`."""
        self.tokenizer = read_tokenizer(tokenizer_file)
        self.eos_ids = frozenset(eos_ids)
        if special_tokens:
            self._special_tokens = dict(special_tokens)
        else:
            self._special_tokens = self._default_special_tokens(bos_id, eos_ids)
        self._template_file = template_file

    def _default_special_tokens(self, bos_id: int | None, eos_ids: Sequence[int]) -> dict[str, str]:
        """The names that most templates use, and the text of these tokens."""
        special_tokens = {}
        if bos_id is not None:
            special_tokens["bos_token"] = self.tokenizer.id_to_token(bos_id) or ""
        if eos_ids:
            special_tokens["eos_token"] = self.tokenizer.id_to_token(eos_ids[0]) or ""
        return special_tokens

    @classmethod
    def of(cls, bundle: Bundle) -> TextCodec:
        """The tokenizer and chat template of a bundle."""
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
        """The chat template, read when it is first needed; None for a bundle without one."""
        if self._template_file is None:
            return None
        from moa.chat.template import ChatTemplate

        return ChatTemplate.read(self._template_file)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the tokenizer's start token."""
        return self._encode(text, special=True)

    def encode_behind(self, text: str) -> list[int]:
        """Return the ids of a text that stands behind others, so without a start token."""
        return self._encode(text, special=False)

    @property
    def template(self) -> str:
        """The chat template's source; empty if there is none."""
        return self._template.source if self._template is not None else ""

    def chat(
        self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any] | None = None
    ) -> str:
        """Return a conversation as one text, up to the start of the assistant's answer. `template`
        holds variables that the chat template may read."""
        if self._template is None:
            raise UsageError(
                "this bundle has no chat template",
                hint="let it continue a text: /v1/completions, or `edge-client generate --raw`",
            )
        return self._template.render(messages, self._special_tokens, template or {})

    def plain(self, text: str) -> list[int]:
        """Return the ids of a rendered conversation, or of a piece from the middle of a text: no
        start token is added."""
        return self._encode(text, special=False)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of ids, by default without special tokens."""
        with tokenizer_errors("decode"):
            text = str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special))
        if len(text) > _LONGEST_TOKEN * max(1, len(ids)):
            raise BundleError(
                f"the bundle's tokenizer makes {len(text)} characters of {len(ids)} tokens"
            )
        return text

    def _encode(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text, with the tokenizer's start token or without; a `UsageError` for
        what is no text."""
        try:
            text.encode()  # lone surrogates, as a file name may bring them, are no UTF-8
        except UnicodeEncodeError:
            raise UsageError("the prompt is not text (UTF-8)", hint="give a text prompt") from None
        with tokenizer_errors("encode"):
            # Of the library's calls only the one for batches lets other threads run meanwhile.
            return list(self.tokenizer.encode_batch([text], add_special_tokens=special)[0].ids)
