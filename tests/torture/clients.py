"""Kills clients during `edge-client chat` and `edge-client use`, and checks that their files are
complete and right.

The next client continues the conversation from the last saved file. Greedy answers depend only on
the text before, so every transcript is a prefix of the same conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from edge_client.cli import main as edge_client
from edge_client.settings import read_config_file
from tests.torture.server import CONTEXT, redirect

QUESTIONS = (
    "What is 17 plus 25?",
    "Reverse the word: stone",
    "What is 9 times 4?",
    "What is 81 minus 13?",
)
_COMMENT = "# written by hand\n"


class Home:
    """Where a client keeps its files, and what they must hold."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        self.transcript = folder / "talk.json"
        self.config = folder / "config.toml"
        self.log = folder / "log"
        self.config.write_text(_COMMENT + 'verifier = "ws://a0:1"\n')
        self.truth: list[str] = []

    @property
    def answers(self) -> list[str]:
        """What the transcript holds; whatever is not a whole conversation is an error."""
        if not self.transcript.exists():
            return []
        said = json.loads(self.transcript.read_text())["messages"]
        for number, (question, answer) in enumerate(zip(said[::2], said[1::2], strict=True)):
            if (
                question != {"role": "user", "content": QUESTIONS[number]}
                or answer["role"] != "assistant"
            ):
                raise ValueError(f"message {2 * number} is not what was asked")
        return [one["content"] for one in said[1::2]]

    def problems(self) -> list[str]:
        """The damage of a kill."""
        found = []
        try:
            if self.truth and self.answers != self.truth[: len(self.answers)]:
                found.append(f"the transcript changed: {self.answers}")
        except (OSError, ValueError, KeyError) as error:
            found.append(f"the transcript is not whole: {error!r}")
        try:
            said = str(read_config_file(self.config)["verifier"])
            if not self.config.read_text().startswith(_COMMENT) or not said.startswith("ws://a"):
                found.append(f"the settings changed: {said}")
        except Exception as error:
            found.append(f"the settings are not whole: {error!r}")
        return found

    def script(self) -> list[str]:
        """What is typed: the rest of the conversation, saved after each answer."""
        lines = [f"/load {self.transcript}"] if self.transcript.exists() else []
        for question in QUESTIONS[len(self.answers) :]:
            lines += [question, f"/save {self.transcript}"]
        return [*lines, "/quit"]


def talk(home: Home, lines: Sequence[str]) -> None:
    """A client that is typed these lines; the body of its process."""
    flags = [
        "--verifier",
        home.url,
        "--config",
        os.devnull,
        "--max-new-tokens",
        "8",
        "--offline-after",
        "60",
    ]
    _run(home, ["chat", *flags, "--threads", "1", "--sync", "off"], "\n".join(lines) + "\n")


def settle(home: Home, times: int) -> None:
    """A client that changes its settings again and again; the body of its process."""
    for number in range(times):
        _run(home, ["use", "--verifier", f"ws://a{number % 7}:1", "--config", str(home.config)])


def _run(home: Home, words: Sequence[str], typed: str = "") -> None:
    redirect(home.log, typed)
    with contextlib.suppress(SystemExit):
        edge_client(words)


async def kill_clients(home: Home, kills: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Kill so many, half of them while they talk; what was counted, and what was wrong."""
    rng = random.Random(seed)
    counts = Counter[str]()
    wrong = list[str]()
    began = time.monotonic()
    await _live(talk, home, home.script(), seconds=None)  # one that nobody disturbs
    whole = time.monotonic() - began
    home.truth = home.answers
    if len(home.truth) < len(QUESTIONS) or not all(home.truth):
        return counts, [f"undisturbed, it answered {home.truth}: {home.log.read_text()[-500:]}"]
    while counts["kills"] < kills:
        if len(home.answers) == len(QUESTIONS):
            home.transcript.unlink()
            counts["conversations"] += 1
        if rng.random() < 0.5:
            killed = await _live(talk, home, home.script(), seconds=rng.uniform(0, whole))
        else:
            killed = await _live(settle, home, 10_000, seconds=rng.uniform(0, 0.1))
        counts["kills"] += killed
        counts["ended"] += not killed
        wrong += home.problems()
    known = {home.transcript, home.config, home.log}
    counts["left over"] = len(set(home.transcript.parent.iterdir()) - known)
    said = home.log.read_text(errors="replace")
    return counts, wrong + [
        "a traceback" for line in said.splitlines() if line.startswith("Traceback")
    ]


async def _live(target: Callable[..., None], *args: object, seconds: float | None) -> bool:
    """Let a process live for that long after its start; whether it had to be killed."""
    process = CONTEXT.Process(target=target, args=args)
    process.start()
    await asyncio.to_thread(process.join, seconds)
    killed = process.is_alive()
    process.kill()
    process.join()
    process.close()
    return killed
