"""References for answers: the target's own text by the library's model, and a strict reader of events."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.kit.exactness import TIE, margin
from edge_client.client import EdgeClient
from edge_client.events import Confirm, Done, Event, Prompt, Retract, Token
from moa.demo import paths
from moa.errors import MoaError
from moa.model.loading import locate
from moa.sampling import SamplingSettings, choose


class Truth:
    """Target-only decoding in float32 on this machine's CPU: one token at a time, with only the sampler from our
    code."""

    def __init__(self, target: str, *, eos_ids: Collection[int], tokens: int) -> None:
        """`target` as the verifier's; empty is the embedded one. Answers have so many `tokens` at most."""
        folder = locate(target or paths().target)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._model.eval()
        self._eos_ids, self._tokens = frozenset(eos_ids), tokens
        self._known: dict[tuple[tuple[int, ...], SamplingSettings], list[int]] = {}

    @torch.inference_mode()
    def answer(self, prompt: Sequence[int], sampling: SamplingSettings) -> list[int]:
        """The target's own answer."""
        key = tuple(prompt), sampling
        if key not in self._known:
            log, new, cache = list(prompt), list(prompt), None
            while len(log) < len(prompt) + self._tokens:
                out = self._model(torch.tensor([new]), past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = out.past_key_values
                new = [choose(out.logits[0, -1].numpy(), sampling, len(log), log)]
                log += new
                if new[0] in self._eos_ids:
                    break
            self._known[key] = log[len(prompt) :]
        return self._known[key]

    def judge(self, prompt: Sequence[int], sampling: SamplingSettings, got: Sequence[int]) -> str:
        """same, tie (they part where float32 sums of another order decide) or different."""
        wanted = self.answer(prompt, sampling)
        if list(got) == wanted:
            return "same"
        return "tie" if margin(self._logits, prompt, wanted, got, sampling)[1] < TIE else "different"

    @torch.inference_mode()
    def _logits(self, context: list[int]) -> Any:
        return self._model(torch.tensor([context]), use_cache=False).logits[0, -1].numpy()


@dataclass
class StrictReader:
    """Replays the user's events; an event that does not fit the earlier ones is an error."""

    prompt: int = 0
    tokens: list[int] = field(default_factory=list)
    verified: list[bool] = field(default_factory=list)
    done: Done | None = None

    def take(self, event: Event) -> None:
        """The next event."""
        _demand(self.done is None, "an event after the end")
        match event:
            case Prompt():
                self.prompt = len(event.ids)
            case Token():
                _demand(event.position == self.prompt + len(self.tokens), "a token is missing, or came twice")
                self.tokens.append(event.id)
                self.verified.append(event.status == "verified")
            case Confirm():
                span = slice(event.start - self.prompt, event.stop - self.prompt)
                _demand(not any(self.verified[span]), "a token was confirmed twice")
                self.verified[span] = [True] * (event.stop - event.start)
            case Retract():
                _demand(event.stop == self.prompt + len(self.tokens), "a retraction leaves a hole")
                start = event.start - self.prompt
                _demand(not any(self.verified[start:]), "a verified token was taken back")
                del self.tokens[start:], self.verified[start:]
            case Done():
                self.done = event
                _demand(event.verified == all(self.verified), "the end does not say what was verified")
            case _:
                pass


async def read(client: EdgeClient, ids: Sequence[int]) -> StrictReader:
    """One turn, read strictly to its end."""
    reader = StrictReader()
    async for event in client.generate(ids=ids):
        reader.take(event)
    _demand(reader.done is not None, "no end")
    return reader


def _demand(good: bool, trouble: str) -> None:
    if not good:
        raise MoaError(f"what the client told cannot be: {trouble}")
