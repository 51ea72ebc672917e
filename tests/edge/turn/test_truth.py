"""Whatever machine, link and verifier do: what a terminal says is true of the text beside it.

A view is shown every event of random histories. Each time the device waits, what is on its screen
is held against the session's log, which is all that the verifier has said, and the provisional
text: which characters are plain, how many tokens are called unverified, what is being done.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from rich.console import Console
from rich.text import Text

from edge_client.events import Done, Event, Prompt
from edge_client.screen.live import (
    PROVISIONAL,
    LiveView,
    how_much_is_verified,
    summary_of_stopped,
)
from edge_client.turn.deadlines import Patience
from tests.edge.reader import Reader
from tests.edge.turn import world as worlds
from tests.edge.turn.test_history import AnyHistory
from tests.edge.turn.world import World, says


class Lines(worlds.Letters):
    """Some ids end a line."""

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).replace("I", "\n")


class Screen(Console):
    """Keeps what was printed for good."""

    def __init__(self) -> None:
        super().__init__(file=io.StringIO(), width=10_000)
        self.lines: list[str] = []

    def print(self, *objects: Any, **how: Any) -> None:
        """Of the lines in yellow, which are remarks, nothing is kept."""
        for one in objects:
            if isinstance(one, Text) and one.style != "yellow":
                self.lines.append(one.plain)


class Watcher(Reader):
    """A reader with a screen."""

    def __init__(self, prompt: Sequence[int]) -> None:
        super().__init__(prompt)
        self.screen = Screen()
        self.view = LiveView(self.screen)
        self.view.take(Prompt(ids=list(prompt)))
        self.online_at = 0.0

    def take(self, event: Event, now: float = 0.0) -> None:
        super().take(event, now)
        self.view.take(event)

    @property
    def plain_and_provisional(self) -> tuple[str, str]:
        """The text on the screen by how it is written."""
        text = self.view.open_text()
        dim = [span for span in text.spans if span.style == PROVISIONAL]
        start = min((span.start for span in dim), default=len(text.plain))
        printed = "".join(f"{line}\n" for line in self.screen.lines)
        return printed + text.plain[:start], text.plain[start:]


class WatchedWorld(World):
    """Looks at the screen whenever the device waits."""

    looks = 0

    def begin(self, *, count: int | None = None) -> None:
        super().begin(count=count)
        self.reader = Watcher(self.log)

    def _will_be_woken(self, wake: float | None) -> None:
        super()._will_be_woken(wake)
        self.look()

    def look(self) -> None:
        reader = self.reader
        assert isinstance(reader, Watcher)
        WatchedWorld.looks += 1
        transcript = self.machine.transcript
        start = transcript.rules.start
        sure = transcript.session.log[start:]
        guessed = transcript.provisional
        # ---- the text
        decode = Lines().decode
        plain, dim = reader.plain_and_provisional
        assert plain == decode(sure)
        assert dim == decode(guessed)
        if self.on_reconnect == "rewind":
            assert all(
                token == says(transcript.session.log[: start + at]) for at, token in enumerate(sure)
            )
        # ---- what is said of it
        words = reader.view.status().plain
        unverified = re.search(r"(\d+) not verified", words)
        assert (int(unverified[1]) if unverified else 0) == len(guessed)
        tokens = re.search(r"· (\d+) tokens?", words)
        assert (int(tokens[1]) if tokens else 0) == len(sure) + len(guessed)
        if checking := re.search(r"checking, (\d+) of (\d+)", words):
            assert (int(checking[1]), int(checking[2])) == (len(sure), len(sure) + len(guessed))
            assert guessed
        if "this device goes on" in words:
            assert guessed
            assert self.is_up
        reads = re.search(r"reads: (\d+) of (\d+)", words)
        assert not reads or int(reads[1]) < int(reads[2])
        # ---- what would be said of it if the user stopped it now
        said = summary_of_stopped(reader.statuses)
        adopted = reader.statuses[: len(sure)].count("provisional")
        alone = len(guessed) + adopted
        length = len(sure) + len(guessed)
        if not length:
            assert said == "stopped: nothing was added"
        else:
            assert re.match(r"stopped · (\d+) tokens? · ", said)[1] == str(length)  # type: ignore[index]
            assert said.endswith(" verified")
            assert said.endswith("· verified") == (not alone)
            assert said.endswith("· nothing verified") == (alone == length)
            not_verified = re.search(r"(\d+) tokens? not verified", said)
            assert int(not_verified[1]) == alone if not_verified else alone in (0, length)

    def ends(self, reason: Any) -> None:
        """What the line below the answer says."""
        transcript = self.machine.transcript
        statuses = transcript.statuses
        done = Done(
            reason=reason,
            verified=transcript.verified and bool(statuses),
            text=transcript.stream.text,
            stats=self.machine.stats.report(self.now),
        )
        said = how_much_is_verified(done, self.reader.statuses)
        log = transcript.session.log[transcript.rules.start :]
        alone = len(transcript.provisional) + self.reader.statuses[: len(log)].count("provisional")
        if not alone and log:
            assert said == "verified"
        elif alone == len(self.reader.ids):
            assert said == "nothing verified"
        else:
            found = re.fullmatch(r"(the last )?(\d+) tokens? not verified", said)
            assert found is not None
            assert int(found[2]) == alone
            assert bool(found[1]) == all(one != "verified" for one in statuses[-alone:])
        # ---- and where whoever ended it does not vouch for it, whatever its tokens are
        doubted = how_much_is_verified(
            msgspec.structs.replace(done, verified=False), self.reader.statuses
        )
        if not alone and log:
            assert doubted == "its end not verified"
        else:
            assert doubted == said


class Watched(AnyHistory):
    def __init__(self, seed: int, draft: Any, on_reconnect: Any) -> None:
        super().__init__(seed, draft, guess_ahead=seed % 2 > 0)
        before = self.world
        self.world = WatchedWorld(
            seed=seed,
            draft=draft,
            count=30,
            right=before.right,
            patience=Patience(offline_after=0.3, settle=1.0),
            guess_ahead=before.guess_ahead,
            server_right=before.server_right,
            on_reconnect=on_reconnect,
            tells=seed % 3 > 0,
            reads=[0.0, 0.0, 3.0][seed % 3],
        )

    def _turn_is_over(self) -> None:
        world = self.world
        assert isinstance(world, WatchedWorld)
        world.look()
        world.ends(world.machine._reason())
        if world.on_reconnect == "rewind":
            super()._turn_is_over()
        else:
            world.next_turn(*self.new_ids)


@pytest.mark.parametrize("on_reconnect", ["rewind", "keep"])
@pytest.mark.parametrize("seed", range(12))
def test_what_the_terminal_says_is_true(
    seed: int, on_reconnect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "Letters", Lines)
    WatchedWorld.looks = 0
    draft = ["device", "server", "auto", "none"][seed % 4]
    Watched(seed, draft, on_reconnect).happens(250)
    assert WatchedWorld.looks > 300
