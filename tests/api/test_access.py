"""Other websites cannot use the endpoint, and keys are compared as a whole."""

from __future__ import annotations

import pytest

from moa.api.access import Access, ApiKeys, is_loopback
from moa.api.errors import ApiError

HERE = "127.0.0.1:8080"
HOSTS = (HERE, "localhost:8080", "LOCALHOST", "[::1]:8080", "192.168.1.20:8080")
FOREIGN_HOSTS = (
    "evil.example",
    "evil.example:8080",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "",
    "a/b",
    "x@127.0.0.1",
    "127.0.0.1:8080 evil",
    "2130706433.example",
    "h" * 300,
    "[::1:",
    "[x]",
    "[",
)
FOREIGN_ORIGINS = (
    "https://evil.example",
    "null",
    "http://127.0.0.1:9999",
    "file://",
    "http://localhost",
    "x",
    "http://[",
    "http://[x]",
)
CROSS = {"sec-fetch-site": "cross-site"}


@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        *(({"host": host}, None) for host in HOSTS),
        *(
            ({"host": host}, "host_refused") for host in FOREIGN_HOSTS
        ),  # the name may have been re-bound
        ({"host": "box.lan:8080"}, None),
        *(({"origin": origin}, "origin_refused") for origin in FOREIGN_ORIGINS),
        ({"origin": f"http://{HERE}"}, None),  # the endpoint's own page
        ({"origin": "https://APP.example"}, None),
        (CROSS | {"sec-fetch-mode": "no-cors"}, "origin_refused"),
        (CROSS | {"sec-fetch-mode": "navigate"}, None),  # a link to the page
    ],
)
def test_other_websites_are_refused(headers: dict[str, str], refused: str | None) -> None:
    access = Access(ApiKeys([]), hosts=["Box.lan"], origins=["https://app.example/"])
    if refused is None:
        access.check_source({"host": HERE} | headers)
        return
    with pytest.raises(ApiError) as error:
        access.check_source({"host": HERE} | headers)
    assert (error.value.status, error.value.code) == (403, refused)


@pytest.mark.parametrize(
    "headers",
    [
        *(
            [header]
            for header in ("", "Bearer", "Bearer wrong", "Basic right", "right", "Bearer rightx")
        ),
        [],
        ["Bearer right", "Bearer right"],
        ["Bearer right", "Bearer wrong"],
    ],
)
def test_no_key_a_wrong_one_or_several_are_turned_away(headers: list[str]) -> None:
    assert ApiKeys(["right", "other"])(headers) is None


def test_each_key_is_a_principal_of_its_own_and_without_keys_everybody_is_the_same() -> None:
    keys = ApiKeys(["right", "other"])
    names = {keys(["Bearer right"]), keys(["bearer other"])}
    assert len(names - {None}) == 2
    assert not any("right" in str(name) for name in names)
    assert ApiKeys([])([]) == ApiKeys([])(["Bearer x"])


def test_loopback() -> None:
    assert [is_loopback(host) for host in ("localhost", "::1", "0.0.0.0", "example.org")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("flag", ["--allowed-host", "--openai-host"])
def test_a_refused_name_is_told_the_flag_of_its_own_program(flag: str) -> None:
    access = Access(ApiKeys([]), names_flag=flag)
    with pytest.raises(ApiError, match=f"allow it with {flag}"):
        access.check_source({"host": "box.lan:8080"})
