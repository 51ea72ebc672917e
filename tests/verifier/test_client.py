"""The tests' own client: what is refused is raised at once, and not waited for."""

from __future__ import annotations

import pytest

from moa.errors import RemoteError
from moa.wire import Code
from moa.wire.messages import Error, Stream
from testing.client import client
from tests.torture.fake_verifier import Behaviour, fake
from tests.verifier import kit

IDS = kit.prompt(1, 10)


def _refused(code: str, *, of_session: bool) -> Behaviour:
    """Each round is refused with this code, with its session's name or without."""
    return lambda message, right: (
        [Error(code, "for a reason", message.session if of_session else b"")]
        if isinstance(message, Stream)
        else right
    )


@pytest.mark.parametrize(
    ("code", "of_session"),
    [
        (Code.UNKNOWN_SESSION, True),
        (Code.QUARANTINED, True),
        (Code.LIMIT, True),
        (Code.BAD_MESSAGE, False),
    ],
)
async def test_a_stream_that_is_refused_for_good_is_an_error_of_that_name(
    code: str, of_session: bool
) -> None:
    behaviour = _refused(code, of_session=of_session)
    async with fake(behaviour, [40], {}) as made, client(made.url) as edge:
        session = await edge.start(IDS, max_new_tokens=4)
        with pytest.raises(RemoteError, match="for a reason") as caught:
            await edge.stream(session)
    assert caught.value.code == code
