from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cloud_verifier.settings import Settings
from edge_client.serve.settings import ServeSettings
from moa.config import WEIGHT_DTYPES
from moa.errors import ConfigError, UsageError
from moa.target.torch_target import pick_dtype
from moa.wire import Limits
from tests.torture.tls import certificate


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_only_loopback_may_be_served_without_authentication(host: str) -> None:
    with pytest.raises(ConfigError, match="without authentication"):
        Settings(host=host)
    assert Settings(host=host, auth_tokens=Path("tokens")).host == host
    for loopback in (Settings().host, "127.9.9.9", "::1", "localhost"):
        assert Settings(host=loopback).auth_tokens is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"tls_cert": Path("c")},
        {"port": 70000},
        {"slots": 0},
        {"batch_wait_ms": -1},
        *({"openai": address} for address in ("x", "1:2:x", "99999", "0.0.0.0:80")),
        {"port": 8080, "openai": "8080"},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        _ = Settings(**wrong).openai_address


@pytest.mark.parametrize("name", ["http://x", "x:8080", "x/y", "", "a b", "*", "x,y"])
def test_a_name_that_no_request_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--openai-host takes a name such as"):
        Settings(openai="18190", openai_hosts=("verifier.lan", name))
    with pytest.raises(ConfigError, match="--allowed-host takes a name such as"):
        ServeSettings(allowed_hosts=(name,))
    names = ("verifier.lan", "my_box", "xn--bcher-kva.example", "192.168.1.2", "::1")
    assert Settings(openai="18190", openai_hosts=names).openai_hosts == names


def test_a_precision_that_torch_is_not_asked_for_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="unknown dtype 'int3'") as no:
        Settings(dtype="int3")
    assert no.value.exit_code == 2
    assert "one of auto, float32, bfloat16, float16" in no.value.line()
    assert {name: pick_dtype(name, "cpu").itemsize for name in ("auto", *WEIGHT_DTYPES)} == {
        "auto": 4,
        "float32": 4,
        "bfloat16": 2,
        "float16": 2,
    }


@pytest.mark.parametrize("origin", ["chat.example", "https://", "https://a/b", "https://a?b", "*"])
def test_what_is_no_website_is_refused(origin: str) -> None:
    for kind in (Settings, ServeSettings):
        with pytest.raises(ConfigError, match="--origin takes a website such as"):
            kind(origins=("https://chat.example", origin))
    origins = ("https://chat.example", "http://127.0.0.1:3000", "null", "tauri://localhost")
    assert Settings(origins=origins).origins == origins


@pytest.mark.parametrize(
    "useless",
    [{"also_called": ("gpt-4o",)}, {"openai_hosts": ("box.lan",)}, {"app": Path("app")}],
)
def test_what_only_the_endpoint_reads_is_refused_without_one(useless: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give --openai, too"):
        Settings(**useless)


@pytest.mark.parametrize(
    ("useless", "said"),
    [
        ({"openai": "18190"}, "--openai is not served in front of an upstream"),
        ({"openai": "18190", "app": Path("app")}, "--openai is not served"),
        ({"openai_hosts": ("a",)}, "--openai-host is not served"),
        ({"also_called": ("a",)}, "--also-called is not served"),
        ({"dtype": "float16"}, "--dtype has no meaning with --upstream"),
        ({"rpc": ("a:1",)}, "--rpc has no meaning"),
        ({"emulate": "250ms"}, "--emulate has no meaning"),
        ({"slots": 8}, "--slots has no meaning"),
        ({"batch_wait_ms": 2.0}, "--batch-wait-ms has no meaning"),
    ],
)
def test_what_would_do_nothing_in_front_of_an_upstream_is_refused(
    useless: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        Settings(upstream=("gpu:8000",), **useless)
    assert refused.value.exit_code == 2
    assert ("edge-client serve --upstream" in refused.value.line()) == ("not served" in said)
    Settings(**{"openai": "18190"} | useless)


def test_an_endpoint_beside_the_port_and_a_slot_of_a_full_context_and_the_largest_draft() -> None:
    limits = Limits(
        max_context_tokens=100, max_prompt_tokens=100, max_tree_nodes=8, max_guess_tokens=32
    )
    assert Settings(limits=limits).slot_capacity == 108
    assert Settings(port=8080, openai="127.0.0.2:8080").openai_address == ("127.0.0.2", 8080)


def test_the_cache_s_default_holds_one_full_context() -> None:
    long = Limits(max_context_tokens=200_000, max_frame_bytes=2_000_000)
    assert Settings().kv_cache_tokens == 131072
    assert Settings(limits=long).kv_cache_tokens == 200_000 + long.max_tree_nodes
    assert Settings(limits=long, kv_tokens=131072).kv_cache_tokens == 131072, "as it was asked for"


@pytest.mark.parametrize("flag", ["threads", "gpu_layers"])
def test_a_negative_number_is_refused(flag: str) -> None:
    """llama.cpp ended with a segmentation fault."""
    wrong: Any = {flag: -2}
    name = flag.replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{name} must be .* or more, not -2"):
        Settings(**wrong)


def test_a_cache_that_holds_no_draft_is_refused_before_anything_is_loaded() -> None:
    few = Limits(max_tree_nodes=8, max_guess_tokens=32)
    with pytest.raises(ConfigError, match=r"--kv-tokens 64 holds no session: .* 64 tokens"):
        Settings(kv_tokens=64)
    with pytest.raises(ConfigError, match="--kv-tokens 8 holds no session"):
        Settings(kv_tokens=8, limits=few)
    assert Settings(kv_tokens=65).kv_cache_tokens == 65
    assert Settings(kv_tokens=9, limits=few).kv_cache_tokens == 9


CERTIFICATE = "-----BEGIN CERTIFICATE-----\n"
KEY = "-----BEGIN PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    ("certificate", "key", "said"),
    [
        (KEY, CERTIFICATE, "c.pem is the private key, and --tls-key .*k.pem the certificate .swap"),
        ("text", KEY, "--tls-cert .*c.pem holds no certificate in PEM"),
        (CERTIFICATE, CERTIFICATE, "--tls-key .*k.pem holds no private key in PEM"),
        (CERTIFICATE, None, "cannot read --tls-key .*k.pem: No such file"),
        (CERTIFICATE, KEY, "cannot use the TLS certificate"),
    ],
)
def test_files_of_tls_that_cannot_be_used_are_named(
    certificate: str, key: str | None, said: str, tmp_path: Path
) -> None:
    for name, content in (("c.pem", certificate), ("k.pem", key)):
        if content is not None:
            (tmp_path / name).write_text(content)
    settings = Settings(tls_cert=tmp_path / "c.pem", tls_key=tmp_path / "k.pem")
    with pytest.raises(UsageError) as refused:
        _ = settings.tls
    assert re.search(said, refused.value.line())


def test_a_private_key_with_a_passphrase_is_refused_by_name(tmp_path: Path) -> None:
    """OpenSSL asked for it twice, or said of the certificate that an argument is invalid."""
    chain, key = certificate(tmp_path)
    locked = tmp_path / "locked"
    command = ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.raises(UsageError, match=r"the private key .*locked has a passphrase"):
        _ = Settings(tls_cert=chain, tls_key=locked).tls
    assert Settings(tls_cert=chain, tls_key=key).tls is not None
