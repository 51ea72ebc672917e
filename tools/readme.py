"""Write the generated parts of the documentation: the references of commands, API and protocol, the
results.

    python -m tools.readme            # or: make docs

Everything is derived from argument parsers, docstrings and benchmarks/results, and
`tests/test_docs.py` fails when it is out of date.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from moa.cli.moa_edge import PROGRAMS
from tools.api import api_page
from tools.prose import wrapped
from tools.wire import filled

ROOT = Path(__file__).resolve().parent.parent
MAIN = {"client_links": "Tokens a second"}
"""How the caption of an experiment's main table begins, where that is not its first."""
TITLES = {
    "cuts": "An answer is cut at a random byte: four clients",
    "cuts_llama_server": "An answer of a llama.cpp server is cut: five clients",
    "upstreams": "Answers of other engines, cut and resumed",
    "upstream_overhead": "First token and throughput through --upstream",
    "acceptance": "Tokens won per verification",
    "acceptance_long": "Tokens won per verification, with room for sixteen",
    "capacity": "Readers that one verifier holds",
    "client_everyday": "One-digit sums and everyday questions, online and offline",
    "client_links": "Device and server, by link",
    "client_offline": "Right answers when the link dies after m tokens (replayed)",
    "client_reconnect": "The link returns",
    "client_slow": "Device and server, by link, with a slow target",
    "client_loopback": "Drafts of the server beside plain streams, without a link",
    "drafters_witness": "Drafters of equal training on a real model, by kind of text",
    "masks": "What a grammar costs, and what it wins",
    "real_cuts": "A real pair: HumanEval when the link dies after m tokens",
    "real_drafts": "A real pair: right guesses and tokens a round",
    "real_exact": "A real pair: a GGUF target's text alone and among others",
    "real_forwards": "A real pair: a GGUF target's forward beside llama.cpp's own call",
    "real_beside": "A real pair: a long prompt beside another session's answer",
    "real_crowd": "A real pair: clients that come and go",
    "real_mixture": "A mixture of experts with random weights: drafted and not",
    "real_mixture_limited": "The same, its 3.8 GB of weights in 2.8 GB of memory",
    "real_faults": "A real pair: answers through cuts and kills",
    "real_faults_05b": "The same with the 0.5B file at both ends",
    "real_faults_float32": "The same with the 1.5B target as a folder, in float32",
    "real_everyday": "A real pair: what people do all day, through cuts and kills",
    "real_links": "A real pair: device and server, by link and time of a forward",
    "real_peers": "A real pair: beside llama.cpp",
    "real_trained": "A real pair: drafters trained beside the target, and the sibling",
    "real_trained_300": "A real pair: the default drafter after 300 steps on 95 answers, and the sibling",
    "server_load": "The verifier under load",
    "families": "Siblings of every family: export, memory, steps",
}
LEAD = (
    "real_cuts",
    "real_drafts",
    "real_links",
    "real_peers",
    "real_forwards",
    "real_faults",
    "real_exact",
    "real_everyday",
)
"""What the page begins with: the pair that people have. Other experiments with it follow, then those
with the embedded pair."""
DRAWN = "client_slow"
"""The experiment whose table is only drawn: the picture has its figures."""
PARSERS = {"moa-edge": "moa.cli.moa_edge:parser"} | {
    program.name: program.parser for program in PROGRAMS
}
"""Where the argument parser of each console script is made."""


def main() -> None:
    """Rewrite the files in place."""
    for path, text in rendered(ROOT):
        path.write_text(text, encoding="utf-8")


def rendered(root: Path) -> Iterator[tuple[Path, str]]:
    """What each generated file should hold."""
    for path, text in _made(root / "docs", root):
        yield path, wrapped(text)


def _made(docs: Path, root: Path) -> Iterator[tuple[Path, str]]:
    yield docs / "cli.md", cli_reference(programs())
    yield docs / "api.md", api_page(root)
    protocol = docs / "wire-protocol.md"
    yield protocol, filled(protocol.read_text(encoding="utf-8"))
    if tables := sorted((root / "benchmarks" / "results").glob("*.md")):
        yield docs / "results.md", results_page(tables, sorted((docs / "pictures").glob("*.svg")))


def digest(tables: str, caption: str = "") -> str:
    """The first table whose caption begins so, with it, and the text after all tables."""
    blocks = tables.strip().split("\n\n")
    shown = [n for n, block in enumerate(blocks) if block.startswith("|")]
    if not shown:
        return tables.strip()
    first = (
        next(n for n in shown if blocks[n - 1].startswith(f"**{caption}")) if caption else shown[0]
    )
    return "\n\n".join([*blocks[first - 1 if caption else 0 : first + 1], *blocks[shown[-1] + 1 :]])


def remarks(tables: str) -> str:
    """What is written between tables and after them."""
    return "\n\n".join(
        block for block in tables.strip().split("\n\n") if not block.startswith(("|", "**"))
    )


def results_page(tables: Iterable[Path], pictures: Iterable[Path]) -> str:
    """The pictures, and the main table of each experiment, one after another."""
    parts = [
        "# Results\n\nGenerated by `make docs` from what `make bench` wrote: the main table of each experiment. "
        "More tables and raw figures are in benchmarks/results; questions and answers in [the log](log/README.md). "
        "The real pair comes first (Qwen2.5-Coder-Instruct, 1.5B and 0.5B: [what was measured](real-models.md)). "
        "Of the embedded pair, what was measured before 2026-11-24 is of the weights of that time, "
        "in the same shapes.\n"
    ]
    if drawn := "\n".join(f"![{p.stem.replace('-', ' ')}](pictures/{p.name})\n" for p in pictures):
        parts.append(f"## Pictures\n\n{drawn}")
    for path in sorted(tables, key=_place):
        text = path.read_text(encoding="utf-8")
        shown = remarks(text) if path.stem == DRAWN else digest(text, MAIN.get(path.stem, ""))
        parts.append(f"## {title(path)}\n\n{shown}\n")
    return "\n".join(parts)


def _place(path: Path) -> tuple[int, str]:
    """Where the page shows an experiment."""
    if path.stem in LEAD:
        return LEAD.index(path.stem), path.stem
    return len(LEAD) + (not path.stem.startswith("real_")), path.stem


def title(path: Path) -> str:
    """An experiment's heading."""
    return TITLES.get(path.stem, path.stem.replace("_", " ").capitalize())


# --- the command reference --------------------------------------------------------------------------------------------


def programs() -> list[argparse.ArgumentParser]:
    """The parsers of all console scripts."""
    found = (where.split(":") for where in PARSERS.values())
    return [getattr(importlib.import_module(module), name)() for module, name in found]


def cli_reference(parsers: Iterable[argparse.ArgumentParser]) -> str:
    """A Markdown page with the options of each command and subcommand. Options that an earlier
    subcommand has, too, are only named.

    Not `--help` itself: the layout of that text changes with the Python version, and this page must
    not.
    """
    parts = [
        "# Command reference\n\nGenerated by `make docs` from the argument parsers; do not edit.\n"
    ]
    for parser in parsers:
        parts += _command(parser, 2)
    return "\n".join(parts)


def _command(
    parser: argparse.ArgumentParser,
    level: int,
    summary: str = "",
    told: dict[str, tuple[str, str]] | None = None,
) -> Iterator[str]:
    """A parser's section, and those of its subcommands; `told` holds the rows of earlier sections
    of this program, with section and name."""
    told = {} if told is None else told
    yield f"{'#' * level} `{parser.prog}`\n"
    if about := parser.description or summary:
        yield f"{about.strip()}\n"
    # argparse has no public way to list what a parser accepts; these names have been stable since
    # Python 2.7.
    actions = [
        action
        for action in parser._actions
        if action.help != argparse.SUPPRESS and action.dest != "help"
    ]
    subcommands = [action for action in actions if isinstance(action, argparse._SubParsersAction)]
    options = {_row(action, parser.prog): action for action in actions if action not in subcommands}
    if own := [row for row in options if row not in told]:
        yield "\n".join([*own, ""])
    elsewhere: dict[str, list[str]] = {}
    for row, action in options.items():
        if not action.option_strings:  # a page says in which order arguments stand
            continue
        where, name = told.setdefault(row, (parser.prog, action.option_strings[-1]))
        if where != parser.prog:
            elsewhere.setdefault(where, []).append(f"`{name}`")
    for where, names in elsewhere.items():
        missing = [
            f"`{name}`"
            for place, name in told.values()
            if place == where and f"`{name}`" not in names
        ]
        less = 0 < len(missing) < len(names)
        yield f"As in `{where}`{', all but' * less}: {', '.join(missing if less else names)}.\n"
    for subcommand in subcommands:
        summaries = {one.dest: one.help or "" for one in subcommand._choices_actions}
        for child in dict.fromkeys(
            subcommand.choices.values()
        ):  # an alias is the same parser again
            yield from _command(
                child, level + 1, summaries.get(child.prog.rpartition(" ")[2], ""), told
            )


def _row(action: argparse.Action, program: str) -> str:
    told = " ".join(_help(action, program).split())
    default = "" if "(default" in told else _default(action)
    return f"* {_usage(action)}" + (f": {told}" if told else "") + default


def _usage(action: argparse.Action) -> str:
    names = ", ".join(action.option_strings)
    if action.nargs == 0:
        return f"`{names}`"
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}"
        if action.choices is not None
        else action.dest.upper()
    )
    if isinstance(value, tuple):
        value = " ".join(value)
    if not names:
        return f"`{value}`" + (" (optional)" if action.nargs in ("?", "*") else "")
    return f"`{names} {value}`"


def _default(action: argparse.Action) -> str:
    if action.required and action.option_strings:
        return " (required)"
    off = action.default is None or action.default is False or action.default is argparse.SUPPRESS
    if off or action.default in ("", [], ()):
        return ""
    return f" (default: {action.default})"


def _help(action: argparse.Action, program: str) -> str:
    return (
        (action.help or "") % {**vars(action), "prog": program}
        if "%" in (action.help or "")
        else action.help or ""
    )


if __name__ == "__main__":
    main()
