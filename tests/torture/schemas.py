"""Schemas that others wrote, through real models: however an answer is drafted and cut, it is the
same and valid.

Each schema is answered by the embedded pair and by a random one, greedily and sampled: without
drafts, drafted by the device, by the server, through cuts, and by the device alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import torch
from transformers import AutoTokenizer

from cloud_verifier.app import Verifier
from cloud_verifier.model import Served, load
from cloud_verifier.settings import Settings
from edge_client.client import EdgeClient
from edge_client.device import Device
from edge_client.events import Confirm, Event, Retract, Token
from edge_client.text.chat import prompt_ids
from edge_client.tools.emulated_network import LinkProxy
from moa import demo
from moa.drafters.attention.config import AttentionConfig
from moa.drafters.attention.model import new_attention
from moa.target.loading import load_model
from moa.target.torch_target import Target
from testing.tiny import tiny
from tests.edge.kit import Reader, export_drafter
from tests.grammar.corpus import Schema

_LANES = 16
"""Answers at once."""
_PART = 40
_MOST = 32
"""Tokens of an answer. One that needs more is compared, too, but not finished."""
_PROMPT = (
    "Can you find name, age and city and answer in JSON: At the age of 32, Sofia moved to Denver."
)
_SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 5},
}
_PATIENT = {"offline_after": 60.0}
_HASTY = {"offline_after": 0.1, "settle_seconds": 30.0, "reconnect_seconds": 0.05}
_WAYS: dict[str, dict[str, Any]] = {
    "plain": {"draft": "none", **_PATIENT},
    "device": {"draft": "device", "guess_ahead": False, **_PATIENT},
    "server": {"draft": "server", **_PATIENT},
    "cut": {"draft": "device", **_HASTY},
    "offline": {"offline": True},
}
_CUT_EVERY, _DOWN_SECONDS = 30, 0.5
"""Verified tokens of all answers between two cuts; every third cut lasts."""


class Pair(NamedTuple):
    """A target in memory, and the device that drafts for it."""

    name: str
    served: Served
    device: Device


class _Cuts:
    """Cuts the link while it watches the answers' events, and counts what the device wrote alone
    meanwhile."""

    def __init__(self, link: LinkProxy) -> None:
        self._link = link
        self._tokens = 0
        self.counts: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        match event:
            case Token(status="provisional"):
                self.counts["provisional"] += 1
            case Token():
                self._verified(1)
            case Confirm(start=start, stop=stop):
                self._verified(stop - start)
            case Retract(start=start, stop=stop):
                self.counts["retracted"] += stop - start
            case _:
                pass

    def _verified(self, tokens: int) -> None:
        self._tokens += tokens
        if self._tokens < _CUT_EVERY:
            return
        self._tokens = 0
        self.counts["cuts"] += 1
        if self.counts["cuts"] % 3:
            self._link.cut()
        else:
            self._link.go_down()
            asyncio.get_running_loop().call_later(_DOWN_SECONDS, self._link.restore)


class Checked:
    """What was counted, and what was wrong."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.wrong: list[str] = []

    async def pair(self, pair: Pair, schemas: Sequence[Schema]) -> None:
        """Answer all schemas in all ways."""
        settings = Settings(
            port=0, slots=4 * _LANES, kv_tokens=_LANES * 1024, device="cpu", dtype="float32"
        )
        known = (
            pair.served.target
        )  # with slots of its own: a verifier that ends keeps those of its sessions
        target = Target.from_model(
            known.model, slots=settings.slots, capacity=512, folder=known.folder
        )
        async with (
            Verifier(dataclasses.replace(pair.served, target=target), settings).open() as running,
            LinkProxy("127.0.0.1", running.transport.port) as link,
        ):
            for sampled, sampling in _SAMPLINGS.items():
                plain: list[Reader] = []
                for way, how in _WAYS.items():
                    began = time.process_time()
                    cuts = _Cuts(link)
                    where = (
                        {}
                        if way == "offline"
                        else {"verifier": link.url if way == "cut" else running.transport.url}
                    )
                    watch = cuts if way == "cut" else lambda _: None
                    found = await _answers(pair.device, schemas, watch, **how, **sampling, **where)
                    name = f"{pair.name}, {sampled}, {way}"
                    self.counts[name] += cuts.counts
                    self.counts[name]["processor ms"] += round(1000 * (time.process_time() - began))
                    plain = plain or found
                    for schema, answer, truth in zip(schemas, found, plain, strict=True):
                        self._judge(name, schema, answer)
                        if way != "offline" and not self._same(name, answer, truth):
                            self.wrong.append(
                                f"{name}: {answer.text!r}, not {truth.text!r}, under {schema.schema}"
                            )

    def _same(self, name: str, answer: Reader, truth: Reader) -> bool:
        """Whether what is verified is the plain answer; a link that is cut on and on may leave the
        end unverified."""
        if all(answer.verified):
            return (answer.tokens, answer.text) == (truth.tokens, truth.text)
        self.counts[name]["unverified"] += 1
        known = answer.verified.index(False)
        return name.endswith("cut") and answer.tokens[:known] == truth.tokens[:known]

    def _judge(self, name: str, schema: Schema, answer: Reader) -> None:
        assert answer.done is not None
        self.counts[name]["tokens"] += len(answer.tokens)
        if answer.done.reason != "eos":
            self.counts[name]["unfinished"] += 1
            return
        self.counts[name]["finished"] += 1
        try:
            schema.judge(answer.text)
        except (ValueError, jsonschema.ValidationError) as error:
            self.wrong.append(f"{name}: {answer.text!r} under {schema.schema}: {str(error)[:200]}")


async def _answers(
    device: Device, schemas: Sequence[Schema], watch: Callable[[Event], None], **how: Any
) -> list[Reader]:
    """Ask for an answer under each schema, some at once."""
    room = asyncio.Semaphore(_LANES)
    ids = prompt_ids(device.codec, _PROMPT)[0]
    async with EdgeClient(
        device=device, max_new_tokens=_MOST, max_offline_tokens=_MOST, **how
    ) as client:

        async def answer(schema: Schema) -> Reader:
            transcript = Reader()
            async with room:
                async for event in client.generate(ids=ids, grammar=schema.grammar):
                    transcript.take(event)
                    watch(event)
            return transcript

        return list(await asyncio.gather(*map(answer, schemas)))


def random_pair(folder: Path) -> Pair:
    """A random pair over the embedded tokenizer. One feature of its hidden states is constant and
    makes quotes, closing brackets and ends likelier: else nearly no answer would end within
    hundreds of tokens."""
    tokenizer = AutoTokenizer.from_pretrained(demo.paths().tokenizer)
    target = tiny("llama", vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos_token_id)
    texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    _keep_constant(target.model)
    with torch.no_grad():
        target.get_input_embeddings().weight[:, 0] = 8.0
        target.model.norm.weight[0] = 1.0
        target.lm_head.weight[:, 0] = torch.tensor(
            [(4.0 + 4.0 * text.startswith('"')) * (text.strip('"}]') == "") for text in texts]
        )
        target.lm_head.weight[tokenizer.eos_token_id, 0] = 8.0
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    loaded = load_model(folder / "target")
    torch.manual_seed(0)
    drafter = new_attention(AttentionConfig.for_target(loaded.facts), loaded.model)
    _keep_constant(drafter)
    export_drafter(drafter, folder)
    where = {name: str(folder / name) for name in ("target", "drafter", "bundle")}
    served = load(Settings(slots=4 * _LANES, kv_tokens=_LANES * 1024, **where))
    return Pair("random", served, Device.load(where["bundle"], threads=1))


@torch.no_grad()
def _keep_constant(model: torch.nn.Module) -> None:
    """Let no layer write to the first feature of the hidden states."""
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0


async def check(schemas: Sequence[Schema]) -> Checked:
    """Both pairs, some schemas at a time: a run that is stopped has shown something of everything."""
    torch.set_num_threads(1)
    checked = Checked()
    with tempfile.TemporaryDirectory() as folder:
        embedded = load(
            Settings(slots=4 * _LANES, kv_tokens=_LANES * 1024)
        )  # the pair that is in the wheel
        pairs = random_pair(Path(folder)), Pair("embedded", embedded, Device.load(threads=1))
        for start in range(0, len(schemas), _PART):
            for pair in pairs:
                await checked.pair(pair, schemas[start : start + _PART])
            total = sum(checked.counts.values(), Counter())
            print(
                f"{min(len(schemas), start + _PART)} schemas, {dict(total)}, {len(checked.wrong)} wrong",
                flush=True,
            )
    return checked
