"""An exported bundle: its manifest, and the checks that run before its files are used. No torch.

    bundle = Bundle.open(folder)            # manifest read and validated; files there, of the right size
    bundle.verify(["cpu-int4"])             # contents hashed: shared files and these variants'
    model = bundle.path(bundle.variant("cpu-int4").model)

The manifest is written last, by a rename. So a folder with a manifest is a complete bundle, and one without is not.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import re
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from moa.errors import BundleError
from moa.manifest import Manifest, Variant
from moa.process.similar_names import did_you_mean
from moa.safe_text import safe_line

SCHEMA = 1
MANIFEST = "manifest.json"
GOLDEN = "golden.npz"
OLDEST_WITH_LINEAR_ATTENTION = "1.30"
"""The first ONNX Runtime that has the gated delta rule as an operator on a processor."""
OPSETS = {20: "1.17", 23: "1.24"}
"""ONNX opsets that bundles use, and the first ONNX Runtime that has their operators."""
_LONGEST_NAME = 512
_PART = re.compile(r'[^\x00-\x1f\x7f<>:"|?*\\/\u202a-\u202e\u2066-\u2069]{1,128}')
"""A part of a file's path."""
_LARGEST_MANIFEST = 4 * 2**20
"""Bytes of a manifest."""
_LARGEST_ARRAYS = 2**26
"""Bytes of all arrays of a `.npz` file together."""
_BUILD_AGAIN = "copy or build the bundle again"
_ARRAY_ERRORS = (
    OSError,
    ValueError,
    EOFError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What `zipfile` and numpy raise for files that are damaged, or made to do harm."""


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk whose manifest is valid."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: str | Path) -> Bundle:
        """Open a bundle, the folder of an exported drafter: read its manifest, and check that every
        file in it exists with the right size. The contents are not read, so it takes
        milliseconds."""
        folder = Path(folder)
        bundle = cls(folder, read_manifest(folder))
        for name, entry in bundle.manifest.files.items():
            path = bundle.path(name)
            if not path.is_file():
                raise BundleError(
                    f"{folder} is incomplete: {name} is missing",
                    hint=_BUILD_AGAIN,
                )
            size = path.stat().st_size
            if size != entry.size:
                raise BundleError(
                    f"{folder} is damaged: {name} has {size} bytes, not {entry.size}",
                    hint=_BUILD_AGAIN,
                )
        return bundle

    def path(self, name: str) -> Path:
        """The path of a file of the manifest."""
        return self.folder / name

    def variant(self, name: str | None = None) -> Variant:
        """One of the forms (variants) in which the bundle has the drafter's graph, by name; without
        one, the default. A `BundleError` for a name that it does not have, or a form that this
        version cannot run."""
        name = name or self.manifest.default_variant
        if name not in self.manifest.variants:
            raise BundleError(
                f"this bundle has no variant {name!r}",
                hint=f"it has {', '.join(sorted(self.manifest.variants))}",
            )
        variant = self.manifest.variants[name]
        if variant.opset not in OPSETS:
            raise BundleError(
                f"variant {name} of {self.folder} uses ONNX opset {variant.opset}, which this version does not know",
                hint=f"known: {', '.join(map(str, OPSETS))}; a newer moa-edge may",
            )
        return variant

    def check_runtime(self, name: str | None, onnxruntime_version: str) -> None:
        """Raise if the installed ONNX Runtime is older than the variant needs."""
        variant = self.variant(name)
        if _version(onnxruntime_version) < _version(variant.min_onnxruntime):
            raise BundleError(
                f"variant {name or self.manifest.default_variant} needs ONNX Runtime {variant.min_onnxruntime}"
                f" or newer, here is {onnxruntime_version}"
            )

    def verify(self, variants: Iterable[str] | None = None) -> int:
        """Compare the contents of the bundle's files with the hashes in its manifest; a
        `BundleError` for a file that differs. Files that only other variants than these need are
        left out (None: all are read). Returns the bytes that were read."""
        every_variant = self.manifest.variants.values()
        chosen = list(every_variant)
        if variants is not None:
            chosen = [self.variant(name) for name in variants]
        unwanted = _files_of(every_variant) - _files_of(chosen)
        hashed_bytes = 0
        for name, entry in self.manifest.files.items():
            if name in unwanted:
                continue
            if sha256(self.path(name)) != entry.sha256:
                raise BundleError(
                    f"{self.folder} is damaged: the contents of {name} are not what its manifest says",
                    hint=_BUILD_AGAIN,
                )
            hashed_bytes += entry.size
        return hashed_bytes

    def draft_to_target(self) -> NDArray[np.int64] | None:
        """The target's ids of the tokens that the drafter knows, where these are only some of the
        target's vocabulary, in the order of its own ids; None if it knows all."""
        name = self.manifest.vocabulary.map
        if name is None:
            return None
        try:
            ids: NDArray[np.int64] = _array(self.path(name).read_bytes(), name)
        except ValueError as error:
            raise BundleError(
                f"{self.path(name)} does not fit its manifest: {safe_line(str(error))}"
            ) from None
        if ids.shape != (self.manifest.vocabulary.draft,) or ids.dtype != np.int64:
            raise BundleError(
                f"{self.path(name)} does not fit its manifest: {ids.dtype} {ids.shape}"
            )
        return ids

    def golden(self) -> list[GoldenCase]:
        """Test inputs, and the outputs of each variant that was run when the bundle was built."""
        return read_golden(self.path(GOLDEN))


def _no_bundle(folder: Path) -> BundleError:
    """The error of a place that is no bundle: what it is, and how one is had."""
    made_by = (
        "`moa-export setup` makes one of a target and a small sibling, `moa-export build` of a"
        " trained drafter; `moa-edge up` makes its own"
    )
    if folder.suffix.lower() == ".gguf" or (folder / "config.json").is_file():
        return BundleError(f"no bundle at {folder}: it is a model", hint=made_by)
    if folder.is_file():
        return BundleError(
            f"no bundle at {folder}: it is a file", hint="unpack an archive, and name the folder"
        )
    reason = f"{MANIFEST} is missing" if folder.is_dir() else "there is no such folder"
    inside = folder / "bundle"
    if (inside / MANIFEST).is_file():
        hint = f"did you mean {inside}?"
    else:
        hint = made_by if folder.is_dir() else did_you_mean(str(folder)) or made_by
    return BundleError(f"no bundle at {folder}: {reason}", hint=hint)


def read_manifest(folder: Path) -> Manifest:
    """Read and validate `manifest.json` of a bundle's folder; a `BundleError` of one line if it is
    missing, damaged, or of another version."""
    path = folder / MANIFEST
    if not path.is_file():
        raise _no_bundle(folder)
    if path.stat().st_size > _LARGEST_MANIFEST:
        raise BundleError(f"{path} is too large to be a manifest")
    content = path.read_bytes()
    try:
        schema = _schema_of.decode(content).schema
        if schema != SCHEMA:
            raise BundleError(f"{folder} has manifest schema {schema}, this version reads {SCHEMA}")
        manifest = _manifest_of.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BundleError(f"{path} is not a valid manifest: {safe_line(str(error))}") from None
    _check_names(path, manifest)
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` atomically; it is the last file to be written."""
    path = folder / MANIFEST
    partial = folder / f"{MANIFEST}.partial"
    with partial.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def sha256(path: Path) -> str:
    """Hash of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class GoldenCase:
    """One step's inputs, and the `top_logp`, `top_tokens` of each variant that ran when the bundle
    was built."""

    name: str
    inputs: dict[str, NDArray[Any]]
    expected: dict[str, tuple[NDArray[np.float32], NDArray[np.int64]]]

    def difference(
        self, variant: str, top_logp: NDArray[np.float32], top_tokens: NDArray[np.int64]
    ) -> float:
        """How far a run of a variant is from the run at the time when the bundle was built: the
        largest difference in the log-probability of the best token then, over all queries; infinite
        if that token is missing now.

        The rest of the list is not compared: quantized kernels differ between processors, so its
        last tokens may change order.
        """
        expected_logp, expected_tokens = self.expected[variant]
        if top_logp.shape != expected_logp.shape or not np.isfinite(top_logp).all():
            return math.inf
        largest = 0.0
        for query in range(expected_tokens.shape[1]):
            best_token = expected_tokens[0, query, 0]
            (places,) = np.nonzero(top_tokens[0, query] == best_token)
            if not len(places):
                return math.inf
            difference = top_logp[0, query, places[0]] - expected_logp[0, query, 0]
            largest = max(largest, abs(float(difference)))
        return largest


def write_golden(path: Path, cases: Iterable[GoldenCase]) -> None:
    """Write golden cases, the inputs of some steps with what they gave, to one `.npz` file. The
    name of an array in it is `CASE/inputs/NAME`, or `CASE/VARIANT/NAME` for results."""
    # Any, as newer versions of numpy have a flag among these names, which older ones do not know.
    arrays: dict[str, Any] = {}
    for case in cases:
        for name, value in case.inputs.items():
            arrays[f"{case.name}/inputs/{name}"] = value
        for variant, (logp, tokens) in case.expected.items():
            arrays[f"{case.name}/{variant}/top_logp"] = logp
            arrays[f"{case.name}/{variant}/top_tokens"] = tokens
    np.savez_compressed(path, **arrays)


def read_golden(path: Path) -> list[GoldenCase]:
    """Read the golden cases that `write_golden` wrote; a `BundleError` for a file that is none."""
    cases: dict[str, GoldenCase] = {}
    # By case and part, which is "inputs" or a variant; then by name.
    parts: dict[tuple[str, str], dict[str, NDArray[Any]]] = {}
    try:
        for key, array in _read_npz(path).items():
            case, part, name = key.split("/")
            parts.setdefault((case, part), {})[name] = array
        for (case, part), arrays in parts.items():
            golden = cases.setdefault(case, GoldenCase(case, {}, {}))
            if part == "inputs":
                golden.inputs.update(arrays)
            else:
                golden.expected[part] = (arrays["top_logp"], arrays["top_tokens"])
    except (ValueError, KeyError) as error:
        raise BundleError(f"{path} does not hold golden vectors: {safe_line(str(error))}") from None
    return list(cases.values())


class _Schema(msgspec.Struct):
    """Only the manifest's version. It is read first, because the other fields depend on it."""

    schema: int


# Made here, not where they are used: two threads that make one at once end the process
# (tests/test_threads.py).
_schema_of = msgspec.json.Decoder(_Schema)
_manifest_of = msgspec.json.Decoder(Manifest)


def _files_of(variants: Iterable[Variant]) -> set[str]:
    """Names of all files that some of the variants have."""
    files: set[str] = set()
    for variant in variants:
        files.update(variant.files)
    return files


def _check_names(path: Path, manifest: Manifest) -> None:
    """Raise a `BundleError` if a manifest lists a file that would lie outside of the bundle, or
    names one for a purpose that it does not list: only listed files are checked."""
    for name in manifest.files:
        if not _is_ordinary(name):
            raise BundleError(f"{path}: {safe_line(repr(name))} is no name for a file of a bundle")
    for name, purpose in _named_files(manifest).items():
        if name not in manifest.files:
            raise BundleError(f"{path} names {name} as its {purpose}, but does not list it")
    if manifest.default_variant not in manifest.variants:
        raise BundleError(
            f"{path} names {manifest.default_variant!r} its default, but has no such variant"
        )


def _is_ordinary(name: str) -> bool:
    """Whether the name of a file stands on every system for the same file, inside of the bundle.
    Windows reads a drive or a stream before a colon, and drops dots and spaces at the end of a
    name."""
    parts = name.split("/")
    return (
        len(name) <= _LONGEST_NAME
        and name != MANIFEST
        and all(_PART.fullmatch(part) and part[-1] not in ". " for part in parts)
    )


def _named_files(manifest: Manifest) -> Mapping[str, str]:
    """Files that the manifest names anywhere, and what each is for."""
    named = {GOLDEN: "golden vectors"}
    for name, variant in manifest.variants.items():
        for file in (variant.model, *variant.files):
            named[file] = f"variant {name}"
    if manifest.vocabulary.map:
        named[manifest.vocabulary.map] = "draft vocabulary"
    if manifest.tokenizer.file:
        named[manifest.tokenizer.file] = "tokenizer"
    if manifest.tokenizer.chat_template:
        named[manifest.tokenizer.chat_template] = "chat template"
    return named


def _version(text: str) -> tuple[int, ...]:
    """The first two numbers of a version: `1.23.0rc1` is (1, 23)."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _read_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Read all arrays of a `.npz` file, by name; a `ValueError` if it is damaged, or too large: it
    may come from a stranger."""
    try:
        with zipfile.ZipFile(path) as file:
            members = file.infolist()
            # A member is never read beyond the size that the directory states.
            size = sum(member.file_size for member in members)
            if size > _LARGEST_ARRAYS:
                raise ValueError(f"{size} bytes, at most {_LARGEST_ARRAYS}")
            arrays = {}
            for member in members:
                name = member.filename.removesuffix(".npy")
                arrays[name] = _array(file.read(member), member.filename)
            return arrays
    except _ARRAY_ERRORS as error:
        raise ValueError(str(error) or type(error).__name__) from None


def _array(content: bytes, name: str) -> NDArray[Any]:
    """The array of a `.npy` file; ValueError if it is none. Never a pickle, which can run code."""
    try:
        array: NDArray[Any] = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except _ARRAY_ERRORS as error:
        raise ValueError(f"{name} is no array: {error}") from None
    return array
