"""Compiling a grammar: by what limits, and what is wrong with one that is refused.

As a program it is the process in which a stranger's grammar is compiled first (`children.py` runs
it), over single bytes in place of a model's tokens. What llguidance builds before it looks at its
own limits, the automaton of a `multipleOf` or of an intersection, costs the same over either: a
grammar that this process survives costs the server no more. Lines of JSON on standard input and
output. Imports nothing of this project, so that it starts in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from moa.process.memory import give_back_free_memory

try:
    import resource
except ImportError:  # Windows: there only the parent's timeout limits a grammar
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

CPU_SECONDS = 0.3
"""Seconds of the processor for one grammar; none of 861 schemas that others wrote needs 2 ms, one of 1,500
properties 150. llguidance spends it outside of Python's lock."""
MEMORY_BYTES = 64 * 2**20
"""Address space of this process beyond what it has at its start."""
LARGEST_KEPT_BYTES = 24 * 2**20
"""Memory of a compiled grammar; none of the 861 takes 1 MB."""
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,  # 4 ms of reading regular expressions
    step_lexer_fuel=50_000,  # 4 ms for a mask
    step_max_items=20_000,  # 1 ms for a mask
    max_lexer_states=2_000,  # 4 MB; none of 841 schemas that others wrote needs 250
    max_grammar_size=100_000,
    verbose_errors=False,
)
_MOST_PARTS = 100
"""Parts of a schema that are compiled to find the place of an error."""
_PLACE_SECONDS = 0.1
"""Seconds of the processor after which the search for the place ends."""
_TRIMMED_BYTES = 2**20
"""What a grammar takes at least for its memory to be given back at once."""
_UNKNOWN_MAPPED_BYTES = 512 * 2**20
"""Address space that this process is taken to have where the system does not say."""


class Refused(ValueError):
    """A grammar is refused; says why."""


class Source(NamedTuple):
    """A grammar's text, and how JSON is written under it."""

    kind: str
    text: str
    json_style: Mapping[str, Any]


def compiled(tokens: LLTokenizer, source: Source) -> LLMatcher:
    """Compile a grammar over these tokens, and return a matcher at the start of a text, which knows
    the tokens that may follow. Raises `Refused`, which says what is wrong, for a grammar that
    cannot be compiled or allows no text at all."""
    matcher = _tried(tokens, source)
    if isinstance(matcher, str):
        error = matcher
        place = _place(tokens, source, error) if source.kind == "json_schema" else ""
        raise Refused(f"{source.kind}{place}: {error}")
    allows_a_token = any(matcher.compute_bitmask())
    if not allows_a_token or matcher.is_error():
        error = line(matcher.get_error())
        raise Refused(f"{source.kind}: it allows no text at all {error}".strip())
    return matcher


def line(error: str) -> str:
    """The first part of an error of llguidance, without what it was looking at."""
    return " ".join(error.partition("<state>")[0].split())


def _tried(tokens: LLTokenizer, source: Source) -> LLMatcher | str:
    """Compile a grammar within the limits. Returns its matcher, or a line that says what is wrong
    with it."""
    try:
        match source.kind:
            case "json_schema":
                style = cast("JsonCompileOptions", {**source.json_style, "lenient": False})
                grammar = LLMatcher.grammar_from_json_schema(source.text, overrides=style)
            case "regex":
                grammar = LLMatcher.grammar_from_regex(source.text)
            case _:
                grammar = LLMatcher.grammar_from_lark(source.text)
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=_LIMITS)
    except ValueError as error:
        return line(str(error))
    if matcher.is_error():
        return line(matcher.get_error())
    return matcher


def _place(tokens: LLTokenizer, source: Source, error: str) -> str:
    """Where in a JSON schema an error of the compiler is, as ` at #/properties/x`, for the message.
    It is the smallest part of the schema that has the same error when it is compiled alone; the
    search is bounded in parts and time. Empty where the text is no JSON."""
    try:
        schema = json.loads(source.text)
    except (ValueError, RecursionError):
        return ""
    place = "#"
    compiled_parts = 0
    deadline = time.thread_time() + _PLACE_SECONDS
    parts = deque(_parts(schema))
    while parts and compiled_parts < _MOST_PARTS and time.thread_time() < deadline:
        name, part = parts.popleft()
        compiled_parts += 1
        alone = source._replace(text=json.dumps(part, ensure_ascii=False))
        if _tried(tokens, alone) == error:
            place = f"{place}/{name}"
            parts = deque(_parts(part))  # go on within this part; its neighbours are not to blame
    return f" at {place}"


_ONE_SCHEMA = ("items", "additionalProperties", "not", "if", "then", "else")
"""Keywords whose value is a schema."""
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value has a schema by each name."""
_LISTED_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
"""Keywords whose value is a list of schemas."""


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schemas directly within a JSON schema, each with its place there, such as
    `properties/x` or `anyOf/0`."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        places: list[tuple[str, Any]] = []
        if keyword in _ONE_SCHEMA:
            places = [(keyword, value)]
        elif keyword in _NAMED_SCHEMAS and isinstance(value, dict):
            places = [(f"{keyword}/{name}", part) for name, part in value.items()]
        elif keyword in _LISTED_SCHEMAS and isinstance(value, list):
            places = [(f"{keyword}/{number}", part) for number, part in enumerate(value)]
        for place, part in places:
            if isinstance(part, dict):
                yield place, part


# ---- the process


def serve(lines: BinaryIO, out: BinaryIO) -> None:
    """Answer lines of JSON: each names a grammar, and is answered with what is wrong with it, or
    nothing, and the memory that it takes. It ends with the input, or when a limit ends this
    process."""

    def say(answer: Any) -> None:
        out.write(json.dumps(answer).encode() + b"\n")
        out.flush()

    tokens = LLTokenizer("byte")
    _limit_memory()
    say("ready")
    while task := lines.readline():
        source = Source(*json.loads(task))
        _limit_time(CPU_SECONDS)
        answer = _judged(tokens, source)
        _limit_time(0.0)
        say(answer)


def _judged(tokens: LLTokenizer, source: Source) -> dict[str, Any]:
    """Compile a grammar, and return the answer about it: why it is refused (empty if it is not),
    and how many bytes the memory of this process grew by."""
    before = _resident_bytes()
    matcher = None
    reason = ""
    try:
        matcher = compiled(tokens, source)
    except Refused as refused:
        reason = str(refused)
    memory = max(0, _resident_bytes() - before)
    del matcher  # it was kept until here for its memory to be counted
    if memory > LARGEST_KEPT_BYTES and not reason:
        reason = f"{source.kind}: it needs too much memory: {memory >> 20} MB"
    if memory > _TRIMMED_BYTES:  # so that it does not count for the next grammar
        give_back_free_memory()
    return {"refused": reason, "bytes": memory}


def _limit_memory() -> None:
    """Bound what this process may take beyond what it has."""
    if resource is not None:
        with contextlib.suppress(ValueError, OSError):  # the system has no such limit
            limit = _mapped_bytes() + MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(seconds: float) -> None:
    """Have the system end this process after so much processor time, whatever it does then."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _mapped_bytes() -> int:
    """Address space of this process."""
    pages = _pages(column=0)
    return _UNKNOWN_MAPPED_BYTES if pages is None else pages * os.sysconf("SC_PAGE_SIZE")


def _resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    pages = _pages(column=1)
    return 0 if pages is None else pages * os.sysconf("SC_PAGE_SIZE")


def _pages(column: int) -> int | None:
    """A number of /proc/self/statm, in pages: 0 is the address space, 1 what is in memory."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[column])
    except (OSError, ValueError):  # not Linux
        return None


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
