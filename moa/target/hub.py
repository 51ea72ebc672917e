"""Models by their name at the hub. No torch: a name that nobody has is refused before that is
imported, which takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from moa.errors import UsageError, first_line
from moa.process.model_places import HUB_ID


def copy_of(source: str, wanted: Sequence[str]) -> Path:
    """Returns the folder in the hub's cache that holds the files of this model which fit the
    patterns; what is missing there is downloaded. A `UsageError` where there is no such model."""
    if not HUB_ID.fullmatch(source):
        raise UsageError(f"no model at {source}: there is no such file or folder")
    try:
        # Folders inside a repository hold other forms of the same model.
        copy = snapshot_download(source, allow_patterns=list(wanted), ignore_patterns=["*/*"])
        return Path(copy)
    except LocalEntryNotFoundError as error:
        raise UsageError(
            f"no model {source}: not a folder here, not in the hub's cache, and the hub cannot be reached"
        ) from error
    except (HfHubHTTPError, ValueError, OSError) as error:
        raise UsageError(f"cannot get model {source}: {first_line(error)}") from error
