"""Chat templates. A module of its own: the template engine takes time to load, and not every prompt is a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
import jinja2.sandbox

from moa.errors import BundleError, UsageError


class ChatTemplate:
    """A conversation as one text, in the way that the target was trained on."""

    def __init__(self, file: Path) -> None:
        # Templates come with models from anywhere: the sandbox keeps them from reaching Python.
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, jinja2.TemplateError) as error:
            raise BundleError(f"{file} is not a chat template: {error}") from None

    def render(self, messages: Sequence[Mapping[str, str]], special: Mapping[str, str]) -> str:
        """The text up to where the assistant's answer begins; `special` are names of special tokens and their text."""
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True, **special)
        except jinja2.TemplateError as error:
            raise UsageError(f"the chat template refuses this conversation: {error}") from None


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
