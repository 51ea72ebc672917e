"""Loads target, drafter and tokenizer of a verifier, and the facts that the service needs."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloud_verifier.drafter_memory import drafter_memory
from cloud_verifier.emulated import slowed_down
from cloud_verifier.engine.contract import ModelFacts
from cloud_verifier.engine.draft import drafting_slots
from cloud_verifier.logs import log, told_while_it_lasts
from cloud_verifier.settings import Settings
from moa.bundle import MANIFEST, Bundle
from moa.config import TargetFacts
from moa.drafters.contract import Drafter, RecordReader
from moa.drafters.onnx_drafting import OnnxDrafting
from moa.drafters.registry import StoredDrafter, find
from moa.errors import UsageError
from moa.gguf.reader import is_gguf
from moa.graph.load import LoadedGraph
from moa.llama.memory_plan import LlamaPlan
from moa.records import DTYPES
from moa.target.contract import ExpectedLoad, LoadOptions, Target
from moa.target.identity import short_id
from moa.target.loading import read_facts, tokenizer_hash_of
from moa.target.memory_plan import DrafterMemory, MemoryPlan, plan_memory
from moa.target.registry import open_target, source_of
from moa.target.torch_target import pick_dtype, with_states
from moa.wire.finish import Decode
from moa.wire.messages import RecordContract

_PREPARATION_SECONDS = 2.0
"""Processor time for what could also be made later, when a request first needs it."""
_USUAL_DRAFT = 8
"""Tokens of a session's draft in the forwards that an accelerator is prepared for at start."""


@dataclass(frozen=True)
class SmallModel:
    """A small model of the target's tokenizer, which drafts streams for any target."""

    name: str
    """For people."""
    drafting: RecordReader


@dataclass(frozen=True)
class Served:
    """A model in memory, ready for the engine."""

    target: Target
    drafter: Drafter | None
    """The device's: activation records are made for it."""
    decode: Decode | None
    """Text of output tokens, for stop strings."""
    facts: ModelFacts
    stream_drafter: Drafter | None = None
    """Drafts streams here: the same one, unless another was given for that."""
    graph: LoadedGraph | None = None
    """That one as it was exported, which drafts in its place."""
    small: SmallModel | None = None
    """Drafts streams and reads nothing of the target but tokens."""

    @property
    def drafts(self) -> str:
        """What drafts streams."""
        if self.small is not None:
            return self.small.name
        if self.stream_drafter is None:
            return "none"
        name = self.stream_drafter.name
        return name if self.graph is None else f"{name}, {self.graph.variant}"


def load(settings: Settings) -> Served:
    """Load the target, its drafter and what else the settings name, and log what was loaded. What
    cannot be used is an error of one line."""
    began = time.monotonic()
    with told_while_it_lasts("loading the model"):
        served = _load(settings)
    log.info(
        "the model is loaded",
        extra={
            "event": "loaded",
            "device": served.target.machine.device,
            "decoder": served.target.capabilities.decoder,
            "computes": short_id(served.facts.computes),
            "seconds": round(time.monotonic() - began, 3),
            "slots": served.facts.slots,
            "kv_megabytes_at_most": round(served.target.memory.kv_bytes / 1e6),
            "records": served.facts.records is not None,
        },
    )
    return served


_SIBLING_HERE = (
    "--server-drafter takes what `moa-train` has made, an EAGLE-3, or a GGUF file; a small model of"
    " the same tokenizer drafts here as its GGUF file, or as its bundle: --bundle FOLDER"
)


def _drafter_of_streams(source: str) -> StoredDrafter:
    """The drafter that --server-drafter names; what else may be meant is told."""
    if (Path(source).expanduser() / MANIFEST).is_file():
        raise UsageError(
            f"--server-drafter {source} is a bundle", hint=f"it drafts here with --bundle {source}"
        )
    return find(source, hint=_SIBLING_HERE)


def _load(settings: Settings) -> Served:
    """Load the target, the drafter that activation records are made for, and what drafts streams
    here: another drafter, the device's exported graph, or a small model."""
    refuse_other_tokenizers(settings)
    stored = stored_drafter(settings)
    streams = stored
    if settings.server_drafter and not is_gguf(settings.server_drafter):
        streams = _drafter_of_streams(settings.server_drafter)
    taps = taps_of(settings, stored, streams)
    target = load_target(settings, _memory_of_drafters(settings, stored, streams))
    small = small_model(settings, target)
    drafter = load_drafter(stored, target) if stored is not None else None
    stream_drafter = drafter
    if streams is not None and streams is not stored:
        stream_drafter = load_drafter(streams, target)
    if taps:
        with_states(target).tap(taps)  # it keeps the states that these drafters read
    target.prepare(expected_load(settings), _PREPARATION_SECONDS)
    # The identity that `moa-export` writes into a bundle's manifest for the same drafter.
    name = stored.weights_id(target.facts) if stored is not None else ""
    graph = None
    if streams is stored and small is None:  # a bundle is of the drafter that makes the records
        graph = load_graph(settings, target.machine.device, name)
    if small is None and stream_drafter is not None and not target.capabilities.states:
        small = drafting_alone(settings, target, stream_drafter, graph)
    from_records = small is None and reads_records(drafter, stream_drafter, graph)
    return Served(
        target=target,
        drafter=drafter,
        decode=decoder_of(target) if target.has_tokenizer else None,
        facts=dataclasses.replace(
            model_facts(target, drafter, name, stream_records=from_records),
            computes=target.computes,
        ),
        stream_drafter=stream_drafter,
        graph=graph,
        small=small,
    )


def load_drafter(stored: StoredDrafter, target: Target) -> Drafter:
    """Load a drafter beside its target. Behind a target that gives no hidden states (a GGUF file),
    only one that reads none can be used; what its kind does not tell before is found here."""
    if target.capabilities.states:
        return stored.load(with_states(target).model, target.facts)
    drafter = stored.load(None, target.facts)
    if drafter.taps or drafter.record_layout is not None:
        with_states(target)  # raises: it has none
    return drafter


def drafting_alone(
    settings: Settings, target: Target, drafter: Drafter, graph: LoadedGraph | None
) -> SmallModel:
    """Returns a drafter that reads only tokens, for a target that gives nothing else."""
    slots = drafting_slots(target)
    shape = settings.stream_shape
    if graph is not None:
        return SmallModel(
            name=f"{drafter.name}, {graph.variant}",
            drafting=OnnxDrafting(None, graph, slots=slots),
        )
    drafting: Any = drafter.drafting(
        slots=slots,
        capacity=target.cache.capacity,
        scratch=shape.breadth * (shape.depth + 1) + 8,
    )
    return SmallModel(name=drafter.name, drafting=drafting)


def small_model(settings: Settings, target: Target) -> SmallModel | None:
    """Returns the small model that drafts streams from tokens alone: a GGUF file given as
    --server-drafter, or a bundle whose drafter reads nothing of a target. None if there is
    neither."""
    if is_gguf(settings.server_drafter):
        if settings.bundle:
            raise UsageError(
                f"--bundle is of no use: {settings.server_drafter} drafts streams",
                hint="leave one out",
            )
        return _small_gguf(Path(settings.server_drafter), settings, target)
    if settings.bundle and not settings.drafter and not settings.server_drafter:
        bundle = Bundle.open(settings.bundle)
        if bundle.manifest.drafter.reads_target:
            return None
        graph = LoadedGraph.load(bundle)
        return SmallModel(
            name=f"sibling, {graph.variant}",
            drafting=OnnxDrafting(None, graph, slots=drafting_slots(target)),
        )
    return None


def _small_gguf(path: Path, settings: Settings, target: Target) -> SmallModel:
    """Load the small model in a GGUF file, which is to draft for this target's streams."""
    from moa.llama.drafting import LlamaDrafting  # loaded where it is asked for

    options = LoadOptions(
        device=settings.device,
        slots=drafting_slots(target),
        capacity=target.cache.capacity,
        gpu_layers=settings.gpu_layers,
        threads=settings.threads,
        library=settings.llama_library,
    )
    drafting = LlamaDrafting.load(path, target.facts, options)
    return SmallModel(name=path.name, drafting=drafting)


def refuse_other_tokenizers(settings: Settings) -> None:
    """Refuse a bundle, or a small model that is to draft here, of another tokenizer than the target's.
    Only files that take a second to read are looked at, before the target is loaded."""
    small = {}
    if settings.bundle:
        manifest = Bundle.open(settings.bundle).manifest
        small[f"the bundle {settings.bundle}"] = manifest.tokenizer.hash
    if is_gguf(settings.server_drafter):
        small[settings.server_drafter] = tokenizer_hash_of(settings.server_drafter)
    if not small:
        return
    target = settings.target or str(_embedded().target)
    wanted = tokenizer_hash_of(target)
    for name, found in small.items():
        if wanted and found != wanted:
            raise UsageError(
                f"{name} has another tokenizer than the target {target}",
                hint="what drafts here must have the target's own",
            )


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


def _memory_of_drafters(settings: Settings, *stored: StoredDrafter | None) -> DrafterMemory:
    """Returns what the drafters will take beside the target: those that are stored in folders, and
    a GGUF file or a bundle that drafts here."""
    return drafter_memory(
        file=settings.server_drafter if is_gguf(settings.server_drafter) else "",
        bundle=_bundle_folder(settings),
        folders=[one.folder for one in stored if one is not None],
        dtype=pick_dtype(settings.dtype, "cpu"),  # of another device's memory there is no plan
    )


def load_target(settings: Settings, drafters: DrafterMemory) -> Target:
    """Load the target into memory, with the KV cache that the settings ask for, or what of it fits
    beside the `drafters`."""
    source = settings.target or str(_embedded().target)
    options = LoadOptions(
        device=settings.device,
        dtype=settings.dtype,
        quantize=settings.quantize,
        slots=settings.slots,
        capacity=settings.slot_capacity,
        kv_tokens=settings.kv_cache_tokens,
        exact=not settings.inexact,
        gpu_layers=settings.gpu_layers,
        kv_type=settings.kv_type,
        cpu_moe=settings.cpu_moe,
        rpc=settings.rpc,
        threads=settings.threads,
        library=settings.llama_library,
    )
    if source_of(source).planned:  # its config says how long its texts may be
        facts, _ = read_facts(source, identify=False)
        settings.limits.context_within(min(settings.slot_capacity, facts.max_positions))
    plan = _memory_plan(source, options, drafters)
    if plan is not None:
        log.info("the target %s", plan, extra={"event": "memory", "figures": plan.figures})
        if settings.kv_tokens is not None and plan.cut:
            log.warning("--kv-tokens asks for %s", plan.cut, extra={"event": "memory_cut"})
        options = dataclasses.replace(options, kv_tokens=plan.kv_tokens)
    # Errors of loading the model are reported by themselves: here it is the KV cache that does not
    # fit.
    with _memory_for(
        f"on the device {settings.device} for the keys and values of {options.kv_tokens} tokens"
    ):
        target = open_target(source, options)
    _tell_short_context(settings, target)
    if settings.forward_time is None:
        return target
    log.warning(
        "every forward is slowed down to %s: for trials",
        settings.emulate,
        extra={"event": "slowed"},
    )
    return slowed_down(target, settings.forward_time)


def _tell_short_context(settings: Settings, target: Target) -> None:
    """Log that the KV cache holds not one session of the length that the model and the settings
    allow: longer questions are refused."""
    allowed = settings.limits.context_within(
        min(settings.slot_capacity, target.facts.max_positions)
    )
    most = settings.limits.context_within(target.cache.capacity)
    if most < allowed:
        log.warning(
            "the KV cache has room for %s tokens of one session, question and answer: with more"
            " --kv-tokens it is up to %s",
            f"{most:,}",
            f"{allowed:,}",
            extra={"event": "short_context"},
        )


def _memory_plan(
    source: str, options: LoadOptions, drafters: DrafterMemory
) -> MemoryPlan | LlamaPlan | None:
    """Returns what the target will take together with the `drafters` beside it, before its weights
    are read; None where an accelerator computes, which has memory of its own."""
    kind = source_of(source)
    if kind.planned:
        return plan_memory(source, options, drafters)
    if kind.name != "gguf":
        return None
    from moa.llama import target as llama  # loaded where it is asked for

    plan = llama.plan_memory(source, options)
    if plan is None:
        return None
    return dataclasses.replace(plan, drafter=drafters.at_start, drafter_token=drafters.per_token)


def stored_drafter(settings: Settings) -> StoredDrafter | None:
    """Where the drafter is that records are made for."""
    if not settings.drafter:
        return None if settings.target else find(_embedded().drafter)
    if not (folder := Path(settings.drafter)).is_dir():
        raise UsageError(f"no drafter at {folder}: there is no such folder")
    stored = find(folder)
    stored.refuse_off_device()
    return stored


def taps_of(
    settings: Settings, drafter: StoredDrafter | None, streams: StoredDrafter | None
) -> tuple[int, ...]:
    """Returns the layers of the target whose hidden states these drafters read; none if they read
    none. It reads only configs, so that what cannot be served is found before the target is
    loaded."""
    if drafter is None and streams is None:
        return ()
    if settings.bundle and streams is not None and streams is not drafter:
        raise UsageError(
            f"--bundle is of no use: {streams.folder} drafts streams", hint="leave one out"
        )
    target = settings.target or str(_embedded().target)
    source = source_of(target)
    drafters = [stored for stored in (drafter, streams) if stored is not None]
    if not source.states:
        for stored in drafters:
            _refuse_shared_weights(stored, source.name)
        return ()  # what such a drafter reads is asked when it is loaded
    facts, _ = read_facts(target, identify=False)
    folders: dict[tuple[int, ...], Path] = {}  # by the layers that its drafter reads
    for stored in drafters:
        taps = stored.config(facts).taps
        if taps:
            folders.setdefault(taps, stored.folder)
    if streams is not None and streams is not drafter:
        _refuse_for_devices(streams, facts)
    if len(folders) > 1:
        first, second = folders.values()
        raise UsageError(f"{first} and {second} read different states", hint="give one of them")
    return next(iter(folders), ())


def _refuse_for_devices(streams: StoredDrafter, facts: TargetFacts) -> None:
    """Refuse a drafter for streams that was made for devices: it reads none of the states that a
    server's own drafter reads."""
    is_for_devices = streams.kind.on_device and streams.kind.shares_weights
    if is_for_devices and not streams.config(facts).taps:
        raise UsageError(
            f"{streams.folder} reads no states of the target, which a server's own drafter does",
            hint="give it as --drafter: it drafts streams, too",
        )


def _refuse_shared_weights(stored: StoredDrafter, source: str) -> None:
    """Refuse a drafter of a kind that needs weights or states of its target, behind a target from a
    `source` that has none to give."""
    if stored.kind.shares_weights:
        raise UsageError(
            f"a target of {source} gives no states and no weights, and a drafter of"
            f" kind {stored.kind.name} needs them",
            hint="leave the drafter out; a kind that reads nothing of its target says"
            " shares_weights = False",
        )


def reads_records(
    drafter: Drafter | None, stream_drafter: Drafter | None, graph: LoadedGraph | None
) -> bool:
    """Whether whatever drafts streams here reads the records that are made for the device."""
    if stream_drafter is None or stream_drafter is not drafter:
        return stream_drafter is None
    return graph is not None or not stream_drafter.taps


def load_graph(settings: Settings, device: str, drafter: str) -> LoadedGraph | None:
    """Returns the exported graph that drafts streams on a CPU, from the bundle that the settings
    name; None without one. It must be the bundle of the drafter whose identity is `drafter`."""
    folder = _bundle_folder(settings)
    if not folder or (not settings.bundle and device != "cpu"):
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


def _bundle_folder(settings: Settings) -> str:
    """The bundle that the settings name, or the embedded one where they name no model; empty if
    there is none."""
    if settings.bundle or settings.target or settings.drafter:
        return settings.bundle
    return str(_embedded().bundle)


def serve_model(
    target: Target,
    drafter: Drafter | None = None,
    *,
    decode: Decode | None = None,
    drafter_name: str = "",
    graph: LoadedGraph | None = None,
) -> Served:
    """Returns models that are in memory already in the form in which they are served."""
    if drafter is not None and drafter.taps:
        with_states(target).tap(drafter.taps)
    from_records = reads_records(drafter, drafter, graph)
    return Served(
        target=target,
        drafter=drafter,
        decode=decode,
        facts=model_facts(target, drafter, drafter_name, stream_records=from_records),
        stream_drafter=drafter,
        graph=graph,
    )


def model_facts(
    target: Target,
    drafter: Drafter | None,
    drafter_name: str = "",
    *,
    stream_records: bool = True,
) -> ModelFacts:
    """Returns what the service must know of a model in memory: identities, limits, and what it can
    do."""
    records = None
    if drafter is not None and (layout := drafter.record_layout) is not None:
        dtypes = [d for d in DTYPES if d != "int4" or layout.width % 2 == 0]
        records = RecordContract(layout.count, layout.width, list(dtypes))
    cache = target.cache
    # Each session holds a page at least. In llama.cpp a page is a whole context, so that there are
    # fewer of them than slots.
    slots = min(cache.slots, cache.pages)
    pages_of_a_full_slot = -(-cache.capacity // cache.page_tokens)  # rounded up
    all_can_be_full = cache.pages >= slots * pages_of_a_full_slot
    return ModelFacts(
        target=target.facts.weights_id,
        tokenizer=target.facts.tokenizer_hash,
        drafter=drafter_name,
        vocab_size=target.facts.vocab_size,
        eos_ids=target.facts.eos_ids,
        slots=slots,
        slots_limit="slots" if slots == cache.slots else "kv_tokens",
        capacity=cache.capacity,
        records=records,
        stream_records=stream_records,
        pages=0 if all_can_be_full else cache.pages,
        page_tokens=cache.page_tokens,
        promise=target.capabilities.promise,
        grammars=target.has_tokenizer and bool(target.facts.eos_ids),
    )


def _embedded() -> Any:
    from moa import demo  # imported here: verifiers of other models do not need it

    return demo.paths()
