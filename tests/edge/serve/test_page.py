"""The chat page: small, without foreign files, and model text never becomes markup or script."""

from __future__ import annotations

import gzip
import re
import shutil
from pathlib import Path
from typing import Any

import edge_client.serve
import moa.api
from moa.api.pages import POLICY, as_sent, page
from tests.web.node import Node

FOLDER = Path(edge_client.serve.__file__).parent / "page"
SHARED = Path(moa.api.__file__).parent / "assets"
FILES = sorted([*FOLDER.iterdir(), *SHARED.iterdir()])
INJECTIONS = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "<svg/onload=alert(1)>",
    "<iframe src=javascript:alert(1)>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](\tjavascript:alert(1))",
    "[x](java\nscript:alert(1))",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "[x](vbscript:msgbox(1))",
    "[x](//evil.example)",
    '[x](https://a.example"onmouseover="alert(1))',
    "![x](https://evil.example/pixel.png)",
    "![x](javascript:alert(1))",
    "[<img src=x onerror=alert(1)>](https://a.example)",
    "`<b>`<i onclick=alert(1)>",
    "```html\n<script>alert(1)</script>\n```",
    '```"onload=alert(1)\nx\n```',
    "# <h1 onclick=alert(1)>",
    "> <style>*{display:none}</style>",
    "- <a href=javascript:alert(1)>x</a>",
    "| <b> | a |\n|---|---|\n| <script>x</script> | y |",
    "**<u>**",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
    "&#106;avascript:alert(1)",
    "https://a.example/<script>",
    "\ue000<b>",
    "[a]: javascript:alert(1)\n\n[a]",
    "<!-- --><![CDATA[<script>]]>",
    "{{constructor.constructor('alert(1)')()}}",
    "$\\href{javascript:alert(1)}{x}$",
    "$$<script>alert(1)</script>$$",
    "<think><img src=x onerror=alert(1)></think><script>alert(1)</script>",
]
TAGS = {
    "a",
    "blockquote",
    "br",
    "code",
    "del",
    "details",
    "em",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "hr",
    "li",
    "math",
    "ol",
    "p",
    "pre",
    "span",
    "strong",
    "summary",
    "table",
    "tbody",
    "td",
    "th",
    "thead",
    "tr",
    "ul",
}
MARKDOWN = """\
# T

a **b** *c* `d` ~~e~~ snake_case_name
f [g](https://h.example)

1. i
   - j
2. k

> l

| m | n |
|---|---|
| o | p |

```py
if x: 1
```
"""
SLOW = [
    *(mark * 4000 for mark in ("*", "`", "[", "~", "**a ", "~~a ", "<think>", "\n</think>a")),
    *(mark * 8000 for mark in ("$$", "$a ", "\\[", "\\(", "$$\n")),
    "> " * 2000 + "x",
    "- " * 2000,
    "_a_" * 1500,
    "|" * 4000 + "\n|-|-|",
    " ".join("`" * length + "a" for length in range(1, 180)),
    "a" + " " * 16000 + "b\nc",
    "[a](b" + " " * 16000,
    "[" * 16000,
    "a|b\n-|" + " " * 16000 + "x",
    "|a|\n" + " " * 16000 + "|",
    "```" + " " * 16000 + "`",
    "```" + "a" * 16000 + "`",
    "#" + " " * 16000 + "x",
    "# " + " #" * 8000 + "x",
    "- " * 8000 + "x",
]


def run(code: str, texts: list[Any]) -> Any:
    """What a program that has the page's parser prints."""
    with Node(f'import {{ parse }} from "{FOLDER.as_uri()}/markdown.js";', f"{code}") as node:
        return node.ask(texts)


def parsed(texts: list[str]) -> list[list[Any]]:
    """The trees that the page's own parser makes of these texts."""
    trees: list[list[Any]] = run("return ask.map(parse);", texts)
    return trees


def elements(nodes: list[Any]) -> Any:
    for node in nodes:
        if not isinstance(node, str):
            yield node
            yield from elements(node["children"])


def text_of(nodes: list[Any]) -> str:
    return "".join(node if isinstance(node, str) else text_of(node["children"]) for node in nodes)


def test_no_text_becomes_anything_but_the_named_elements() -> None:
    allowed = {
        "a": {"href", "target", "rel"},
        "math": {"tex", "display"},
        "pre": {"tabindex", "data-language"},
        "table": {"tabindex"},
        "td": {"class"},
        "th": {"class"},
        "span": {"class"},
        "ol": {"start"},
    }
    for text, tree in zip(INJECTIONS, parsed(INJECTIONS), strict=True):
        for element in elements(tree):
            assert element["tag"] in TAGS, text
            assert set(element["attrs"]) <= allowed.get(element["tag"], set()), text
            if element["tag"] == "a":
                assert re.match(r"https?://|mailto:", element["attrs"]["href"]), text
                assert element["attrs"]["rel"] == "noopener noreferrer"


def test_markup_in_a_text_stays_to_be_read() -> None:
    for text, tree in zip(INJECTIONS[:4], parsed(INJECTIONS[:4]), strict=True):
        assert text_of(tree) == text


def test_the_usual_markdown() -> None:
    (tree,) = parsed([MARKDOWN])
    tags = [element["tag"] for element in elements(tree)]
    assert tags == [
        "h1",
        "p",
        "strong",
        "em",
        "code",
        "del",
        "br",
        "a",
        "ol",
        "li",
        "ul",
        "li",
        "li",
        "blockquote",
        "p",
        "table",
        "thead",
        "tr",
        "th",
        "th",
        "tbody",
        "tr",
        "td",
        "td",
        "pre",
        "code",
        "span",
        "span",
    ]
    assert "snake_case_name" in text_of(tree)


def test_formulas_are_told_from_prices() -> None:
    prices = "It costs $5 or $6, US$7-$8, \\$9, `$a$` and $HOME/$PATH."
    text = f"{prices}\n\n$x_1$, \\(y\\) and\n$$\n- z\n+ 1\n$$\nor \\[\nv \\\\[4pt] w\n\\]."
    formulas = [element for element in elements(parsed([text])[0]) if element["tag"] == "math"]
    assert [formula["attrs"] for formula in formulas] == [
        {"tex": "x_1"},
        {"tex": "y"},
        {"tex": "\n- z\n+ 1\n", "display": "block"},
        {"tex": "\nv \\\\[4pt] w\n", "display": "block"},
    ]
    assert [text_of([formula]) for formula in formulas] == [
        "$x_1$",
        "\\(y\\)",
        "$$\n- z\n+ 1\n$$",
        "\\[\nv \\\\[4pt] w\n\\]",
    ]


def test_provisional_items_headings_and_quotes_are_drawn_as_such() -> None:
    """An item of which nothing is verified stood flush left, as a number, until it was."""
    border = "\ue000"
    for text, whole in (
        (f"Steps:\n{border}1.", "Steps:\n1."),
        (f"Steps:\n1{border}.", "Steps:\n1."),
        (f"1. a\n2.{border} b", "1. a\n2. b"),
        (f"1. a\n{border}2. b\n3. c", "1. a\n2. b\n3. c"),
        (f"- a\n\n{border}- b", "- a\n\n- b"),
        (f"- a\n  {border}- b", "- a\n  - b"),
        (f"{border}# T", "# T"),
        (f"{border}> q", "> q"),
        (f"```\n{border}- x\n```", "```\n- x\n```"),
    ):
        marked, plain = parsed([text, whole])
        assert [one["tag"] for one in elements(marked) if one["tag"] != "p"] == [
            one["tag"] for one in elements(plain) if one["tag"] != "p"
        ], text
        assert text_of(marked).replace(border, "") == text_of(plain)
        assert text_of(marked).count(border) == 1
    (code,) = parsed([f"```\n{border}- x\n```"])
    assert text_of(code).startswith(f"{border}- x"), "in code the mark is text, and not verified"


def test_thinking_is_folded() -> None:
    closed, unopened, running = parsed(
        ["<think>\nHm.\n</think>\n\n42", "Hm.\n</think>\n\n42", "<think>\nHm"]
    )
    assert [node["tag"] for node in closed] == ["details", "p"]
    assert text_of(closed) == "ThoughtHm.42"
    assert unopened == closed
    assert text_of(running) == "Thinking …Hm"


def test_no_text_takes_the_parser_long() -> None:
    quick = run(
        "const used = () => process.cpuUsage().user / 1000;"
        "return ask.map((text) => { const began = used(); parse(text); return used() - began; });",
        SLOW,
    )
    assert max(quick) < 500, "ms of the processor"


FORMULAS = [
    "\\def\\a{" + "x+" * 700 + "}" + "\\a" * 190,
    "\\newcommand{\\a}{x}\\a",
    "\\csname def\\endcsname\\a{x}\\a",
    "\\let\\a=x\\a",
    "\\gdef\\a{x}\\a",
    "\\edef\\a{x}\\a",
    "\\\\globallet\\a=x\\a",
    "\\renewcommand{\\frac}{x}\\frac",
    "\\providecommand{\\a}{x}\\a",
]
LONG_FORMULAS = [
    "x+" * 1000,
    "\\frac{1}{" * 200 + "x" + "}" * 200,
    "x^{" * 450 + "x" + "}" * 450,
    "\\begin{matrix}" + "a&b\\\\" * 330 + "\\end{matrix}",
    "x" + "'" * 1990,
]


def test_no_formula_defines_anything_or_takes_long(tmp_path: Path) -> None:
    for file in FILES:
        shutil.copy(file, tmp_path)
    told = run(
        f"const {{ options }} = await import('{tmp_path.as_uri()}/render.js');"
        "const { readFileSync } = await import('node:fs');"
        "const { runInThisContext } = await import('node:vm');"
        f"runInThisContext(readFileSync('{tmp_path}/temml.min.js', 'utf8'));"
        "const used = () => process.cpuUsage().user / 1000;"
        "return ask.map((tex) => {"
        "  const began = used();"
        "  let made = '';"
        "  try { made = temml.renderToString(tex, options(true)); } catch { /* stays text */ }"
        "  return [made.length, used() - began];"
        "});",
        ["x", *FORMULAS, *LONG_FORMULAS],
    )
    lengths = [length for length, _ in told]
    assert lengths[1 : len(FORMULAS) + 1] == [0] * len(FORMULAS)
    assert lengths[0] > 0
    assert all(0 < length < 200_000 for length in lengths[len(FORMULAS) + 1 :])
    assert max(ms for _, ms in told) < 1500, "ms of the processor"


UNKNOWN = "\u2013"


def figures_after(tmp_path: Path, statuses: list[dict[str, Any] | None]) -> list[str]:
    """What the tiles show after these statuses, a second apart; None: the endpoint told none."""
    for file in FILES:
        shutil.copy(file, tmp_path)
    shown: list[str] = run(
        "const element = () => ({ append() {}, setAttribute(name, value) { this[name] = value; } });"
        "globalThis.document = { createElement: element, createElementNS: element };"
        f"const {{ Figures }} = await import('{tmp_path.as_uri()}/figures.js');"
        "const figures = new Figures(element());"
        "ask.forEach((status, i) => (status ? figures.take(status, 1000 * i) : figures.unknown()));"
        "const names = ['rtt', 'tokensPerForward', 'traffic'];"
        "return names.map((name) => figures[name].value.textContent);",
        statuses,
    )
    return shown


def status(forwards: int, tokens: int, received: int = 0, **more: Any) -> dict[str, Any]:
    counts = {"forwards": forwards, "forward_tokens": tokens, "received_bytes": received}
    return {"rtt_ms": 4.63, "verifier": "one:1", **counts, **more}


def test_a_tile_shows_a_dash_until_its_figure_is_known(tmp_path: Path) -> None:
    assert figures_after(tmp_path, [{}]) == [UNKNOWN, UNKNOWN, UNKNOWN]
    assert figures_after(tmp_path, [status(0, 0)]) == ["4.6 ms", UNKNOWN, UNKNOWN]


def test_tokens_a_forward_are_those_of_the_answers_that_ended_last(tmp_path: Path) -> None:
    answers = [status(0, 0), status(10, 45, 500), status(10, 45, 500), status(14, 51, 2500)]
    assert figures_after(tmp_path, answers[:3]) == ["4.6 ms", "4.5", "0 B/s"]
    assert figures_after(tmp_path, answers) == ["4.6 ms", "1.5", "2.0 kB/s"]


def test_counts_that_began_anew_or_are_another_verifiers_are_no_figures(tmp_path: Path) -> None:
    restarted = [status(10, 45, 9000), status(4, 8, 300)]
    assert figures_after(tmp_path, restarted) == ["4.6 ms", UNKNOWN, UNKNOWN]
    another = [status(10, 45, 9000), status(90, 95, 19000, verifier="two:1")]
    assert figures_after(tmp_path, another) == ["4.6 ms", UNKNOWN, UNKNOWN]


def test_without_a_status_no_old_figure_of_the_link_stays(tmp_path: Path) -> None:
    shown = figures_after(tmp_path, [status(0, 0), status(10, 45, 500), None])
    assert shown == [UNKNOWN, "4.5", UNKNOWN]


def test_scripts_have_no_lines_longer_than_a_line_of_python() -> None:
    web = FOLDER.parents[1] / "web"
    ours = [file for file in [*FILES, *web.rglob("*.js")] if file.suffix == ".js"]
    wide = [
        f"{file.name}:{number}"
        for file in ours
        if not file.name.endswith(".min.js")  # as it was published
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 100
    ]
    assert not wide


def test_a_page_is_small() -> None:
    sent = [as_sent(file.name, file.read_bytes()) for file in FILES]
    assert sum(len(gzip.compress(content)) for content in sent) < 100_000


def test_scripts_are_sent_without_their_comments_and_are_the_same() -> None:
    for file in FILES:
        content = file.read_bytes()
        sent = as_sent(file.name, content)
        if sent == content:
            assert file.suffix != ".js" or file.name == "temml.min.js"  # as it was published
            continue
        written = content.decode().split("\n")
        left = sent.decode().split("\n")
        assert len(left) == len(written), "errors name the lines of the file"
        assert not [line for line in written if opens_a_text(line)], file.name
        for before, after in zip(written, left, strict=True):
            if before != after:
                assert (before.lstrip()[:2], after) == ("//", "")


def opens_a_text(line: str) -> bool:
    """Whether a text of several lines begins or ends here, whose lines may look like comments."""
    code = re.sub(r'/\S+/|//.*|"`+"', "", line)  # these have backticks of their own
    return code.count("`") % 2 > 0


def test_nothing_comes_from_another_host_and_scripts_write_no_markup() -> None:
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    for file in FILES:
        text = file.read_text(encoding="utf-8").replace("http://www.w3.org/", "")
        assert not re.search(r"""["'(]\s*(https?:)?//\w""", text), file.name
        if file.suffix == ".html":
            assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", text)
        if file.suffix == ".js":
            assert not re.search(markup, text)


def test_every_file_is_served_under_the_policy_and_kept_by_the_service_worker() -> None:
    worker = (FOLDER / "sw.js").read_text(encoding="utf-8")
    found = re.search(r"FILES = \[(.*?)\];", worker, re.DOTALL)
    assert found is not None
    listed = set(re.findall(r'"(.*?)"', found[1]))
    assert listed == {"./"} | {file.name for file in FILES} - {"index.html", "sw.js"}
    routes = [*page("edge_client.serve", "page", "/"), *page("moa.api", "assets", "/")]
    assert {route.path for route in routes} == {"/"} | {f"/{file.name}" for file in FILES}
    assert "unsafe" not in POLICY
    assert "default-src 'none'" in POLICY
