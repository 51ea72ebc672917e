"""The options that all scenarios share."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is done; where it is done is a `Pair`."""

    clients: tuple[int, ...] = (1, 4, 16)
    prompt: int = 64
    """Prompt tokens, about: each client's differs."""
    tokens: int = 192
    """Output tokens of a client."""
    nodes: int = 8
    """Tokens in a draft."""
    rate: float = 0.7
    """Probability that a drafted token is right."""
    repeats: int = 5
    sessions: int = 10_000
    think: float = 0.02
    """Seconds that a client takes between two rounds, where the scenario is not about speed."""
    threads: int = 0
    """Threads of the verifier's process; 0 leaves them to it, as a user would."""
    flags: tuple[str, ...] = field(default=())
    """More flags of `cloud-verifier serve`."""
