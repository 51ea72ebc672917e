"""Merges the metrics of several processes into one page, with a label for the process. Pure."""

from __future__ import annotations

from collections.abc import Mapping

_LABEL = "worker"


def merge(pages: Mapping[str, bytes]) -> bytes:
    """One Prometheus text page, with the samples of a family together, as the format requires."""
    families: dict[str, list[str]] = {}
    for process, page in pages.items():
        family: list[str] = []
        for line in page.decode().splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                family = families.setdefault(name, [])
                if not family:
                    family.append(line)
            elif line.startswith("# TYPE "):
                if len(family) == 1:
                    family.append(line)
            elif line:
                family.append(_labelled(line, process))
    return "".join(f"{line}\n" for family in families.values() for line in family).encode()


def _labelled(sample: str, process: str) -> str:
    end = min(i for i in (sample.find("{"), sample.find(" ")) if i >= 0)
    own = f'{_LABEL}="{process}"'
    if sample[end] == "{":
        return f"{sample[:end]}{{{own},{sample[end + 1 :]}"
    return f"{sample[:end]}{{{own}}}{sample[end:]}"
