"""How many replicas of the verifier there should be, and the settings that each is given. Pure: no Ray, no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from cloud_verifier import cli
from cloud_verifier.settings import Settings
from moa.cli.command_line import CommandParser
from moa.errors import ConfigError

GOOD_QUEUE_MS = 20.0
"""Rounds that wait longer than this for the model have too few replicas."""
GOOD_PAGES = 0.7
"""Share of the KV cache in use; the rest is for devices that come while another replica starts."""

_OF_THE_SERVER = frozenset({"port", "tls_cert", "tls_key", "workers", "openai", "model_name", "openai_host"})
"""Flags of `cloud-verifier serve` that belong to a process with a port of its own."""


def settings_from(arguments: Mapping[str, Any]) -> Settings:
    """Settings from the flags of `cloud-verifier serve`, written as `slots: 32` or `max_context_tokens: 8192`.

    `host` is where the server in front listens. As on our own port, only a loopback address needs no token file.
    """
    names = {name.replace("-", "_"): value for name, value in arguments.items()}
    if foreign := sorted(_OF_THE_SERVER & set(names)):
        raise ConfigError(f"{foreign[0]} is no setting of a replica", hint="the server in front has the port")
    # Unless it is said otherwise, others reach it.
    names.setdefault("host", "0.0.0.0")  # nosec B104
    words = [
        f"--{name.replace('_', '-')}={one}"
        for name, value in names.items()
        for one in (value if isinstance(value, list) else [value])
    ]
    return cli.settings_from(cli.parser(_Parser).parse_args(["serve", *words]))


def replicas_wanted(now: int, queue_ms: Iterable[float], pages_used: Iterable[float]) -> int:
    """Enough that rounds wait no longer, and memory is no fuller, than is good: whichever needs more."""
    pressure = max(_mean(queue_ms) / GOOD_QUEUE_MS, _mean(pages_used) / GOOD_PAGES)
    return max(1, math.ceil(now * pressure))


class _Parser(CommandParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
