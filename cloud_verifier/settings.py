"""Settings of a verifier process. Limits have their own home, `moa.wire.limits`."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from cloud_verifier.forward_time import ForwardTime
from moa.api.access import check_names, check_origins, is_loopback
from moa.config import WEIGHT_DTYPES
from moa.demo import paths
from moa.errors import ConfigError, UsageError
from moa.prices import check_prices
from moa.tree import TreeShape
from moa.wire.limits import Limits

USUAL_KV_TOKENS = 131072
"""Tokens of the KV cache where nobody says how many."""
_OF_A_TARGET = (
    "device",
    "dtype",
    "quantize",
    "gpu_layers",
    "kv_type",
    "cpu_moe",
    "rpc",
    "threads",
    "llama_library",
    "inexact",
    "emulate",
    "slots",
    "kv_tokens",
    "max_batch_rows",
    "max_batch_tokens",
    "prefill_tokens",
    "batch_wait_ms",
)
"""Settings of a target that this process runs itself: in front of an upstream there is none."""
_OF_THE_ENDPOINT = ("openai", "app", "model_name", "also_called", "openai_hosts")
"""Settings of the endpoint beside the verifier's port."""
_CERTIFICATE = b"CERTIFICATE-----"
_PRIVATE_KEY = b"PRIVATE KEY-----"
"""How the first line of either ends in a file in PEM."""
_STREAM_TREE = TreeShape(breadth=8, depth=16, nodes=63, min_score=-4.0)
"""The largest tree that the server drafts in stream rounds. What a level and a node cost decides
how much of it."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to serve, where, and how work is batched into forwards."""

    target: str = ""
    """Target model; empty is the embedded pair."""
    drafter: str = ""
    """Its drafter, for activation records."""
    bundle: str = ""
    """The drafter as exported: on a CPU its graph drafts streams, ten times as fast as torch. A
    device's sibling needs no --drafter beside it."""
    server_drafter: str = ""
    """A drafter of streams: by `moa-train`, a published EAGLE-3, or a small model of the target's
    tokenizer: `independent:` and its folder, or a GGUF file; --drafter still makes records"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or, untested, mps."""
    dtype: str = "auto"
    """auto, float32, bfloat16, float16."""
    quantize: str = ""
    """int8: hold the target's matrices in eight bits a weight (torchao)."""
    gpu_layers: int = -1
    """Of a GGUF file: layers on a card; -1: as many as fit."""
    kv_type: str = ""
    """Of a GGUF file: what keys and values are kept in, f16 unless given: f16, bf16, q8_0, q5_1, q5_0,
    q4_1, q4_0 or iq4_nl."""
    cpu_moe: bool = False
    """Of a GGUF file: keep a mixture's experts in the machine's memory, and the rest of a layer on
    the card."""
    rpc: tuple[str, ...] = ()
    """Of a GGUF file: HOST:PORT of llama.cpp's rpc-server on another machine, which takes layers as a
    card does; trusted networks only."""
    threads: int = 0
    """Of a GGUF file: threads of a forward; 0: as many as this process has cores."""
    llama_library: str = ""
    """Of a GGUF file: llama.cpp's shared library, other than the installed one."""
    inexact: bool = False
    """On an accelerator, in less than float32: let drafts be trees, and take the libraries'
    products. Faster in large batches, but a token's numbers then depend a little on its batch and
    its draft."""
    emulate: str = ""
    """For trials: make every forward as slow as a larger target's, such as 250ms, or 250ms+20ms: so
    much more for each token after the first."""

    upstream: tuple[str, ...] = ()
    """Instead of a target: the address of somebody else's engine, such as http://gpu:8000/v1. Several
    that serve the same model: the next one is asked where one fails."""
    upstream_model: str = ""
    """Which of its models; empty: its only one."""
    upstream_api: str = "auto"
    """How it is asked: llama-server, vllm, sglang (token ids), completions, ollama (text), chat,
    chat-vllm, chat-prefix, chat-whole, anthropic (messages); auto: by its name, or what its list of
    models says."""
    upstream_key_file: Path | None = None
    """File with its API key; else the variable MOA_UPSTREAM_KEY."""
    upstream_price_in: float = 0.0
    """Money for a million tokens that it reads, in whatever currency the budget is."""
    upstream_price_out: float = 0.0
    """Money for a million tokens that it writes."""
    upstream_budget: float = 0.0
    """Money that may be spent there within 24 hours; 0: no limit. Counted from the usage that it
    tells, else from the device's tokens; a restart begins at 0."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8765
    """Port to listen on, 0 picks one."""
    auth_tokens: Path | None = None
    """Who may connect: token file with lines of `token new`."""
    tls_cert: Path | None = None
    """Certificate chain, PEM."""
    tls_key: Path | None = None
    """Its private key, PEM."""
    origins: tuple[str, ...] = ()
    """Browser origin that may connect; a request without an Origin header does not come from a
    browser and is always allowed."""

    openai: str = ""
    """Also serve OpenAI's API and the operator's page, on this port."""
    model_name: str = ""
    """The target's name in that API and in the metrics; empty is the target's own."""
    also_called: tuple[str, ...] = ()
    """Another name for it that requests may use, such as gpt-4o; *: any name."""
    openai_hosts: tuple[str, ...] = ()
    """A DNS name that requests may use."""
    app: Path | None = None
    """A web app of `edge-client page`, to serve below /app/."""

    slots: int = 256
    """Sessions with a KV cache at most."""
    kv_tokens: int | None = None
    """Most tokens of the KV cache, over all sessions; at most `slots` full contexts, and on a CPU
    what the free memory holds beside the weights. It takes memory as it is used. Default: 131072,
    or one full context where that is more."""
    max_batch_rows: int = 64
    """Sessions in one forward."""
    max_batch_tokens: int = 2048
    """Draft tokens in one forward."""
    prefill_tokens: int = 256
    """Prompt tokens in one forward without drafts; fewer where rounds come meanwhile, so that these
    take about 25 % longer on average."""
    batch_wait_ms: float = 1.5
    """How long a forward waits for further drafts that are expected soon, in milliseconds; 0: not
    at all."""

    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Refuse settings that are out of range, do not go together, or would serve strangers
        without authentication; the error names the setting."""
        _ = self.forward_time  # it checks what `--emulate` says
        if self.upstream and (self.target or self.drafter or self.server_drafter):
            raise ConfigError(
                "--upstream takes the place of --target and drafters: give one of them"
            )
        if self.upstream:
            self._check_upstream()
        if not self.upstream and (self.upstream_model or self.upstream_key_file):
            raise ConfigError("--upstream-model and --upstream-key-file need --upstream")
        check_prices(self.upstream_price_in, self.upstream_price_out, self.upstream_budget)
        self._check_access()
        self._check_ports()
        for name in ("slots", "kv_tokens", "max_batch_rows", "max_batch_tokens", "prefill_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        if self.kv_tokens is not None and self.kv_tokens <= self.limits.max_tree_nodes:
            raise ConfigError(
                f"--kv-tokens {self.kv_tokens} holds no session: a draft alone takes up to"
                f" {self.limits.max_tree_nodes} tokens (--max-tree-nodes)",
                hint=f"a whole context and a draft take {self.slot_capacity:,}",
            )
        if self.dtype not in ("auto", *WEIGHT_DTYPES):
            raise ConfigError(
                f"unknown dtype {self.dtype!r}", hint=f"one of auto, {', '.join(WEIGHT_DTYPES)}"
            )
        if self.threads < 0:
            raise ConfigError(
                f"--threads must be 0 or more, not {self.threads}",
                hint="0: as many as this process has cores",
            )
        if self.gpu_layers < -1:
            raise ConfigError(
                f"--gpu-layers must be -1 or more, not {self.gpu_layers}", hint="-1: as many as fit"
            )
        if self.slots > 65536:
            raise ConfigError(f"slots must be at most 65536, not {self.slots}")
        if not 0 <= self.batch_wait_ms <= 1000:
            raise ConfigError(f"batch_wait_ms must be 0..1000, not {self.batch_wait_ms}")

    def _check_access(self) -> None:
        """Refuse to serve strangers without authentication, TLS without one of its files, and names
        and websites that no request can have."""
        check_names("--openai-host", self.openai_hosts)
        check_origins(self.origins)
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("TLS needs both --tls-cert and --tls-key")
        if not self.auth_tokens and not is_loopback(self.host):
            raise ConfigError(
                f"refusing to listen on {self.host} without authentication",
                hint="give --auth-tokens FILE (make one with `cloud-verifier token new`), or listen on 127.0.0.1",
            )
        if self.openai and not self.auth_tokens and not is_loopback(self.openai_address[0]):
            raise ConfigError(
                "refusing to serve --openai to others without authentication",
                hint="give --auth-tokens",
            )

    def _check_ports(self) -> None:
        """Refuse ports that cannot be, or that two listeners would share."""
        if self.app and not self.openai:
            raise ConfigError("--app is served by the endpoint: give --openai, too")
        for flag, names in (
            ("--also-called", self.also_called),
            ("--openai-host", self.openai_hosts),
        ):
            if names and not self.openai:
                raise ConfigError(f"{flag} is for requests at the endpoint: give --openai, too")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be 0..65535, not {self.port}")
        if self.openai and self.port and self.openai_address == (self.host, self.port):
            raise ConfigError(f"--openai needs a port of its own: {self.port} is the verifier's")

    def _check_upstream(self) -> None:
        """Refuse settings that would do nothing in front of an upstream: whoever gives one expects
        something of it."""
        defaults = {one.name: one.default for one in fields(self)}
        for name in (*_OF_THE_ENDPOINT, *_OF_A_TARGET):
            value = getattr(self, name)
            if value == defaults[name]:
                continue
            # The flag of a list names one of its items.
            one = name.removesuffix("s") if isinstance(value, tuple) else name
            flag = "--" + one.replace("_", "-")
            if name in _OF_THE_ENDPOINT:
                raise ConfigError(
                    f"{flag} is not served in front of an upstream",
                    hint="the endpoint for programs is `edge-client serve --upstream URL`",
                )
            raise ConfigError(
                f"{flag} has no meaning with --upstream: the engine there runs the model",
                hint="leave it out",
            )

    @property
    def forward_time(self) -> ForwardTime | None:
        """What `--emulate` says; None for the target's own speed."""
        return ForwardTime.of(self.emulate) if self.emulate else None

    @property
    def kv_cache_tokens(self) -> int:
        """What `kv_tokens` says, or its default: whoever asks for a longer context and says no more
        has one session."""
        if self.kv_tokens is not None:
            return self.kv_tokens
        return max(USUAL_KV_TOKENS, self.slot_capacity)

    @property
    def served_name(self) -> str:
        """The model's name for clients, metrics and pages: as a device says it, the last part of
        where the target came from."""
        return self.model_name or Path(self.target or paths().target).name

    @property
    def openai_address(self) -> tuple[str, int]:
        """Host and port of the endpoint; the default host is the verifier's."""
        host, _, port = self.openai.rpartition(":")
        if not port.isdecimal() or int(port) > 65535:
            raise ConfigError(f"--openai takes [HOST:]PORT, not {self.openai!r}")
        return host.strip("[]") or self.host, int(port)

    @property
    def tls(self) -> ssl.SSLContext | None:
        """The TLS context for `--tls-cert` and `--tls-key`; None for a port without TLS."""
        if self.tls_cert is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        _check_pem(self.tls_cert, self.tls_key or self.tls_cert)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key, self._refuse_passphrase)
        except (OSError, ssl.SSLError) as error:
            why = error.strerror or str(error)
            if "KEY_VALUES_MISMATCH" in why:
                why = f"the key {self.tls_key} belongs to another one"
            raise UsageError(f"cannot use the TLS certificate {self.tls_cert}: {why}") from None
        return context

    def _refuse_passphrase(self) -> str:
        """Called for the passphrase of a private key that has one."""
        raise UsageError(
            f"the private key {self.tls_key} has a passphrase, which a service cannot type",
            hint="openssl pkey -in KEY -out PLAIN takes it away; protect the file by its mode",
        )

    @property
    def stream_shape(self) -> TreeShape:
        """The tree of a stream round."""
        return replace(_STREAM_TREE, nodes=min(_STREAM_TREE.nodes, self.limits.max_tree_nodes - 1))

    @property
    def slot_capacity(self) -> int:
        """Largest number of tokens in a slot: a full context, and the largest draft after it."""
        return self.limits.max_context_tokens + self.limits.max_tree_nodes


def _check_pem(certificate: Path, key: Path) -> None:
    """Refuse files of TLS that are not there, swapped, or of another kind: the library's own errors
    name a line of its source."""
    content = {}
    for flag, path in (("--tls-cert", certificate), ("--tls-key", key)):
        try:
            content[flag] = path.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read {flag} {path}: {error.strerror}") from None
    of_certificate, of_key = content["--tls-cert"], content["--tls-key"]
    if _CERTIFICATE in of_certificate and _PRIVATE_KEY in of_key:
        return
    if _PRIVATE_KEY in of_certificate and _CERTIFICATE in of_key:
        raise UsageError(
            f"--tls-cert {certificate} is the private key, and --tls-key {key} the certificate",
            hint="swap the two",
        )
    if _CERTIFICATE not in of_certificate:
        raise UsageError(f"--tls-cert {certificate} holds no certificate in PEM")
    raise UsageError(f"--tls-key {key} holds no private key in PEM")
