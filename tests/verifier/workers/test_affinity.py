"""The worker of a connection."""

from __future__ import annotations

import secrets
from collections import Counter, deque
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloud_verifier.workers.affinity import choose_worker, is_whole, key_of

KEYS = [f"device-{i}" for i in range(3000)]


def _head(target: str = "/", *fields: str) -> bytes:
    return "\r\n".join([f"GET {target} HTTP/1.1", "Host: x", *fields, "", ""]).encode()


@pytest.mark.parametrize(
    ("head", "key"),
    [
        (_head("/", "X-Session-Id: abc"), "abc"),
        (_head("/", "x-session-id:abc "), "abc"),
        (_head("/?session=abc"), "abc"),
        (_head("/?a=b&session=abc", "X-Session-Id: from-the-header"), "from-the-header"),
        (_head("/"), ""),
        (_head("/", "X-Session-Id: " + "a" * 65), ""),
        (_head("/", "X-Session-Id: a b"), ""),
        (_head("/") + b"X-Session-Id: body", ""),
        (b"nonsense", ""),
        (b"\xff\xfe\r\n\r\n", ""),
    ],
)
def test_the_key_in_a_head(head: bytes, key: str) -> None:
    assert key_of(head) == key


@given(st.binary(max_size=300))
def test_any_bytes_have_a_key_or_none(head: bytes) -> None:
    assert len(key_of(head)) <= 64


def test_a_head_is_whole_with_its_empty_line() -> None:
    assert is_whole(_head())
    assert not is_whole(_head()[:-1])


def test_keys_spread_evenly_and_stay() -> None:
    loads = dict.fromkeys(range(4), 0)
    homes = {key: choose_worker(key, loads) for key in KEYS}
    assert all(600 < count < 900 for count in Counter(homes.values()).values())
    assert homes == {key: choose_worker(key, loads) for key in KEYS}


def test_a_worker_that_goes_takes_only_its_own_keys_along() -> None:
    before = {key: choose_worker(key, dict.fromkeys(range(4), 0)) for key in KEYS}
    after = {key: choose_worker(key, {0: 0, 1: 0, 3: 0}) for key in KEYS}
    moved = {key for key in KEYS if before[key] != after[key]}
    assert moved == {key for key in KEYS if before[key] == 2}
    assert set(Counter(after[key] for key in moved)) == {0, 1, 3}, "and the others share them"


def test_no_worker_is_overfull() -> None:
    loads = dict.fromkeys(range(4), 0)
    for _ in range(400):
        worker = choose_worker("the same key for all", loads)
        assert worker is not None
        loads[worker] += 1
    assert max(loads.values()) <= 100 + 3 * 100**0.5


def test_forty_devices_that_all_return_find_their_worker() -> None:
    stayed = 0
    for _ in range(50):
        keys = [secrets.token_hex(8) for _ in range(40)]
        homes = []
        for _ in range(2):
            loads = dict.fromkeys(range(3), 0)
            placed = {}
            for key in sorted(keys, key=lambda _: secrets.randbits(32)):
                worker = choose_worker(key, loads)
                assert worker is not None
                loads[worker] += 1
                placed[key] = worker
            homes.append(placed)
        stayed += sum(homes[0][key] == homes[1][key] for key in keys)
    assert stayed / 2000 >= 0.95


@pytest.mark.parametrize("seed", range(12))
def test_luck_and_ends_that_were_noticed_late_send_nobody_away(seed: int) -> None:
    """Forty devices come back again and again, each before its worker has noticed the end of its last ten."""
    luck, keys = Random(seed), [f"{seed}-{i}" for i in range(40)]
    loads = dict.fromkeys(range(4), 0)
    at: dict[str, int] = {}
    unnoticed: deque[int] = deque()
    stayed = 0
    for _ in range(2000):
        key = luck.choice(keys)
        if key in at:
            unnoticed.append(at.pop(key))
        if len(unnoticed) > 10:
            loads[unnoticed.popleft()] -= 1
        worker = choose_worker(key, loads)
        assert worker is not None
        loads[worker] += 1
        at[key] = worker
        stayed += worker == choose_worker(key, dict.fromkeys(range(4), 0))
    assert stayed >= 0.96 * 2000


def test_there_may_be_nobody() -> None:
    assert choose_worker("key", {}) is None
