"""Other websites cannot use the endpoint, and keys are compared as a whole."""

from __future__ import annotations

import pytest

from moa.api.access import Access, ApiKeys, is_loopback
from moa.api.errors import ApiError

HERE = "127.0.0.1:8080"


def judge(access: Access | None = None, **headers: str) -> str | None:
    """The code of the refusal, or None."""
    given = {"host": HERE} | {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        (access or Access(ApiKeys([]))).check_source(given)
    except ApiError as error:
        return error.code if error.status == 403 else "another status"
    return None


@pytest.mark.parametrize("host", [HERE, "localhost:8080", "LOCALHOST", "[::1]:8080", "192.168.1.20:8080"])
def test_addresses_and_localhost_are_served(host: str) -> None:
    assert judge(host=host) is None


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "", "a/b", "x@127.0.0.1",
     "127.0.0.1:8080 evil", "2130706433.example", "h" * 300, "[::1:", "[x]", "["],
)  # fmt: skip
def test_a_name_that_may_have_been_rebound_is_refused(host: str) -> None:
    assert judge(host=host) == "host_refused"


def test_a_name_can_be_allowed() -> None:
    assert judge(Access(ApiKeys([]), hosts=["Box.lan"]), host="box.lan:8080") is None


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "null",
        "http://127.0.0.1:9999",
        "file://",
        "http://localhost",
        "x",
        "http://[",
        "http://[x]",
    ],
)
def test_another_origin_is_refused(origin: str) -> None:
    assert judge(origin=origin) == "origin_refused"


def test_the_own_page_and_listed_origins_may() -> None:
    assert judge(origin=f"http://{HERE}") is None
    assert judge(Access(ApiKeys([]), origins=["https://app.example/"]), origin="https://APP.example") is None


def test_a_request_that_the_browser_calls_cross_site_is_refused() -> None:
    assert judge(sec_fetch_site="cross-site", sec_fetch_mode="no-cors") == "origin_refused"
    assert judge(sec_fetch_site="cross-site", sec_fetch_mode="navigate") is None  # a link to the page


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic right", "right", "Bearer rightx"])
def test_a_wrong_key_is_turned_away(header: str) -> None:
    assert ApiKeys(["right", "other"])([header]) is None


@pytest.mark.parametrize("headers", [[], ["Bearer right", "Bearer right"], ["Bearer right", "Bearer wrong"]])
def test_no_key_or_several_are_none(headers: list[str]) -> None:
    assert ApiKeys(["right"])(headers) is None


def test_each_key_is_a_principal_of_its_own() -> None:
    keys = ApiKeys(["right", "other"])
    names = {keys(["Bearer right"]), keys(["bearer other"])}
    assert None not in names
    assert len(names) == 2
    assert not any("right" in str(name) for name in names)


def test_without_keys_everybody_is_the_same() -> None:
    assert ApiKeys([])([]) == ApiKeys([])(["Bearer x"])


def test_loopback() -> None:
    assert is_loopback("localhost")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("example.org")
