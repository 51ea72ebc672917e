"""Text to ids and back: chat template, tokenizer, and a decoder that can take tokens back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from moa.errors import BundleError, UsageError

if TYPE_CHECKING:
    from edge_client.text.template import ChatTemplate


class TextCodec:
    """The tokenizer and chat template of a bundle."""

    def __init__(
        self,
        tokenizer_file: Path,
        template_file: Path | None = None,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
    ) -> None:
        try:
            content = tokenizer_file.read_bytes()
            self.tokenizer = Tokenizer.from_str(content.decode("utf-8"))
        except OSError:
            raise BundleError(f"no tokenizer at {tokenizer_file}") from None
        except Exception as error:  # the tokenizers library raises bare Exception
            raise BundleError(f"{tokenizer_file} is not a tokenizer: {error}") from None
        self.eos_ids = frozenset(eos_ids)
        special = {"bos_token": bos_id, "eos_token": min(eos_ids, default=None)}
        self._special = {name: self.tokenizer.id_to_token(i) or "" for name, i in special.items() if i is not None}
        self._template_file = template_file

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
        """Ids of plain text, as they are."""
        return list(self.tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation, up to where the assistant's answer begins."""
        if self._template is None:
            raise UsageError("this bundle has no chat template", hint="use `generate --raw`")
        text = self._template.render(messages, self._special)
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


@dataclass
class TextStream:
    """The text of a growing list of tokens, piece by piece; tokens can be taken back.

    A piece is decoded together with the token before it, since many tokenizers join words by context; characters that
    are not complete yet are held back.
    """

    codec: TextCodec
    text: str = ""
    _ids: list[int] = field(default_factory=list)
    _marks: list[tuple[int, int, int]] = field(default_factory=lambda: [(0, 0, 0)])
    """After each token: where the decoding context starts, how many tokens are in the text, the text's length."""

    def add(self, token: int) -> str:
        """The text that this token adds."""
        self._ids.append(token)
        context, done, length = self._marks[-1]
        before = self.codec.decode(self._ids[context:done])
        after = self.codec.decode(self._ids[context:])
        if len(after) <= len(before) or after.endswith("\ufffd"):
            self._marks.append((context, done, length))
            return ""
        piece = after[len(before) :]
        self.text += piece
        self._marks.append((done, len(self._ids), len(self.text)))
        return piece

    def cut(self, tokens: int) -> int:
        """Take back all but the first `tokens`; how many characters remain."""
        del self._ids[tokens:], self._marks[tokens + 1 :]
        self.text = self.text[: self._marks[-1][2]]
        return len(self.text)

    def flush(self) -> str:
        """What was held back, complete or not; nothing may be added after it."""
        context, done, _ = self._marks[-1]
        piece = self.codec.decode(self._ids[context:])[len(self.codec.decode(self._ids[context:done])) :]
        self.text += piece
        return piece
