"""The identity of a model's tokenizer, from its files alone, and whether a bundle is for it: read
before anything is loaded. No torch."""

from __future__ import annotations

from pathlib import Path

from moa.bundle import read_manifest
from moa.errors import BundleError, UsageError
from moa.gguf.reader import is_gguf, read_head
from moa.gguf.tokenizer import tokenizer_of
from moa.process.user_folders import expanded
from moa.safe_text import safe_line
from moa.target.identity import tokenizer_hash
from moa.tokenizer_file import LARGEST_FILE, checked_tokenizer

_WANTED = ("*.json",)
"""Files that are taken from the hub: those that tell the tokenizer, which the target needs anyway."""


def hash_in_files(source: str | Path) -> str:
    """The hash of the tokenizer of a model, a GGUF file, a folder or a hub id. Empty where the model
    has none, or has it in an older form, which only a library reads."""
    path = expanded(source)
    if is_gguf(path):
        return tokenizer_hash(tokenizer_of(read_head(path)).json)
    if path.is_dir():
        return hash_in_folder(path)
    from moa.target import hub  # it imports what speaks with the hub, which takes a second

    return hash_in_folder(hub.copy_of(str(source), _WANTED))


def hash_in_folder(folder: Path) -> str:
    """A hash of the meaning of a folder's `tokenizer.json`: two with the same hash encode texts
    alike. Empty where the folder has none."""
    check_files(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        return ""
    try:
        return tokenizer_hash(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not a tokenizer") from error


def check_files(folder: Path) -> None:
    """Raise a `UsageError` if a tokenizer's files are too large, or describe a tokenizer that makes
    too much text: they are untrusted, and are checked before a library sees them."""
    for name in ("tokenizer.json", "tokenizer.model"):
        file = folder / name
        if file.is_file() and file.stat().st_size > LARGEST_FILE:
            raise UsageError(f"{file} is too large for a tokenizer")
    if (folder / "tokenizer.json").is_file():
        try:
            checked_tokenizer(folder / "tokenizer.json")
        except BundleError as error:
            raise UsageError(str(error)) from None


def refuse_other_tokenizer(
    bundle: str | Path, target: str | Path, *, hint: str, name: str = ""
) -> None:
    """Raise a `UsageError` if a bundle is for another tokenizer than the target's: a verifier of
    that target would refuse every device that has it. `hint` says what to do, `name` what the target
    is called where that is not its place."""
    manifest = read_manifest(expanded(bundle))
    wanted = manifest.tokenizer.hash
    found = hash_in_files(target)
    if not wanted or not found or wanted == found:
        return
    made_for = safe_line(manifest.target.source)
    raise UsageError(
        f"the bundle {bundle} was made for {made_for}, and {name or target} has another tokenizer",
        hint=hint,
    )
