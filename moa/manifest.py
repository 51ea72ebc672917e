"""The contents of a bundle's `manifest.json`. No torch."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from moa.config import TargetFacts


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the manifest's parts: immutable, and a key that this version does not know is an
    error."""


class FileEntry(Part, frozen=True, kw_only=True):
    """A file's contents."""

    sha256: str
    size: int


class KVHeads(Part, frozen=True, kw_only=True):
    """Heads with a cache, and their width."""

    kv_heads: int
    head_dim: int


class RecordFormat(KVHeads, frozen=True, kw_only=True):
    """Activation records: keys and values of one position for CA, the drafter's cross-attention;
    none where `kv_heads` is 0, for a drafter without CA. A query at position q may use records of
    positions below q."""

    rope_theta: float
    keys: Literal["rotated"] = "rotated"
    """Keys arrive rotated at their absolute position."""
    positions: Literal["absolute"] = "absolute"
    borrowed: tuple[KVHeads, ...] = ()
    """The last layers with a cache whose rows records carry, too: the target's own, or for a
    drafter of states what the target's states make of the drafter's rows."""
    known_to_rows: bool = False
    """Only of earlier bundles: whether cached keys and values of the drafter's own layers depend on
    records."""

    @property
    def numbers(self) -> int:
        """How many numbers a record holds: keys and values of all its heads."""
        return 2 * sum(part.kv_heads * part.head_dim for part in (self, *self.borrowed))


class Vocabulary(Part, frozen=True, kw_only=True):
    """The target's vocabulary and the drafter's, which may be a part of it."""

    target: int
    draft: int
    map: str | None = None
    """An int64 .npy file: target id of each draft id. None: the two are the same."""


class TokenizerFiles(Part, frozen=True, kw_only=True):
    """The target's tokenizer, for the device."""

    hash: str
    file: str | None
    chat_template: str | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    special_tokens: dict[str, str] = {}
    """Special tokens that a chat template may name (`eos_token` and others), with their text."""


BundleKind = Literal["moa", "independent", "states"]
"""What a bundle may say of which kind its drafter is. A device that does not know a word refuses the
bundle."""


class DrafterIdentity(Part, frozen=True, kw_only=True):
    """Which drafter this is. `independent` is a small causal LM that takes no activations; `states`
    reads the target's states as rows of its own cache."""

    kind: BundleKind
    source: str
    weights_id: str
    config: dict[str, Any]

    @property
    def reads_target(self) -> bool:
        """Whether it reads anything of its target but tokens."""
        return self.kind != "independent"


class TargetIdentity(Part, frozen=True, kw_only=True):
    """Which target it was made for."""

    source: str
    facts: TargetFacts


class Agreement(Part, frozen=True, kw_only=True):
    """How often a variant's drafts agree with the target on held-out prompts, compared with the
    float32 drafter in torch."""

    prompts: int
    tokens: int
    top1: float
    """Share of the target's tokens that are the variant's first guess."""
    top1_same: float
    """Share of positions where the variant's first guess is the float32 drafter's."""
    acceptance: float
    """Acceptance length: tokens per round, the target's own included, with the calibration's tree."""
    acceptance_ratio: float
    """The acceptance length, divided by the float32 drafter's."""


class StepTime(Part, frozen=True, kw_only=True):
    """Median time of one run of the graph over so many tokens, where and when it was built."""

    tokens: int
    threads: int
    ms: float


class Variant(Part, frozen=True, kw_only=True):
    """One form of the drafter, for one kind of runtime."""

    model: str
    files: tuple[str, ...]
    runtime: str
    precision: str
    form: Literal["dynamic", "static"]
    opset: int
    min_onnxruntime: str
    size: int
    checked: Literal["executed", "static"]
    """`executed`: it ran and was compared when built. `static`: only a checker looked at it."""
    checked_with: str
    inputs: dict[str, tuple[int | str, ...]]
    outputs: dict[str, tuple[int | str, ...]]
    parity: float | None = None
    """Largest logit difference from torch in float32; only exact forms have one."""
    agreement: Agreement | None = None
    step_times: tuple[StepTime, ...] = ()
    notes: str = ""


class TreeUsed(Part, frozen=True, kw_only=True):
    """The tree that acceptance was measured with."""

    breadth: int
    depth: int
    nodes: int


class Acceptance(Part, frozen=True, kw_only=True):
    """Acceptance by depth: entry d is the chance that at least d+1 drafted tokens of a round are
    accepted."""

    chain: tuple[float, ...]
    tree: tuple[float, ...]
    tree_shape: TreeUsed


class Offline(Part, frozen=True, kw_only=True):
    """Quality of offline text by the number of tokens since the last record, or since the prompt if
    there is no record."""

    lengths: tuple[int, ...]
    agreement: tuple[float, ...]
    """Share of tokens between the previous length and this one that equal the target's, given the
    target's text so far."""
    unbroken: tuple[float, ...]
    """Share of offline texts that still equal the target's after that many tokens."""


class Calibration(Part, frozen=True, kw_only=True, omit_defaults=True):
    """Measured with the float32 drafter on held-out prompts; what the controller and the offline
    guard start from."""

    prompts: int
    tokens: int
    source: str
    acceptance: Acceptance
    offline: Offline
    """The connection was lost after the prompt: its records are there."""
    cold: Offline | None = None
    """Asked without a connection: there are no records."""


class Manifest(Part, frozen=True, kw_only=True, omit_defaults=True):
    """Everything about a bundle. What has a default is written only where it differs: older readers
    refuse what they do not know."""

    schema: int
    created: str
    producer: dict[str, str]
    """Versions of the tools that made it."""
    recipe: dict[str, Any]
    """The settings it was built with."""
    target: TargetIdentity
    drafter: DrafterIdentity
    tokenizer: TokenizerFiles
    vocabulary: Vocabulary
    cache: tuple[KVHeads, ...]
    """Layers with a cache, in the order of the graph's past_k_0, past_k_1, ..."""
    records: RecordFormat | None
    top_k: int
    default_variant: str
    variants: dict[str, Variant]
    calibration: Calibration | None
    files: dict[str, FileEntry]
    """Every file but the manifest itself."""
