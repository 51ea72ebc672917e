"""Loads target, drafter and tokenizer of a verifier, and the facts that the service needs."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloud_verifier.emulated import slowed_down
from cloud_verifier.engine.work import ModelFacts
from cloud_verifier.logs import log
from cloud_verifier.settings import Settings
from moa import __version__
from moa.bundle import Bundle
from moa.config import read_config
from moa.errors import UsageError
from moa.graph.load import LoadedGraph
from moa.model.borrowed import SharedWeights
from moa.model.checkpoint import load_drafter
from moa.model.drafter import Drafter
from moa.model.eagle3 import FILES, PublishedEagle3, is_eagle3
from moa.model.features import FeatureModel
from moa.model.identity import computation_id, weights_id
from moa.model.loading import locate
from moa.model.state_drafter import StateDrafter, is_states
from moa.model.target import Target as TorchTarget
from moa.model.target import with_states
from moa.records import DTYPES
from moa.target.contract import ExpectedLoad, LoadOptions, Target
from moa.target.registry import open_target
from moa.wire.finish import Decode
from moa.wire.messages import RecordContract

_PREPARATION_SECONDS = 2.0
"""Processor time for what could also be made later, when a request first needs it."""
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
        server_drafter = load_server_drafter(settings.server_drafter, with_states(target))
    if folder is not None and states:
        model = with_states(target).model
        drafter = StateDrafter.load(folder, target.facts, SharedWeights.of(model))
        server_drafter = server_drafter or drafter
    elif folder is not None:
        drafter = load_drafter(folder, with_states(target).model, target.facts)
    if server_drafter is not None:
        # It keeps the states that this drafter reads.
        with_states(target).tap(server_drafter.config.taps)
    target.prepare(expected_load(settings), _PREPARATION_SECONDS)
    # The identity that `moa-export` writes into a bundle's manifest for the same drafter.
    name = weights_id(folder, target.facts) if folder is not None else ""
    machine = target.machine
    served = Served(
        target=target,
        drafter=drafter,
        decode=decoder_of(target) if target.has_tokenizer else None,
        facts=dataclasses.replace(
            model_facts(target, drafter, name, stream_records=server_drafter is None),
            computes=_computes(settings, target),
        ),
        graph=load_graph(settings, machine.device, name),
        server_drafter=server_drafter,
    )
    log.info(
        "the model is loaded",
        extra={
            "event": "loaded",
            "device": machine.device,
            "decoder": target.capabilities.decoder,
            "seconds": round(time.monotonic() - began, 3),
            "slots": target.cache.slots,
            "megabytes": round(target.memory.kv_bytes / 1e6),
            "records": served.facts.records is not None,
        },
    )
    return served


def decoder_of(target: Target) -> Decode:
    """Text of output tokens."""
    tokenizer = target.tokenizer
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))


@contextlib.contextmanager
def _memory_for(what: str) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise UsageError(f"no memory {what}", hint="lower --kv-tokens") from error


def expected_load(settings: Settings) -> ExpectedLoad:
    """The forwards that this server will run."""
    return ExpectedLoad(
        rows=settings.max_batch_rows,
        tokens=settings.max_batch_tokens,
        draft_tokens=_USUAL_DRAFT,
        prompt_tokens=settings.prefill_tokens,
    )


def load_target(settings: Settings) -> Target:
    """The target alone."""
    options = LoadOptions(
        device=settings.device,
        dtype=settings.dtype,
        quantize=settings.quantize,
        slots=settings.slots,
        capacity=settings.slot_capacity,
        kv_tokens=settings.kv_tokens,
        exact=not settings.inexact,
    )
    # Errors of loading the model are reported by themselves: here it is the KV cache that does not
    # fit.
    with _memory_for(
        f"on the device {settings.device} for the keys and values of {settings.kv_tokens} tokens"
    ):
        target = open_target(settings.target or str(_embedded().target), options)
    if settings.forward_time is None:
        return target
    log.warning(
        "every forward is slowed down to %s: for trials",
        settings.emulate,
        extra={"event": "slowed"},
    )
    return slowed_down(target, settings.forward_time)


def drafter_folder(settings: Settings) -> Path | None:
    """Where the drafter is that records are made for."""
    if not settings.drafter:
        return None if settings.target else Path(_embedded().drafter)
    if not (folder := Path(settings.drafter)).is_dir():
        raise UsageError(f"no drafter at {folder}: there is no such folder")
    return folder


def load_server_drafter(source: str, target: TorchTarget) -> PublishedEagle3 | StateDrafter:
    """A drafter of streams, from a folder or a hub id."""
    folder = locate(source, FILES)
    kind = PublishedEagle3 if is_eagle3(read_config(folder, "drafter")) else StateDrafter
    return kind.load(folder, target.facts, SharedWeights.of(target.model))


def load_graph(settings: Settings, device: str, drafter: str) -> LoadedGraph | None:
    """The graph that drafts streams, on a CPU; its bundle must be of the drafter with this id."""
    folder = settings.bundle
    if not folder and not settings.target and not settings.drafter and device == "cpu":
        folder = str(_embedded().bundle)
    if not folder:
        return None
    if not drafter:
        raise UsageError(
            "--bundle is of no use without --drafter", hint="give the folder that it was made of"
        )
    if device != "cpu":
        raise UsageError(
            f"--bundle is for a CPU, and the target is on {device}", hint="leave it out"
        )
    bundle = Bundle.open(folder)
    if bundle.manifest.drafter.weights_id != drafter:
        raise UsageError(
            f"{folder} was made of another drafter, or by an older version",
            hint="make one with `moa-export build`",
        )
    return LoadedGraph.load(bundle)


def _computes(settings: Settings, target: Target) -> str:
    """What tells this verifier from a replica whose text may differ."""
    return computation_id(
        target.facts.weights_id,
        getattr(target, "folder", None),
        dtype=target.machine.dtype,
        quantize=settings.quantize,
    )


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
        with_states(target).tap(streams.config.taps)
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
    cache = target.cache
    pages_of_a_full_slot = -(-cache.capacity // cache.page_tokens)
    all_can_be_full = cache.pages >= cache.slots * pages_of_a_full_slot
    return ModelFacts(
        target=target.facts.weights_id,
        tokenizer=target.facts.tokenizer_hash,
        drafter=drafter_name,
        vocab_size=target.facts.vocab_size,
        eos_ids=target.facts.eos_ids,
        slots=cache.slots,
        capacity=cache.capacity,
        records=records,
        stream_records=stream_records,
        pages=0 if all_can_be_full else cache.pages,
        page_tokens=cache.page_tokens,
        trees=target.capabilities.trees,
        grammars=target.has_tokenizer and bool(target.facts.eos_ids),
    )


def _embedded() -> Any:
    from moa import demo  # imported here: verifiers of other models do not need it

    return demo.paths()
