"""The oldest version that `pyproject.toml` allows of each dependency, as constraints for pip: what
`make oldest` installs, so that a lower bound is a version that the tests ran with."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("train", "export", "verifier", "optimum", "serve", "upstream")
"""What the tests of models, training and export need, besides the base install: they run verifiers
and their endpoint, too."""
KEPT = {"torch"}
"""Not the oldest but the pinned one, which export needs. The verifier's 2.9 has no build for a CPU
alone in Python's own index; with the one for CUDA the conformance suite of targets passes."""


def main() -> int:
    """Print constraints: the oldest versions, then the pins of all that has none."""
    oldest = lower_bounds()
    for name, version in sorted(oldest.items()):
        print(f"{name}=={version}")
    return 0


def lower_bounds() -> dict[str, str]:
    """The oldest versions allowed, by name; a dependency without one is an error."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    texts = list(project["dependencies"])
    for extra in EXTRAS:
        texts += project["optional-dependencies"][extra]
    found: dict[str, str] = {}
    for requirement in map(Requirement, texts):
        name = canonicalize_name(requirement.name)
        if name == "moa-edge" or name in KEPT:
            continue
        (bound,) = (part.version for part in requirement.specifier if part.operator == ">=")
        found[name] = bound
    return found


if __name__ == "__main__":
    sys.exit(main())
