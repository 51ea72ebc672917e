"""What answers must match: `--json-schema FILE`, and in a chat `--tools FILE`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from edge_client.client import EdgeClient
from edge_client.device import Device
from moa.api.tools import Tool, ToolFormat, Tools, listed
from moa.chat_window import fitting, prompt_room
from moa.errors import UsageError
from moa.grammar.spec import MAX_BYTES, Grammar
from moa.safe_text import safe_line


class Structure(NamedTuple):
    """A schema, tools, both, or nothing."""

    schema: Grammar | None = None
    tools: Tools | None = None
    file: Path | None = None
    """Of the schema."""

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Structure:
        """What the flags name."""
        schema, tools = arguments.json_schema, getattr(arguments, "tools", None)
        known = _read(tools, list[Tool], "a list of tools as OpenAI writes them") if tools is not None else []
        return cls(
            Grammar.of_schema(_read(schema, dict[str, Any], "a JSON schema")) if schema is not None else None,
            Tools(tuple(known), parallel=False) if known else None,
            schema,
        )

    def check(self, device: Device) -> None:
        """Refuse a schema that cannot be followed, by its file's name."""
        try:
            if self.schema is not None:
                device.grammars.compile(self.schema)
        except UsageError as error:
            raise UsageError(f"the schema in {self.file} cannot be used: {error}", hint=error.hint) from None

    def question(
        self, client: EdgeClient, messages: Sequence[Mapping[str, str]], longest: int
    ) -> tuple[Sequence[Mapping[str, str]] | None, dict[str, Any]]:
        """Prompt and keywords of `generate`, for an answer of so many tokens. The user's message after a call is its
        result."""
        tools = self.tools
        if tools is None:
            return messages, {} if self.schema is None else {"grammar": self.schema}
        codec = client.device.codec
        form = ToolFormat.of(codec.template)
        offered = [listed(tool) for tool in tools.tools] if form.knows_tools else None

        def encode(messages: Sequence[Mapping[str, str]]) -> tuple[Sequence[int], None]:
            told = form.messages(_with_results(messages, form), tools)
            return codec.encode_rendered(codec.render_chat(told, {"tools": offered})), None

        (ids, _), _ = fitting(messages, prompt_room(client.shared.max_context, longest), encode)
        return None, {"ids": ids, "grammar": form.grammar(tools, self.schema)}

    def called(self, client: EdgeClient, text: str) -> str:
        """The function that an answer calls; empty if it calls none."""
        if self.tools is None:
            return ""
        _, calls, _ = ToolFormat.of(client.device.codec.template).split(text)
        return calls[0].name if calls else ""


def add(command: argparse.ArgumentParser, *, tools: bool = False) -> None:
    """The flags."""
    group = command.add_argument_group("structure")
    group.add_argument("--json-schema", type=Path, metavar="FILE", help="answer in JSON that fits this schema")
    if tools:
        group.add_argument(
            "--tools",
            type=Path,
            metavar="FILE",
            help="let the model call these functions (a JSON list, as OpenAI writes them); type what a call returned",
        )


def _read(path: Path, kind: Any, what: str) -> Any:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} is too large", hint=f"at most {MAX_BYTES} bytes")
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not {what}: {safe_line(str(error))}") from None


def _with_results(messages: Sequence[Mapping[str, str]], form: ToolFormat) -> list[dict[str, Any]]:
    """The conversation with its calls, and their results, as such."""
    told: list[dict[str, Any]] = []
    for message in messages:
        content, calls, _ = form.split(message["content"]) if message["role"] == "assistant" else ("", [], "")
        if calls:
            functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
            told.append({"role": "assistant", "content": content})
            told[-1]["tool_calls"] = [{"id": "call", "type": "function", "function": one} for one in functions]
        elif told and told[-1].get("tool_calls"):
            told.append({"role": "tool", "content": message["content"], "tool_call_id": "call"})
        else:
            told.append(dict(message))
    return told
