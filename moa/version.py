"""Which version runs: the release, and the commit that it was built from or runs from, where that is
known. git itself is not needed, and nothing of this project: the build reads the commit with it, too.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

COMMIT_FILE = "commit.txt"
"""Where the build of a wheel writes the commit, beside this file."""
_SHOWN = 8
"""Digits of a commit that tell it from others."""
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


@cache
def running_version() -> str:
    """The version that this process runs, such as 0.1.0+gd3f93c4d; without a commit where that is
    not known. Changes that were not committed are not seen. In a checkout it is the commit of the
    first call: a command makes it as it starts."""
    from moa import __version__

    package = Path(__file__).parent
    commit = _written(package) or commit_of(package.parent) or _installed_from()
    if not commit:
        return __version__
    more = "." if "+" in __version__ else "+"
    return f"{__version__}{more}g{commit[:_SHOWN]}"


def commit_of(checkout: Path) -> str:
    """The commit of a checkout of git, by git's own files; empty if there is none, or it cannot be
    read."""
    try:
        git = checkout / ".git"
        if git.is_file():  # of another worktree: it names the folder
            git = checkout / git.read_text().removeprefix("gitdir:").strip()
        shared = git
        if (git / "commondir").is_file():
            shared = git / (git / "commondir").read_text().strip()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return _checked(head)
        branch = head.removeprefix("ref: ")
        if (shared / branch).is_file():
            return _checked((shared / branch).read_text().strip())
        for line in (shared / "packed-refs").read_text().splitlines():
            commit, _, name = line.partition(" ")
            if name == branch:
                return _checked(commit)
    except (OSError, ValueError):  # no files of git, or of another kind
        pass
    return ""


def _written(package: Path) -> str:
    """The commit that the build has written into this package; empty if it has none."""
    try:
        return _checked((package / COMMIT_FILE).read_text().strip())
    except (OSError, ValueError):
        return ""


def _installed_from() -> str:
    """The commit of a repository that pip has installed from by its address; empty if it has not."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        text = distribution("moa-edge").read_text("direct_url.json") or "{}"
        return _checked(str(json.loads(text).get("vcs_info", {}).get("commit_id", "")))
    except (PackageNotFoundError, ValueError):
        return ""


def _checked(text: str) -> str:
    """A commit, if this is one; else nothing."""
    return text if _COMMIT.fullmatch(text) else ""
