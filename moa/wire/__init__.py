"""The wire: messages, codec, limits and the edge's session state machine. No I/O and no torch.

`messages` holds the two closed sets of typed messages, `codec` turns them into frames and checks
limits, `session` is the edge's state machine (the verifier's is in
`cloud_verifier/sessions/session.py`), `finish` says when a turn ends, `versions` how ends agree,
`codes` what an error means. `docs/wire-protocol.md` describes the protocol.
"""

from moa.wire.codec import (
    chain_hash,
    check,
    client_frame,
    decode_client,
    decode_server,
    encode,
    wire_limits,
)
from moa.wire.codes import RETRYABLE, CloseCode, Code, Refusal, remote_error
from moa.wire.events import (
    Advanced,
    Ready,
    RecordsArrived,
    Recovered,
    Refused,
    SessionEvent,
    Working,
)
from moa.wire.limits import Limits
from moa.wire.ranges import Ranges
from moa.wire.session import ClientSession
from moa.wire.versions import (
    FEATURES,
    PROTOCOL_VERSIONS,
    SUBPROTOCOL,
    agree_features,
    agree_version,
)

__all__ = [
    "FEATURES",
    "PROTOCOL_VERSIONS",
    "RETRYABLE",
    "SUBPROTOCOL",
    "Advanced",
    "ClientSession",
    "CloseCode",
    "Code",
    "Limits",
    "Ranges",
    "Ready",
    "RecordsArrived",
    "Recovered",
    "Refusal",
    "Refused",
    "SessionEvent",
    "Working",
    "agree_features",
    "agree_version",
    "chain_hash",
    "check",
    "client_frame",
    "decode_client",
    "decode_server",
    "encode",
    "remote_error",
    "wire_limits",
]
