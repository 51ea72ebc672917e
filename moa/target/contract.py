"""The contract of a target: what verifies drafts, whatever computes it. No torch.

Engine, checks, metrics and tests speak to `Target`, `KVCache` and `Step` alone. A target may keep
its KV cache in C++ or on another machine, and have its logits as numpy arrays: nothing here asks.

    cache = target.cache
    slot = cache.acquire()
    step = target.forward([Row.chain(slot, prompt)])         # run the prompt ...
    target.commit(step, 0, range(len(prompt)))               # ... and keep it
    step = target.forward([Row(slot, tokens, parents)])      # a draft behind it
    (accepted,) = accept_rows(step, [judged])
    target.commit(step, 0, accepted.path)                    # what is not in the path is gone
    cache.release(slot)

What every target promises (`tests/target/test_conformance.py` holds all of them to it):

* A forward changes nothing that is committed. A draft that is not committed needs no clean-up: the
  next forward of the slot writes over it.
* A slot's committed tokens, and nothing else, decide what its next forward computes.
* `FullError` (no slot, no memory), `CapacityError` (the slot is at its capacity) and `UsageError`
  are raised before anything has changed, so that the other rows can run without this one.
* Logits that are no numbers raise `NumericalError` where they are read, for their row alone.
* Only one thread calls a target, but `KVCache.free_pages` may be read from another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from moa.config import TargetFacts
from moa.errors import UsageError
from moa.grammar.matcher import Bits, GrammarCompiler
from moa.sampling import SamplingSettings
from moa.target.rows import Row


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a target can do beyond the contract's least."""

    decoder: str
    """What computes its forwards, in logs and metrics: `packed`, `library`, `cuda`, `llama.cpp`."""
    trees: bool
    """Whether drafts may branch. Else rows must be chains: a branch would not give exactly the
    numbers of plain decoding, or cannot be computed."""
    states: bool
    """Whether commits carry hidden states, keys and values as torch tensors
    (`moa.target.torch_target.Committed`): drafters that read the target need them, and records are made
    of them."""
    batch_invariant: bool
    """Whether a token's numbers are the same bits whatever else is in its forward, and however its
    prompt was cut into pieces."""

    @property
    def promise(self) -> str:
        """What "verified" says of a text, in one sentence."""
        if self.batch_invariant:
            return (
                "the text is, to the last bit, what this target says a token at a time, whatever was"
                " drafted and whoever else is served"
            )
        return (
            "each token is the target's own choice after the text before it; only where its two best"
            " are as close as rounding may drafts and other sessions decide between them"
        )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What a target's KV cache and work buffers may grow to, in bytes; the weights are not counted."""

    kv_bytes_per_token: int
    """Of one slot's one token, above 0: how many sequences fit is planned with it, and reported. A
    target whose state does not grow says what a slot takes, divided by its capacity."""
    kv_bytes: int
    buffer_bytes: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a target computes, for people."""

    device: str
    """As `--device` names it: `cpu`, `cuda:0`."""
    dtype: str
    """Of its weights: `float32`, `bfloat16`, `Q4_K_M`."""
    hardware: str
    weights_on_disk: bool = False
    """Whether memory does not hold the weights, so that a forward reads from a disk what it needs:
    forwards of one size then take different times by themselves."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How to load a target. One that does not know a setting refuses it with a `UsageError`, unless
    it is at its default."""

    device: str = "auto"
    dtype: str = "auto"
    quantize: str = ""
    slots: int = 1
    """Most sequences."""
    capacity: int = 2048
    """Most tokens of a slot; the model's own limit is kept, too."""
    kv_tokens: int = 0
    """Most tokens of all slots; 0: all can be full."""
    exact: bool = True
    """Whether a token's bits must not depend on its batch, its draft and the pieces of its prompt."""
    gpu_layers: int = -1
    """Layers on a card; -1: as many as fit."""
    kv_type: str = ""
    """What keys and values are kept in, other than the target's own choice."""
    cpu_moe: bool = False
    """Whether a mixture's experts stay in the machine's memory while its other weights are on a
    card."""
    rpc: tuple[str, ...] = ()
    """Other machines that compute layers, each `HOST:PORT`."""
    threads: int = 0
    """Of a forward; 0: as many as this process has cores."""
    library: str = ""
    """The shared library to compute with, other than the installed one."""

    def refuse(self, source: str, *names: str) -> None:
        """Raise a `UsageError` if the user has set one of the settings with these `names`, which
        mean nothing to a target of this `source`. A setting at its default was not set."""
        for option in dataclasses.fields(self):
            if option.name in names and getattr(self, option.name) != option.default:
                flag = "--" + option.name.replace("_", "-")
                raise UsageError(f"{flag} does not go with {source}", hint="leave it out")


@dataclass(frozen=True, kw_only=True)
class ExpectedLoad:
    """The forwards that a server expects: what a target may make ready for before its port opens."""

    rows: int
    """Most rounds of a forward."""
    tokens: int
    """Most tokens of a forward."""
    draft_tokens: int
    """Tokens of a usual draft."""
    prompt_tokens: int
    """Prompt tokens in a forward beside rounds."""


class Node(NamedTuple):
    """A node of a forward: `node` of its `row`."""

    row: int
    node: int


class Draw(NamedTuple):
    """How the token after one node is sampled: the settings, the position of that token, and what
    the repetition penalty applies to: the text up to the draft (shared by the nodes of a row) and
    the drafted tokens up to the node; and what a grammar allows."""

    settings: SamplingSettings
    position: int
    text: Sequence[int] = ()
    drafted: Sequence[int] = ()
    allowed: Bits | None = None
    start: int = 0
    """Where the answer begins in the text: what is counted for penalties."""


Chooser = Callable[[Sequence[Node], Sequence[Draw]], list[int]]
"""The token after each of these nodes, by the rule of `moa.sampling.choose`; `NO_NUMBER` where the
logits are no numbers."""
NO_NUMBER = -2
"""Chosen where the best logit is NaN or infinite."""


class KVCache(Protocol):
    """A target's slots: each holds one sequence's keys and values.

    Memory is counted in pages; a target without pages has pages of one token.
    """

    @property
    def slots(self) -> int:
        """Most sequences."""

    @property
    def capacity(self) -> int:
        """Most tokens of a slot."""

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""

    @property
    def pages(self) -> int:
        """Most pages of all slots."""

    @property
    def free(self) -> int:
        """Slots that `acquire` can still give."""

    @property
    def free_pages(self) -> int:
        """Pages that no slot holds."""

    @property
    def lengths(self) -> Sequence[int]:
        """Committed tokens of each slot."""

    @property
    def pages_held(self) -> Sequence[int]:
        """Pages that each slot holds; shared ones count for every holder."""

    def acquire(self) -> int:
        """Take an empty slot; a `FullError` where there is none."""

    def share(self, source: int, tokens: int) -> int:
        """Take a slot that begins with the first `tokens` of `source`, without running them again;
        neither changes the other afterwards."""

    def release(self, slot: int) -> None:
        """Give a slot back. Its next user must find nothing of this one."""


class Committed(Protocol):
    """Tokens that joined a slot. With `Capabilities.states` it is `moa.target.torch_target.Committed`,
    whose tensors drafters read; nobody else looks into it."""

    @property
    def start(self) -> int:
        """Position of the first of them."""

    @property
    def stop(self) -> int:
        """The position after them."""

    @property
    def tokens(self) -> Sequence[int]:
        """Their ids."""


@dataclass(frozen=True)
class CommittedTokens:
    """`Committed` of a target whose commits carry no states: where the tokens are, and their ids."""

    start: int
    tokens: Sequence[int]

    @property
    def stop(self) -> int:
        """The position after them."""
        return self.start + len(self.tokens)


class Step(Protocol):
    """The results of one forward, in the order of its rows, until the next one. They may still be
    being computed; whatever reads them waits."""

    @property
    def sizes(self) -> Sequence[int]:
        """Tokens of each row."""

    @property
    def path(self) -> str:
        """How it ran, for metrics: a word, and behind a space what was special about its shape."""

    @property
    def choose(self) -> Chooser | None:
        """Samples where the logits are, for many nodes at once. None: the host's walk reads the
        logits of the nodes that it reaches, which are fewer."""

    def wait(self) -> None:
        """Return when all is computed."""

    def argmax(self, b: int) -> NDArray[np.int64]:
        """The most likely token after each node of row b; -1 after nodes that were not judged. A
        `NumericalError` where logits of the row are no numbers."""

    def host_logits(self, nodes: Sequence[Node]) -> NDArray[np.float32]:
        """Logits `[len(nodes), vocab]` of nodes of any rows, judged ones or not. A node may count
        from the end of its row: -1 is the last."""


class Tokenizer(Protocol):
    """The parts of `transformers.PreTrainedTokenizerBase` that a server uses."""

    chat_template: Any
    """The source of the template, or None."""

    @property
    def special_tokens_map(self) -> Any:
        """Text of special tokens by the names that a template may use."""

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Any:
        """`["input_ids"]` of a text."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> Any:
        """The text of ids."""

    def get_chat_template(self, chat_template: str | None = None, tools: Any = None) -> str:
        """The template's source: of those for conversations with tools and without, if there are
        two."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """The text of a conversation, made in this process: for our own models."""


class Target(Protocol):
    """A causal language model that verifies drafts for many sequences at once."""

    facts: TargetFacts
    """Dimensions and identity."""

    @classmethod
    def open(cls, source: str, options: LoadOptions) -> Self:
        """Load what `source` names: a folder, a hub id, or a file. Errors are one clear line."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""

    @property
    def computes(self) -> str:
        """Tells it from a replica whose text may differ: a hash of its weights, of how it is asked,
        and of all that decides how it adds. Empty for a model that came from no file."""

    @property
    def cache(self) -> KVCache:
        """Its slots."""

    def forward(self, rows: Sequence[Row]) -> Step:
        """Run every row's tokens behind its slot's committed ones; each node sees these and its own
        ancestors. All or nothing: see `Row` for what is refused."""

    def commit(self, step: Any, b: int, path: Sequence[int]) -> Committed:
        """Append `path`, a chain of nodes of row b from the slot's end on, to its slot. A row can be
        committed once, and only until its slot takes part in another forward or is released;
        afterwards it is a `UsageError`, also when the slot was acquired again. `step` is a result
        of this target's `forward`."""

    # ---- text

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is one: a model that gets only ids needs none."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Its own tokenizer and chat template; a `UsageError` without."""

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles what answers must match."""

    # ---- costs

    @property
    def machine(self) -> Machine:
        """Where it computes."""

    @property
    def memory(self) -> Memory:
        """What it takes."""

    def prepare(self, load: ExpectedLoad, seconds: float) -> None:
        """Make now what the first requests would wait for, or find no memory for; what can wait, only
        as long as `seconds` of processor time are left."""

    @property
    def unprepared(self) -> bool:
        """Whether `prepare_more` has something to do."""

    def prepare_more(self) -> None:
        """Called while nothing waits: make one of the things that speed later forwards up."""
