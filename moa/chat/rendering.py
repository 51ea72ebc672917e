"""The process that renders chat templates (`template.py` runs it): jinja2 as transformers sets it
up, and limits.

Its output must equal that of `apply_chat_template`, so the environment is exactly that of
transformers 4.57: sandbox, block trimming, loop controls, the `generation` tag, `raise_exception`,
`strftime_now`, and a `tojson` that does not escape HTML. Lines of JSON on standard input and
output. Imports nothing of this project, so that it starts in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

try:
    import resource
except ImportError:  # Windows: there only the client's timeout limits a template
    resource = None  # type: ignore[assignment]

_MEMORY = 512 * 2**20
_SECONDS = 20


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it only has to parse."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block's body, as it is."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment in which transformers compiles templates."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return made


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` as transformers has it: jinja2's own would escape characters for HTML."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _answer(template: jinja2.Template, task: dict[str, Any], longest: int) -> dict[str, str]:
    """Render the conversation of a `task`, and return the answer about it: the `text`, or the
    reason why it is `refused`. A text of more than `longest` characters is refused as soon as it is
    so long: a template is a program, and could write for ever."""
    pieces: list[str] = []
    length = 0
    # Special tokens have the tokenizer's names; `documents` are None, and so are `tools` unless
    # there are some.
    ours = {
        "tools": task["variables"].get("tools"),
        "documents": None,
        "add_generation_prompt": True,
    } | task["special"]
    names = task["variables"] | ours | {"messages": task["messages"]}
    try:
        for piece in template.generate(names):
            pieces.append(piece)
            length += len(piece)
            if length > longest:
                return {"kind": "refused", "text": f"it makes more than {longest} characters of it"}
    except Exception as error:  # an untrusted template may raise anything
        return {"kind": "refused", "text": f"{error}" or type(error).__name__}
    return {"kind": "text", "text": "".join(pieces)}


def _limit_memory() -> None:
    if resource is not None:
        with contextlib.suppress(ValueError, OSError):  # the system has no such limit
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time() -> None:
    """Normally the client ends this process; the limit is for an endless template whose client has
    died."""
    if resource is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(
            resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + _SECONDS, hard)
        )


def serve(lines: BinaryIO, out: BinaryIO, longest: int) -> None:
    """Read a chat template from the first line, then a conversation from each further one, and
    answer each with a line, until the input ends. Lines are JSON."""

    def say(line: bytes) -> None:
        out.write(line + b"\n")
        out.flush()

    _limit_memory()
    source = json.loads(lines.readline())
    say(b"ready")
    template: jinja2.Template | None = None
    while line := lines.readline():
        _limit_time()
        try:
            template = template or environment().from_string(source)
        except Exception as error:
            answer = {"kind": "broken", "text": f"{error}" or type(error).__name__}
        else:
            answer = _answer(template, json.loads(line), longest)
        try:
            content = json.dumps(answer).encode()
        except ValueError:
            content = b'{"kind": "refused", "text": "it makes no text of it"}'
        say(content)


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[1]))
