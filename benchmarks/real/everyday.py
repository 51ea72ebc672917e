"""What people do with an assistant all day, through sockets: a conversation of many rounds, a prompt
of thousands of tokens, invoices written as JSON, and an agent with three tools.

Each is run three times. *Plain* is a stream without drafts and without faults: the target's own
text. *Faults* is `auto`, and in every answer the connection is cut or the verifier is killed with
signal 9; every text must be the plain one, and verified. *Offline* is the device alone. Greedy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.kit.figures import table
from benchmarks.kit.progress import say
from benchmarks.real.faults import Restarted
from benchmarks.real.lines import Lines
from benchmarks.real.prompts import Prompt, invoices
from edge_client.client import EdgeClient
from edge_client.conversation import Conversation
from edge_client.device import Device
from edge_client.events import AnswerSoFar
from edge_client.settings import ClientSettings
from edge_client.text.codec import TextCodec
from edge_client.tools.emulated_network import LinkProxy
from moa.api.tools import Tool, ToolFormat, Tools, listed
from moa.errors import MoaError
from moa.grammar.spec import Grammar

WAYS = ("plain", "faults", "offline")
_ROUNDS = 10
_INVOICES = 10
_ANSWER = 48
"""Tokens of an answer of the conversation, and behind the long prompt."""
_WHOLE = 200
"""Tokens that a JSON object or a tool call may have: it ends by itself."""
_LATEST_FAULT = 8
"""Tokens after which the link is cut or the verifier killed, at most."""
_STEPS = 6
"""Answers that the agent may take."""
_PATIENCE = 900.0
"""Seconds that anything may take: a long prompt on one core takes minutes."""
_MARGIN = 1024
"""Tokens that a context has beside the long prompt."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer of a scene."""

    prompt: int
    """Tokens of its prompt."""
    ids: list[int]
    text: str
    verified: bool
    fault: str
    """What happened in its middle: cut, kill, or nothing."""
    seconds: float


# ---- asking


class _Asker:
    """Asks one question after another in one conversation, and lets faults happen."""

    def __init__(
        self,
        conversation: Conversation,
        codec: TextCodec,
        link: LinkProxy | None,
        server: Restarted,
        rng: random.Random,
    ) -> None:
        """With a `link` every answer meets a fault."""
        self._conversation = conversation
        self.codec = codec
        self.format = ToolFormat.of(codec.template)
        self._link = link
        self._server = server
        self._rng = rng
        self.answers: list[Answer] = []

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokens: int,
        *,
        grammar: Grammar | None = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        """The text of the answer to this conversation."""
        template = {"tools": [listed(tool) for tool in tools]} if tools else None
        ids = self.codec.plain(self.codec.chat(messages, template))
        after = self._rng.randint(1, _LATEST_FAULT) if self._link is not None else 0
        kills = self._rng.random() < 0.5
        said = AnswerSoFar()
        fault = ""
        back: asyncio.Task[None] | None = None
        began = time.monotonic()
        asking = self._conversation.generate(ids=ids, grammar=grammar, max_new_tokens=tokens)
        async for event in asking:
            said.take(event)
            if self._link is None or fault or len(said.ids) < after:
                continue
            fault = "kill" if kills else "cut"
            if kills:
                self._server.kill()
                back = asyncio.create_task(asyncio.to_thread(self._server.start))
            else:
                self._link.cut()
        if back is not None:
            await back
        if said.done is None:
            raise MoaError("the answer never ended")
        answer = Answer(
            prompt=len(ids),
            ids=said.ids,
            text=said.done.text,
            verified=said.done.verified,
            fault=fault,
            seconds=round(time.monotonic() - began, 1),
        )
        self.answers.append(answer)
        return answer.text


Scene = Callable[[_Asker, Sequence[Prompt], int], Any]
"""Asks what belongs to it; returns how many of its answers are right, or None where no program can
tell."""


# ---- the scenes


async def _conversation(asker: _Asker, prompts: Sequence[Prompt], tokens: int) -> None:
    """Many rounds, each behind all of the earlier ones."""
    messages: list[dict[str, str]] = []
    questions = [prompt for prompt in prompts if prompt.kind == "chat"][:_ROUNDS]
    for question in questions:
        messages += question.messages
        answer = await asker.ask(messages, _ANSWER)
        messages.append({"role": "assistant", "content": answer})


async def _long_prompt(asker: _Asker, prompts: Sequence[Prompt], tokens: int) -> None:
    """A question behind so many tokens of notes."""
    notes = ""
    for prompt in prompts:
        notes += prompt.messages[0]["content"] + "\n\n"
        if len(asker.codec.plain(notes)) >= tokens:
            break
    question = f"{notes}These are my notes. What are they about? Answer in one paragraph."
    await asker.ask([{"role": "user", "content": question}], _ANSWER)


async def _invoices(asker: _Asker, prompts: Sequence[Prompt], tokens: int) -> int:
    """Letters, each to be written as an object of a schema with a list of objects in it. One is
    right if it parses, and number and customer are the letter's."""
    right = 0
    for prompt in invoices(_INVOICES):
        grammar = Grammar.of_schema(prompt.schema or {})
        text = await asker.ask(prompt.messages, _WHOLE, grammar=grammar)
        with contextlib.suppress(ValueError):
            found = json.loads(text)
            letter = prompt.messages[0]["content"]
            right += found["number"] in letter and found["customer"] in letter
    return right


def _tool(name: str, description: str, **properties: Any) -> Tool:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return msgspec.convert({"function": {**function, "strict": True}}, Tool)


_TEXT = {"type": "string"}
_TOOLS = (
    _tool("find_flight", "The cheapest flight, with its price in US dollars.", to=_TEXT, day=_TEXT),
    _tool("convert", "Converts US dollars.", dollars={"type": "number"}, currency=_TEXT),
    _tool("book", "Books a flight by its number.", flight=_TEXT),
)
_RESULTS: dict[str, dict[str, Any]] = {
    "find_flight": {"flight": "MA 417", "dollars": 240},
    "convert": {"amount": 221.4, "currency": "EUR"},
    "book": {"booked": True, "code": "QX7P2"},
}
_TASK = (
    "Find the cheapest flight to Lisbon on 2026-12-03, convert its price into euros, and book it. "
    "Call one tool at a time. At the end tell me the price in euros and the booking code."
)


async def _agent(asker: _Asker, prompts: Sequence[Prompt], tokens: int) -> int:
    """Calls of three tools, one after the other, until it answers in words. It is right if it has
    called all three, and tells what the last one has returned."""
    tools = Tools(tuple(_TOOLS), "auto", parallel=False)
    grammar = asker.format.grammar(tools, None)
    messages: list[dict[str, Any]] = [{"role": "user", "content": _TASK}]
    called: set[str] = set()
    for _ in range(_STEPS):
        text = await asker.ask(
            asker.format.messages(messages, tools), _WHOLE, grammar=grammar, tools=_TOOLS
        )
        said, calls = tools.reader().split(text)
        if not calls:
            return int(len(called) == len(_TOOLS) and _RESULTS["book"]["code"] in text)
        (call,) = calls[:1]
        called.add(call.name)
        function = {"name": call.name, "arguments": call.arguments}
        messages.append(
            {
                "role": "assistant",
                "content": said,
                "tool_calls": [{"id": "1", "type": "function", "function": function}],
            }
        )
        result = json.dumps(_RESULTS.get(call.name, {"error": "no such tool"}))
        messages.append({"role": "tool", "tool_call_id": "1", "content": result})
    return 0


SCENES: dict[str, Scene] = {
    "a conversation": _conversation,
    "a long prompt": _long_prompt,
    "invoices as JSON": _invoices,
    "an agent with three tools": _agent,
}


# ---- the run


async def measure(
    target: str,
    bundle: Path,
    prompts: Sequence[Prompt],
    out: Lines,
    *,
    prompt_tokens: int,
    threads: int,
    scenes: Collection[str] = tuple(SCENES),
) -> None:
    """Each of these scenes in every way that is not in `out` yet."""
    device = Device.load(bundle, threads=threads)
    codec = TextCodec.of(device.bundle)
    context = prompt_tokens + _MARGIN
    flags = ["--slots=2", f"--max-context-tokens={context}", f"--max-prompt-tokens={context}"]
    server = Restarted.of(target, flags, threads=threads)
    missing = [(name, way) for name in scenes for way in WAYS if f"{name}/{way}" not in out]
    with server.running():
        for name, way in missing:
            async with _asking(way, device, codec, server) as asker:
                right = await SCENES[name](asker, prompts, prompt_tokens)
            answers = [asdict(answer) for answer in asker.answers]
            out.add(f"{name}/{way}", scene=name, way=way, right=right, answers=answers)
            seconds = sum(answer.seconds for answer in asker.answers)
            say(f"{name}, {way}: {len(answers)} answers, {seconds:.0f} s")


@contextlib.asynccontextmanager
async def _asking(
    way: str, device: Device, codec: TextCodec, server: Restarted
) -> AsyncGenerator[_Asker, None]:
    """A client with one conversation, over a link of its own."""
    async with LinkProxy("127.0.0.1", server.port, seed=0) as link:
        settings = ClientSettings(
            verifier="" if way == "offline" else link.url,
            offline=way == "offline",
            draft="auto" if way == "faults" else "none" if way == "plain" else "device",
            temperature=0.0,
            settle_seconds=_PATIENCE,
            answer_seconds=_PATIENCE,
        )
        async with EdgeClient(settings, device=device) as client:
            if way != "offline":
                await client.wait_online(120)
            async with client.conversation() as conversation:
                faulty = link if way == "faults" else None
                yield _Asker(conversation, codec, faulty, server, random.Random(way))


def figures(lines: Lines) -> dict[str, Any]:
    """By scene, where all ways have run."""
    runs = []
    for scene in SCENES:
        ways = {way: lines.found.get(f"{scene}/{way}") for way in WAYS}
        plain, faulty, alone = ways["plain"], ways["faults"], ways["offline"]
        if plain is None or faulty is None or alone is None:
            continue
        runs.append(
            {
                "scene": scene,
                "answers": len(faulty["answers"]),
                "longest_prompt": max(answer["prompt"] for answer in plain["answers"]),
                "cuts": sum(answer["fault"] == "cut" for answer in faulty["answers"]),
                "kills": sum(answer["fault"] == "kill" for answer in faulty["answers"]),
                "same": sum(
                    one["text"] == other["text"]
                    for one, other in zip(faulty["answers"], plain["answers"], strict=False)
                ),
                "verified": sum(answer["verified"] for answer in faulty["answers"]),
                "right": {way: line["right"] for way, line in ways.items() if line is not None},
                "seconds": {
                    way: round(sum(answer["seconds"] for answer in line["answers"]), 1)
                    for way, line in ways.items()
                    if line is not None
                },
            }
        )
    return {"runs": runs}


def tables(result: dict[str, Any]) -> str:
    """A line for each scene."""

    def by_way(found: Mapping[str, Any]) -> str:
        return " / ".join("-" if found[way] is None else f"{found[way]:g}" for way in WAYS)

    header = ["scene", "answers", "longest prompt", "cuts", "kills", "the plain text", "verified"]
    header += [f"right: {' / '.join(WAYS)}", f"seconds: {' / '.join(WAYS)}"]
    rows = [
        [
            run["scene"],
            run["answers"],
            run["longest_prompt"],
            run["cuts"],
            run["kills"],
            run["same"],
            run["verified"],
            by_way(run["right"]),
            by_way(run["seconds"]),
        ]
        for run in result["runs"]
    ]
    return table(header, rows)
