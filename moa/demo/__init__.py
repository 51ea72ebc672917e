"""The embedded pair: a small target and its MoA drafter, so that nothing needs to be downloaded. No
torch here.

`python -m moa.demo` prints where they are; `demo/` in the repository is how they were made.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DemoPaths:
    """Folders of the embedded pair."""

    target: Path
    drafter: Path
    tokenizer: Path
    bundle: Path
    prompts: Path


def paths() -> DemoPaths:
    """Where this installation keeps the embedded pair."""
    home = Path(__file__).parent
    return DemoPaths(
        home / "target", home / "drafter", home / "target", home / "bundle", home / "prompts.json"
    )
