"""Chat templates render as in transformers, and a hostile one ends soon with a one-line error."""

from __future__ import annotations

import inspect
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moa.api.errors import ApiError
from moa.api.requests import template_variables
from moa.chat import template as module
from moa.chat.template import ChatTemplate
from moa.errors import BundleError, UsageError

TEMPLATES = sorted((Path(__file__).parent / "templates").glob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "<|eot_id|>", "pad_token": "<pad>"}
CHATS = {
    "one": [{"role": "user", "content": "  What is <b>17</b> & 25? Grüße, 世界 👋 "}],
    "system": [
        {"role": "system", "content": "Be brief. /no_think"},
        {"role": "user", "content": "Hi\n\nthere"},
    ],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "'quotes' \"and\" \\ {{ braces }} {% tags %}"},
    ],
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "<it>", "parameters": PARAMETERS},
    }
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    plain = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=plain, **SPECIAL)


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.stem)
def test_what_transformers_writes(file: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    ours = ChatTemplate.read(file)
    source = file.read_text(encoding="utf-8")
    for tools in ([], TOOLS):
        for name, chat in CHATS.items():
            theirs = tokenizer.apply_chat_template(
                chat,
                tools=tools or None,
                chat_template=source,
                tokenize=False,
                add_generation_prompt=True,
            )
            assert (
                ours.render(chat, tokenizer.special_tokens_map, {"tools": tools or None}) == theirs
            ), name


def test_variables_reach_the_template_as_in_transformers(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    file = next(file for file in TEMPLATES if file.stem == "qwen3")
    chat = CHATS["one"]
    given = {"enable_thinking": False}
    theirs = tokenizer.apply_chat_template(
        chat,
        chat_template=file.read_text(encoding="utf-8"),
        tokenize=False,
        add_generation_prompt=True,
        **given,
    )
    ours = ChatTemplate.read(file)
    assert ours.render(chat, SPECIAL, given) == theirs != ours.render(chat, SPECIAL)
    assert ours.render(
        chat, SPECIAL, {"messages": [], "add_generation_prompt": False}
    ) == ours.render(chat, SPECIAL)


def test_no_variable_is_a_parameter_of_transformers() -> None:
    """`chat_template` would be a program of the client's, and `tokenize` another type."""
    parameters = set(inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters)
    for name in parameters - {"kwargs"}:
        with pytest.raises(ApiError, match="cannot be set here"):
            template_variables({name: "x"})


def made(folder: Path, source: str) -> ChatTemplate:
    (folder / "chat.jinja").write_text(source, encoding="utf-8")
    return ChatTemplate.read(folder / "chat.jinja")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ raise_exception('roles\\x1b[2J must alternate') }}", r"roles\\x1b\[2J must alternate"),
        ("{{ messages[9].content.x }}", "no element 9"),
        ("{{ '%d' % 'x' }}", "number is required"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ 'x' * 2**30 }}", "MemoryError"),
        (
            "{% set x = 'xxxxxxxx' %}{% set ns = namespace(x=x) %}"
            "{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
            "MemoryError|too much memory",
        ),
        ("{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}", "makes more than"),
        ("{{ '\\ud800' }}", "."),
        ("{{ lipsum(n=10**9) }}", "too long|memory|over"),
        ("{{ 9 ** (9 ** 9) }}", "takes over|MemoryError"),
    ],
)
def test_what_goes_wrong_in_a_template_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, what: str
) -> None:
    monkeypatch.setattr(module, "_RENDER_SECONDS", 3.0)
    with pytest.raises(UsageError, match=what):
        made(tmp_path, source).render(CHATS["one"], {})


def test_a_template_without_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RENDER_SECONDS", 1.0)
    loop = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    template = made(tmp_path, "{% if messages[0].content == 'loop' %}" + loop + "{% endif %}fine")
    assert template.render(CHATS["one"], {}) == "fine"
    began = time.monotonic()
    with pytest.raises(BundleError, match="takes over"):
        template.render([{"role": "user", "content": "loop"}], {})
    assert time.monotonic() - began < 30
    assert template.render(CHATS["one"], {}) == "fine", (
        "the next conversation has a process of its own"
    )


def test_secrets_are_not_in_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOA_EDGE_TOKEN", "moa_secret")
    template = made(tmp_path, "fine")
    template.render(CHATS["one"], {})
    assert template._process is not None
    assert b"moa_secret" not in Path(f"/proc/{template._process.pid}/environ").read_bytes()


def test_what_is_too_large_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="too large"):
        made(tmp_path, "x" * (2**20 + 1))
