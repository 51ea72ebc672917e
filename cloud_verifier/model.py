"""Loads target, drafter and tokenizer of a verifier, and the facts that the service needs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cloud_verifier.emulated import EmulatedTarget
from cloud_verifier.engine.work import ModelFacts
from cloud_verifier.logs import log
from cloud_verifier.settings import Settings
from moa import __version__
from moa.bundle import Bundle
from moa.config import read_config
from moa.errors import ConfigError, UsageError
from moa.graph.load import LoadedGraph
from moa.model.borrowed import SharedWeights
from moa.model.checkpoint import load_drafter
from moa.model.drafter import Drafter
from moa.model.eagle3 import FILES, PublishedEagle3, is_eagle3
from moa.model.features import FeatureModel
from moa.model.identity import weights_id
from moa.model.layout import Row
from moa.model.loading import locate
from moa.model.pages import PAGE
from moa.model.products import MOST_ROWS, sizes_up_to
from moa.model.state_drafter import StateDrafter, is_states
from moa.model.target import Target
from moa.records import DTYPES
from moa.wire.finish import Decode
from moa.wire.messages import RecordContract

_WARM_SECONDS = 2.0
_USUAL_DRAFT = 8
"""Tokens of a session's draft in the forwards that an accelerator is prepared for at start."""


@dataclass(frozen=True)
class Served:
    """A model in memory, ready for the engine."""

    target: Target
    drafter: Drafter | StateDrafter | None
    """Makes activation records."""
    decode: Decode | None
    """Text of output tokens, for stop strings."""
    facts: ModelFacts
    graph: LoadedGraph | None = None
    """The drafter as exported, which drafts streams in place of `drafter`."""
    server_drafter: FeatureModel | None = None
    """A drafter of streams alone, which drafts in place of both."""

    @property
    def drafts(self) -> str:
        """What drafts streams."""
        if self.server_drafter is not None:
            return "eagle3" if isinstance(self.server_drafter, PublishedEagle3) else "states"
        if self.drafter is None:
            return "none"
        return "torch" if self.graph is None else self.graph.variant


def load(settings: Settings) -> Served:
    """Load everything that `settings` names; errors are one clear line."""
    began = time.monotonic()
    log.info(
        "starting",
        extra={"event": "start", "version": __version__, "target": settings.target or "embedded"},
    )
    folder = drafter_folder(settings)
    if states := folder is not None and is_states(folder):
        if settings.server_drafter and is_eagle3(
            read_config(locate(settings.server_drafter, FILES), "drafter")
        ):
            raise UsageError(
                f"{folder} and {settings.server_drafter} read different states",
                hint="give one of them",
            )
        if settings.bundle:
            raise UsageError(
                f"--bundle is of no use: {folder} drafts streams without its graph",
                hint="leave it out",
            )
    target = load_target(settings)
    drafter: Drafter | StateDrafter | None = None
    server_drafter: PublishedEagle3 | StateDrafter | None = None
    if settings.server_drafter:
        server_drafter = load_server_drafter(settings.server_drafter, target)
    if folder is not None and states:
        drafter = StateDrafter.load(folder, target.facts, SharedWeights.of(target.model))
        server_drafter = server_drafter or drafter
    elif folder is not None:
        drafter = load_drafter(folder, target.model, target.facts)
    if server_drafter is not None:
        target.tap(server_drafter.config.taps)  # it keeps the states that this drafter reads
    # The head's copy in float32 is made now: the first request would wait for it, or find no
    # memory.
    with _memory_for(
        f"for the {4 * target.head_weight.numel() / 2**30:.1f} GiB of the LM head in float32"
    ):
        _ = target.wide_head
    warm_up(target, min(MOST_ROWS, settings.max_batch_tokens))
    if target.runner is not None:
        target.runner.prepare(
            target.runner.usual(settings.max_batch_rows, _USUAL_DRAFT, settings.prefill_tokens)
        )
    # The identity that `moa-export` writes into a bundle's manifest for the same drafter.
    name = weights_id(folder, target.facts) if folder is not None else ""
    tokenizer = target.tokenizer
    served = Served(
        target,
        drafter,
        lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        model_facts(target, drafter, name, stream_records=server_drafter is None),
        load_graph(settings, target.device, name),
        server_drafter,
    )
    log.info(
        "the model is loaded",
        extra={
            "event": "loaded",
            "device": str(target.device),
            "seconds": round(time.monotonic() - began, 3),
            "slots": target.pool.slots,
            "megabytes": round(target.pool.nbytes / 1e6),
            "records": served.facts.records is not None,
        },
    )
    return served


@contextlib.contextmanager
def _memory_for(what: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise UsageError(f"no memory {what}", hint="lower --kv-tokens") from error


@torch.inference_mode()
def warm_up(target: Target, most: int, *, seconds: float = _WARM_SECONDS) -> None:
    """Have oneDNN make its kernels for every number of tokens up to `most` now, small ones first:
    else the first requests wait for them, and memory grows for hours, whenever a number comes up
    for the first time. Kernels of one layer serve all. A large target on a slow machine does as
    much of it as there are `seconds` of processor time for: on a busy machine, too, the kernels are
    there when the port opens."""
    if target.device.type != "cpu" or not target.packed:
        return
    until = time.process_time() + seconds
    hidden = torch.zeros(most, target.head_weight.shape[1], dtype=target.dtype)
    slot = target.pool.acquire()
    try:
        for tokens in sizes_up_to(min(most, target.pool.capacity, PAGE * target.pool.pages)):
            if time.process_time() > until:
                break
            target.run_first_layer([Row.chain(slot, [0] * tokens, judged="none")])
            target.most_likely(hidden[:tokens])
    finally:
        target.pool.release(slot)


def load_target(settings: Settings) -> Target:
    """The target alone."""
    device = pick_device(settings.device)
    kind: type[Target] = Target
    slowed: dict[str, Any] = {}
    if settings.forward_time is not None:
        kind = EmulatedTarget
        slowed["forward_time"] = settings.forward_time
        log.warning(
            "every forward is slowed down to %s: for trials",
            settings.emulate,
            extra={"event": "slowed"},
        )
    # Errors of loading the model are reported by themselves: here it is the KV cache that does not
    # fit.
    with _memory_for(f"on {device} for the keys and values of {settings.kv_tokens} tokens"):
        return kind.load(
            settings.target or str(_embedded().target),
            device=device,
            dtype=pick_dtype(settings.dtype, device),
            quantize=settings.quantize,
            slots=settings.slots,
            capacity=settings.slot_capacity,
            kv_tokens=settings.kv_tokens,
            pack_weights=True,
            exact=not settings.inexact,
            **slowed,
        )


def drafter_folder(settings: Settings) -> Path | None:
    """Where the drafter is that records are made for."""
    if not settings.drafter:
        return None if settings.target else Path(_embedded().drafter)
    if not (folder := Path(settings.drafter)).is_dir():
        raise UsageError(f"no drafter at {folder}: there is no such folder")
    return folder


def load_server_drafter(source: str, target: Target) -> PublishedEagle3 | StateDrafter:
    """A drafter of streams, from a folder or a hub id."""
    folder = locate(source, FILES)
    kind = PublishedEagle3 if is_eagle3(read_config(folder, "drafter")) else StateDrafter
    return kind.load(folder, target.facts, SharedWeights.of(target.model))


def load_graph(settings: Settings, device: torch.device, drafter: str) -> LoadedGraph | None:
    """The graph that drafts streams, on a CPU; its bundle must be of the drafter with this id."""
    folder = settings.bundle
    if not folder and not settings.target and not settings.drafter and device.type == "cpu":
        folder = str(_embedded().bundle)
    if not folder:
        return None
    if not drafter:
        raise UsageError(
            "--bundle is of no use without --drafter", hint="give the folder that it was made of"
        )
    if device.type != "cpu":
        raise UsageError(
            f"--bundle is for a CPU, and the target is on {device}", hint="leave it out"
        )
    bundle = Bundle.open(folder)
    if bundle.manifest.drafter.weights_id != drafter:
        raise UsageError(
            f"{folder} was made of another drafter", hint="make one with `moa-export build`"
        )
    return LoadedGraph.load(bundle)


def serve_model(
    target: Target,
    drafter: Drafter | StateDrafter | None = None,
    *,
    decode: Decode | None = None,
    drafter_name: str = "",
) -> Served:
    """Serve models that are in memory."""
    streams = drafter if isinstance(drafter, StateDrafter) else None
    if streams is not None:
        target.tap(streams.config.taps)
    facts = model_facts(target, drafter, drafter_name, stream_records=streams is None)
    return Served(target, drafter, decode, facts, server_drafter=streams)


def model_facts(
    target: Target,
    drafter: Drafter | StateDrafter | None,
    drafter_name: str = "",
    *,
    stream_records: bool = True,
) -> ModelFacts:
    """The facts of a model in memory that the service needs."""
    records = None
    if isinstance(drafter, StateDrafter) or (drafter is not None and drafter.config.use_ca):
        layout = drafter.layout
        dtypes = [d for d in DTYPES if d != "int4" or layout.width % 2 == 0]
        records = RecordContract(layout.count, layout.width, list(dtypes))
    return ModelFacts(
        target=target.facts.weights_id,
        tokenizer=target.facts.tokenizer_hash,
        drafter=drafter_name,
        vocab_size=target.facts.vocab_size,
        eos_ids=target.facts.eos_ids,
        slots=target.pool.slots,
        capacity=target.pool.capacity,
        records=records,
        stream_records=stream_records,
        pages=target.pool.pages
        if target.pool.pages < target.pool.slots * target.pool.per_slot
        else 0,
        page_tokens=PAGE,
        trees=target.trees,
        grammars=target.folder is not None and bool(target.facts.eos_ids),
    )


def pick_device(name: str) -> str:
    """The device that `name` stands for; `auto` is the best one here."""
    if name == "auto":
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    return name


def pick_dtype(name: str, device: str) -> torch.dtype:
    """The precision that `name` stands for; `auto` is bfloat16 on an accelerator and float32 on a
    CPU."""
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name == "auto":
        return torch.float32 if device.startswith("cpu") else torch.bfloat16
    if name not in names:
        raise ConfigError(f"unknown dtype {name!r}", hint=f"one of auto, {', '.join(names)}")
    return names[name]


def _embedded() -> Any:
    from moa import demo  # imported here: verifiers of other models do not need it

    return demo.paths()
