"""What a type checker says of a client's settings. `make check` reads this file; nothing runs it.

An ignored error that is no error any more is one itself, so each line proves that its mistake is
found.
"""

from __future__ import annotations

from edge_client import EdgeClient


async def mistakes(client: EdgeClient) -> None:
    """Names and types that are wrong, and some that are right."""
    EdgeClient(verifier="local", temperature=0.5)
    EdgeClient(verifer="local")  # type: ignore[call-arg]
    EdgeClient(verifier=3)  # type: ignore[arg-type]
    EdgeClient(draft="nobody")  # type: ignore[arg-type]
    client.generate("Hi", max_new_tokens=3, seed=1)
    client.generate("Hi", max_new_token=3)  # type: ignore[call-arg]
    client.generate("Hi", verifier="local")  # type: ignore[call-arg]
