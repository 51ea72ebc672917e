"""The client's settings. Order: flag, environment variable, config file, default."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import os
import tomllib
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypedDict
from urllib.parse import SplitResult, urlsplit

import msgspec

from edge_client.turn.budget import BYTES_PER_KILOBIT
from edge_client.turn.controller import WhoDrafts
from edge_client.turn.deadlines import Patience
from edge_client.turn.reachability import not_passed_on
from edge_client.turn.records import Precision
from edge_client.turn.transcript import OnReconnect
from moa.errors import ConfigError, UsageError
from moa.logprobs import MAX_TOP
from moa.prices import check_prices
from moa.process.user_folders import NoHomeError, config_folder, expanded
from moa.safe_text import safe_line
from moa.sampling import SamplingSettings
from moa.upstream_address import upstream_address
from moa.wire.limits import MAX_STOP_BYTES, MAX_STOP_STRINGS

ENVIRONMENT = "MOA_EDGE_"
"""`max_kbps` is `MOA_EDGE_MAX_KBPS`."""
CONFIG = "MOA_EDGE_CONFIG"
"""The variable that names the config file."""
_LARGEST_FILE = 2**20
_RECORD_SHARE = 0.7
"""Share of the hard limit for activation records; the rest is for the tokens."""
_LEAST = {
    "max_new_tokens": 0,
    "threads": 0,
    "max_offline_tokens": -1,
    "offline_after": 0,
    "settle_seconds": 0,
}
_PATHS = ("upstream_key_file", "bundle", "tls_ca")
"""Settings that name a file or folder."""
_POSITIVE = ("answer_seconds", "connect_seconds", "keepalive_seconds", "reconnect_seconds")


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """Everything a user can set."""

    # where
    verifier: str = ""
    """`ws://` or `wss://` address, `local` to start one on this machine, empty for none."""
    upstream: str = ""
    """Instead of a verifier: the address of an engine's HTTP interface, such as http://gpu:8000/v1.
    Its key is in MOA_UPSTREAM_KEY, or in a file."""
    upstream_model: str = ""
    """Which of its models; empty: its only one."""
    upstream_api: str = "auto"
    """How it is asked: llama-server, vllm, sglang, completions, ollama, chat, chat-vllm, chat-prefix,
    chat-whole, anthropic; auto: by its name, or what it says."""
    upstream_key_file: str = ""
    """File with its API key; else the variable MOA_UPSTREAM_KEY."""
    upstream_price_in: float = 0.0
    """Money for a million tokens that it reads, in whatever currency the budget is."""
    upstream_price_out: float = 0.0
    """Money for a million tokens that it writes."""
    upstream_budget: float = 0.0
    """Money that may be spent there within 24 hours; 0: no limit. Counted from the usage that it
    tells, else from the device's tokens; a restart begins at 0."""
    bundle: str = ""
    """Name of a bundle that was pulled, or a folder; empty is the embedded one."""
    variant: str = ""
    """Which of the bundle's variants to run; empty is the bundle's default."""
    token: str = ""
    """Bearer token for the verifier; better in MOA_EDGE_TOKEN than on a command line."""
    tls_ca: str = ""
    """PEM file of the authority that signed the verifier's certificate."""
    offline: bool = False
    """Only this device: nothing is verified."""

    # what
    max_new_tokens: int = 0
    """Tokens of an answer at most; 0: until the model ends it, as long as the context and the
    verifier allow."""
    temperature: float = 0.0
    """0 is greedy decoding."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0 is off."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this much probability; 1 is off."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest; 0 is off."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of the context less likely."""
    frequency_penalty: float = 0.0
    """Above 0 makes tokens of the answer less likely, each time that they occur."""
    presence_penalty: float = 0.0
    """Above 0 makes tokens of the answer less likely, however often they occur."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, and what is added to their logits."""
    seed: int = 0
    """Same seed, same text; a command that samples without one draws a seed and prints it."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer and are not part of it."""
    ignore_eos: bool = False
    """Continue after an end token."""
    logprobs: int = -1
    """Return each target token's log-probability, with so many of the likeliest; -1: none; needs
    --json or --jsonl."""

    # how
    draft: WhoDrafts = "auto"
    """Who drafts: auto, device, server or none."""
    guess_ahead: bool = True
    """Send guesses ahead of the answers, so that the verifier need not wait for the link; else the
    device drafts where an answer is waited for, with `draft = "device"`."""
    on_reconnect: OnReconnect = "rewind"
    """rewind withdraws offline text that the target contradicts, keep continues from it."""
    sync: Precision = "auto"
    """Activation records: auto, int8, int4, fp16 or off."""
    max_kbps: float = 0.0
    """Kilobits a second that may be used at most; 0 is no limit."""
    threads: int = 0
    """Threads of the drafter; 0 is half of the cores, at most 4, or twice as many where a large
    drafter was measured to be faster with them."""
    max_offline_tokens: int = -1
    """Unverified tokens at which to stop: 0 is never, -1 what the bundle's calibration says, or
    where text repeats itself."""
    offline_after: float = 1.0
    """Write provisionally after a wait of at least so many seconds beyond the usual; longer, where a
    round trip or the target's forward is slow."""
    settle_seconds: float | None = None
    """Least seconds to wait for the check of offline text once it is complete, whatever keeps the
    verifier from it; longer with a slow target. Default: 5, or 0.5 where nothing has ever
    answered at the verifier's address, or at the upstream's."""
    answer_seconds: float = 120.0
    """Longest wait for an answer on a live connection, in seconds; then the round is sent on a new
    one."""
    connect_seconds: float = 10.0
    """Longest wait for a connection, in seconds."""
    keepalive_seconds: float = 5.0
    """Seconds between two pings; a connection without an answer for twice as long is closed."""
    reconnect_seconds: float = 5.0
    """Longest pause between two attempts to reach the verifier, in seconds."""

    def __post_init__(self) -> None:
        """Refuse what is out of range, or does not go together, with one line that names it."""
        self._check_ranges()
        self._check_texts()
        check_prices(self.upstream_price_in, self.upstream_price_out, self.upstream_budget)
        if self.upstream:
            if self.verifier not in ("", "local"):
                raise UsageError("--upstream takes the place of --verifier: give one or the other")
            upstream_address(self.upstream)  # raises for what is none
            object.__setattr__(self, "verifier", "local")  # it is asked by a process beside us
        elif self.upstream_key_file:
            raise UsageError("--upstream-key-file needs --upstream")
        if self.verifier and self.verifier != "local":
            _check_address(self.verifier)
        if self.offline and self.verifier:
            raise UsageError("--offline needs no verifier: give one or the other")
        if self.max_kbps and self.max_kbps < 1:
            raise ConfigError(
                f"max_kbps must be a number from 1 on, or 0 for no limit, not {self.max_kbps}"
            )
        adjustments = self.sampling.adjustments  # this checks the settings of sampling
        if self.upstream and adjustments:
            raise ConfigError(not_passed_on(adjustments[0]))

    def _check_ranges(self) -> None:
        """Raise a `ConfigError` for a setting that is out of range, or none of its choices."""
        for field, hint in _HINTS.items():  # evaluated once: each answer has settings of its own
            value = getattr(self, field)
            if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
                choices = ", ".join(typing.get_args(hint))
                raise ConfigError(f"{field} must be one of {choices}, not {value!r}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"{field} must be a finite number, not {value}")
            if field in _LEAST and value is not None and value < _LEAST[field]:
                raise ConfigError(f"{field} must be at least {_LEAST[field]}, not {value}")
            if field in _POSITIVE and value <= 0:
                raise ConfigError(f"{field} must be above 0, not {value}")
        if not -1 <= self.logprobs <= MAX_TOP:
            raise ConfigError(f"logprobs must be -1..{MAX_TOP}, not {self.logprobs}")

    def _check_texts(self) -> None:
        """Raise a `ConfigError` for an access token that cannot be sent in a header, and for stop
        strings that a verifier would refuse."""
        for character in self.token:
            if not "!" <= character <= "~":
                raise ConfigError(
                    "token holds a space, a control character or a letter beyond ASCII: no verifier made it"
                )
        stop: object = self.stop  # a program without a type checker may give another
        if isinstance(stop, str):
            raise ConfigError(
                f"stop is a tuple of texts, not the text {stop!r}", hint=f"({stop!r},)"
            )
        if "" in self.stop:
            raise ConfigError("a stop string must not be empty")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ConfigError(f"{len(self.stop)} stop strings, at most {MAX_STOP_STRINGS}")
        for text in self.stop:
            size = len(text.encode(errors="replace"))
            if size > MAX_STOP_BYTES:
                raise ConfigError(f"a stop string has {size} bytes, at most {MAX_STOP_BYTES}")

    @property
    def sampling(self) -> SamplingSettings:
        """How tokens are chosen."""
        names = [field.name for field in dataclasses.fields(SamplingSettings)]
        return SamplingSettings(**{name: getattr(self, name) for name in names})

    @property
    def who_verifies(self) -> str:
        """Who verifies, in words: the engine of others behind `upstream`, or a verifier."""
        return "the upstream" if self.upstream else "the verifier"

    @property
    def upstream_name(self) -> str:
        """The upstream's address as it was given, with its model if that was named; empty without
        an upstream."""
        model = f"{self.upstream_model} at " if self.upstream and self.upstream_model else ""
        return model + self.upstream

    @property
    def patience(self) -> Patience:
        """How long a turn waits for what."""
        settle: dict[str, float] = {}
        if self.settle_seconds is not None:  # a verifier that is being started is worth this wait
            settle = {"settle": self.settle_seconds, "settle_unheard": self.settle_seconds}
        return Patience(self.offline_after, answer=self.answer_seconds, **settle)

    @property
    def record_rate(self) -> int:
        """Bytes a second that activation records may take of the hard limit; 0 is no limit."""
        return int(self.max_kbps * BYTES_PER_KILOBIT * _RECORD_SHARE)

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any],
        *,
        environment: Mapping[str, str] = os.environ,
        file: Path | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> Self:
        """Returns the settings from all sources: flags before environment variables, these before
        the config file, and that before `defaults`, which replace the fields' own. A flag that is
        None was not given."""
        values = dict(defaults or {})
        with contextlib.suppress(NoHomeError):  # then there is no file of this user's either
            path = config_file(file, environment)
            must_exist = bool(file or environment.get(CONFIG))
            values |= _beside(path, read_config_file(path, must_exist=must_exist))
        values |= _from_environment(environment)
        for name in flags:
            if name not in _HINTS:
                raise _unknown(name)
        values |= {
            name: _converted(name, value) for name, value in flags.items() if value is not None
        }
        return cls(**values)


def _unknown(name: str) -> ConfigError:
    return ConfigError(f"unknown setting {safe_line(repr(name), 40)}", hint=_nearest(name, _HINTS))


def changed(
    settings: ClientSettings, changes: Mapping[str, Any], fixed: Collection[str] = ()
) -> ClientSettings:
    """Returns the settings with these changes; a `ConfigError` for a name that is none, and for one
    that is `fixed` once a client is made."""
    for name in changes:
        if name not in _HINTS:
            raise _unknown(name)
        if name in fixed:
            raise ConfigError(
                f"{name} is a setting of the whole client, not of an answer",
                hint="EdgeClient(...) takes it",
            )
    return dataclasses.replace(settings, **changes)


class TurnChanges(TypedDict, total=False):
    """The settings that one turn may have to itself, as keywords that a type checker knows."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    seed: int
    stop: tuple[str, ...]
    ignore_eos: bool
    logprobs: int
    draft: WhoDrafts
    guess_ahead: bool
    on_reconnect: OnReconnect
    max_offline_tokens: int
    offline_after: float
    settle_seconds: float | None
    answer_seconds: float


class SettingChanges(TurnChanges, total=False):
    """All fields of `ClientSettings` in the same way (`**changes: Unpack[...]`)."""

    verifier: str
    upstream: str
    upstream_model: str
    upstream_api: str
    upstream_key_file: str
    upstream_price_in: float
    upstream_price_out: float
    upstream_budget: float
    bundle: str
    variant: str
    token: str
    tls_ca: str
    offline: bool
    sync: Precision
    max_kbps: float
    threads: int
    connect_seconds: float
    keepalive_seconds: float
    reconnect_seconds: float


_HINTS: dict[str, Any] = typing.get_type_hints(ClientSettings)
OF_THE_CLIENT = frozenset(_HINTS) - frozenset(TurnChanges.__annotations__)
"""Settings that no single answer has to itself."""
_WORDS = {
    float: "a number",
    float | None: "a number",
    int: "a whole number",
    bool: "true or false",
    str: "a text",
}


def config_file(named: Path | None = None, environment: Mapping[str, str] = os.environ) -> Path:
    """The config file: named by a flag or a variable, or the user's default one."""
    if named is not None or environment.get(CONFIG):
        return named or Path(environment[CONFIG])
    return config_folder(environment) / "config.toml"


def read_config_file(path: Path, *, must_exist: bool = False) -> dict[str, Any]:
    """Returns the settings in a config file; an empty dict if there is no such file."""
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise ConfigError(f"{path} is too large for a config file")
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if must_exist:
            raise UsageError(f"no config file at {path}") from None
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {safe_line(str(error))}") from None
    for name in values:
        if name not in _HINTS:
            hint = _flag_of_serve(name) or _nearest(name, _HINTS)
            raise ConfigError(f"{path}: unknown setting {name!r}", hint=hint)
    return {
        name: _converted(f"{path}: {name}", value, _HINTS[name]) for name, value in values.items()
    }


def _beside(file: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a file with their paths as they are meant there: from its folder on,
    wherever a command is started. The name of a pulled bundle, for which there is no folder, stays."""
    found = dict(values)
    for name in _PATHS:
        if not (value := found.get(name)):
            continue
        path = file.parent / expanded(value)  # an absolute one stays what it is
        may_be_a_name = name == "bundle" and not {"/", os.sep} & set(value)
        if not may_be_a_name or path.is_dir():
            found[name] = str(path)
    return found


def _flag_of_serve(name: str) -> str:
    """Returns a hint for the name of a flag that only `edge-client serve` has, and which is no
    setting; empty for any other name."""
    from edge_client.serve.settings import ServeSettings  # only who has made a mistake needs it

    flags: dict[str, str] = {}
    for field in dataclasses.fields(ServeSettings):
        # A flag that may be repeated names one of several.
        may_be_repeated = isinstance(field.default, tuple)
        flag = field.name.removesuffix("s") if may_be_repeated else field.name
        flags |= {field.name: flag, flag: flag}
    flag = flags.get(name.replace("-", "_"), "")
    if not flag:
        return ""
    also = ", or set MOA_API_KEY" if flag == "api_key" else ""
    return f"it is no setting, but a flag of `edge-client serve`: --{flag.replace('_', '-')}{also}"


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings from our environment variables. An unknown one is an error: it is most
    likely misspelt."""
    known = {ENVIRONMENT + name.upper(): name for name in _HINTS}
    values: dict[str, Any] = {}
    for variable in sorted(v for v in environment if v.startswith(ENVIRONMENT) and v != CONFIG):
        if variable not in known:
            hint = _flag_of_serve(variable.removeprefix(ENVIRONMENT).lower())
            hint = hint or _nearest(variable, [*known, CONFIG], ENVIRONMENT)
            raise ConfigError(f"unknown environment variable {variable}", hint=hint)
        values[known[variable]] = from_text(known[variable], environment[variable], called=variable)
    return values


def from_text(name: str, text: str, *, called: str = "") -> Any:
    """A setting's value from text; `called` is its name in an error. Lists are separated by commas."""
    hint = _HINTS[name]
    value: Any = text
    if typing.get_origin(hint) is tuple:
        value = text.split(",") if text else []
    return _converted(called or name, value, hint, strict=False)


def _converted(name: str, value: Any, hint: Any = None, *, strict: bool = True) -> Any:
    """Returns the value as the setting's type, or raises an error that names the setting.
    `strict=False` reads numbers from text, as flags and variables have them."""
    hint = hint or _HINTS[name]
    try:
        return msgspec.convert(value, hint, strict=strict)
    except msgspec.ValidationError:
        if typing.get_origin(hint) is Literal:
            wanted = f"one of {', '.join(typing.get_args(hint))}"
        else:
            wanted = _WORDS.get(hint, "a list of texts")
        raise ConfigError(f"{name} must be {wanted}, not {safe_line(repr(value))}") from None


def _check_address(address: str) -> None:
    """A `UsageError` unless this is an address of a verifier, ws or wss, with a host."""
    try:
        parts = urlsplit(address)
        host = parts.hostname or ""
        port = parts.port
        host.encode("idna")
    except ValueError as error:  # also UnicodeError: a host name label that is too long
        raise UsageError(
            f"{safe_line(repr(address))} is no verifier address", hint=safe_line(str(error))
        ) from None
    if parts.scheme not in ("ws", "wss") or not host or port == 0:
        if parts.scheme in ("http", "https") and parts.path.rstrip("/").endswith("/v1"):
            raise UsageError(  # where OpenAI's routes lie
                f"{safe_line(repr(address))} is no verifier address",
                hint=f"did you mean --upstream {safe_line(address)}? A verifier's is like ws://HOST:PORT",
            )
        likely = _likely_address(address, parts)
        asked = f"did you mean {safe_line(likely)}? " if likely else ""
        raise UsageError(
            f"{safe_line(repr(address))} is no verifier address",
            hint=f"{asked}It is like ws://HOST:PORT, wss://HOST:PORT, or local",
        )


def _likely_address(address: str, parts: SplitResult) -> str:
    """The address of a verifier that was most likely meant; empty if there is none."""
    if "//" not in address:
        return f"ws://{address}"
    if parts.scheme == "http" and parts.hostname:
        # A verifier's own port, unless a port was named: 80 is that of a web server.
        return f"ws://{parts.netloc}" if parts.port else f"ws://{parts.netloc}:8765"
    if parts.scheme == "https" and parts.hostname:
        return f"wss://{parts.netloc}"
    return ""


def _nearest(name: str, known: Iterable[str], beginning: str = "") -> str:
    """Returns a hint for an unknown name: the known name that looks most like it, or all known
    names. They are compared without the beginning that all of them share."""
    by_rest = {one.removeprefix(beginning): one for one in known}
    close = difflib.get_close_matches(name.removeprefix(beginning), list(by_rest), n=1)
    if close:
        return f"did you mean {by_rest[close[0]]}?"
    return f"known: {', '.join(sorted(by_rest.values()))}"
