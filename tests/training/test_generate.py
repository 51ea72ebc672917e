from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moa.errors import UsageError
from moa.target.torch_target import Target
from moa.training.generate import GeneratedAnswers
from moa.training.sources import DocumentReader, examples

WITH = {"data": [], "target": "x", "max_new_tokens": 6, "temperature": 0.0, "seed": 0, "batch": 4}


@pytest.fixture(scope="module")
def model(target: Path) -> Target:
    return Target.load(target, slots=4, capacity=96)


def _run(model: Target, chats: Path, out: Path, **changes: object) -> str:
    answers = GeneratedAnswers(out, WITH | changes)
    reader = DocumentReader(model.tokenizer, model.facts.vocab_size)
    prompts = [reader.prompt(example, 64) for example in examples([str(chats)])]
    answers.write(model, prompts[:10], quiet=True)
    assert answers.complete()
    return answers.path.read_text(encoding="utf-8")


def test_answers_are_the_targets_own_and_made_once(
    model: Target, chats: Path, tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in _run(model, chats, tmp_path).splitlines()]
    assert len(lines) == 10
    assert (
        model.tokenizer.decode(lines[3]["ids"][: lines[3]["prompt_tokens"]])
        == "<bos>u>3 plus 3?<eos>\na>"
    )
    prompt = torch.tensor([lines[3]["ids"][: lines[3]["prompt_tokens"]]])
    other = model.model.generate(
        prompt, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(prompt)
    )
    assert other[0].tolist() == lines[3]["ids"]
    before = (tmp_path / "generated.jsonl").read_text(encoding="utf-8")
    GeneratedAnswers(tmp_path, WITH).write(None, [])  # type: ignore[arg-type]
    assert (tmp_path / "generated.jsonl").read_text(encoding="utf-8") == before
    with pytest.raises(UsageError, match="another temperature"):
        GeneratedAnswers(tmp_path, WITH | {"temperature": 1.0}).complete()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_run_that_was_cut_off_anywhere_ends_the_same(
    model: Target, chats: Path, tmp_path: Path, temperature: float
) -> None:
    whole = _run(model, chats, tmp_path / "whole", temperature=temperature)
    for cut in (0, 7, len(whole) // 2, len(whole) - 1):
        out = tmp_path / str(cut)
        out.mkdir()
        (out / "generated.jsonl").write_text(whole[:cut], encoding="utf-8")
        assert _run(model, chats, out, temperature=temperature) == whole
