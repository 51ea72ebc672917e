"""Compiling a grammar: by what limits, and what is wrong with one that is refused.

As a program it is the process in which a stranger's grammar is compiled first (`children.py` runs
it), over single bytes in place of a model's tokens. What llguidance builds before it looks at its
own limits, the automaton of a `multipleOf` or of an intersection, costs the same over either: a
grammar that this process survives costs the server no more. Lines of JSON on standard input and
output. Imports nothing of this project, so that it starts in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

try:
    import resource
except ImportError:  # Windows: there only the parent's timeout limits a grammar
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

CPU_SECONDS = 0.3
"""Processor time of one grammar; none of 861 schemas that others wrote needs 2 ms, one of 1,500
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
_TRIES = 100
"""Parts of a schema that are compiled to find the place of an error."""
_PLACE_SECONDS = 0.1
"""Processor time after which the search for the place ends."""
_TRIMMED_BYTES = 2**20
"""What a grammar takes at least for its memory to be given back at once."""


class Refused(ValueError):
    """A grammar is refused; says why."""


class Source(NamedTuple):
    """A grammar's text, and how JSON is written under it."""

    kind: str
    text: str
    json_style: Mapping[str, Any]


def compiled(tokens: LLTokenizer, source: Source) -> LLMatcher:
    """A matcher at the start of a text; `Refused` says what is wrong with the grammar."""
    found = _tried(tokens, source)
    if isinstance(found, str):
        place = _place(tokens, source, found) if source.kind == "json_schema" else ""
        raise Refused(f"{source.kind}{place}: {found}")
    if not any(found.compute_bitmask()) or found.is_error():
        raise Refused(f"{source.kind}: it allows no text at all {line(found.get_error())}".strip())
    return found


def line(error: str) -> str:
    """The first part of an error of llguidance, without what it was looking at."""
    return " ".join(error.partition("<state>")[0].split())


def _tried(tokens: LLTokenizer, source: Source) -> LLMatcher | str:
    """A compiled grammar, or what is wrong with it."""
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
    return line(matcher.get_error()) if matcher.is_error() else matcher


def _place(tokens: LLTokenizer, source: Source, error: str) -> str:
    """Where in a schema the error is: the smallest part of it that alone has the same error."""
    try:
        part = json.loads(source.text)
    except (ValueError, RecursionError):
        return ""
    place = "#"
    tries = _TRIES
    until = time.thread_time() + _PLACE_SECONDS
    within = _parts(part)
    while (found := next(within, None)) is not None and tries > 0 and time.thread_time() < until:
        tries -= 1
        name, schema = found
        alone = source._replace(text=json.dumps(schema, ensure_ascii=False))
        if _tried(tokens, alone) == error:
            place = f"{place}/{name}"
            within = _parts(schema)
    return f" at {place}"


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly within a schema."""
    for key, inner in schema.items() if isinstance(schema, dict) else ():
        if key in ("items", "additionalProperties", "not", "if", "then", "else"):
            if isinstance(inner, dict):
                yield key, inner
        elif key in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(inner, dict):
                yield from (
                    (f"{key}/{k}", one) for k, one in inner.items() if isinstance(one, dict)
                )
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(inner, list):
            yield from ((f"{key}/{n}", one) for n, one in enumerate(inner) if isinstance(one, dict))


# ---- the process


def serve(lines: BinaryIO, out: BinaryIO) -> None:
    """Judge one grammar a line, until the input ends or a limit ends this process."""

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
    """Why the grammar is refused, or nothing; and the memory that it takes."""
    before = _resident_bytes()
    matcher = None
    why = ""
    try:
        matcher = compiled(tokens, source)
    except Refused as refused:
        why = str(refused)
    taken = max(0, _resident_bytes() - before)
    del matcher
    if taken > LARGEST_KEPT_BYTES:
        why = why or f"{source.kind}: it needs too much memory: {taken >> 20} MB"
    if taken > _TRIMMED_BYTES:
        _give_back_free_memory()
    return {"refused": why, "bytes": taken}


def _limit_memory() -> None:
    if resource is not None:
        with contextlib.suppress(ValueError, OSError):  # the system has no such limit
            most = _mapped_bytes() + MEMORY_BYTES
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time(seconds: float) -> None:
    """Have the system end this process after so much processor time, whatever it does then."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _mapped_bytes() -> int:
    return _pages(0)


def _resident_bytes() -> int:
    return _pages(1)


def _pages(column: int) -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[column]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):  # not Linux
        return 0 if column else 512 * 2**20


def _give_back_free_memory() -> None:
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
