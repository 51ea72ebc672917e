"""transformers' `generate` on the same files, plain and with an assistant model: another peer of the
same cores.

The files become folders as the project itself unpacks them, and the library loads those. Times are
processor time without that of reading the prompt, as they are of the other peers.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import DynamicCache, GenerationConfig

from benchmarks.kit.progress import say
from benchmarks.real.lines import Line, Lines
from moa.target.library import cache_argument
from moa.target.loading import load_model, without_foreign_warnings

PLAIN = "transformers, plain"
ASSISTED = "transformers, assisted by the small model"
_KEY = "transformers/"


def speeds(
    big: Path,
    small: Path,
    prompts: Sequence[tuple[str, list[int]]],
    out: Lines,
    *,
    tokens: int,
    threads: int,
    dtype: str,
) -> None:
    """Tokens a second of the library's answers to these prompts."""
    prompts = [(key, ids) for key, ids in prompts if _key(key) not in out]
    if not prompts:
        return
    torch.set_num_threads(threads)
    target, assistant = (_library_model(file, dtype) for file in (big, small))
    for key, ids in prompts:
        text = torch.tensor([ids])
        prompt = _read(target, text)
        with without_foreign_warnings():  # of how the library's parts call each other
            ways = {
                PLAIN: _answer(target, text, copy.deepcopy(prompt), tokens),
                ASSISTED: _answer(target, text, prompt, tokens, assistant=assistant),
            }
        out.add(_key(key), dtype=dtype, ways=ways)
        seconds = (f"{way} {one['verify']:.2f} + {one['draft']:.2f}" for way, one in ways.items())
        say(f"{key}: {', '.join(seconds)}")


def answers(out: Lines) -> list[Line]:
    """What was measured so far, prompt by prompt."""
    return [line for key, line in out.found.items() if key.startswith(_KEY)]


def said(lines: Sequence[Line]) -> str:
    """How many texts the assistant has left as they were."""
    same = sum(line["ways"][ASSISTED]["ids"] == line["ways"][PLAIN]["ids"] for line in lines)
    return f"In {same} of {len(lines)} answers the assisted text is the plain one."


def _key(prompt: str) -> str:
    """By which a prompt's line is found."""
    return f"{_KEY}{prompt}"


def _library_model(file: Path, dtype: str) -> Any:
    """A model as the library itself runs it, which never ends an answer before its length."""
    model: Any = load_model(file, dtype=getattr(torch, dtype)).model
    model.set_attn_implementation("sdpa")  # the library's default: the loader has chosen ours
    model.generation_config = GenerationConfig(pad_token_id=0, use_cache=True)
    return model


@torch.inference_mode()
def _read(target: Any, text: torch.Tensor) -> DynamicCache:
    """The rows of all of a prompt but its last token."""
    rows = DynamicCache(config=target.config)
    target(text[:, :-1], **{cache_argument(target): rows}, use_cache=True, logits_to_keep=1)
    return rows


def _answer(
    target: Any, text: torch.Tensor, rows: DynamicCache, tokens: int, *, assistant: Any = None
) -> dict[str, Any]:
    """Seconds of drafting and of verifying an answer, its rounds, the tokens of each,
    and its text."""
    with _forwards(target, rows) as forwards, _drafting(assistant) as drafting:
        began = time.process_time()
        found = target.generate(
            text,
            attention_mask=torch.ones_like(text),
            max_new_tokens=tokens,
            do_sample=False,
            assistant_model=assistant,
            **{cache_argument(target): rows},
        )
        seconds = time.process_time() - began
    said = found[0, text.shape[1] :].tolist()
    return {
        "draft": drafting.seconds - drafting.reading,
        "verify": seconds - drafting.seconds,
        "rounds": len(forwards),
        "tokens": len(said),
        "forwards": forwards,
        "ids": said,
    }


@contextmanager
def _forwards(target: Any, rows: DynamicCache) -> Iterator[list[int]]:
    """The tokens of each forward of a target whose prompt is read already. Assisted generation
    takes no note of that: its first forward would read the prompt again."""
    known = rows.get_seq_length()
    forwards: list[int] = []

    def only_new(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not forwards and named["input_ids"].shape[1] > known:
            for name in ("input_ids", "position_ids"):
                if named.get(name) is not None:
                    named[name] = named[name][..., known:]
        forwards.append(named["input_ids"].shape[1])
        return args, named

    hook = target.register_forward_pre_hook(only_new, with_kwargs=True)
    try:
        yield forwards
    finally:
        hook.remove()


class _Drafting:
    """Processor time of an assistant, in all and of its first forward, which reads the prompt."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.reading = 0.0
        self._began = 0.0

    def begins(self, *_: Any) -> None:
        """A forward."""
        self._began = time.process_time()

    def ends(self, *_: Any) -> None:
        """A forward."""
        self.reading = self.reading or time.process_time() - self._began


@contextmanager
def _drafting(assistant: Any) -> Iterator[_Drafting]:
    """What an assistant takes meanwhile, if there is one."""
    found = _Drafting()
    if assistant is None:
        yield found
        return
    generate = assistant.generate

    def timed(*args: Any, **named: Any) -> Any:
        began = time.process_time()
        result = generate(*args, **named)
        found.seconds += time.process_time() - began
        return result

    hooks = [
        assistant.register_forward_pre_hook(found.begins),
        assistant.register_forward_hook(found.ends),
    ]
    try:
        with patch.object(assistant, "generate", timed):
            yield found
    finally:
        for hook in hooks:
            hook.remove()
