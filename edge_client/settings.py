"""The client's settings: a flag wins over an environment variable, that over the config file, that over the default."""

from __future__ import annotations

import dataclasses
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from edge_client.turn.budget import Budget
from edge_client.turn.controller import Draft
from edge_client.turn.reconcile import OnReconnect
from edge_client.turn.sync import Precision
from moa.errors import ConfigError, UsageError
from moa.sampling import SamplingSettings

ENVIRONMENT = "MOA_EDGE_"
"""`max_kbps` is `MOA_EDGE_MAX_KBPS`."""


@dataclass(frozen=True, kw_only=True)
class ClientSettings:
    """Everything a user can set."""

    # where
    verifier: str = ""
    """`ws://` or `wss://` address, `local` for one on this machine, empty for none."""
    bundle: str = ""
    """Folder of an exported bundle; empty is the embedded one."""
    variant: str = ""
    token: str = ""
    """Bearer token for the verifier."""
    tls_ca: str = ""
    """A PEM file of the authority that signed the verifier's certificate."""
    offline: bool = False

    # what
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    # how
    draft: Draft = "auto"
    ahead: bool = True
    """Draft on while an answer is awaited; off only to see what it gains."""
    on_reconnect: OnReconnect = "rewind"
    sync: Precision = "auto"
    max_kbps: float = 0.0
    max_calls: int = 0
    threads: int = 0
    max_offline_tokens: int = -1
    """Unverified tokens at which to stop: 0 is never, -1 what the bundle's calibration says."""
    settle_seconds: float = 5.0
    """At the end, how long to wait for a lost link so that what was written offline is checked."""
    answer_floor_seconds: float = 0.25
    """The shortest wait for an answer before the device goes on alone."""
    first_answer_seconds: float = 5.0
    reconnect_seconds: float = 5.0
    """The longest wait between two attempts to reach the verifier."""

    def __post_init__(self) -> None:
        for field, hint in typing.get_type_hints(type(self)).items():
            if typing.get_origin(hint) is Literal and getattr(self, field) not in typing.get_args(hint):
                choices = ", ".join(typing.get_args(hint))
                raise ConfigError(f"{field} must be one of {choices}, not {getattr(self, field)!r}")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if self.threads < 0 or self.max_offline_tokens < -1:
            raise ConfigError("threads must be at least 0, max_offline_tokens at least -1")
        waits = (self.settle_seconds, self.answer_floor_seconds, self.first_answer_seconds, self.reconnect_seconds)
        if min(waits) < 0:
            raise ConfigError("waiting times must not be negative")
        if self.verifier and self.verifier != "local" and not self.verifier.startswith(("ws://", "wss://")):
            raise UsageError(
                f"no verifier address: {self.verifier!r}", hint="like ws://host:8765, wss://host, or local"
            )
        if self.offline and self.verifier:
            raise UsageError("--offline needs no verifier: give one or the other")
        _ = self.sampling, self.budget

    @property
    def sampling(self) -> SamplingSettings:
        """How tokens are chosen."""
        names = [field.name for field in dataclasses.fields(SamplingSettings)]
        return SamplingSettings(**{name: getattr(self, name) for name in names})

    @property
    def budget(self) -> Budget:
        """The hard limits."""
        return Budget(self.max_calls, self.max_kbps)

    @classmethod
    def load(
        cls,
        flags: Mapping[str, Any],
        *,
        environment: Mapping[str, str] = os.environ,
        file: Path | None = None,
    ) -> Self:
        """Put together what was given: `flags` that are None were not."""
        values = _from_file(file or default_file(environment), must_exist=file is not None)
        hints = typing.get_type_hints(cls)
        if unknown := sorted(set(values) - set(hints)):
            raise ConfigError(f"config file: unknown setting {unknown[0]!r}", hint=f"known: {', '.join(hints)}")
        for name, hint in hints.items():
            if (text := environment.get(ENVIRONMENT + name.upper())) is not None:
                values[name] = _parse(name, text, hint)
        values |= {name: value for name, value in flags.items() if value is not None}
        return cls(**{name: _checked(name, value, hints[name]) for name, value in values.items()})


def default_file(environment: Mapping[str, str]) -> Path:
    """Where the config file is looked for."""
    home = environment.get("XDG_CONFIG_HOME") or str(Path("~/.config").expanduser())
    return Path(home) / "moa-edge" / "config.toml"


def _from_file(path: Path, *, must_exist: bool) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except (FileNotFoundError, NotADirectoryError):
        if must_exist:
            raise UsageError(f"no config file at {path}") from None
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _parse(name: str, text: str, hint: Any) -> Any:
    try:
        if hint is bool:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
        if hint in (int, float):
            return hint(text)
    except (KeyError, ValueError):
        raise ConfigError(f"{ENVIRONMENT}{name.upper()} is not a {hint.__name__}: {text!r}") from None
    return tuple(text.split(",")) if typing.get_origin(hint) is tuple else text


def _checked(name: str, value: Any, hint: Any) -> Any:
    """A value of the right type, or an error that names the setting."""
    origin = typing.get_origin(hint)
    if origin is tuple and isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    expected = str if origin in (Literal, types.UnionType) else hint
    if origin is tuple or not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        wanted = "a list of strings" if origin is tuple else getattr(expected, "__name__", str(expected))
        raise ConfigError(f"{name} must be {wanted}, not {value!r}")
    return value
