"""From a target and a small sibling of its family to what server and device need: a plan, the
steps, the commands."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from export.atomic_folder import gigabytes
from export.plan import ExportPlan, make_plan
from export.progress import Notify, silent
from export.source import TargetTokenizer
from moa.cli.working import roughly
from moa.drafters.registry import PREFIX
from moa.errors import UnsupportedModelError, UsageError
from moa.gguf.reader import is_gguf
from moa.process.busy import slowdown
from moa.target.families import refuse_as_sibling
from moa.target.gguf_folder import GgufModel
from moa.target.identity import repeated_weights, text_shapes
from moa.target.loading import locate, read_facts, read_shape, tokenizer_hash_of

VARIANTS = ("cpu-int4",)
_MOST_LOOKED_AT = 64
"""Folders in which another sibling is looked for."""
_MORE_WEIGHTS = 1.5
"""Times the target's weights that a sibling may have: more is a pair in the wrong order."""
_BYTES_PER_TARGET_WEIGHT = 2
"""The verifier loads a target in bfloat16 on a GPU."""
_SERVERS = {"H100": 2600, "RTX 4090": 900, "laptop": 40}
NOT_CALIBRATED = (
    "calibration: none, so the device guesses how long it can be trusted alone;"
    " `moa-export setup --calibration FILE` measures it"
)
_DEVICES = {"laptop": 40, "phone": 15}
"""Memory bandwidth in GB/s that a decoder reaches."""
_BUSY = 1.5
"""Above this a time is told as it would be with what else runs now."""


@dataclass(frozen=True)
class Setup:
    """What to set up. `records`: training data for a drafter that reads the target's state; empty:
    no training."""

    target: str
    sibling: str
    out: Path
    variants: tuple[str, ...] = VARIANTS
    records: tuple[str, ...] = ()
    calibration: tuple[Path, ...] = ()
    """Held-out prompts, on which the drafter is compared with the target."""
    steps: int | None = None
    force: bool = False

    @property
    def drafter(self) -> Path:
        """The folder of the trained drafter, if one is trained."""
        return self.out / "drafter"

    @property
    def bundle(self) -> Path:
        """The folder of the bundle."""
        return self.out / "bundle"


@dataclass(frozen=True)
class SetupPlan:
    """Sizes computed from the headers of files: nothing was measured, and no weight was read."""

    family: str
    target_weights: int
    target_ties_head: bool
    """Whether the target's head is its embedding, however often its file stores that."""
    target_bytes: int
    target_form: str
    """What it takes so many bytes in, with its preposition."""
    kv_bytes_per_token: int
    export: ExportPlan
    trains: bool
    calibrates: bool

    def lines(self, *, is_made: bool = False) -> list[str]:
        """Returns the plan as lines for people; every figure is computed, none was measured. Nothing
        is said of the making of a bundle that is made already."""
        sizes = self.export.variant_bytes
        largest_variant = max(sizes.values())
        variants = ", ".join(f"{name} {gigabytes(size)}" for name, size in sizes.items())
        calibration = NOT_CALIBRATED
        if self.calibrates:
            calibration = "calibration: on the prompts given, with the target in memory"
        making = (
            f"making it takes {gigabytes(self.export.disk)} of disk,"
            f" {gigabytes(self.export.memory)} of memory, and about {self.export.seconds:.0f} s on two"
            " cores that do nothing else"
        )
        if (slower := slowdown()) > _BUSY:
            making += f"; this machine is busy: about {roughly(slower * self.export.seconds)} s now"
        lines = [
            f"target ({self.family}): {self.target_weights / 1e9:.3g}B weights, {gigabytes(self.target_bytes)}"
            f" {self.target_form}, and {self.kv_bytes_per_token / 1024:.4g} kB of KV cache a token",
            f"bundle: {variants}",
            *([] if is_made else [making]),
            f"a forward of the target takes at least: {_least_times(self.target_bytes, _SERVERS)}",
            f"a step on the device takes at least: {_least_times(largest_variant, _DEVICES)}",
            calibration,
        ]
        if self.trains:
            lines.append("training: moa-train --dry-run measures its time and memory")
        return lines


def _least_times(size: int, bandwidths: Mapping[str, int]) -> str:
    """The shortest time of a step over `size` bytes of weights, all of which it reads once, on each
    machine by its memory bandwidth in GB/s."""
    times = []
    for name, rate in bandwidths.items():
        milliseconds = 1e-6 * size / rate
        times.append(f"{milliseconds:.2g} ms ({name}, {rate} GB/s)")
    return ", ".join(times)


def make_setup_plan(setup: Setup) -> SetupPlan:
    """Estimate a setup from the models' shapes and tokenizers; a `UsageError` for a pair that
    cannot work. If the sibling, the small model that is to draft, cannot be exported, the error
    names others on this machine that can."""
    facts, folder = read_facts(setup.target, identify=False)
    _, sibling_folder = read_facts(setup.sibling, identify=False)
    if _tokenizer_of(folder) != _tokenizer_of(sibling_folder):
        raise UsageError(
            f"{setup.sibling} has another tokenizer than {setup.target}",
            hint="take a small model of the same family and generation",
        )
    try:
        export = make_plan(setup.target, PREFIX + setup.sibling, setup.variants, None)
    except UnsupportedModelError as error:
        others = others_of_its_tokenizer(folder, sibling_folder)
        if not others:
            raise
        raise UnsupportedModelError(
            str(error), hint=f"here are models of the same tokenizer: {', '.join(others)}"
        ) from None
    stored = _stored(setup.target)
    repeated = _repeated(stored, folder)
    weights = _weights_in(folder) - repeated
    _refuse_swapped(setup, weights, sibling_folder)
    target_bytes = weights * _BYTES_PER_TARGET_WEIGHT
    target_form = "in bfloat16"
    if stored is not None:
        target_bytes = stored.stored_bytes
        target_form = "in its GGUF file"
    keys_and_values = 2 * facts.layers * facts.kv_heads * facts.head_dim  # of a token
    return SetupPlan(
        family=facts.family,
        target_weights=weights,
        target_ties_head=facts.tie_embeddings or repeated > 0,
        target_bytes=target_bytes,
        target_form=target_form,
        kv_bytes_per_token=keys_and_values * _BYTES_PER_TARGET_WEIGHT,
        export=export,
        trains=bool(setup.records),
        calibrates=bool(setup.calibration),
    )


def _refuse_swapped(setup: Setup, of_target: int, sibling_folder: Path) -> None:
    """Raise a `UsageError` if the model that is to draft has far more weights than the target:
    whoever swaps the two would learn it from a lack of memory, or from slow answers."""
    most = _MORE_WEIGHTS * of_target
    of_sibling = _weights_in(sibling_folder)
    if of_sibling > most:  # else its file, which has a whole vocabulary in its head, is not read
        of_sibling -= _repeated(_stored(setup.sibling), sibling_folder)
    if of_sibling <= most:
        return
    raise UsageError(
        f"{setup.sibling}, the small model for the device, has {of_sibling / 1e9:.3g}B weights, and the"
        f" target {setup.target} has {of_target / 1e9:.3g}B",
        hint="the device's model is the smaller one: swap the two",
    )


def _tokenizer_of(folder: Path) -> str:
    """The hash of a folder's tokenizer; an error where it has none that a device can use."""
    if (folder / "tokenizer.json").is_file():
        return tokenizer_hash_of(folder)
    return TargetTokenizer.of(folder).hash


def others_of_its_tokenizer(target: Path, sibling: Path) -> list[str]:
    """Returns the names of up to three models on this machine that could be the sibling instead,
    the smallest first. It looks into the folders beside the two models and into the hub's cache."""
    wanted = _tokenizer_of(target)
    beside = {*target.parent.iterdir(), *sibling.parent.iterdir()} - {target, sibling}
    cached = {Path(path).parent: name for name, path in _cached_models()}
    found: list[tuple[int, str]] = []  # number of weights, name
    for folder in sorted(beside | cached.keys())[:_MOST_LOOKED_AT]:
        # A folder that is no model, or cannot be a sibling, raises one of these.
        with contextlib.suppress(UsageError, OSError, ValueError):
            if not (folder / "tokenizer.json").is_file():
                continue
            refuse_as_sibling(read_shape(folder)[1])
            if _tokenizer_of(folder) == wanted:
                found.append((_weights_in(folder), cached.get(folder, str(folder))))
    return [name for _, name in sorted(found)[:3]]


def _stored(model: str) -> GgufModel | None:
    """What a GGUF file stores; None for a folder or a hub's id."""
    return GgufModel.read(Path(model).expanduser()) if is_gguf(model) else None


def _repeated(stored: GgufModel | None, folder: Path) -> int:
    """The weights of a head that is the embedding, stored once more, of a model in a GGUF file, or
    else in this folder: they are counted once."""
    return repeated_weights(folder) if stored is None else stored.repeated_weights


def _weights_in(folder: Path) -> int:
    """The number of weights that a folder has of a language model, from its files' headers."""
    return sum(math.prod(shape) for shape in text_shapes(folder).values())


def _cached_models() -> Iterator[tuple[str, str]]:
    """Yield the name of each model in the hub's cache, and the path of its config.json."""
    with contextlib.suppress(CacheNotFound):
        for repository in scan_cache_dir().repos:
            for revision in repository.revisions:
                for file in revision.files:
                    if file.file_name == "config.json":
                        yield repository.repo_id, str(file.file_path)


def training_command(setup: Setup) -> list[str]:
    """Arguments of `moa-train`: the sibling stays as it is, and only its attention to records is
    trained."""
    arguments = [setup.target, "--data", *setup.records, "--out", str(setup.drafter)]
    arguments += ["--attention", "--body", setup.sibling, "--freeze-body"]
    if setup.steps is not None:
        arguments += ["--steps", str(setup.steps)]
    return arguments


def run_setup(
    setup: Setup,
    train: Callable[[Sequence[str]], int],
    say: Notify,
    show: Notify = silent,
) -> None:
    """Train the attention to the target's records if there is data, and build the bundle. A
    repeated run goes on with the training where it was left."""
    # The exporter and its libraries take seconds to import, and a plan needs none of them.
    from export.build import BuildSettings, build

    drafter = PREFIX + setup.sibling
    if setup.records:
        say(f"training: moa-train {' '.join(training_command(setup))}")
        if train(training_command(setup)) != 0:
            raise UsageError(
                "the training did not end well",
                hint="its last lines say why; run the same command again",
            )
        drafter = str(setup.drafter)
    locate(setup.sibling, say=say)  # one in a GGUF file is unpacked now: it says so
    build(
        BuildSettings(
            target=setup.target,
            drafter=drafter,
            out=setup.bundle,
            variants=setup.variants,
            calibration=setup.calibration,
            force=setup.force,
        ),
        say=say,
        show=show,
    )


def next_commands(setup: Setup) -> list[str]:
    """Returns the commands to run next, on the server and on the device."""
    drafter = f" --drafter {setup.drafter}" if setup.records else ""
    if (
        setup.target == setup.sibling
    ):  # a model that is its own target is for another one's endpoint
        return [
            "with an endpoint that you have:",
            f"  edge-client chat --upstream URL --bundle {setup.bundle}",
            f"  edge-client serve --upstream URL --bundle {setup.bundle}    # chat page and API",
        ]
    return [
        "on the server:",
        "  cloud-verifier token new --name laptop --append tokens.txt    # prints the device's TOKEN once",
        f"  cloud-verifier serve --target {setup.target}{drafter} --host 0.0.0.0 --auth-tokens tokens.txt",
        f"on the device, with a copy of {setup.bundle}:",
        "  edge-client chat --bundle bundle --verifier ws://SERVER:8765 --token TOKEN",
        "  edge-client serve --bundle bundle --verifier ws://SERVER:8765 --token TOKEN   # chat page and API",
    ]
