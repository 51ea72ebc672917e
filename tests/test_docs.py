"""The documentation matches the repository: generated parts, links, make targets, and all cited
files and names."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import edge_client
from edge_client.events import Event
from moa.wire.codes import Code
from moa.wire.limits import Limits
from tools.api import api_page
from tools.prose import wrapped
from tools.readme import LEAD, PARSERS, programs, rendered, results_page

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
MODULES = [str(path) for top in ROOT.glob("[!.]*") if top.is_dir() for path in top.rglob("*.py")]
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)[^)]*\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CITED = re.compile(
    r"`((?:moa|export|edge_client|cloud_verifier|benchmarks|tools|tests|docs)/[\w./-]*)(?::([\w.]+))?`"
)


MODULE = re.compile(r"`([\w/]+\.py)`")
"""A module by the end of its path, which the page's context completes."""
LOG = ROOT / "docs" / "log"


def is_history(page: Path) -> bool:
    """Whether a page is dated and stays as it was written: it names modules of its day."""
    return (
        page.name == "CHANGELOG.md"
        or page.is_relative_to(LOG)
        or page.is_relative_to(ROOT / "docs" / "decisions")
    )


def find_module(short: str) -> bool:
    """Whether a module of the repository has a path that ends so."""
    return any(path.endswith(f"/{short}") for path in MODULES)


@functools.cache
def names_in(path: Path) -> set[str]:
    """Every function, class, attribute and method that a module defines, methods and fields as
    `Class.name`."""
    found: set[str] = set()

    def visit(nodes: list[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign):
                found.update(prefix + t.id for t in node.targets if isinstance(t, ast.Name))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found


def test_generated_parts_are_current() -> None:
    """So whatever makes them makes the same."""
    stale = [path.name for path, text in rendered(ROOT) if path.read_text(encoding="utf-8") != text]
    assert not stale, f"run `make docs` and commit {stale}"


def test_results_begin_with_the_pair_that_people_have(tmp_path: Path) -> None:
    names = ("capacity", "real_crowd", LEAD[1], LEAD[0])
    for name in names:
        (tmp_path / f"{name}.md").write_text(f"Of {name}.\n", encoding="utf-8")
    page = results_page(sorted(tmp_path.glob("*.md")), [])
    assert re.findall(r"^Of (\w+)", page, re.MULTILINE) == [LEAD[0], LEAD[1], *names[1::-1]]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_what_a_page_names_is_there_and_its_code_parses(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    if not is_history(page):
        missing += [short for short in MODULE.findall(text) if not find_module(short)]
        for path, name in CITED.findall(text):
            file = ROOT / path
            if not file.exists() or (name and name not in names_in(file)):
                missing.append(f"{path}:{name}" if name else path)
    assert not missing
    for program, *words in commands_in(page):
        parsers()[program].parse_args(words)  # a mistake is a SystemExit, and says what it is
    for language, code in FENCE.findall(text):
        if language == "python":
            body = compile(
                code, page.name, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            ).body
            imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
            exec(compile(ast.Module(imports, []), page.name, "exec"), {})


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.parent != ROOT],
    ids=lambda p: p.relative_to(ROOT).as_posix(),
)
def test_no_line_of_prose_is_wider_than_a_line_of_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert wrapped(text) == text, f"run `python -m tools.prose {page.relative_to(ROOT)}`"


@pytest.mark.parametrize(
    "text",
    [
        "a " * 60 + "- b " * 60,  # no list begins in the middle of a sentence
        "* item " + "word " * 40 + "\n\n  " + "more " * 40,
        "text " * 30 + "`a span of code` " * 20,
        "| a table |" + "x" * 200 + "|\n\n```\n" + "code " * 50 + "\n```\n# heading " + "x " * 80,
    ],
)
def test_wrapping_changes_no_meaning(text: str) -> None:
    def meaning(page: str) -> list[tuple[str, list[str]]]:
        return [(token.type, token.content.split()) for token in MarkdownIt().parse(page)]

    assert meaning(wrapped(text)) == meaning(text)
    assert wrapped(wrapped(text)) == wrapped(text)


def test_decisions_are_numbered_one_after_another() -> None:
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    for number, page in enumerate(pages, 1):
        assert page.name.startswith(f"{number:04}-"), (
            "two decisions of one number, or a number left out"
        )
        assert page.read_text().startswith(f"# {number}. ")


@pytest.mark.parametrize("page", sorted(LOG.glob("2*.md")), ids=lambda p: p.stem)
def test_an_entry_of_the_log_answers_a_question(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# {page.name[:10]}: ")
    assert "\nQuestion: " in text
    assert "\nAnswer: " in text
    assert f"]({page.name})" in (LOG / "README.md").read_text(encoding="utf-8"), "not in the index"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_page_shows_a_folder_of_somebodys_machine(page: Path) -> None:
    """Recorded output has them."""
    assert not re.findall(r"(?<![\w.~])/(?:root|home/\w+|Users/\w+)/", page.read_text("utf-8"))


def test_every_verb_that_a_page_names_is_in_the_makefile() -> None:
    verbs = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(
            re.findall(r"(?:^|`)make ([a-z]+)\b", page.read_text(encoding="utf-8"), re.MULTILINE)
        )
        assert named <= verbs, page.name


def test_every_console_script_is_in_the_reference() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(PARSERS) == set(scripts) == set(parsers())


def commands_in(page: Path) -> list[list[str]]:
    """Commands of ours in a page's code blocks. Lines with `...` or `|` are patterns, not commands."""
    code = "\n".join(
        code
        for language, code in FENCE.findall(page.read_text(encoding="utf-8"))
        if language != "python"
    )
    lines = [line.removeprefix("$ ") for line in code.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.split(" ")[0] in PARSERS]
    return [words for words in commands if not any("|" in word or word == "..." for word in words)]


@functools.cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    return {parser.prog: parser for parser in programs()}


def test_the_readme_shows_all_programs_at_work() -> None:
    assert {command[0] for command in commands_in(ROOT / "README.md")} == set(PARSERS)


def test_the_api_page_has_every_public_name_and_says_something_of_each() -> None:
    page = api_page(ROOT)
    names = [name for name in edge_client.__all__ if name not in ("ClientSettings", "Event")]
    assert [name for name in names if f"# `{name}`\n\n" not in page] == []
    for line in page.splitlines():
        if line.startswith("| `"):
            assert line.rsplit("|", 2)[1].strip(), line


def test_every_event_and_what_generate_takes_is_imported_from_the_device() -> None:
    assert {event.__name__ for event in Event.__subclasses__()} <= set(edge_client.__all__)
    assert edge_client.Grammar.of_schema({"type": "integer"}).kind == "json_schema"


def test_the_api_page_lists_the_fields_of_an_answer() -> None:
    (_, after) = api_page(ROOT).split("## `Answer`\n")
    section = after.partition("\n## ")[0]
    fields = ("text", "verified", "reason", "stats")
    assert [field for field in fields if f"* `{field}: " not in section] == []


def test_the_flag_of_a_time_says_its_unit() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    times = [field.name for field in dataclasses.fields(Limits) if field.type == "float"]
    times.remove("max_tokens_per_second")
    assert "hello_timeout" in times
    flags = ["--" + name.replace("_", "-") for name in times]
    assert [flag for flag in flags if f"* `{flag} SECONDS`" not in page] == []


def test_the_protocol_is_described() -> None:
    text = (ROOT / "docs" / "wire-protocol.md").read_text(encoding="utf-8")
    assert all(
        f"<!-- generated: {part} -->" in text
        for part in ("types", "client", "server", "structures", "codes", "closes")
    )
    assert all(f"| `{code.value}` |" in text for code in Code)
    assert '### Stream `"stream"`' in text
