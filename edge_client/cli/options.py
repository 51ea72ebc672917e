"""Flags that the commands share; most set a field of `ClientSettings`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import secrets
import stat
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from edge_client.bundles.store import locate
from edge_client.screen.pipe import rescue
from edge_client.settings import ClientSettings
from moa.cli.command_line import add_flags, given_fields
from moa.cli.working import Tell, working
from moa.errors import UsageError
from moa.grammar.spec import MAX_BYTES, Grammar
from moa.process.secret_files import exposed
from moa.safe_text import safe_line

if TYPE_CHECKING:
    from edge_client.client import EdgeClient
    from edge_client.device import Device

_CONNECTION = {
    "verifier": "ADDRESS",
    "upstream": "URL",
    "upstream_model": "NAME",
    "upstream_api": "API",
    "upstream_key_file": "FILE",
    "upstream_price_in": "MONEY",
    "upstream_price_out": "MONEY",
    "upstream_budget": "MONEY",
    "bundle": "NAME_OR_DIR",
    "variant": "NAME",
    "token": "TOKEN",
    "tls_ca": "FILE",
    "threads": "N",
}
_ONCE = {"upstream": "several are for `cloud-verifier serve`"}
"""Flags of which a second one would silently win, and what to do instead."""
_SAMPLING = {
    "max_new_tokens": "N",
    "temperature": "T",
    "top_k": "K",
    "top_p": "P",
    "min_p": "P",
    "repetition_penalty": "X",
    "frequency_penalty": "X",
    "presence_penalty": "X",
    "seed": "N",
    "stop": "TEXT",
    "ignore_eos": "",
}
_BEHAVIOUR = {
    "offline": "",
    "draft": "WHO",
    "on_reconnect": "HOW",
    "sync": "PRECISION",
    "max_kbps": "N",
    "max_offline_tokens": "N",
    "offline_after": "S",
    "settle_seconds": "S",
}
_LONGEST_PROMPT = 2**22
"""Bytes; far more than any context holds."""


def add_connection(command: argparse.ArgumentParser) -> None:
    """The flags for where the verifier and the bundle are."""
    group = command.add_argument_group("connection")
    add_flags(group, ClientSettings, _CONNECTION, once=_ONCE)
    add_config(group)


def add_config(command: Any) -> None:
    """Which settings file."""
    command.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="settings file (default: MOA_EDGE_CONFIG, or ~/.config/moa-edge/config.toml)",
    )


def add_generation(command: argparse.ArgumentParser, **defaults: Any) -> None:
    """What to generate, and how; `defaults` are the command's own."""
    add_flags(command.add_argument_group("text"), ClientSettings, _SAMPLING, defaults)
    behaviour = command.add_argument_group("behaviour")
    add_flags(behaviour, ClientSettings, _BEHAVIOUR, defaults)
    behaviour.add_argument(
        "--guess-ahead",
        action=argparse.BooleanOptionalAction,
        help="send guesses ahead of the verifier's answers",
    )


def settings_from(options: argparse.Namespace, **defaults: Any) -> ClientSettings:
    """Settings of the parsed flags, the environment and the config file; `defaults` of a command
    come last."""
    settings = ClientSettings.load(
        given_fields(options, ClientSettings),
        file=getattr(options, "config", None),
        defaults=defaults,
    )
    if settings.upstream_key_file and (problem := exposed(Path(settings.upstream_key_file))):
        say(f"the upstream's key: {problem}")
    return dataclasses.replace(settings, bundle=locate(settings.bundle))


@contextlib.asynccontextmanager
async def opened(settings: ClientSettings) -> AsyncIterator[EdgeClient]:
    """A client that is open while the body runs. If it takes longer than a second to open, a
    terminal is told what is being waited for, and for how long."""
    from edge_client.client import EdgeClient  # it loads ONNX Runtime: not every command needs that

    async with contextlib.AsyncExitStack() as stack:
        with waiting(what_takes_long(settings)):
            client = await stack.enter_async_context(EdgeClient(settings))
        yield client


def what_takes_long(settings: ClientSettings) -> str:
    """What is waited for while a client with these settings opens."""
    if settings.offline or settings.verifier != "local":
        return "loading the drafter"
    if settings.upstream:
        return f"connecting to {safe_line(settings.upstream_name)}"
    return "starting a verifier on this machine"


def waiting(what: str) -> contextlib.AbstractContextManager[Tell]:
    """A context whose body makes the user wait: where it takes longer than a second, a terminal is
    told what for, and for how long."""
    return working("edge-client", what, at_once=False, elsewhere=False)


def draw_seed() -> int:
    """A random seed if none was given; short enough to type."""
    return secrets.randbelow(2**32)


def say(line: str) -> None:
    """A remark, on standard error."""
    print(f"edge-client: {safe_line(line)}", file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Print a result as JSON on one line of standard output. If that cannot be written, it goes to
    standard error."""
    line = msgspec.json.encode(value)
    try:
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # nobody reads
    except OSError as error:
        rescue(line.decode(), error)


def tell_seed(settings: ClientSettings, drawn: int) -> None:
    """Print the seed that was drawn, if it was used."""
    if settings.temperature > 0 and settings.seed == drawn:
        say(f"seed {drawn} (--seed {drawn} gives the same text)")


def add_structure(command: argparse.ArgumentParser) -> None:
    """The flag for what the answer must match."""
    group = command.add_argument_group("structure")
    group.add_argument(
        "--json-schema", type=Path, metavar="FILE", help="answer in JSON that fits this schema"
    )


def read_schema(path: Path | None) -> Grammar | None:
    """Returns the JSON schema in a file, as a grammar that answers must match; None without a
    file."""
    if path is None:
        return None
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{path} is too large", hint=f"at most {MAX_BYTES} bytes")
        return Grammar.of_schema(msgspec.json.decode(path.read_bytes(), type=dict[str, Any]))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not a JSON schema: {safe_line(str(error))}") from None


def check_schema(schema: Grammar | None, path: Path | None, device: Device) -> None:
    """Refuse a schema that cannot be followed, by its file's name."""
    try:
        if schema is not None:
            with waiting("reading the schema"):
                device.grammars.compile(schema)
    except UsageError as error:
        raise UsageError(f"the schema in {path} cannot be used: {error}", hint=error.hint) from None


def add_prompt(command: argparse.ArgumentParser) -> None:
    """The flags for where the prompt comes from."""
    command.add_argument(
        "prompt",
        nargs="*",
        help="the prompt; text from standard input (piped, or with -) is appended, or used instead",
    )
    command.add_argument(
        "-f",
        "--file",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="add this text file; may be repeated",
    )
    command.add_argument(
        "--raw", action="store_true", help="no chat template: continue the text as it is"
    )


def read_prompt(words: Sequence[str], files: Sequence[Path] = ()) -> str:
    """Returns the prompt: the words of the command line, then the files, then what is piped in,
    with an empty line between them."""
    parts = [" ".join(word for word in words if word != "-")]
    parts += [read_file(file) for file in files]
    if sys.stdin is not None and _reads_input("-" in words, bool(words or files)):
        parts.append(_decoded(sys.stdin.buffer.read(_LONGEST_PROMPT + 1), "standard input"))
    prompt = "\n\n".join(part for part in parts if part)
    if not prompt.strip():
        raise UsageError("the prompt is empty", hint="give it as an argument or on standard input")
    return prompt


def _reads_input(asked: bool, has_prompt: bool) -> bool:
    """Whether standard input is part of the prompt: if it is asked for, if it is piped, or if there
    is no other prompt and nobody would have to type."""
    if asked or _is_piped():
        return True
    return not has_prompt and not sys.stdin.isatty()


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file; other kinds are read only if asked for."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def read_file(path: Path) -> str:
    """The text of a file, without the end of its last line."""
    try:
        with path.open("rb") as file:
            return _decoded(file.read(_LONGEST_PROMPT + 1), str(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def _decoded(content: bytes, where: str) -> str:
    """Returns the text of the bytes that were read, without its last line break; `where` names
    their source in errors."""
    if len(content) > _LONGEST_PROMPT:
        raise UsageError(
            f"{where} is too long for a prompt", hint=f"at most {_LONGEST_PROMPT >> 20} MB"
        )
    try:
        return content.decode("utf-8").rstrip("\n")
    except UnicodeDecodeError:
        raise UsageError(f"{where} is not text (UTF-8)", hint="make text of it first") from None
