"""What people do with an assistant all day: what counts as right, and a scene through sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.real import everyday
from benchmarks.real.__main__ import main
from benchmarks.real.lines import read
from benchmarks.real.prompts import Prompt, as_line, invoices
from export.cli import main as export
from moa.api.tools import ToolFormat
from testing.tiny import save_tiny

QWEN = "{% if tools %}<tool_call>{% endif %}"


class Scripted:
    """Answers what it was given, in place of a model."""

    def __init__(self, answers: Sequence[str]) -> None:
        self.format = ToolFormat.of(QWEN)
        self.asked: list[Sequence[Mapping[str, Any]]] = []
        self._answers: Iterator[str] = iter(answers)

    async def ask(self, messages: Sequence[Mapping[str, Any]], *_: Any, **__: Any) -> str:
        self.asked.append(list(messages))
        return next(self._answers)


def bare(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{bare(name, **arguments)}\n</tool_call>"


ALL_CALLS = [
    call("find_flight", to="Lisbon", day="2026-12-03"),
    call("convert", dollars=240, currency="EUR"),
    call("book", flight="MA 417"),
]

AS_QWEN_CODER = [
    f"```json\n{bare('find_flight', to='Lisbon', day='2026-12-03')}\n```",
    bare("convert", dollars=240, currency="EUR") + "\n" + bare("book", flight="MA 417"),
    bare("book", flight="MA 417"),
]
"""Without its mark, and two calls at once, of which the agent takes one."""


@pytest.mark.parametrize(
    ("answers", "right"),
    [
        ([*AS_QWEN_CODER, "221.40 EUR, the code is QX7P2."], 1),
        ([*ALL_CALLS, "221.40 EUR, the code is QX7P2."], 1),
        ([*ALL_CALLS, "It is booked."], 0),
        ([ALL_CALLS[0], ALL_CALLS[2], "The code is QX7P2."], 0),
        (["The code is QX7P2."], 0),
        ([ALL_CALLS[0]] * 6, 0),
    ],
)
def test_an_agent_is_right_that_has_used_its_tools_and_tells_the_code(
    answers: list[str], right: int
) -> None:
    asker = Scripted(answers)
    assert asyncio.run(everyday.SCENES["an agent with three tools"](asker, [], 0)) == right
    assert len(asker.asked) == len(answers)
    results = [message for message in asker.asked[-1] if message["role"] == "tool"]
    assert len(results) == len(answers) - 1


def test_an_invoice_is_right_that_has_the_letters_number_and_customer() -> None:
    letters = [prompt.messages[0]["content"] for prompt in invoices(10)]
    words = [letter.split("Invoice ")[1].split(" of ")[0] for letter in letters]
    names = [letter.split(" for ")[1].split(":")[0] for letter in letters]
    answers = [
        json.dumps({"number": number, "customer": customer})
        for number, customer in zip(words, names, strict=True)
    ]
    scene = everyday.SCENES["invoices as JSON"]
    assert asyncio.run(scene(Scripted(answers), [], 0)) == 10
    answers[0] = answers[0][:-1]  # no JSON
    answers[1] = json.dumps({"number": "Z-0", "customer": names[1]})
    answers[2] = json.dumps({"number": words[2], "customer": "Nobody"})
    assert asyncio.run(scene(Scripted(answers), [], 0)) == 7


@pytest.mark.parametrize("name", ["a conversation", "a long prompt"])
def test_prompts_are_many_rounds_or_very_long(name: str) -> None:
    prompts = [Prompt("chat", f"{n}", [{"role": "user", "content": f"word {n}"}]) for n in range(9)]

    class Codec:
        def plain(self, text: str) -> list[str]:
            return text.split()

    asker = Scripted(["yes"] * 9)
    asker.codec = Codec()  # type: ignore[attr-defined]
    asyncio.run(everyday.SCENES[name](asker, prompts, 8))
    if name == "a conversation":
        assert [len(messages) for messages in asker.asked] == list(range(1, 18, 2))
    else:
        ((question,),) = asker.asked
        assert "word 3" in question["content"]
        assert "word 4" not in question["content"]


def test_a_scene_through_faults_is_the_plain_text_and_is_told_in_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny("llama", tmp_path / "target", max_position_embeddings=2048)
    template = "{% for one in messages %}{{ one.content }}{% endfor %}"
    (tmp_path / "target" / "chat_template.jinja").write_text(template)
    words = ["setup", str(tmp_path / "target"), "--sibling", str(tmp_path / "target")]
    assert export([*words, "--out", str(tmp_path / "out"), "-v", "cpu-fp32"]) == 0
    prompts = [Prompt("chat", "1", [{"role": "user", "content": "a b c d e f"}])]
    (tmp_path / "prompts.jsonl").write_text("".join(as_line(one) + "\n" for one in prompts))
    one_scene = {"a long prompt": everyday.SCENES["a long prompt"]}
    monkeypatch.setattr(everyday, "SCENES", one_scene)
    bundle = str(tmp_path / "out" / "bundle")
    run = ["everyday", str(tmp_path), str(tmp_path / "target"), "--bundle", bundle]
    assert main([*run, "--prompt", "24", "--threads", "0"]) == 0
    plain, faulty, alone = read(tmp_path / "everyday.jsonl")
    assert [line["way"] for line in (plain, faulty, alone)] == list(everyday.WAYS)
    assert faulty["answers"][0]["ids"] == plain["answers"][0]["ids"]
    assert faulty["answers"][0]["verified"]
    assert faulty["answers"][0]["fault"] in ("cut", "kill")
    assert not plain["answers"][0]["fault"]
    assert not alone["answers"][0]["verified"]
    capsys.readouterr()
    assert main(["tables", str(tmp_path)]) == 0
    assert "| a long prompt | 1 |" in capsys.readouterr().out
