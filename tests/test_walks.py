"""The walks of docs/data-path.md are those that a guess and a token take: each named function is
called by the one before it, nothing of ours stands between, and none that returns what the walk
goes on with is left out; a token passes the generators that are named, and no other one."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import re
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pytest

from cloud_verifier.engine.job import Job
from cloud_verifier.sessions.session import ServerSession
from edge_client import EdgeClient
from edge_client.cli import generate
from edge_client.events import Event, Token
from edge_client.serve.endpoint import endpoint
from edge_client.serve.settings import ServeSettings
from edge_client.settings import ClientSettings
from edge_client.turn.shell import TurnShell
from moa.process.listening import Port
from moa.speculation.guess_tree import neg_log_probs_of
from moa.tree import DraftTree
from moa.wire import messages
from moa.wire.messages import Progress, StreamTokens
from tests.api.scripted import browser
from tests.verifier import kit

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = tuple(f"{ROOT / name}/" for name in ("cloud_verifier", "edge_client", "export", "moa"))
PAGE = (ROOT / "docs" / "data-path.md").read_text("utf-8")
NAME = re.compile(r"`([\w.]+)`")
IDS = kit.prompt(0, 20)
COUNT = 12


def is_ours(code: CodeType) -> bool:
    """Whether this is code of the product."""
    return code.co_filename.startswith(PACKAGES)


def ours_above(frame: FrameType | None) -> Iterator[CodeType]:
    """The functions of ours on the stack from this frame on, innermost first."""
    while frame is not None:
        if is_ours(frame.f_code):
            yield frame.f_code
        frame = frame.f_back


def listed(heading: str) -> list[str]:
    """The numbered items below the sentence of the page that begins like this."""
    _, _, after = PAGE.partition(heading)
    assert after, f"the page says nowhere: {heading}"
    block = after.partition("\n1. ")[2].partition("\n\n")[0]
    return re.split(r"\n\d\. ", block)


# ---- from a guess to the tokens that it wins


def walk_of_a_guess() -> tuple[list[list[str]], list[str]]:
    """The functions that hand a guess on, by stage; and those that return what the walk goes on
    with, in parentheses on the page."""
    stages = []
    returns: list[str] = []
    for item in listed("From the guess's frame to the frame of its tokens"):
        returns += [
            name for found in re.findall(r"\(([^)]*)\)", item) for name in NAME.findall(found)
        ]
        stages.append(NAME.findall(re.sub(r"\([^)]*\)", "", item)))
    return stages, returns


def holds(value: Any, text: Sequence[int], depth: int = 3) -> bool:
    """Whether two tokens that follow each other in this text do so in a value or its parts, too.
    Sessions and rounds, where both threads look tokens up, do not count."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple) and all(isinstance(part, int) for part in value):
        return bool(set(pairwise(value)) & set(pairwise(text)))
    if depth == 0 or isinstance(value, Job | ServerSession):
        return False
    return any(holds(part, text, depth - 1) for part in parts_of(value))


def parts_of(value: Any) -> Sequence[Any]:
    """The items of a container, or the fields of an object."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    names = {*getattr(value, "__struct_fields__", ()), *getattr(value, "__dict__", ())}
    names |= {*getattr(type(value), "__dataclass_fields__", ())}
    return [getattr(value, name) for name in names if hasattr(value, name)]


class Calls:
    """Who called each of these functions, while it records; in all threads that begin after this."""

    def __init__(self, walk: Collection[str], returns: Collection[str], text: list[int]) -> None:
        self.recording = False
        self.callers: dict[str, set[str]] = {}
        """By function, in the order of their first calls."""
        self.values: dict[str, list[Any]] = {}
        self.brought: set[str] = set()
        """Functions that the walk has asked, and that have returned something with tokens of this
        text."""
        self._walk = walk
        self._names = {*walk, *returns}
        self._text = text

    def __call__(self, frame: FrameType, event: str, value: object) -> None:
        code = frame.f_code
        if not self.recording or event not in ("call", "return") or not is_ours(code):
            return
        name = code.co_qualname
        above = next(ours_above(frame.f_back), None)
        caller = above.co_qualname if above is not None else ""
        if event == "return":
            if caller in self._walk and name not in self._walk and holds(value, self._text):
                self.brought.add(name)
        elif name in self._names:
            self.callers.setdefault(name, set()).add(caller)
            self.values.setdefault(name, []).append(dict(frame.f_locals))

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


async def run_one_guess(calls: Calls, truth: list[int]) -> StreamTokens:
    """A guess that comes while a forward runs, the stream's own or one before it; and the answer that
    it wins."""
    async with kit.verifier(drafter=False) as running, kit.client(running) as edge:
        session = await edge.start(IDS, max_new_tokens=COUNT)
        with kit.held_forward(running) as (entered, release):
            await edge.send(session.stream(speculate=False))
            assert await asyncio.to_thread(entered.wait, kit.PATIENCE)
            (at_verifier,) = running.service.table
            calls.recording = True
            tokens = [IDS[-1], *truth[:4]]
            tree = DraftTree(tokens, list(range(-1, 4)), [-0.01 * n for n in range(5)])
            await edge.send(session.foresee(tree.tokens, tree.parents, neg_log_probs_of(tree)))
            await kit.until(lambda: at_verifier.guesses is not None and at_verifier.guesses.waiting)
            release.set()
            while True:
                answer = await edge.receive()
                session.receive(answer)
                if isinstance(answer, Progress):  # on a busy machine the prompt took its time
                    continue
                assert isinstance(answer, StreamTokens)
                if answer.foreseen:
                    calls.recording = False
                    break
        begin = answer.base + 1 - len(IDS)
        assert len(answer.tokens) > 1
        assert answer.tokens == truth[begin : begin + len(answer.tokens)]
        await edge.send(session.cancel())  # type: ignore[arg-type]
        while session.busy:
            session.receive(await edge.receive())
    return answer


async def test_a_guess_takes_the_walk_of_the_page() -> None:
    truth = kit.generated(IDS, COUNT)
    stages, returns = walk_of_a_guess()
    walk = [name for stage in stages for name in stage]
    assert (len(walk), len(returns)) == (16, 5)
    calls = Calls(walk, returns, [IDS[-1], *truth])
    with calls.installed():
        answer = await run_one_guess(calls, truth)
    # Who hands it on stands on the page before, and calls the next one without anybody between.
    for stage in stages:
        for place, name in enumerate(stage):
            if place:
                assert calls.callers[name] & set(stage[:place]), (name, calls.callers[name])
            elif name in calls.callers:  # else it has run since the connection began
                assert not calls.callers[name] & {*walk, *returns}, "a thread's, or a loop's"
    for name in returns:
        assert calls.callers[name] <= set(walk), (name, calls.callers[name])
    for name in walk[1:]:
        assert name in calls.callers
    # No other function that they ask returns tokens of the guess, or of its answer.
    assert calls.brought <= set(returns)
    assert "Guesses.pick" in calls.brought
    # It is the guess, and its tokens, that they carry.
    guess = calls.values["Guesses.add"][0]["message"]
    forwards = [list(call["rows"][0].tokens) for call in calls.values["Target.forward"]]
    # Its first tokens may have come meanwhile, by the forward that ran.
    assert any(len(tokens) > 1 and tokens == guess.tokens[-len(tokens) :] for tokens in forwards)
    assert answer.tokens in [call["message"].tokens for call in calls.values["Outbox.answer"]]


# ---- from the shell to the reader


def generators_of(heading: str) -> list[str]:
    """The generators that pass a token on, as the page lists them."""
    return [NAME.findall(item)[0] for item in listed(heading)]


class Passing:
    """The generators of ours that yield something with a token in it, from the one that does first
    on, whether they wait for it or not."""

    def __init__(self) -> None:
        self.generators: list[str] = []
        self._text = ""
        """Of a token that the shell has told."""

    def told(self, events: Sequence[Event]) -> None:
        """The shell tells these events."""
        for event in events:
            if isinstance(event, Token) and len(event.text.strip()) >= _LONG_ENOUGH:
                self._text = self._text or event.text.strip()

    def __call__(self, frame: FrameType, event: str, value: object) -> None:
        code = frame.f_code
        if not self._text or event != "return" or not (is_ours(code) and is_generator(code)):
            return
        if code.co_flags & inspect.CO_ASYNC_GENERATOR:
            # What it yields is wrapped. All else that leaves it, it awaits.
            wrapped = type(value).__name__ == "async_generator_wrapped_value"
            value = gc.get_referents(value) if wrapped else None
        if self._text in repr(value) and code.co_qualname not in self.generators:
            self.generators.append(code.co_qualname)


_LONG_ENOUGH = 4
"""Characters of a token that nothing else is likely to contain."""


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Passing]:
    """The generators that a token passes from the shell on, in this thread."""
    found = Passing()
    drain = TurnShell._drain

    def drained(shell: TurnShell) -> Any:
        events = drain(shell)
        found.told(events)
        return events

    monkeypatch.setattr(TurnShell, "_drain", drained)
    sys.setprofile(found)
    yield found
    sys.setprofile(None)


def is_generator(code: CodeType) -> bool:
    """Whether a function yields. A coroutine that is written as a generator does not: no token
    passes there."""
    yields = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
    return bool(code.co_flags & yields) and not code.co_flags & inspect.CO_ITERABLE_COROUTINE


async def test_a_token_reaches_the_terminal_through_three_generators(
    passing: Passing, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ClientSettings(offline=True, max_new_tokens=8, settle_seconds=0)
    asked = {"prompt": "What is 17 + 25?", "raw": False, "grammar": None}
    await generate._answer(settings, None, asked, generate.JsonLines())
    assert '"token"' in capsys.readouterr().out
    names = generators_of("A token on its way to the terminal")
    assert len(names) <= 3
    assert passing.generators == names


MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]


@pytest.mark.parametrize(
    ("path", "question"),
    [
        ("chat/completions", {"messages": MESSAGES}),
        ("chat/completions", {"messages": MESSAGES, "n": 2}),
        ("responses", {"input": MESSAGES}),
    ],
    ids=["one choice", "two choices", "a response"],
)
@pytest.mark.parametrize("resumable", [False, True])
async def test_a_token_reaches_an_http_client_through_five_generators(
    passing: Passing, resumable: bool, path: str, question: dict[str, Any]
) -> None:
    marks = {"mode": "provisional", "resumable": resumable}
    question = {"model": "demo", "stream": True, "moa": marks, **question}
    async with (
        EdgeClient(offline=True, max_new_tokens=8, settle_seconds=0) as client,
        endpoint(client, ServeSettings(), "demo", Port("127.0.0.1", 0)) as address,
        browser(address) as http,
    ):
        response = await http.post(f"/v1/{path}", json=question)
        assert response.status_code == 200
        assert response.text.rstrip().endswith("data: [DONE]")
    names = generators_of("A token on its way to an HTTP client")
    assert len(names) <= 5
    assert names[-1] == "Recording.listen"
    assert passing.generators == (names if resumable else names[:-1])


# ---- the picture


def test_the_picture_names_modules_and_messages_that_there_are() -> None:
    picture = (ROOT / "docs" / "data-path.svg").read_text("utf-8")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", picture)
    modules = [path for text in texts for path in re.findall(r"[\w/]+(?:\.py|/)", text)]
    assert len(modules) > 10
    for path in modules:
        assert any((ROOT / top / path).exists() for top in ("", "edge_client", "cloud_verifier"))
    named = [text.partition(":")[0] for text in texts if re.match(r"[A-Z]\w+: ", text)]
    assert len(named) == 5
    for name in named:
        assert hasattr(messages, name)
