"""Text to ids and back: chat template, tokenizer, and a decoder that can take tokens back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from edge_client.text.tokenizer import foreign, read_tokenizer
from moa.bundle import Bundle
from moa.errors import BundleError, UsageError

if TYPE_CHECKING:
    from edge_client.text.template import ChatTemplate


_LONGEST_TOKEN = 4096
"""Characters that one token can add to a text; real vocabularies hold runs of up to a few hundred spaces."""


class TextCodec:
    """The tokenizer and chat template of a bundle, which may come from anywhere: what they make is bounded."""

    def __init__(
        self,
        tokenizer_file: Path,
        template_file: Path | None = None,
        *,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """`special_tokens` are what a template may name; without them, those of `bos_id` and the first of `eos_ids`."""
        self.tokenizer = read_tokenizer(tokenizer_file)
        self.eos_ids = frozenset(eos_ids)
        ids = {"bos_token": bos_id, "eos_token": next(iter(eos_ids), None)}
        named = {name: self.tokenizer.id_to_token(i) or "" for name, i in ids.items() if i is not None}
        self._special = dict(special_tokens or named)
        self._template_file = template_file

    @classmethod
    def of(cls, bundle: Bundle) -> TextCodec:
        """That of a bundle."""
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
        """Ids of plain text, as they are."""
        return self._encode(text, special=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation, up to where the assistant's answer begins."""
        return self.encode_rendered(self.render_chat(messages))

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """A conversation as one text, up to where the assistant's answer begins."""
        if self._template is None:
            raise UsageError("this bundle has no chat template", hint="use `generate --raw`")
        return self._template.render(messages, self._special)

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered conversation or of a part of one."""
        return self._encode(text, special=False)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self._decode(ids, skip_special=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, without special tokens."""
        return self._decode(ids, skip_special=True)

    def _decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        with foreign("decode"):
            text = str(self.tokenizer.decode(list(ids), skip_special_tokens=skip_special))
        if len(text) > _LONGEST_TOKEN * max(1, len(ids)):
            raise BundleError(f"the bundle's tokenizer makes {len(text)} characters of {len(ids)} tokens")
        return text

    def _encode(self, text: str, *, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError("the prompt is not text (UTF-8)", hint="give a text prompt") from None
        with foreign("encode"):
            return list(self.tokenizer.encode(text, add_special_tokens=special).ids)


@dataclass
class TextStream:
    """The text of a growing list of tokens, piece by piece; tokens can be taken back.

    A piece is decoded together with the token before it, since many tokenizers join words by context. Two things are
    held back: characters that are not complete yet, and what may turn out to be the beginning of a stop string. From
    a stop string on there is no text.
    """

    codec: TextCodec
    stop: tuple[str, ...] = ()
    _raw: str = ""
    _ids: list[int] = field(default_factory=list)
    _marks: list[_Mark] = field(default_factory=lambda: [_Mark()])
    """After each token."""

    @property
    def text(self) -> str:
        """What may be shown."""
        return self._raw[: self._marks[-1].shown]

    def add(self, token: int) -> str:
        """The text that this token adds."""
        self._ids.append(token)
        mark = self._marks[-1]
        before = self.codec.decode(self._ids[mark.context : mark.done])
        after = self.codec.decode(self._ids[mark.context :])
        if len(after) <= len(before) or after.endswith("\ufffd"):
            self._marks.append(mark)
            return ""
        self._raw += after[len(before) :]
        self._marks.append(_Mark(mark.done, len(self._ids), len(self._raw), *self._visible(mark)))
        return self._raw[mark.shown : self._marks[-1].shown]

    def cut(self, tokens: int) -> int:
        """Take back all but the first `tokens`; how many characters remain."""
        del self._ids[tokens:], self._marks[tokens + 1 :]
        self._raw = self._raw[: self._marks[-1].length]
        return self._marks[-1].shown

    def flush(self) -> str:
        """What was held back, complete or not; nothing may be added after it."""
        mark = self._marks[-1]
        if mark.stopped:
            return ""
        decoded = self.codec.decode(self._ids[mark.context :])
        self._raw += decoded[len(self.codec.decode(self._ids[mark.context : mark.done])) :]
        end, _ = self._find_stop(mark.shown)
        self._marks[-1] = dataclasses.replace(mark, shown=end)
        return self._raw[mark.shown : end]

    def _visible(self, before: _Mark) -> tuple[int, bool]:
        """How much of the text may be shown, and whether a stop string ends it."""
        if before.stopped:
            return before.shown, True
        end, stopped = self._find_stop(before.shown)
        if not stopped:
            # The longest end of the text with which some stop string begins.
            longest = max(map(len, self.stop), default=1) - 1
            tails = (self._raw[at:] for at in range(max(before.shown, end - longest), end))
            end -= next((len(tail) for tail in tails if any(stop.startswith(tail) for stop in self.stop)), 0)
        return end, stopped

    def _find_stop(self, start: int) -> tuple[int, bool]:
        """Where the text ends; what was shown already holds no beginning of a stop string."""
        found = [at for stop in self.stop if (at := self._raw.find(stop, start)) >= 0]
        return (min(found), True) if found else (len(self._raw), False)


@dataclass(frozen=True, slots=True)
class _Mark:
    """The stream after a token."""

    context: int = 0
    """Where the decoding context starts."""
    done: int = 0
    """How many tokens are in the text."""
    length: int = 0
    """The text's length, held back parts included."""
    shown: int = 0
    stopped: bool = False
