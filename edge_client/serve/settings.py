"""What `edge-client serve` can be told; each field with a docstring is a flag."""

from __future__ import annotations

import typing
from dataclasses import dataclass
from pathlib import Path

from moa.api.access import check_names, check_origins, is_loopback
from moa.api.answer import Mode
from moa.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServeSettings:
    """Address, access and limits of the endpoint."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8080
    """Port to listen on; 0 picks one."""
    api_keys: tuple[str, ...] = ()
    """API key of a client; better in MOA_API_KEY."""
    mode: Mode = "keep"
    """Text that the device writes without the verifier: keep sends it, marked; hold holds it back;
    provisional sends it and corrects it later, for clients that can."""
    patience: float | None = None
    """Seconds that a complete answer waits for a lost link; default: 1 in mode keep, 5 provisional,
    20 hold."""
    most_answers: int = 64
    """Answers at once."""
    keep_seconds: float = 900.0
    """How long complete resumable streams are kept."""
    allowed_hosts: tuple[str, ...] = ()
    """A DNS name, beside addresses and localhost, that requests may use."""
    origins: tuple[str, ...] = ()
    """A website whose pages may use it; default: none."""
    app: Path | None = None
    """A web app of `edge-client page`, to serve below /app/."""
    model_name: str = ""
    """The model's name for clients; default: the target's own."""
    also_called: tuple[str, ...] = ()
    """Another name for the model that requests may use, such as gpt-4o; *: any name."""

    def __post_init__(self) -> None:
        """Refuse settings that are out of range, or that would serve strangers without a key."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be 0..65535, not {self.port}")
        if self.mode not in (modes := typing.get_args(Mode)):
            raise ConfigError(f"mode must be one of {', '.join(modes)}, not {self.mode!r}")
        check_names("--allowed-host", self.allowed_hosts)
        check_origins(self.origins)
        if not self.api_keys and not is_loopback(self.host):
            raise ConfigError(
                f"refusing to listen on {self.host} without an api key",
                hint="give --api-key, or listen on 127.0.0.1",
            )
        if any(not key.strip() or not key.isascii() for key in self.api_keys):
            raise ConfigError("an api key is empty or not ASCII")
