"""Every limit of the service, in one settings class. The protocol's fixed upper bounds are in
`messages`.

Exceeding a limit is answered with a typed error whose `limit` is the name of the field here.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from moa.errors import ConfigError

MAX_STOP_STRINGS = 8
"""Stop strings of a turn, where nobody configures another number: what an endpoint may accept from
its callers."""
MAX_STOP_BYTES = 128
"""Bytes of one stop string in UTF-8; also the most characters that a frame may carry of one
(`messages.Name`)."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one verifier accepts, holds and waits for. Times are in seconds, sizes in bytes."""

    # one message
    max_frame_bytes: int = 256 * 1024
    """Size of a client's message; a lost session is opened again in one message, with 5 bytes a
    token."""
    max_prompt_tokens: int = 8192
    """Tokens of a prompt."""
    max_context_tokens: int = 8192
    """Tokens of prompt and output together, and so the size of a slot."""
    max_new_tokens: int = 4096
    """Output tokens of a turn."""
    max_tree_nodes: int = 64
    """Tokens of a forward's draft."""
    max_guess_tokens: int = 256
    """Tokens of a message of guesses, of which a forward verifies the likeliest."""
    max_stop_strings: int = MAX_STOP_STRINGS
    """Stop strings of a turn."""
    max_stop_bytes: int = MAX_STOP_BYTES
    """Bytes of one stop string."""

    # one connection
    max_sessions_per_connection: int = 64
    """Sessions that are open on one connection."""
    hello_timeout: float = 10.0
    """How long a new connection may take to say hello."""
    handshake_timeout: float = 10.0
    """How long TLS and the websocket handshake may take together."""
    send_timeout: float = 20.0
    """How long the other end may take to read a frame; then the connection is closed."""
    ping_interval: float = 20.0
    """Time between two pings, which detect a dead connection."""
    ping_timeout: float = 20.0
    """How long the answer to a ping may take."""
    send_buffer_bytes: int = 64 * 1024
    """Bytes that may wait in the kernel and the library. A verdict cannot overtake them."""
    max_waiting_bytes: int = 1024 * 1024
    """Answers that wait to be sent. Above `send_buffer_bytes` of them, no request of this
    connection is read."""
    record_window_bytes: int = 512 * 1024
    """Activation records in flight, not acknowledged by the device."""
    max_bad_messages: int = 8
    """Invalid messages on a connection before it is closed."""
    max_empty_frames_per_second: int = 400
    """Websocket frames that bring no new work: pings, repetitions, refused requests. A connection
    above this limit, or above one of the next two, is read more slowly, and closed after it was
    throttled for most of `flood_seconds`."""
    max_bytes_per_second: int = 1024 * 1024
    """Received bytes, and bytes of answers."""
    max_refusals_per_second: int = 10
    """Requests that are refused permanently; retryable refusals such as `busy` do not count."""
    burst_seconds: float = 2.0
    """Burst size of these three limits, in seconds at the limit's rate."""
    flood_seconds: float = 3.0
    """How long a connection may be throttled before it is closed as a flood."""

    # one principal
    connection_budgets_per_principal: int = 4
    """All connections of a principal together have this many times the budget of one: the three
    limits above."""
    max_sessions_per_principal: int = 256
    """Sessions of one principal, those without a connection included."""
    max_connections_per_principal: int = 256
    """Connections of one principal; answers of one key at once on the port of --openai."""
    max_queue_per_principal: int = 64
    """Queued rounds of one principal."""
    max_tokens_per_second: float = 0.0
    """Tokens a second, on average, that are run for one principal, an entry of the token file; without
    such a file all devices are one. Counted are those of prompts and of answers, but not the beginning
    of a prompt that another session of the principal has in memory. Its own guesses that turn out
    wrong have as much again, and never cost text; what is drafted for it here is not counted. 0 is no
    limit."""
    max_burst_tokens: int = 32768
    """Tokens that a principal who has used none for a while may use at once, above
    `max_tokens_per_second`. A longer prompt waits until all of them are there, and is then taken
    whole: the wait behind it is the longer."""

    # the whole service
    max_half_open: int = 128
    """Connections that have not finished their handshake; the oldest is dropped for a new one."""
    max_log_lines_per_second: int = 20
    """Log lines for one principal, or for one address without a principal."""
    max_connections: int = 4096
    """Connections of all principals."""
    max_sessions: int = 4096
    """Sessions of all principals."""
    max_queue: int = 512
    """Queued rounds of all principals."""
    max_log_bytes: int = 64 * 1024 * 1024
    """Memory of all token logs; the longest unused sessions are forgotten beyond it."""
    idle_seconds: float = 2.0
    """A connected session that has paused this long may lose its slot to one that needs it."""
    detached_seconds: float = 300.0
    """A session without a connection keeps its slot this long (less when others need it)."""
    cold_seconds: float = 3600.0
    """A session without a slot keeps its token log this long."""
    request_seconds: float = 30.0
    """A stream whose first forward has waited longer than this is answered `deadline` instead of run."""
    drain_seconds: float = 20.0
    """How long running work may take to end when the verifier stops."""
    busy_retry_seconds: float = 0.25
    """The shortest `retry_after` of a busy answer; it grows with the queue."""

    def __post_init__(self) -> None:
        """Raise a `ConfigError` for a limit that is no number above 0, and for limits that do not
        go together."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.name == "max_tokens_per_second"
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if not is_number or value < 0 or (value == 0 and not may_be_zero):
                wanted = "0, for no limit, or more" if may_be_zero else "above 0"
                raise ConfigError(f"limit {field.name} must be {wanted}, not {value!r}")
            if field.type == "int" and not isinstance(value, int):
                raise ConfigError(f"limit {field.name} must be a whole number, not {value!r}")
        if self.max_prompt_tokens > self.max_context_tokens:
            raise ConfigError("limit max_prompt_tokens must not be above max_context_tokens")
        least = self.least_frame_bytes(self.max_context_tokens)
        if self.max_frame_bytes < least:
            raise ConfigError(
                f"limit max_frame_bytes must be at least {least} for a context of {self.max_context_tokens} tokens,"
                f" not {self.max_frame_bytes}"
            )

    def context_within(self, capacity: int) -> int:
        """The most tokens of a session whose slot holds so many: the largest draft needs a place
        behind them. A `ConfigError` where nothing is left."""
        context = min(self.max_context_tokens, capacity - self.max_tree_nodes)
        if context < 1:
            raise ConfigError(
                f"a slot of {capacity} tokens has no room for a draft of {self.max_tree_nodes}",
                hint="lower --max-tree-nodes",
            )
        return context

    @staticmethod
    def least_frame_bytes(context: int) -> int:
        """Smallest allowed frame limit: a lost session is opened again in one frame, with up to 5
        bytes for each token of its log."""
        return 5 * context + 4096
