"""How densely the code is packed, by package, beside projects that are known to be readable.

    python -m tools.density                      # this repository, and what is installed beside it
    python -m tools.density PATH [PATH ...]      # other checkouts too, for example of nano-vllm

A code line is a line with at least one token that is neither a comment nor a docstring. The figures
are for looking at, not for chasing: no test holds the code to them, but for the two that are zero.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import sys
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "moa",
    "edge_client",
    "cloud_verifier",
    "export",
    "benchmarks",
    "examples",
    "tools",
    "testing",
    "tests",
)
NEIGHBOURS = ("websockets", "starlette")
"""Installed with the developers' tools, and known for code that reads well."""
_LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


@dataclass
class Density:
    """Counts over the modules of one package."""

    code_lines: int = 0
    tokens: int = 0
    comment_lines: int = 0
    tuple_assignments: int = 0
    """Tuples of targets that are set from tuples of values."""
    ternaries: int = 0
    kept_from_formatter: int = 0
    """Comments that tell the formatter to leave something packed."""
    splatted_literals: int = 0
    """Literals unpacked into literals: they can only keep the formatter from one name a line."""

    def add(self, source: str) -> None:
        """Count one module."""
        tree = ast.parse(source)
        docstrings = _docstring_lines(tree)
        lines: set[int] = set()
        comments: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            line = token.start[0]
            if token.type == tokenize.COMMENT:
                comments.add(line)
                self.kept_from_formatter += token.string.startswith(("# fmt: skip", "# fmt: off"))
            elif token.type not in _LAYOUT and line not in docstrings:
                self.tokens += 1
                lines.update(range(line, token.end[0] + 1))
        self.code_lines += len(lines)
        self.comment_lines += len(comments - lines)
        for node in ast.walk(tree):
            self.tuple_assignments += _sets_tuple_from_tuple(node)
            self.ternaries += isinstance(node, ast.IfExp)
            self.splatted_literals += _is_splatted_literal(node)

    @property
    def row(self) -> tuple[str, ...]:
        """The figures of a table's row."""
        thousands = max(self.code_lines, 1) / 1000
        return (
            f"{self.code_lines:,}",
            f"{self.tokens / max(self.code_lines, 1):.1f}",
            f"{self.tuple_assignments / thousands:.1f}",
            f"{self.ternaries / thousands:.1f}",
            f"{100 * self.comment_lines / max(self.code_lines, 1):.1f} %",
            str(self.kept_from_formatter),
            str(self.splatted_literals),
        )


def density_of(paths: Iterable[Path]) -> Density:
    """Count these modules."""
    found = Density()
    for path in paths:
        found.add(path.read_text(encoding="utf-8"))
    return found


def table(others: Sequence[Path] = ()) -> str:
    """The whole table, in Markdown."""
    head = (
        "package",
        "code lines",
        "tokens a code line",
        "tuples set from tuples, per 1,000",
        "ternaries, per 1,000",
        "comment lines",
        "kept from the formatter",
        "splatted literals",
    )
    folders = {name: ROOT / name for name in PACKAGES}
    folders |= {f"({name})": folder for name in NEIGHBOURS if (folder := _installed(name))}
    folders |= {f"({path.name})": path for path in others}
    rows = [head, ("---",) + ("---:",) * (len(head) - 1)]
    for name, folder in folders.items():
        rows.append((name, *density_of(sorted(folder.rglob("*.py"))).row))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _installed(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of statements that are only a text: docstrings of modules, classes, functions, fields."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _sets_tuple_from_tuple(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and isinstance(node.targets[0], ast.Tuple)
    )


def _is_splatted_literal(node: ast.AST) -> bool:
    if isinstance(node, ast.Dict):
        unpacked = [value for key, value in zip(node.keys, node.values, strict=True) if key is None]
        return any(isinstance(value, ast.Dict) for value in unpacked)
    return isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List | ast.Set)


if __name__ == "__main__":
    print(table([Path(argument) for argument in sys.argv[1:]]))
